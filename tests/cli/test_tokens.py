"""The token of a command: which catalogs get it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

import dissociated as dis

from .shell import call


class Catalog(NamedTuple):
    """A catalog with a dataset `d`, and the tokens that it got."""

    uri: str
    tokens: set[str]


@pytest.fixture
def catalogs() -> Iterator[list[Catalog]]:
    """Yield two catalogs that accept any token."""
    with ExitStack() as owned:
        running = []
        for _ in range(2):
            tokens: set[str] = set()

            def authorize(token: str, tokens: set[str] = tokens) -> tuple[str, str]:
                tokens.add(token)
                return "user", "admin"

            server = owned.enter_context(dis.Server(["shm:"], catalog="grpc://0.0.0.0:0", authorize=authorize))
            server.publish("d", pa.table({"n": [1]}))
            port = server.catalog_uri.rpartition(":")[2]
            running.append(Catalog(f"grpc://127.0.0.1:{port}", tokens))
        yield running


def test_the_token_of_the_environment_is_for_the_catalog_of_the_environment(catalogs: list[Catalog]) -> None:
    own, other = catalogs
    ask = partial(call, DISSOCIATED_TOKEN="secret", DISSOCIATED_CATALOG=own.uri)
    for arguments in (["ls"], ["ls", own.uri], ["describe", f"{own.uri}/d"], ["head", "d", "--catalog", f"{own.uri}/"]):
        own.tokens.clear()
        assert ask(*arguments).returncode == 0
        assert own.tokens == {"secret"}
    for arguments in (
        ["ls", other.uri],
        ["ls", "--catalog", other.uri],
        ["sql", "FROM d", "--into", f"{other.uri}/x"],
        ["drop", "d", f"{other.uri}/d", "--yes"],
    ):
        refused = ask(*arguments)
        assert refused.returncode == 1
        assert f"{other.uri} requires a token" in refused.stderr
        assert "DISSOCIATED_TOKEN with DISSOCIATED_CATALOG" in refused.stderr
    assert not other.tokens


def test_without_a_catalog_in_the_environment_its_token_is_not_sent_in_plain_text(catalogs: list[Catalog]) -> None:
    catalog = catalogs[0]
    assert call("ls", catalog.uri.replace("127.0.0.1", "0.0.0.0"), DISSOCIATED_TOKEN="secret").returncode == 1
    assert not catalog.tokens
    assert call("ls", catalog.uri, DISSOCIATED_TOKEN="secret").returncode == 0
    assert catalog.tokens == {"secret"}


def test_the_token_of_a_file_is_for_one_catalog(catalogs: list[Catalog], tmp_path: Path) -> None:
    own, other = catalogs
    (tmp_path / "token").write_text("secret\n")
    options = ("--token-file", tmp_path / "token")
    for arguments in (
        ("drop", f"{own.uri}/d", f"{other.uri}/d", "--yes"),
        ("sql", "FROM d", "--catalog", own.uri, "--into", f"{other.uri}/x"),
    ):
        refused = call(*arguments, *options)
        assert refused.returncode == 1
        assert f"{own.uri!r} and {other.uri!r} are two" in refused.stderr
    assert not other.tokens
    assert call("drop", f"{own.uri}/d", "--catalog", own.uri, *options).returncode == 0

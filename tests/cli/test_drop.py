"""Dropping several datasets, and versions as Python lists them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

import dissociated as dis
from cli.shell import run
from support import processes

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def client() -> Iterator[dis.Client]:
    """Yield a client of a server with five datasets."""
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        for name in ("team/a", "team/b", "team/b.old", "x", "y"):
            server.publish(name, pa.table({"n": [1]}))
        yield client


def names(client: dis.Client) -> list[str]:
    return sorted(client)


def test_a_pattern_and_names_are_dropped_at_once(client: dis.Client) -> None:
    assert run("drop", "team/*b*", "x", "--catalog", client.uri, "--yes") == ""
    assert names(client) == ["team/a", "y"]


@pytest.mark.parametrize(("chosen", "number"), [(["team/*"], 3), (["x", "y"], 2)])
def test_nothing_is_dropped_before_the_answer(client: dis.Client, chosen: list[str], number: int) -> None:
    before = names(client)
    assert "give --yes" in run("drop", *chosen, "--catalog", client.uri, status=1)
    command = [sys.executable, "-m", "dissociated", "drop", *chosen, "--catalog", client.uri]
    for no in (b"\x04", b"\n"):  # Ctrl-D, or Enter
        asked = processes.in_terminal(80, command, os.environ, given=no)
        assert f"Drop {number} datasets: " in asked
        assert "Traceback" not in asked
        assert names(client) == before
    processes.in_terminal(80, command, os.environ, given=b"y\n")
    assert len(names(client)) == len(before) - number


def test_a_missing_name_keeps_all(client: dis.Client) -> None:
    assert "'z'" in run("drop", "x", "z", "--yes", "--catalog", client.uri, status=1)
    assert "no dataset matches 'w*'" in run("drop", "x", "w*", "--yes", "--catalog", client.uri, status=1)
    assert len(names(client)) == 5


def test_one_name_is_dropped_without_a_question(client: dis.Client) -> None:
    assert run("drop", f"{client.uri}/x") == ""
    assert names(client) == ["team/a", "team/b", "team/b.old", "y"]


def test_ls_takes_a_pattern(client: dis.Client) -> None:
    lines = run("ls", "*b*", "--catalog", client.uri).splitlines()[1:]
    assert [line.split()[0] for line in lines] == ["team/b", "team/b.old"]


def test_versions_are_counted_from_one_and_dated(client: dis.Client) -> None:
    (version,) = client.versions("x")
    assert version["version"] == 1
    assert timedelta(0) <= datetime.now(UTC) - version["created"] < timedelta(hours=1)
    assert client.dataset("x").created == version["created"]

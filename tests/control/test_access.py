"""Tickets and tokens: a wrong one gets an error message and no data."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dissociated as dis
from dissociated.control import access
from dissociated.control.access import Grant, Signer, Tokens, read_token
from dissociated.control.roles import Role
from dissociated.errors import AccessDenied, DatasetNotFound, OptionError, RemoteError
from support.certificates import Certificates
from support.helpers import Serve, location

SECRET = bytes(range(32))
TABLE = pa.table({"n": [1, 2, 3]})
TRANSPORTS = ("shm", "tcp", "tls", "inproc")


# Signed tickets by themselves


def test_the_layout_of_a_signed_ticket() -> None:
    content = struct.pack("<QH", 1_007_000, 5) + b"datum" + rb'["a", "\u00e9"]'
    ticket = hmac.new(SECRET, content, hashlib.sha256).digest() + content
    assert Signer(SECRET, 8.0).sign(Grant(b"datum", ("a", "é")), 999.4) == (ticket, 1007.0)
    assert Signer(SECRET, 8.0).check(ticket, 1006.999) == Grant(b"datum", ("a", "é"))


def test_a_ticket_is_good_for_at_most_its_lifetime_and_at_least_most_of_it() -> None:
    signer = Signer(SECRET, 80.0)
    for now in (0.0, 1.5, 9.999, 1e9 + 0.25):
        _, expires = signer.sign(Grant(b"datum"), now)
        assert expires is not None
        assert 70 < expires - now <= 80


def test_two_requests_soon_after_another_get_the_same_ticket() -> None:
    signer = Signer(SECRET, 80.0)
    assert signer.sign(Grant(b"datum"), 1000.0) == signer.sign(Grant(b"datum"), 1009.9)
    assert signer.sign(Grant(b"datum"), 1000.0) != signer.sign(Grant(b"datum"), 1010.0)


def test_an_expired_ticket_is_refused() -> None:
    ticket, expires = Signer(SECRET, 80.0).sign(Grant(b"datum"), 1000.0)
    assert expires == 1080.0
    Signer(SECRET, 80.0).check(ticket, 1079.9)
    with pytest.raises(AccessDenied, match="this ticket has expired: look the dataset up again"):
        Signer(SECRET, 80.0).check(ticket, 1080.0)


@given(st.data(), st.builds(Grant, st.binary(max_size=50), st.none() | st.lists(st.text(max_size=9)).map(tuple)))
def test_an_altered_ticket_is_refused(data: st.DataObject, granted: Grant) -> None:
    signer = Signer(SECRET, 80.0)
    ticket = signer.sign(granted, 1000.0).data
    assert signer.check(ticket, 1000.0) == granted
    at = data.draw(st.integers(0, 8 * len(ticket) - 1))
    flipped = bytearray(ticket)
    flipped[at // 8] ^= 1 << at % 8
    cut = ticket[: data.draw(st.integers(0, len(ticket) - 1))]
    for altered in (bytes(flipped), cut, ticket + b"\0"):
        with pytest.raises(AccessDenied, match="not made by this server, or was altered"):
            signer.check(altered, 1000.0)


@pytest.mark.parametrize("foreign", [b"", bytes(16), bytes(42), secrets.token_bytes(60)], ids=len)
def test_an_invalid_signed_ticket_is_refused(foreign: bytes) -> None:
    with pytest.raises(AccessDenied, match="not made by this server"):
        Signer(SECRET, 80.0).check(foreign, 0.0)


def test_secrets_and_lifetimes_that_make_no_sense() -> None:
    with pytest.raises(OptionError, match="15 bytes can be guessed"):
        Signer(bytes(15), 1.0)
    for lifetime in (0.0, -1.0, float("nan")):
        with pytest.raises(OptionError, match="positive number of seconds"):
            Signer(SECRET, lifetime)
    with pytest.raises(OptionError, match="give ticket_lifetime"):
        dis.Server([], catalog=None, secret=SECRET)


# Tickets and a server


@pytest.fixture
def server(serve: Serve, trusted: Certificates) -> dis.Server:
    """Start a server with signed tickets that are valid for an hour."""
    made = serve(*(f"{scheme}:" for scheme in TRANSPORTS), ticket_lifetime=3600.0, **trusted.options)
    made.publish("data", TABLE)
    return made


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Move the clock forward within the `with` block."""
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + seconds)
        yield


def refused(server: dis.Server, scheme: str, ticket: bytes, sentence: str) -> None:
    with pytest.raises(RemoteError, match=sentence):
        dis.open_stream(location(server, "data", scheme), ticket)


@pytest.mark.parametrize("scheme", TRANSPORTS)
def test_only_a_ticket_of_this_server_in_its_time_is_served(
    server: dis.Server, serve: Serve, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    ticket = server.ticket("data")
    assert dis.open_stream(location(server, "data", scheme), ticket).read_all() == TABLE
    other = serve("inproc:", ticket_lifetime=3600.0)
    other.publish("data", TABLE, ticket=server.dataset("data").ticket)
    refused(server, scheme, other.ticket("data"), "not made by this server, or was altered")
    refused(server, scheme, ticket[:-1] + bytes([ticket[-1] ^ 1]), "not made by this server, or was altered")
    # The identifier itself, which can be read in every signed ticket, does not suffice.
    refused(server, scheme, server.dataset("data").ticket, "not made by this server, or was altered")
    with at(monkeypatch, 3601):
        refused(server, scheme, ticket, "this ticket has expired")
        assert dis.open_stream(location(server, "data", scheme), server.ticket("data")).read_all() == TABLE


@pytest.mark.parametrize("lifetime", [None, 3600.0])
def test_a_ticket_is_bound_to_one_version(serve: Serve, lifetime: float | None) -> None:
    server = serve("tcp:", ticket_lifetime=lifetime)
    server.publish("data", TABLE)
    ticket = server.ticket("data")
    server.publish("data", TABLE)
    refused(server, "tcp", ticket, "no dataset has this ticket, which may have been replaced")
    newer = server.ticket("data")
    server.drop("data")
    with pytest.raises(DatasetNotFound, match="no dataset has this ticket"):
        server.registry.resolve_ticket(newer, None, lambda: False)


@pytest.mark.parametrize("scheme", TRANSPORTS)
def test_a_ticket_for_some_columns_is_good_for_no_others(server: dis.Server, scheme: str) -> None:
    wide = pa.table({"a": [1, 2], "secret": ["x", "y"], "b": [3, 4]})
    server.publish("data", wide)
    ticket = server.ticket("data", columns=["b", "a"])
    assert dis.open_stream(location(server, "data", scheme), ticket).read_all() == wide.select(["a", "b"])
    with pytest.raises(dis.errors.ColumnNotFound, match="no column 'secret'; there are a, b"):
        dis.open_stream(location(server, "data", scheme), ticket, columns=["secret"])
    # The signature covers the columns, too.
    for part in (ticket.partition(b"[")[0], ticket.replace(b'"b"', b'"s"')):
        refused(server, scheme, part, "not made by this server, or was altered")


def test_tickets_for_columns_that_cannot_be(server: dis.Server, serve: Serve) -> None:
    with pytest.raises(dis.errors.ColumnNotFound, match="there is no column 'm'"):
        server.ticket("data", columns=["n", "m"])
    plain = serve("inproc:")
    plain.publish("data", TABLE)
    with pytest.raises(OptionError, match="tickets for some columns must be signed"):
        plain.ticket("data", columns=["n"])


def test_a_ticket_that_no_request_can_carry_is_refused(server: dis.Server, serve: Serve) -> None:
    for one in (server, serve("tcp:")):
        for size in (65_473, 70_000):
            with pytest.raises(OptionError, match=r"is too long, since it may have 65,472 at most"):
                one.publish("long", TABLE, ticket=b"x" * size)
        assert "long" not in one.names()
        one.publish("long", TABLE, ticket=b"x" * 65_000)
        assert dis.open_stream(location(one, "long", "tcp"), one.ticket("long")).read_all() == TABLE
    wide = pa.table({f"column {number}": [1] for number in range(6_000)})
    server.publish("wide", wide)
    with pytest.raises(OptionError, match="grant fewer columns"):
        server.ticket("wide", columns=wide.column_names)


def test_a_stream_that_has_begun_outlives_its_ticket(server: dis.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.publish("data", pa.Table.from_batches(TABLE.to_batches() * 100).to_reader())
    reader = dis.open_stream(location(server, "data", "tcp"), server.ticket("data"))
    with at(monkeypatch, 3601):
        assert reader.read_all().num_rows == 300


def test_servers_with_one_secret_accept_each_others_tickets(serve: Serve) -> None:
    servers = [serve("tcp:", ticket_lifetime=3600.0, secret=SECRET) for _ in range(2)]
    for one in servers:
        one.publish("data", TABLE, ticket=b"shared")
    uris = [
        servers[0].locations("data", streams="metadata")[0],
        servers[1].locations("data", streams="bodies")[0],
    ]
    assert dis.open_stream(uris, servers[0].ticket("data")).read_all() == TABLE
    refused(servers[0], "tcp", b"shared", "not made by this server")


# Tokens


def test_tokens_and_whose_they_are() -> None:
    tokens = Tokens(["first", "second"])
    assert [tokens(token) for token in ("second", "third", "")] == [("token 2", Role.READ), None, None]
    owners = {"sesame": "ali", "simsim": ("zoe", "write"), "s": ("kim", Role.ADMIN)}
    named = Tokens(owners)
    assert [named(token) for token in owners] == [("ali", Role.READ), ("zoe", Role.WRITE), ("kim", Role.ADMIN)]
    assert "sesame" not in repr(vars(Tokens(["sesame"])))


def test_a_token_file_that_others_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tokens"
    path.write_text("0123456789abcdef")
    for mode, told in ((0o600, 0), (0o640, 1), (0o604, 1)):
        path.chmod(mode)
        for read in (read_token, Tokens.read, access.read_secret):
            caplog.clear()
            read(path)
            assert [one.getMessage() for one in caplog.records] == [
                f"secret file is readable by other users, close it with chmod 600: path={path}"
            ] * told


def test_a_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# who may do what\n\nali sesame write\n  plain  \nzoe\tsimsim\nkim s admin\nbob b read\n")
    tokens = Tokens.read(path)
    assert {one: tokens(one) for one in ("sesame", "plain", "simsim", "s", "b")} == {
        "sesame": ("ali", Role.WRITE),
        "plain": ("token 2", Role.READ),  # a line without a role may read
        "simsim": ("zoe", Role.READ),
        "s": ("kim", Role.ADMIN),
        "b": ("bob", Role.READ),
    }
    assert [tokens(one) for one in ("ali", "# who", "write", "read", "")] == [None] * 5
    assert read_token(path) == "sesame"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has no token"),
        (b"# nothing\n", "has no token"),
        (
            b"a b hunter2\n",
            "line 1 of .* is not TOKEN, NAME TOKEN or NAME TOKEN ROLE; the roles are read, write, admin",
        ),
        (b"# roles\na b peer\n", "line 2 of"),
        (b"a b WRITE\n", "line 1 of"),
        (b"hunter2 write\n", "line 1 of"),  # "write" is probably not meant as a token
        (b"write\n", "line 1 of"),
        (b"hunter2 #ali\n", r"line 1 of .* A comment has a line of its own"),
        (b"ali hunter2 # write\n", "line 1 of"),
        (b"a b write more\n", "line 1 of"),
        ("sésame\n".encode(), "printable ASCII"),
        (b"\xff\n", "cannot read tokens from"),
    ],
)
def test_files_of_no_tokens(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    for read in (Tokens.read, read_token):
        with pytest.raises(OptionError, match=sentence) as caught:
            read(path)
        assert "sésame" not in str(caught.value)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(OptionError, match="No such file"):
        Tokens.read(tmp_path / "nowhere")


def test_a_token_has_one_owner_and_role(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("ali hunter2 read\nzoe hunter2 admin\n")
    with pytest.raises(OptionError, match=r"has a token twice") as caught:
        Tokens.read(path)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "tokens",
    [
        *([], "one string", ["with space"], [""], ["new\nline"], ["read"]),
        *({"a": ("ali", "peer")}, {"a": ("ali", "")}, {"a": None}, {"a": ["ali", "admin"]}),
        asyncio.sleep,
    ],
)
def test_tokens_that_cannot_be(tokens: Any) -> None:
    with pytest.raises(OptionError):
        access.authorizer(tokens)

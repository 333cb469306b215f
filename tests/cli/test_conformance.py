"""The command conformance: our own client and server pass, and deliberately wrong peers are reported by rule."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import RemoteError, RemoteProtocolError
from faults.peer import (
    FREE,
    PREAMBLE,
    TAGGED,
    UNTAGGED,
    WANT,
    RawConnection,
    connect,
    frame,
    free,
    free_of,
    metadata,
    want,
    want_of,
)
from support.helpers import PATIENCE, location
from support.processes import Fork

from .shell import run

pytestmark = pytest.mark.usefixtures("forks")

VALID = [
    "ordinary", "shuffled", "reversed", "metadata-first", "trickled", "addresses", "scattered", "mixed", "late-regions",
]  # fmt: skip
WRONG = [
    ("cut", "stream-whole"),
    ("schema-last", "schema-first"),
    ("twice", "message-once"),
    ("short-body", "body-length"),
    ("reserved-bit", "tag-reserved"),
    ("unknown-kind", "tag-kind"),
    ("wrong-count", "end-count"),
    ("two-ends", "end-once"),
    ("wrong-total", "list-total"),
    ("wrong-length", "list-length"),
    ("stray-address", "address-region"),
    ("bad-seals", "region-seals"),
    ("overlap", "region-overlap"),
]
STREAMS: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


@contextmanager
def playing(listen: str, count: int) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Run `conformance serve`. Yield its URI, and a function that returns its reports."""
    arguments = ("conformance", "serve", "--listen", listen, "--count", str(count))
    with Fork("-m", "dissociated", *arguments, **STREAMS) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), lambda: process.communicate(timeout=PATIENCE)[0].splitlines()
        assert process.wait(PATIENCE) == 0


def test_the_variants_are_listed() -> None:
    listed = re.findall(r"^(\S+) +.*?(?:: breaks (\S+))?$", run("conformance", "serve", "--list"), re.MULTILINE)
    assert [(name, rule) for name, rule in listed if rule] == WRONG
    assert [name for name, rule in listed if not rule] == [*VALID, "abort"]


def test_our_client_reads_every_valid_variant_and_frees_everything() -> None:
    tables = []
    with playing("shm:", len(VALID)) as (uri, reports):
        for name in VALID:
            tables.append(dis.open_stream(uri, name.encode(), timeout=PATIENCE).read_all().combine_chunks())
            tables[-1].validate(full=True)
            assert tables[-1].equals(tables[0])
            tables[-1] = pa.table(tables[-1].to_pydict(), tables[-1].schema)
        lines = dict(line.split(": ", 1) for line in reports())
    assert [*lines] == VALID
    for name in VALID:
        leased = re.fullmatch(r"ok; leased (\d+), freed (\d+)", lines[name])
        assert leased is not None, lines[name]
        assert leased[1] == leased[2]
        assert (leased[1] != "0") is (name in ("addresses", "scattered", "mixed", "late-regions"))


@pytest.mark.parametrize("listen", ["tcp:", "shm:"])
def test_our_client_names_the_rule_of_every_wrong_variant(listen: str) -> None:
    wrong = [
        (name, rule) for name, rule in WRONG if listen == "shm:" or not rule.startswith(("list", "region", "addr"))
    ]
    with playing(listen, len(wrong)) as (uri, reports):
        for name, rule in wrong:
            with pytest.raises(RemoteProtocolError) as caught:
                dis.open_stream(uri, name.encode(), timeout=PATIENCE).read_all()
            assert caught.value.rule == rule
        lines = dict(line.split(": ", 1) for line in reports())
    assert [*lines] == [name for name, _ in wrong]
    assert [line for line in lines.values() if "FAIL" in line] == []


def test_our_client_learns_why_the_player_gives_up() -> None:
    with playing("tcp:", 3) as (uri, reports):
        with pytest.raises(RemoteError, match="the dataset was dropped"):
            dis.open_stream(uri, b"abort", timeout=PATIENCE).read_all()
        with pytest.raises(RemoteError, match="there is no variant 'none'"):
            dis.open_stream(uri, b"none", timeout=PATIENCE)
        with pytest.raises(RemoteError, match="needs shared memory"):
            dis.open_stream(uri, b"addresses", timeout=PATIENCE)
        assert [line.partition(":")[0] for line in reports()] == ["abort", "-", "addresses"]


def free_twice(connection: RawConnection, uri: str) -> None:
    connection.send(want(b"addresses", want_of(uri)))
    while (received := connection.read_frame()).kind != TAGGED:
        pass
    address = max(
        int.from_bytes(received.payload[at : at + 8], "little") for at in range(16, len(received.payload), 16)
    )
    connection.send(free(address, address, tag=free_of(uri)))


WRONG_CLIENTS: dict[str, Callable[[RawConnection, str], None]] = {
    "preamble": lambda connection, _: connection.send(b"GET / HTTP/1.1\r\n\r\n"),
    "client-tags": lambda connection, _: connection.send(want(b"ordinary", 5)),
    "client-frames": lambda connection, uri: connection.send(
        want(b"addresses", want_of(uri)) + frame(UNTAGGED, b"hello")
    ),
    "request-once": lambda connection, uri: connection.send(
        want(b"addresses", want_of(uri)) + frame(TAGGED, b"addresses", want_of(uri))
    ),
    "free-length": lambda connection, uri: connection.send(
        want(b"addresses", want_of(uri)) + frame(TAGGED, bytes(7), free_of(uri))
    ),
    "free-leased": free_twice,
}


@pytest.mark.parametrize("rule", WRONG_CLIENTS)
def test_the_player_names_the_rule_that_a_client_breaks(rule: str) -> None:
    with playing("shm:", 1) as (uri, reports):
        with connect(uri) as connection:
            WRONG_CLIENTS[rule](connection, uri)
            with suppress(EOFError):
                while True:
                    connection.read_frame()
        (line,) = reports()
    assert f"FAIL breaks {rule}: " in line


@pytest.mark.parametrize(("scheme", "lifetime"), [("tcp", None), ("shm", None), ("tcp", 600)])
def test_our_server_passes_every_check(scheme: str, lifetime: float | None) -> None:
    with dis.Server(["tcp:", "shm:"], catalog=None, ticket_lifetime=lifetime) as server:
        server.publish("data", pa.table({"n": range(10_000), "s": ["x"] * 10_000}), ticket=b"\x01ticket")
        uri = location(server, "data", scheme)
        lines = run("conformance", "check", uri, "--ticket", "0x" + server.ticket("data").hex()).splitlines()
    assert [line for line in lines if not line.startswith("ok    ")] == []
    assert len(lines) == (15 if scheme == "shm" else 9)
    assert any(re.search(r"leased [1-9]", line) for line in lines) is (scheme == "shm")


def test_a_server_that_sends_another_part_than_the_requested_one_fails_the_checks() -> None:
    """The player does not know parts, and does not say that it does."""
    with playing("tcp:", 7) as (uri, reports):
        output = run("conformance", "check", f"{uri}&request=1", "--ticket", "ordinary", status=1)
        assert "FAIL  unknown part: " in output
        assert "ok    a client that reads other streams first: " in output
        assert len(reports()) == 7


def test_a_server_that_answers_what_it_must_refuse_fails_the_checks() -> None:
    """It sends the same message to everybody, and ends the connection without an error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with suppress(OSError):  # the listener is shut down
                while True:
                    with closing(listener.accept()[0]) as client:
                        client.recv(1 << 16)
                        client.sendall(PREAMBLE + metadata(0, bytes(8)))
                        client.shutdown(socket.SHUT_WR)
                        client.recv(1 << 16)

        answering = threading.Thread(target=answer)
        answering.start()
        uri = f"tcp://127.0.0.1:{listener.getsockname()[1]}?want_data={WANT}&free_data={FREE}"
        output = run("conformance", "check", uri, "--ticket", "t", status=1)
        listener.shutdown(socket.SHUT_RDWR)
        answering.join(PATIENCE)
    for rule in ("client-tags", "client-frames"):
        assert re.search(f"FAIL  refuses what breaks {rule}: .*sent a message in place of ABORT", output)

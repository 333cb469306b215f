"""Clients that break the protocol: the server tells them why and closes the connection, and others notice nothing."""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from support.helpers import case, location, wait_until

from .conftest import ROWS, Good, Serve, Spawn, descriptors
from .peer import (
    ABORT,
    PATIENCE,
    PREAMBLE,
    REGION,
    RUN,
    SEALED,
    TAGGED,
    UNTAGGED,
    RawConnection,
    connect,
    end,
    frame,
    free,
    free_of,
    head,
    region,
    want,
    want_of,
)

HANDSHAKE = 0.5  # seconds; enough for well-behaved clients on a loaded machine


@contextmanager
def other(good: Good, scheme: str) -> Iterator[RawConnection]:
    """Yield a raw connection to a server, which must serve other clients before, meanwhile and afterwards."""
    uri = location(good.server, "good", scheme)
    good.check()
    with connect(uri) as connection:
        yield connection
        good.check()
    wait_until(good.alone, "the server has let go of the connection")
    good.check()


def reason(connection: RawConnection) -> str:
    """Return why the server closed the connection: its last frame, after any frames of the stream."""
    frames = connection.read_frames()
    assert frames, "closed without a reason"
    assert frames[-1].kind == ABORT
    return frames[-1].payload.decode()


class Case(NamedTuple):
    name: str
    data: bytes
    phrase: str


# Placeholders in the cases for the tags that each server chooses.
SOME, OTHER = 0x1122_3344_5566_7788, 0x99AA_BBCC_DDEE_FF00


def tagged(payload: bytes, tag: int) -> bytes:
    return frame(TAGGED, payload, tag)


HANDSHAKES = [
    Case("HTTP", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "does not speak dissociated's framing"),
    Case("TLS", bytes.fromhex("160301020001fc0303") + bytes(100), "does not speak dissociated's framing"),
    Case("zeros", bytes(1000), "does not speak dissociated's framing"),
    Case("another version", b"DISSOC\x00\x07", "speaks version 7 of the framing"),
    Case("unknown frame", PREAMBLE + head(6, 0), "unknown kind 6"),
    Case("frame of all ones", PREAMBLE + b"\xff" * 16, "unknown kind 255"),
    Case("untagged", PREAMBLE + frame(UNTAGGED, b"\x01\0\0\0\0"), "untagged message"),
    Case("end of stream", PREAMBLE + end(0), "untagged message"),
    Case("large untagged", PREAMBLE + head(UNTAGGED, 2**26), "bytes"),
    Case("untagged beyond the cap", PREAMBLE + head(UNTAGGED, 2**26 + 1), "at most"),
    Case("unknown tag", PREAMBLE + tagged(b"ticket", 12345), "unknown tag 0x0000000000003039"),
    Case("request of 2 MiB", PREAMBLE + head(TAGGED, 2**21, SOME), "at most 65536 are accepted"),
    Case("request of 2**55 bytes", PREAMBLE + head(TAGGED, 2**55, SOME), "at most 65536 are accepted"),
    Case("unknown ticket", PREAMBLE + tagged(b"no such ticket", SOME), "no dataset has this ticket"),
    Case("empty ticket", PREAMBLE + tagged(b"", SOME), "no dataset has this ticket"),
    Case("ticket of zeros", PREAMBLE + tagged(bytes(65_536), SOME), "no dataset has this ticket"),
    Case("free before want", PREAMBLE + tagged(bytes(8), OTHER), "not allowed while the sender of this stream is idle"),
    Case("region", PREAMBLE + region(4096, 4096, SEALED), "shared memory"),
    Case("large region frame", PREAMBLE + head(REGION, 2**17), "at most 65536 bytes"),
    Case("large abort", PREAMBLE + head(ABORT, 2**17), "at most 65536 bytes"),
    Case("run", PREAMBLE + frame(RUN, struct.pack("<QQQQ", 1, 0, 0, 0)), "a run of messages"),
    Case("run of nothing", PREAMBLE + frame(RUN), "cut off"),
    Case("large run", PREAMBLE + head(RUN, 2**26), "bytes"),
]


def with_tags(data: bytes, uri: str) -> bytes:
    data = data.replace(struct.pack("<Q", SOME), struct.pack("<Q", want_of(uri)))
    free_tag = free_of(uri) if "free_data" in uri else want_of(uri) & ~0xFF | 0x100
    return data.replace(struct.pack("<Q", OTHER), struct.pack("<Q", free_tag))


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm"])
def test_broken_request(serve: Serve, scheme: str) -> None:
    """Try all requests over shm, and every fourth over the other media, which treat them alike."""
    good = serve(f"{scheme}:")
    for name, data, phrase in HANDSHAKES if scheme == "shm" else HANDSHAKES[::4]:
        with case(name), other(good, scheme) as connection:
            connection.send(with_tags(data, good.server.locations("good")[0]))
            assert phrase in reason(connection)


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_an_abort_is_not_answered(serve: Serve, scheme: str) -> None:
    good = serve(f"{scheme}:")
    for begun in (b"", tagged(good.server.ticket("good"), SOME)):
        with other(good, scheme) as connection:
            connection.send(PREAMBLE + with_tags(begun, good.server.locations("good")[0]) + frame(ABORT, b"no \xff"))
            assert ABORT not in {received.kind for received in connection.read_frames()}


#: Lengths of the part of a request that a client sends before it falls silent or hangs up.
REQUEST = want(bytes(16), SOME)
CUTS = [0, 3, 8, 9, 23, 24, 30, len(REQUEST) - 1]


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm"])
def test_client_hangs_up(serve: Serve, scheme: str) -> None:
    good = serve(f"{scheme}:")
    for cut in CUTS:
        with case(cut), other(good, scheme) as connection:
            connection.send(REQUEST[:cut])
            connection.socket.shutdown(socket.SHUT_WR)
            connection.hold()


def test_client_falls_silent(serve: Serve) -> None:
    good = serve("shm:", "tcp:", "tls:", handshake_timeout=HANDSHAKE)
    silent: dict[tuple[str, int], RawConnection] = {}
    with ExitStack() as connections:
        for scheme, cut in product(("tcp", "tls", "shm"), CUTS):
            connection = connections.enter_context(connect(location(good.server, "good", scheme)))
            connection.send(REQUEST[:cut])
            silent[scheme, cut] = connection
        good.check()
        for name, connection in silent.items():
            # The deadline of the whole request is equally long and may expire first on a busy machine.
            with case(name):
                assert re.search(f"silent for {HANDSHAKE:g} s|sent no complete request in time", reason(connection))
    wait_until(good.alone, "the server has let go of the connections")
    good.check()


# Requests during leases


class Stream(NamedTuple):
    """A stream in shared memory that was read to its end, the addresses that are held, and the tag that frees them."""

    connection: RawConnection
    held: list[int]
    free_tag: int
    want_tag: int


@contextmanager
def holding(good: Good) -> Iterator[Stream]:
    uri = good.server.locations("good")[0]
    assert uri.startswith("shm")
    with other(good, "shm") as connection:
        connection.send(want(good.server.ticket("good"), want_of(uri)))
        yield Stream(connection, read_stream(connection), free_of(uri), want_of(uri))


def read_stream(connection: RawConnection) -> list[int]:
    """Read to the end of the stream, and return every address that must be freed."""
    return read_addresses(connection, None)


def read_addresses(connection: RawConnection, bodies: int | None) -> list[int]:
    """Read `count` bodies by address, or to the end of the stream, and return every address that must be freed."""
    held: list[int] = []
    while bodies is None or bodies > 0:
        kind, tag, payload = connection.read_frame()
        if kind == UNTAGGED and payload[0] == 0:
            return held
        if kind == TAGGED and tag >> 56 == 1:
            bodies = None if bodies is None else bodies - 1
            pairs = struct.unpack(f"<{len(payload) // 8}Q", payload)[2:]
            held += (address for address, length in zip(pairs[::2], pairs[1::2], strict=True) if length)
    return held


def test_stream_is_held_until_all_is_freed(serve: Serve) -> None:
    # The cases below are variations of this test.
    good = serve("shm:")
    with holding(good) as stream:
        assert len(stream.held) == 3 * 4  # batches of integers and of strings with validity and offsets
        stream.connection.send(free(*stream.held[:5], tag=stream.free_tag))
        stream.connection.send(free(*stream.held[5:], tag=stream.free_tag))
        assert stream.connection.read_frames() == []


def many_addresses() -> pa.Table:
    """Return a table with more addresses than a request may have bytes. Its messages are too long for runs."""
    batch = pa.record_batch({str(number): pa.array([number], pa.int64()) for number in range(2200)})
    return pa.Table.from_batches([batch] * 30)


def test_one_message_frees_everything(serve: Serve) -> None:
    good = serve("shm:", inline_limit=0)
    good.server.publish("many", many_addresses())
    uri = good.server.locations("many")[0]
    with other(good, "shm") as connection:
        connection.send(want(good.server.ticket("many"), want_of(uri)))
        held = read_stream(connection)
        assert len(held) == 2200 * 30
        # Also the addresses of empty buffers, which are 0.
        connection.send(free(*held, *[0] * len(held), tag=free_of(uri)))
        assert connection.read_frames() == []


def test_one_message_frees_much_while_the_server_sends(serve: Serve) -> None:
    good = serve("shm:", inline_limit=0)
    good.server.publish("many", many_addresses())
    uri = good.server.locations("many")[0]
    with other(good, "shm") as connection:
        connection.send(want(good.server.ticket("many"), want_of(uri)))
        # The server is still sending the rest, which does not fit into the socket.
        held = read_addresses(connection, 10)
        assert len(held) == 2200 * 10
        connection.send(free(*held, tag=free_of(uri)))
        connection.send(free(*read_stream(connection), tag=free_of(uri)))
        assert connection.read_frames() == []


def test_more_addresses_than_are_held_are_refused_unread(serve: Serve) -> None:
    good = serve("shm:", inline_limit=0)
    good.server.publish("many", many_addresses())
    uri = good.server.locations("many")[0]
    with other(good, "shm") as connection:
        connection.send(want(good.server.ticket("many"), want_of(uri)))
        pairs = 2 * len(read_stream(connection))
        connection.send(head(TAGGED, 8 * (pairs + 1), free_of(uri)))
        assert f"a message of {8 * (pairs + 1)} bytes; at most {8 * pairs} are accepted" in reason(connection)


FREES: dict[str, tuple[Callable[[Stream], bytes], str]] = {
    "unknown address": (lambda s: free(12345, tag=s.free_tag), "freed the address 0x3039, which it does not hold"),
    "address within a buffer": (lambda s: free(s.held[0] + 8, tag=s.free_tag), "which it does not hold"),
    "the last address": (lambda s: free(2**64 - 1, tag=s.free_tag), "which it does not hold"),
    "double free": (lambda s: free(s.held[0], s.held[0], tag=s.free_tag), "which it does not hold"),
    "double free in two": (lambda s: free(s.held[0], tag=s.free_tag) * 2, "which it does not hold"),
    "empty": (lambda s: frame(TAGGED, b"", s.free_tag), "free_data message of 0 bytes"),
    "ragged": (lambda s: frame(TAGGED, bytes(12), s.free_tag), "free_data message of 12 bytes"),
    "of 2**55 bytes": (lambda s: head(TAGGED, 2**55, s.free_tag), "at most 65536 are accepted"),
    "second request": (lambda s: frame(TAGGED, b"ticket", s.want_tag), "a second stream"),
    "second preamble": (lambda s: PREAMBLE + free(1, tag=s.free_tag), "this kind has no tag and at most"),
    "region": (lambda s: region(0, 4096, SEALED), "shared memory"),
    "untagged": (lambda s: frame(UNTAGGED, b"\0\0\0\0\0"), "untagged message"),
}


def test_broken_free(serve: Serve) -> None:
    good = serve("shm:")
    for name, (make, phrase) in FREES.items():
        with case(name), holding(good) as stream:
            stream.connection.send(make(stream))
            assert phrase in reason(stream.connection)


def test_client_hangs_up_within_a_free(serve: Serve) -> None:
    good = serve("shm:")
    for cut in (1, 16, 20):
        with case(cut), holding(good) as stream:
            stream.connection.send(free(*stream.held, tag=stream.free_tag)[:cut])


def test_client_holds_for_too_long(serve: Serve) -> None:
    good = serve("shm:", lease_timeout=HANDSHAKE)
    with holding(good) as stream:
        assert "silent" in reason(stream.connection)


def test_descriptors_from_a_client(serve: Serve) -> None:
    good = serve("shm:")
    with holding(good) as stream:
        with open("/dev/zero", "rb") as file:
            stream.connection.send_with(free(stream.held[0], tag=stream.free_tag), [file.fileno()] * 100)
            stream.connection.send_with(region(0, 4096, SEALED), [file.fileno()])
        assert "shared memory" in reason(stream.connection)


def test_descriptors_with_the_request(serve: Serve) -> None:
    # The kernel drops the descriptors, and nothing else happens.
    good = serve("shm:")
    uri = good.server.locations("good")[0]
    with other(good, "shm") as connection:
        with open("/dev/zero", "rb") as file:
            connection.send_with(want(good.server.ticket("good"), want_of(uri)), [file.fileno()] * 100)
        held = read_stream(connection)
        assert "/dev/zero" not in descriptors()
        connection.send(free(*held, tag=free_of(uri)))
        assert connection.read_frames() == []


CANNOT_WRITE = """
import mmap, os, sys

descriptor = int(sys.argv[1])
os.setuid(65534)  # as which this one may have it; root could do anything
for attempt in (
    lambda: os.pwrite(descriptor, b"x", 0),
    lambda: os.ftruncate(descriptor, 0),
    lambda: mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE),
    lambda: os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR),
):
    try:
        attempt()
        print("could")
    except OSError as error:
        print(error.errno)
print(len(mmap.mmap(descriptor, 4096, prot=mmap.PROT_READ).read()))
"""


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", ["table", "live", "file"])
def test_descriptors_that_are_handed_out_cannot_be_written(
    serve: Serve, table: pa.Table, tmp_path: Path, kind: str
) -> None:
    good = serve("shm:")
    path = tmp_path / "file.arrow"
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    path.chmod(0o644)
    sources = {"table": table, "live": table.to_reader, "file": path}
    good.server.publish("this", sources[kind])
    (uri,) = good.server.locations("this")
    with connect(uri) as connection:
        connection.send(want(good.server.ticket("this"), want_of(uri)))
        connection.read_frame()
        while not connection.descriptors:
            connection.read_frame()
        (descriptor,) = connection.descriptors
        ran = subprocess.run(
            [sys.executable, "-c", CANNOT_WRITE, str(descriptor)],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert ran.stdout.split() == [str(errno.EBADF), str(errno.EINVAL), str(errno.EACCES), str(errno.EACCES), "4096"]
    good.check()


# Floods


@pytest.fixture
def large(serve: Serve) -> Good:
    """Start a server whose dataset "large" does not fit into a socket's buffer."""
    good = serve("shm:", "tcp:", "tls:", stall_timeout=HANDSHAKE)
    good.server.publish("large", pa.table({"n": pa.array(np.arange(1 << 20))}))
    return good


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm"])
def test_flood_instead_of_reading(large: Good, scheme: str) -> None:
    server = large.server
    uri = location(server, "large", scheme, bodies="packed")
    with other(large, scheme) as connection:
        connection.send(want(server.ticket("large"), want_of(uri)))
        with pytest.raises((BrokenPipeError, ConnectionResetError, ssl.SSLEOFError)):
            connection.send(frame(TAGGED, bytes(8), want_of(uri)) * 3_000_000)


@pytest.mark.parametrize("scheme", ["tcp", "tls", "shm"])
def test_client_takes_nothing(large: Good, scheme: str) -> None:
    # The client gets a prefix of the stream and nothing else, not even the reason.
    server = large.server
    uri = location(server, "large", scheme, bodies="packed")
    request = want(server.ticket("large"), want_of(uri))
    with connect(uri) as whole:
        whole.send(request)
        expected = whole.read_rest()
    with other(large, scheme) as connection:
        connection.send(request)
        got = connection.read_exactly(8)
        wait_until(large.alone, "the server has given up")
        got += connection.read_rest()
    assert len(got) < len(expected)
    assert expected.startswith(got)


def test_many_at_once(serve: Serve) -> None:
    # More connections than the listeners queue break off at every length of the request.
    good = serve("shm:", "tcp://127.0.0.1:0")
    for uri in good.server.locations("good"):
        request = want(good.server.ticket("good"), want_of(uri))
        for n in range(200):
            with connect(uri) as connection:
                connection.send(request[: n % (len(request) + 1)])
    good.check()


# Other users of the host, who reach the socket in spite of its mode

AS_NOBODY = """
import os, sys
from dissociated import DissociatedError, Server, open_stream  # which this user may read
import pyarrow as pa

path = sys.argv[1]
if sys.argv[2] == "serve":
    os.setuid(65534)
    server = Server([f"shm://{path}"], catalog=None)
    server.publish("data", pa.table({"n": [1, 2, 3]}), ticket=b"ticket")
    print(server.locations("data")[0], flush=True)
    sys.stdin.read()
else:
    os.setuid(int(sys.argv[4]) if sys.argv[4:] else 65534)
    try:
        print(open_stream(path, bytes.fromhex(sys.argv[3]), timeout=5).read_all().num_rows)
    except DissociatedError as error:
        print(type(error).__name__, error)
"""


def stranger(spawn: Spawn, uri: str, ticket: bytes, user: int = 65534) -> str:
    """Return the output of a client of another user that reads at `uri`."""
    out, _ = spawn("-c", AS_NOBODY, uri, "connect", ticket.hex(), str(user)).communicate(timeout=PATIENCE)
    return out.strip()


@pytest.mark.needs("root")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_client_of_another_user(serve: Serve, spawn: Spawn, runtime: str, mode: int) -> None:
    os.chmod(runtime, 0o755)
    good = serve(f"shm://{runtime}/own.sock")
    os.chmod(f"{runtime}/own.sock", mode)
    heard = stranger(spawn, good.server.locations("good")[0], good.server.ticket("good"))
    if mode == 0o600:
        assert heard.startswith("TransportError connecting to the shm server")
        assert "Permission denied" in heard
    else:
        assert heard == "AccessDenied this server does not allow user 65534: its owner can add the user to `allow`"
    good.check()


@pytest.mark.needs("root")
def test_client_of_a_user_who_is_allowed(serve: Serve, spawn: Spawn, runtime: str) -> None:
    # The allowed user also trusts the server's user, root, as every user does. Other users are refused.
    os.chmod(runtime, 0o755)
    good = serve(f"shm://{runtime}/own.sock?allow=nobody,12345")
    assert "allow" not in good.server.locations("good")[0]
    heard = {
        user: stranger(spawn, good.server.locations("good")[0], good.server.ticket("good"), user)
        for user in (65534, 12345, 54321)
    }
    assert heard == {
        65534: str(3 * ROWS),
        12345: str(3 * ROWS),
        54321: "AccessDenied this server does not allow user 54321: its owner can add the user to `allow`",
    }
    good.check()


@pytest.mark.needs("root")
def test_server_of_another_user(spawn: Spawn, runtime: str) -> None:
    os.chmod(runtime, 0o777)
    process = spawn("-c", AS_NOBODY, f"{runtime}/own.sock", "serve")
    assert process.stdout is not None
    uri = process.stdout.readline().strip()
    sentence = r"runs as another user, whose memory is not trusted: to trust it, use trusted_users=\[65534\]"
    for trusted in ("", "&allow=12345"):
        with pytest.raises(dis.errors.TransportError, match=sentence):
            dis.open_stream(uri + trusted, b"ticket")
    assert dis.open_stream(uri + "&allow=nobody", b"ticket").read_all()["n"].to_pylist() == [1, 2, 3]
    process.kill()
    process.wait(PATIENCE)
    os.unlink(f"{runtime}/own.sock")

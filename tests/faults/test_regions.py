"""Servers that share memory which cannot be mapped safely, or send addresses outside of shared memory."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import dissociated as dis
from dissociated.errors import RemoteProtocolError, TransportError

from .conftest import Scripted
from .content import BASE, BODY, META, SCHEMA, TABLE
from .peer import (
    ADDRESSES,
    FILE,
    LIVE,
    PREAMBLE,
    REGION,
    SEALED,
    Frame,
    RawConnection,
    RawServer,
    Script,
    addresses,
    body,
    end,
    frame,
    region,
)

SIZE = 8192
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
ALL_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@contextmanager
def memfd(size: int = SIZE, seals: int = ALL_SEALS) -> Iterator[int]:
    """Provide a memfd that starts with the body of the dataset."""
    descriptor = os.memfd_create("raw", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, BODY[:size], 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def on_disk() -> Iterator[int]:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(SIZE))
        file.flush()
        yield file.fileno()


@contextmanager
def pipe() -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


@contextmanager
def sockets() -> Iterator[int]:
    one, other = socket.socketpair()
    with one, other:
        yield one.fileno()


@contextmanager
def directory() -> Iterator[int]:
    descriptor = os.open("/tmp", os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def write_only() -> Iterator[int]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(SIZE))
        file.flush()
        descriptor = os.open(file.name, os.O_WRONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


@contextmanager
def device() -> Iterator[int]:
    with open("/dev/zero", "rb") as file:
        yield file.fileno()


def stream(*pairs: tuple[int, int], frees: bool = True) -> bytes:
    return SCHEMA + META + body(1, addresses(*pairs), ADDRESSES) + end(2)


def sharing(descriptors: list[int], announcement: bytes, rest: bytes) -> Script:
    """Return a script that greets, shares these descriptors together with `announcement`, and sends the rest."""

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        connection.send_with(announcement, descriptors)
        connection.send(rest)
        connection.hold()

    return script


def refused(server: RawServer, phrase: str, error: type[Exception] = RemoteProtocolError) -> None:
    with pytest.raises(error, match=phrase) as caught:
        dis.open_stream(server.uri, b"ticket", timeout=10).read_all()
    assert type(caught.value) is error
    server.wait_done()
    del caught  # The traceback refers to this frame, which would be a reference cycle.


GOOD = stream((0, 0), (BASE, 8000))

#: The shared memory, its announcement, and the client's error.
UNSAFE = {
    "no seals": (lambda: memfd(seals=0), (SIZE, SEALED), "without the seals"),
    "no seals, live": (lambda: memfd(seals=0), (SIZE, LIVE), "without the seals"),
    "it can be written": (lambda: memfd(seals=SIZE_SEALS), (SIZE, SEALED), "without the seals"),
    "it can shrink": (lambda: memfd(seals=fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW), (SIZE, LIVE), "without the seals"),
    "a file that claims seals": (on_disk, (SIZE, SEALED), "without the seals"),
    "a live file": (on_disk, (SIZE, LIVE), "without the seals"),
    "too small": (memfd, (SIZE + 1, SEALED), "a region of 8193 bytes and shared one of 8192"),
    "much too small": (memfd, (2**63 + 5, SEALED), "shared one of 8192"),
    "too small a file": (on_disk, (SIZE + 1, FILE), "shared one of 8192"),
    "unknown backing": (memfd, (SIZE, 3), "unknown backing 3"),
    "a pipe": (pipe, (SIZE, FILE), "neither a file nor a memfd"),
    "a socket": (sockets, (SIZE, FILE), "neither a file nor a memfd"),
    "a directory": (directory, (SIZE, FILE), "neither a file nor a memfd"),
    "a device": (device, (SIZE, FILE), "neither a file nor a memfd"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_region(scripted: Scripted, name: str) -> None:
    make, (size, backing), phrase = UNSAFE[name]
    with make() as descriptor:
        refused(scripted("shm", sharing([descriptor], region(BASE, size, backing), GOOD)), phrase)


def test_region_that_cannot_be_read(scripted: Scripted) -> None:
    with write_only() as descriptor:
        refused(
            scripted("shm", sharing([descriptor], region(BASE, SIZE, FILE), GOOD)),
            "cannot map the 8192 bytes",
            TransportError,
        )


def test_region_without_descriptor(scripted: Scripted) -> None:
    refused(scripted("shm", sharing([], region(BASE, SIZE, SEALED), GOOD)), "without its descriptor")


@pytest.mark.parametrize("payload", [b"", bytes(16), bytes(32)])
def test_region_without_extent(scripted: Scripted, payload: bytes) -> None:
    with memfd() as descriptor:
        refused(scripted("shm", sharing([descriptor], frame(REGION, payload), GOOD)), "its extent")


@pytest.mark.parametrize("base", [BASE, BASE - 1, BASE + SIZE - 1, BASE - SIZE + 1, 1])
def test_overlapping_regions(scripted: Scripted, base: int) -> None:
    size = 2 * BASE if base == 1 else SIZE

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        with memfd() as one, memfd(size) as other:
            connection.send_with(region(BASE, SIZE, SEALED), [one])
            connection.send_with(region(base, size, SEALED), [other])
        connection.send(GOOD)
        connection.hold()

    refused(scripted("shm", script), "overlaps")


def test_too_many_regions(scripted: Scripted) -> None:
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        with memfd() as descriptor:
            for n in range(4097):
                connection.send_with(region(BASE + n * SIZE, SIZE, SEALED), [descriptor])
        connection.send(GOOD)
        connection.hold()

    refused(scripted("shm", script), "more than 4096 regions")


LEAVING = {
    "before": ((BASE - 8, 8000), "in no region"),
    "far before": ((0, 8000), "in no region"),
    "behind": ((BASE + SIZE, 8000), "in no region"),
    "far behind": ((2**63, 8000), "in no region"),
    "over the end": ((BASE + SIZE - 7992, 8000), "extends beyond <Region"),
    "over the end of the addresses": ((2**64 - 8, 8000), "in no region"),
}


@pytest.mark.parametrize("name", LEAVING)
def test_address_outside(scripted: Scripted, name: str) -> None:
    pair, phrase = LEAVING[name]
    with memfd() as descriptor:
        refused(scripted("shm", sharing([descriptor], region(BASE, SIZE, SEALED), stream((0, 0), pair))), phrase)


def test_extent_into_the_next_region(scripted: Scripted) -> None:
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        with memfd() as descriptor:
            connection.send_with(region(BASE, SIZE, SEALED), [descriptor])
            connection.send_with(region(BASE + SIZE, SIZE, SEALED), [descriptor])
        connection.send(stream((0, 0), (BASE + SIZE - 4000, 8000)))
        connection.hold()

    refused(scripted("shm", script), "extends beyond <Region")


def test_descriptors_that_no_region_claims(scripted: Scripted) -> None:
    # A peer must not be able to exhaust the descriptors of this process.
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE + SCHEMA)
        with memfd() as descriptor:
            for at in range(len(META)):
                connection.send_with(META[at : at + 1], [descriptor] * 16)
        connection.hold()

    refused(scripted("shm", script), "descriptors")


def test_good_conversation(scripted: Scripted) -> None:
    # The cases above are variations of this test. The batch lies in the region, and its address is freed.
    given_back: list[Frame] = []

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        connection.send_with(region(BASE, SIZE, SEALED), [descriptor])
        connection.send(GOOD)
        given_back.append(connection.read_frame())
        connection.hold()

    with memfd() as descriptor:
        server = scripted("shm", script)
        table = dis.open_stream(server.uri, b"ticket", timeout=10).read_all()
        assert table.equals(TABLE)
        del table
        server.wait_done()
    assert given_back == [(2, 9, struct.pack("<Q", BASE))]


def test_unaligned_addresses_are_copied(scripted: Scripted) -> None:
    # Such addresses are legal, although libarrow could not read the buffers in place.
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        connection.send_with(region(BASE - 4, SIZE, SEALED), [descriptor])
        connection.send(stream((0, 0), (BASE, 8000)))
        assert connection.read_frame().payload == struct.pack("<Q", BASE)
        connection.hold()

    descriptor = os.memfd_create("raw", os.MFD_ALLOW_SEALING)
    os.write(descriptor, bytes(4) + BODY + bytes(SIZE))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, ALL_SEALS)
    server = scripted("shm", script)
    assert dis.open_stream(server.uri, b"ticket", timeout=10).read_all().equals(TABLE)
    server.wait_done()
    os.close(descriptor)


def test_client_without_descriptors(scripted: Scripted) -> None:
    # The kernel then drops the descriptors. The message says that this process lacks descriptors, not the server.
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # More descriptors than that are open.
        try:
            connection.send_with(region(BASE, SIZE, SEALED), [descriptor])
            connection.send(GOOD)
            connection.hold()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    with memfd() as descriptor:
        refused(scripted("shm", script), "ulimit -n", TransportError)


def test_memory_that_the_client_cannot_map(scripted: Scripted) -> None:
    size = 1 << 40  # sparse

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size, limits[1]))
        try:
            connection.send_with(region(BASE, size, SEALED), [descriptor])
            connection.hold()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)

    with memfd(size) as descriptor:
        refused(scripted("shm", script), "cannot map the 1099511627776 bytes", TransportError)


def test_live_region_may_be_written_meanwhile(scripted: Scripted) -> None:
    # The file is not sealed against shrinking, which would crash a reader.
    with memfd(seals=SIZE_SEALS) as descriptor, mmap.mmap(descriptor, SIZE) as memory:
        server = scripted("shm", sharing([descriptor], region(BASE, SIZE, LIVE), GOOD))
        table = dis.open_stream(server.uri, b"ticket", timeout=10).read_all()
        memory[:8] = struct.pack("<q", -1)
        assert table["n"][0].as_py() == -1
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 0)
        del table
        server.wait_done()

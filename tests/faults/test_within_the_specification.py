"""Peers that use freedoms of the specification which our own side does not use: they are understood."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.format.message import buffer_extents, parse_header
from dissociated.ipc import CollectListener, DissociatedDecoder
from dissociated.memory.region import AddressSpace, Region
from support import arrow_cases

from .conftest import Scripted
from .content import BODY, META, SCHEMA, TABLE
from .peer import ADDRESSES, FREE, PREAMBLE, SEALED, RawConnection, addresses, body, end, metadata
from .peer import region as region_frame

BASE = 0x10000
SIZE = 1 << 20
APART = 5  # regions, in turns


@contextmanager
def memfds(contents: Sequence[bytes | bytearray]) -> Iterator[list[int]]:
    descriptors = []
    try:
        for content in contents:
            descriptors.append(os.memfd_create("raw", os.MFD_ALLOW_SEALING))
            os.write(descriptors[-1], content)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptors[-1], fcntl.F_ADD_SEALS, seals)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Apart:
    """A stream in which consecutive buffers of a message lie in different regions."""

    def __init__(self, batches: Sequence[pa.RecordBatch], codec: str | None = None, unaligned: bool = False) -> None:
        self.regions = [bytearray(SIZE) for _ in range(APART)]
        self.ends = [8] * APART
        self.sent: list[int] = []
        self.messages: list[tuple[bytes, list[tuple[int, int]] | None]] = []
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            for batch in batches:
                writer.write_batch(batch)
        for message in pa.ipc.MessageReader.open_stream(sink.getvalue()):
            header = message.metadata.to_pybytes()
            extents = None if message.type == "schema" else self._place(header, message.body.to_pybytes(), unaligned)
            self.messages.append((header, extents))

    def _place(self, header: bytes, content: bytes, unaligned: bool) -> list[tuple[int, int]]:
        extents = []
        for index, (offset, length) in enumerate(zip(*buffer_extents(header, parse_header(header)), strict=True)):
            number = index % APART
            at = self.ends[number] + unaligned
            self.regions[number][at : at + length] = content[offset : offset + length]
            self.ends[number] = at + length + -(at + length) % 8
            # An empty buffer may have any address, which is freed unless it is 0.
            extents.append((BASE + number * SIZE + at if length else (0, 1, 2**64 - 1)[index % 3], length))
        self.sent += [address for address, length in extents if length or address]
        return extents

    def lists(self) -> Iterator[tuple[int, bytes]]:
        """Return the number of each message with a body and its address list, whose total includes padding."""
        for number, (_, extents) in enumerate(self.messages):
            if extents is not None:
                total = sum(length + -length % 8 for _, length in extents)
                yield number, addresses(*extents, total=total)


#: A batch with a column of every type, an empty batch, and dictionaries that change.
EVERYTHING = pa.record_batch(
    {f"{name} {n}": array for name, some in arrow_cases.ARRAYS.items() for n, array in enumerate(some)}
)
STREAMS = {
    "every type": (EVERYTHING, EVERYTHING.slice(0, 0), EVERYTHING.slice(3, 9)),
    "two columns": (pa.record_batch({"a": range(1000), "b": [f"word {n % 7}" for n in range(1000)]}),) * 3,
    "dictionaries": tuple(
        pa.record_batch({"d": pa.array(words).dictionary_encode(), "n": range(len(words))})
        for words in (["a", "b"], ["c", "d", "e"], ["a"])
    ),
}


@pytest.mark.parametrize("how", ["where it lies", "compressed", "unaligned"])
@pytest.mark.parametrize("name", STREAMS)
def test_buffers_of_one_message_in_several_regions(scripted: Scripted, name: str, how: str) -> None:
    batches = STREAMS[name]
    apart = Apart(batches, "zstd" if how == "compressed" else None, how == "unaligned")
    freed: list[int] = []

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        for number, descriptor in enumerate(descriptors):
            connection.send_with(region_frame(BASE + number * SIZE, SIZE, SEALED), [descriptor])
        for number, (header, _) in enumerate(apart.messages):
            connection.send(metadata(number, header))
        connection.send(body(0, b""))  # no column needs it
        for number, listed in apart.lists():
            connection.send(body(number, listed, ADDRESSES))
        connection.send(end(len(apart.messages)))
        while len(freed) < len(apart.sent):
            kind, tag, payload = connection.read_frame()
            assert (kind, tag) == (2, FREE)
            freed.extend(struct.unpack(f"<{len(payload) // 8}Q", payload))
        connection.hold()

    with memfds(apart.regions) as descriptors:
        server = scripted("shm", script)
        reader = dis.open_stream(server.uri, b"ticket", timeout=10)
        allocated = pa.total_allocated_bytes()
        read = list(reader)
        if how == "where it lies" and name != "every type":
            assert pa.total_allocated_bytes() == allocated
        for batch, expected in zip(read, batches, strict=True):
            batch.validate(full=True)
            assert batch.equals(expected)
        del read, batch, reader
        server.wait_done()
    assert sorted(freed) == sorted(apart.sent)


@pytest.mark.parametrize("name", STREAMS)
def test_the_decoder_takes_several_regions_too(name: str) -> None:
    batches = STREAMS[name]
    apart = Apart(batches)
    space = AddressSpace()
    for number, memory in enumerate(apart.regions):
        space.add(Region(BASE + number * SIZE, pa.py_buffer(memory)))
    returns: SimpleQueue[Sequence[int]] = SimpleQueue()
    listener = CollectListener()
    decoder = DissociatedDecoder(listener, address_space=space, returns=returns)
    for number, (header, _) in enumerate(apart.messages):
        decoder.consume_metadata(struct.pack("<BI", 1, number) + header)
    for number, listed in apart.lists():
        decoder.consume_body(1 << 56 | number, listed)
    decoder.consume_metadata(struct.pack("<BI", 0, len(apart.messages)))
    decoder.consume_body(0, b"")  # after everything else
    assert listener.complete
    assert listener.batches == [*batches]
    listener.batches.clear()
    freed: list[int] = []
    while not returns.empty():
        freed += returns.get()
    assert sorted(freed) == sorted(apart.sent)


def test_an_address_for_an_empty_buffer_and_an_empty_body_for_the_schema(scripted: Scripted) -> None:
    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(PREAMBLE)
        connection.send_with(region_frame(BASE, 8192, SEALED), [descriptor])
        listed = addresses((77, 0), (BASE + 8, 8000))
        connection.send(body(0, bytes(16), ADDRESSES) + SCHEMA + META + body(1, listed, ADDRESSES) + end(2))
        assert connection.read_frame().payload == struct.pack("<2Q", 77, BASE + 8)
        connection.hold()

    with memfds([bytes(8) + BODY + bytes(SIZE)]) as (descriptor,):
        server = scripted("shm", script)
        assert dis.open_stream(server.uri, b"ticket", timeout=10).read_all().equals(TABLE)
        server.wait_done()

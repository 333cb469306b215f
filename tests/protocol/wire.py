"""A peer made by hand: bytes of the specification, and Arrow IPC messages from libarrow.

This module does not call the code under test.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pyarrow as pa

from support.tensor_cases import GOLDEN

UINT32 = 2**32


class Encoded(NamedTuple):
    """An Arrow IPC message from libarrow: its flatbuffer and its packed body (None if it has no body)."""

    header: bytes
    body: bytes | None


#: A record batch of two buffers with a layout that libarrow never writes: nothing aligned, no nodes, no padding.
BY_HAND = bytes.fromhex(
    "10000000"  # 0: the root table is at 16
    "0c00 1400 0000 0400 0800 0c00"  # 4: its vtable: no version, type at 4, header at 8, bodyLength at 12
    "0c000000 03000000 16000000 6400000000000000"  # 16: vtable 12 back, RECORD_BATCH, table 22 ahead, 100
    "0a00 0800 0000 0000 0400"  # 36: vtable of the record batch: only buffers, at 4
    "0a000000 04000000"  # 46: vtable 10 back, vector 4 ahead
    "02000000"  # 54: two buffers
    "0000000000000000 1e00000000000000"  # 58: offset 0, 30 bytes
    "2000000000000000 4400000000000000"  # 74: offset 32, 68 bytes
)


def patched(at: int, hexadecimal: str) -> bytes:
    """Return BY_HAND with other bytes at one position."""
    new = bytes.fromhex(hexadecimal)
    return BY_HAND[:at] + new + BY_HAND[at + len(new) :]


def metadata(sequence: int, header: bytes) -> bytes:
    """Return `bytes([1]) + le_bytes(sequence_number) + batch_metadata`."""
    return b"\x01" + (sequence % UINT32).to_bytes(4, "little") + header


def end_of_stream(count: int) -> bytes:
    """Return `bytes([0]) + le_bytes(sequence_number)`."""
    return b"\x00" + (count % UINT32).to_bytes(4, "little")


def tag(sequence: int, kind: int = 0) -> int:
    """Return a tag: bits 0 to 31 are the sequence number, bits 56 to 63 the kind of the body."""
    return sequence % UINT32 + kind * 2**56


def uint64s(*values: int) -> bytes:
    """Return unsigned little-endian 64-bit integers."""
    return b"".join(value.to_bytes(8, "little") for value in values)


def address_list(*extents: tuple[int, int]) -> bytes:
    """Return an address list: total size, number of buffers, and an (address, length) pair for each buffer."""
    pairs = [number for extent in extents for number in extent]
    return uint64s(sum(length for _, length in extents), len(extents), *pairs)


def read_messages(stream: pa.Buffer) -> Iterable[pa.ipc.Message]:
    reader = pa.BufferReader(stream)
    while True:
        try:
            yield pa.ipc.read_message(reader)
        except EOFError:
            return


def encode(*batches: pa.RecordBatch, custom_metadata: dict[str, str] | None = None) -> list[Encoded]:
    """Return the IPC messages of a stream of these batches. The schema is first."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch, custom_metadata=custom_metadata)
    return [
        Encoded(message.metadata.to_pybytes(), None if message.type == "schema" else message.body.to_pybytes())
        for message in read_messages(sink.getvalue())
    ]


def encode_tensor(tensor: pa.Tensor) -> Encoded:
    """Return the IPC message of a tensor."""
    sink = pa.BufferOutputStream()
    pa.ipc.write_tensor(tensor, sink)
    message = pa.ipc.read_message(sink.getvalue())
    return Encoded(message.metadata.to_pybytes(), message.body.to_pybytes())


def golden_tensor(name: str) -> Encoded:
    """Return the message of a golden tensor."""
    content = GOLDEN[name]
    body_at = 8 + int.from_bytes(content[4:8], "little")
    return Encoded(content[8:body_at], content[body_at:])


def decode(header: bytes, body: bytes) -> pa.ipc.Message:
    """Let libarrow read this flatbuffer and this body as one encapsulated message."""
    padded = header + bytes(-len(header) % 8)
    return pa.ipc.read_message(b"\xff\xff\xff\xff" + len(padded).to_bytes(4, "little") + padded + body)


def joined(parts: Sequence[bytes]) -> bytes:
    """Return the message that arrives when `parts` are sent together."""
    return b"".join(parts)

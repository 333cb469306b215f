"""Literal bytes of every kind of message: the parsed values, and the streams of such messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.format.encapsulated import Encapsulated, encapsulate, walk
from dissociated.format.message import Header, HeaderType, buffer_extents, parse_header, row_count
from support.helpers import Serve

from .vectors import (
    ANNOTATED,
    BATCH,
    DELTA,
    EMPTY,
    END,
    INDICES,
    LEGACY_END,
    LZ4,
    MORE_INDICES,
    SCHEMA,
    WORDS,
    WORDS_SCHEMA,
    ZSTD,
    Vector,
)

S, D, R = HeaderType.SCHEMA, HeaderType.DICTIONARY_BATCH, HeaderType.RECORD_BATCH

Extents = list[tuple[int, int]]


class Known(NamedTuple):
    """A vector and the meaning of its bytes."""

    vector: Vector
    parsed: Header  # type, length of the body, where that stands; first buffer, how many; whether it has metadata
    extents: Extents
    rows: int


MESSAGES = {
    "schema": Known(SCHEMA, Header(S, 0, -1, 0, 0), [], 0),
    "batch": Known(BATCH, Header(R, 16, 32, 80, 2), [(0, 0), (0, 12)], 3),
    "metadata of its own": Known(ANNOTATED, Header(R, 16, 40, 128, 2), [(0, 0), (0, 12)], 3),
    "empty batch": Known(EMPTY, Header(R, 0, -1, 56, 2), [(0, 0), (0, 0)], 0),
    "lz4": Known(LZ4, Header(R, 40, 32, 96, 2), [(0, 0), (0, 37)], 64),
    "zstd": Known(ZSTD, Header(R, 32, 32, 104, 2), [(0, 0), (0, 29)], 64),
    "schema with a dictionary": Known(WORDS_SCHEMA, Header(S, 0, -1, 0, 0), [], 0),
    "dictionary": Known(WORDS, Header(D, 24, 32, 96, 3), [(0, 0), (0, 12), (16, 3)], 0),
    "indices": Known(INDICES, Header(R, 16, 32, 80, 2), [(0, 1), (8, 3)], 3),
    "delta": Known(DELTA, Header(D, 16, 32, 104, 3), [(0, 0), (0, 8), (8, 1)], 0),
    "more indices": Known(MORE_INDICES, Header(R, 8, 32, 80, 2), [(0, 0), (0, 1)], 1),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_read_in_a_message(name: str) -> None:
    vector, parsed, extents, rows = MESSAGES[name]
    assert parse_header(vector.header) == parsed
    assert list(zip(*buffer_extents(vector.header, parsed), strict=True)) == extents
    assert row_count(vector.header) == rows
    assert parsed.has_body is (vector.body is not None)
    assert parsed.body_length == len(vector.body or b"")


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_encapsulated(name: str) -> None:
    vector, parsed, _, _ = MESSAGES[name]
    assert encapsulate(vector.header) == vector.prefix + vector.header
    assert list(walk(memoryview(vector.whole))) == [Encapsulated(vector.header, parsed, 8 + len(vector.header))]


@pytest.mark.parametrize(
    ("vector", "prefix"), [(SCHEMA, "7c000000"), (BATCH, "8c000000"), (EMPTY, "74000000")], ids=["124", "140", "116"]
)
def test_a_message_with_the_legacy_prefix(vector: Vector, prefix: str) -> None:
    """The length counts four more bytes of padding, so that with a prefix of 4 bytes the body is still aligned."""
    whole = vector.legacy()
    assert whole[:4] == bytes.fromhex(prefix)
    (found,) = walk(memoryview(whole))
    assert found == Encapsulated(vector.header + bytes(4), parse_header(vector.header), 8 + len(vector.header))


@pytest.mark.parametrize(("vector", "at"), [(SCHEMA, 22), (BATCH, 26)], ids=["schema", "batch"])
def test_a_message_of_version_4(vector: Vector, at: int) -> None:
    (found,) = walk(memoryview(vector.version_4(at)))
    assert pa.ipc.read_message(vector.version_4(at)).metadata_version == pa.ipc.MetadataVersion.V4
    assert found.parsed == parse_header(vector.header)


@pytest.mark.parametrize("end", [END, LEGACY_END], ids=["8 bytes", "4 bytes"])
def test_nothing_follows_the_end_of_a_stream(end: bytes) -> None:
    assert len(list(walk(memoryview(SCHEMA.whole + BATCH.whole + end + EMPTY.whole)))) == 2


def whole(*vectors: Vector) -> bytes:
    return b"".join(one.whole for one in vectors) + END


#: Streams, and the values and the metadata of each of their batches.
STREAMS: dict[str, tuple[bytes, list[tuple[list[Any], dict[bytes, bytes] | None]]]] = {
    "no batch": (whole(SCHEMA), []),
    "batches": (
        whole(SCHEMA, BATCH, EMPTY, ANNOTATED),
        [([1, 2, 3], None), ([], None), ([1, 2, 3], {b"k": b"v"})],
    ),
    "legacy": (SCHEMA.legacy() + BATCH.legacy() + EMPTY.legacy() + LEGACY_END, [([1, 2, 3], None), ([], None)]),
    "version 4": (SCHEMA.version_4(22) + BATCH.version_4(26) + END, [([1, 2, 3], None)]),
    "compressed": (whole(SCHEMA, LZ4, BATCH, ZSTD), [([7] * 64, None), ([1, 2, 3], None), ([7] * 64, None)]),
    "a dictionary that grows": (
        whole(WORDS_SCHEMA, WORDS, INDICES, DELTA, MORE_INDICES),
        [(["a", "bc", None], None), (["d"], None)],
    ),
    "a dictionary again": (
        whole(WORDS_SCHEMA, WORDS, INDICES, WORDS, INDICES),
        [(["a", "bc", None], None), (["a", "bc", None], None)],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_arrives(serve: Serve, tmp_path: Path, name: str) -> None:
    content, expected = STREAMS[name]
    (tmp_path / "stream").write_bytes(content)
    server = serve("shm:", "tcp://127.0.0.1:0", "inproc:")
    server.publish("stream", tmp_path / "stream")
    for bodies in ("any", "packed"):
        for uri in server.locations("stream", bodies=bodies):
            reader = dis.open_stream(uri, server.ticket("stream"))
            assert reader.schema.field(0).nullable is ("dictionary" in name)
            assert batches(reader) == expected, uri


def batches(reader: Any) -> list[tuple[list[Any], dict[bytes, bytes] | None]]:
    found: list[tuple[list[Any], dict[bytes, bytes] | None]] = []
    while True:
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return found
        batch.validate(full=True)
        found.append((batch.column(0).to_pylist(), metadata and dict(metadata)))

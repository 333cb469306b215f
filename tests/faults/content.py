"""A small dataset as the messages that scripted servers send."""

from __future__ import annotations

import struct

import pyarrow as pa

from .peer import PREAMBLE, SEALED, body, end, metadata, region

BATCH = pa.record_batch({"n": pa.array(range(1000), pa.int64())})
TABLE = pa.Table.from_batches([BATCH])


def apart(encapsulated: pa.Buffer) -> tuple[bytes, bytes]:
    """Return the flatbuffer and the body of an encapsulated message."""
    raw = encapsulated.to_pybytes()
    marker, length = struct.unpack_from("<Ii", raw)
    assert marker == 0xFFFFFFFF
    return raw[8 : 8 + length], raw[8 + length :]


SCHEMA_HEADER, _ = apart(BATCH.schema.serialize())
BATCH_HEADER, BODY = apart(BATCH.serialize())
assert len(BODY) == 8000

#: Its two buffers: no validity bitmap, and 1000 integers.
BUFFERS = ((0, 0), (0, 8000))

SCHEMA = metadata(0, SCHEMA_HEADER)
META = metadata(1, BATCH_HEADER)
GOOD = PREAMBLE + SCHEMA + META + body(1, BODY) + end(2)

BASE = 0x10000
REGION = region(BASE, 8192, SEALED)

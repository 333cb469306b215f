"""Checksums of columns, which Spark and a reader of Arrow compute independently.

A checksum is the sum of 32 bits of a hash of every non-null value. It depends on every bit of every value, but not on
the order of rows. Numbers, booleans and timestamps are hashed by XXH64 of their 64 bits, which is built into Spark and
implemented in NumPy by `xxhash64` below. Strings are hashed by CRC-32 of their UTF-8.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructField

U64 = np.uint64
MASK = 0xFFFFFFFF
SEED = U64(42)  # the seed of Spark's xxhash64
PRIME_1, PRIME_2, PRIME_3, PRIME_4, PRIME_5 = map(
    U64,
    (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    ),
)


def in_spark(field: StructField) -> Column:
    """Return the aggregate that computes the checksum of a column in Spark."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import FractionalType, StringType, TimestampType

    column = F.col(field.name)
    match field.dataType:
        case StringType():
            hashed = F.crc32(column.cast("binary"))
        case TimestampType():
            hashed = F.xxhash64(F.unix_micros(column))
        case FractionalType():
            hashed = F.xxhash64(column.cast("double"))
        case _:
            hashed = F.xxhash64(column.cast("long"))
    return F.coalesce(F.sum(F.when(column.isNotNull(), hashed.bitwiseAND(F.lit(MASK)))), F.lit(0))


def in_arrow(column: pa.ChunkedArray) -> int:
    """Compute the checksum of an Arrow column."""
    column = column.drop_null()
    if pa.types.is_string(column.type):
        counted = pc.value_counts(column)
        return sum(zlib.crc32(each["values"].as_buffer()) * each["counts"].as_py() for each in counted)
    if pa.types.is_floating(column.type):
        column = column.cast(pa.float64())
    elif pa.types.is_boolean(column.type):
        column = column.cast(pa.int8()).cast(pa.int64())
    else:
        column = column.cast(pa.int64())
    return int((xxhash64(column.to_numpy().view(U64)) & U64(MASK)).sum())


def xxhash64(values: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Return XXH64 of each value, taken as 8 bytes."""
    rounds = _rotate(values * PRIME_2, 31) * PRIME_1
    hashed = _rotate((SEED + PRIME_5 + U64(8)) ^ rounds, 27) * PRIME_1 + PRIME_4
    hashed = (hashed ^ (hashed >> U64(33))) * PRIME_2
    hashed = (hashed ^ (hashed >> U64(29))) * PRIME_3
    return hashed ^ (hashed >> U64(32))


def _rotate(values: npt.NDArray[np.uint64], bits: int) -> npt.NDArray[np.uint64]:
    return (values << U64(bits)) | (values >> U64(64 - bits))

"""Batches that the tests of devices send."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from support.arrow_cases import ARRAYS, batches

_whole = [batches(arrays) for arrays in ARRAYS.values()]
NAMES = [f"{type_} {name}" for type_, (batch, *_) in zip(ARRAYS, _whole, strict=True) for name in batch.schema.names]
#: Batches with columns of every type: whole, empty, a slice that begins and ends within a byte, and a single row.
ALL_TYPES = [
    pa.record_batch([column for batch in some for column in batch.columns], NAMES) for some in zip(*_whole, strict=True)
]
NUMBERS = pa.table({"n": range(50_000), "f": pa.array(np.linspace(0, 1, 50_000)), "s": ["text"] * 50_000})


def pieces() -> Iterator[pa.RecordBatch]:
    yield from NUMBERS.to_batches(max_chunksize=7_000)

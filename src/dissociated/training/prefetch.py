"""Batches that are copied to a device ahead of their use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import chain

import numpy as np
import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.device import to_device
from dissociated.codec.dlpack import DeviceColumn
from dissociated.errors import WrongKind
from dissociated.memory.device.base import Device
from dissociated.training.columns import Array, Column


def prefetch(batches: Iterator[Mapping[str, Column]], device: Device, ahead: int) -> Iterator[dict[str, DeviceColumn]]:
    """Yield the columns of batches on a device. While one batch is used, the next `ahead` are copied.

    Copies begin in pinned memory of the device's ring, and do not stop this thread. Booleans become bytes.

    Raises:
        WrongKind: if a column is not an array of numbers.
    """
    first = next(batches, None)
    if first is None:
        return
    head = _record_batch(first, device)
    rest = (_record_batch(batch, device) for batch in batches)
    # A generator of batches and their metadata, which these have not.
    reader = BatchReader(head.schema, ((batch, None) for batch in chain([head], rest)))
    with closing(to_device(reader, device)) as copied:
        waiting = deque[dict[str, DeviceColumn]]()
        for batch in copied:
            waiting.append({name: batch[name] for name in head.schema.names})
            if len(waiting) > ahead:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()


def _record_batch(batch: Mapping[str, Column], device: Device) -> pa.RecordBatch:
    return pa.record_batch({name: _pinned(name, column, device) for name, column in batch.items()})


def _pinned(name: str, column: Column, device: Device) -> pa.Array:
    """Copy a column into pinned memory. If the ring is full, the copy is in other memory."""
    if not isinstance(column, np.ndarray):
        raise WrongKind(f"column {name!r} has no array of numbers to be copied to {device.name}: leave it out")
    kind = np.dtype(np.uint8) if column.dtype == np.bool_ else column.dtype
    memory = device.ring.allocate(column.size * kind.itemsize)
    values: Array = np.empty(column.size, kind) if memory is None else np.frombuffer(memory, kind)
    values.reshape(column.shape)[:] = column
    buffer = pa.py_buffer(values) if memory is None else memory
    array = pa.Array.from_buffers(pa.from_numpy_dtype(kind), column.size, [None, buffer], 0)
    return array if column.ndim == 1 else pa.FixedSizeListArray.from_arrays(array, column.size // len(column))

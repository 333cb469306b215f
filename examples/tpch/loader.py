"""Batches for training, as a DataLoader gives them, out of a table in shared memory; a copy only where it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Convert = Callable[[npt.NDArray[Any]], Any]


class Loader:
    """Batches of at most `size` rows: for each column one array, a view of the memory that the table lies in.

    Each `for` is an epoch, with the batches in an order of its own. A batch never spans two record batches, since that
    would be a copy. The arrays are read-only. `convert` makes of one what the model takes; what may be written to must
    be a copy.
    """

    def __init__(
        self, table: pa.Table, columns: Sequence[str], size: int, seed: int = 0, convert: Convert = np.asarray
    ) -> None:
        self._batches = table.select(columns).to_batches()
        self._slices = [
            (index, start) for index, batch in enumerate(self._batches) for start in range(0, batch.num_rows, size)
        ]
        self._columns = columns
        self._size = size
        self._random = np.random.default_rng(seed)
        self._convert = convert

    def __len__(self) -> int:
        return len(self._slices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for at in self._random.permutation(len(self._slices)):
            index, start = self._slices[at]
            batch = self._batches[index].slice(start, self._size)
            yield {name: self._convert(view(batch.column(name))) for name in self._columns}


def view(array: pa.Array) -> npt.NDArray[Any]:
    """The values as NumPy sees them, in place: decimals as whole numbers of their last digit, dates as days.

    Raises ValueError for what NumPy has no view of: nulls, strings, bits, decimals of more than 18 digits.
    """
    if array.null_count:
        raise ValueError("a column with nulls has no view in NumPy")
    if pa.types.is_decimal128(array.type) and array.type.precision <= 18:
        words = np.frombuffer(array.buffers()[1], "<i8", 2 * len(array), 16 * array.offset)
        return words[::2]  # the upper half of each repeats the sign
    if pa.types.is_date32(array.type):
        array = array.view(pa.int32())
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise ValueError(f"{array.type} has no view in NumPy")
    kind = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(array.buffers()[1], kind, len(array), kind.itemsize * array.offset)


def tensors() -> Convert | None:
    """What makes a tensor of an array, where PyTorch is installed.

    A copy, of one batch: PyTorch knows no tensors that are read-only, so arithmetic in place on one that shared the
    memory with its server would end the process (SIGSEGV).
    """
    if not find_spec("torch"):
        return None
    import torch

    return lambda array: torch.from_numpy(array.copy())

"""Q6 over columns of lineitem on a device, computed there if CuPy is installed, and otherwise from copies."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa

import dissociated as dis
from dissociated.codec.device import DeviceBatch
from examples.tpch.steps import step

Arrays = dict[str, Any]


def q6_on_device(client: dis.Client, columns: list[str], device: str, q6: Callable[[Arrays], int]) -> int:
    """Read these columns of lineitem onto the device, and return the sum of `q6` over all batches."""
    with step("to device") as current:
        with client.read_on_device("lineitem", columns=columns, device=device) as reader:
            batches = [*reader]
        for batch in batches:
            batch.synchronize()
        rows, nbytes = sum(batch.num_rows for batch in batches), sum(batch.nbytes for batch in batches)
        current.says = f"{rows:,} rows, {nbytes / 1e6:,.0f} MB on {device}"
        current.facts = {"on_device": nbytes}
    there = device.startswith("cuda") and find_spec("cupy") is not None
    with step("q6 there" if there else "q6 copied") as current:
        revenue = sum(q6((in_cupy if there else in_numpy)(batch, columns)) for batch in batches)
        current.says = "by CuPy" if there else "on the host, of copies: CuPy is not installed, or this is no GPU"
    return revenue


def in_cupy(batch: DeviceBatch, columns: list[str]) -> Arrays:
    """Return CuPy arrays over the device's memory."""
    import cupy

    return {name: _lowest(cupy.asarray(batch[name])) for name in columns}


def in_numpy(batch: DeviceBatch, columns: list[str]) -> Arrays:
    """Return NumPy arrays of a copy on the host."""
    copy = batch.to_host()
    return {name: _lowest(_numbers(copy[name])) for name in columns}


def _numbers(column: pa.Array) -> np.ndarray[Any, Any]:
    width = column.type.bit_width // 8
    numbers = np.frombuffer(column.buffers()[1], f"<i{min(width, 8)}").reshape(-1, max(1, width // 8))
    return numbers[column.offset : column.offset + len(column)]


def _lowest(numbers: Any) -> Any:
    """Return the lower 64 bits of 128-bit decimals, which hold all values of TPC-H. Other numbers are unchanged."""
    return numbers[:, 0] if numbers.ndim == 2 else numbers

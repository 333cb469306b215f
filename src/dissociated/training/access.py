"""Kinds of access to the arrays of batches: read-only, in a private mapping, or copied."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np
import pyarrow as pa

from dissociated.memory.private import PrivateMapping
from dissociated.memory.region import Region
from dissociated.training.columns import Array, Column, Lists


class Access(Enum):
    """A kind of access to the arrays of a batch."""

    #: Arrays lie in the server's memory if possible, and are read-only.
    READ_ONLY = auto()
    #: Arrays lie in the server's memory if possible, mapped privately. They can be written to, and the change is
    #: visible in that array alone.
    PRIVATE = auto()
    #: Arrays are copies that can be written to.
    COPIED = auto()


class Lender:
    """A converter of the arrays of one epoch to arrays with the requested access.

    No two arrays that can be written to share a byte. `find` returns the region of shared memory that contains an
    address of this process, or None.
    """

    def __init__(self, access: Access, find: Callable[[int], Region | None]) -> None:
        self._access = access
        self._find = find
        self._region: Region | None = None  # the region of the last array
        self._mapping: PrivateMapping | None = None  # a private mapping of `_region`
        # For DLPack: consumers may ignore that an array is read-only. See `SharedArray`.
        self._exporter = Lender(Access.PRIVATE, find) if access is Access.READ_ONLY else None

    def lend(self, array: Array) -> Array:
        """Return an array of the same values with the requested access.

        A writable `array` is returned as it is, since it has memory of its own already.
        """
        if self._access is Access.READ_ONLY:
            if array.flags.writeable:
                array.flags.writeable = False
                return array
            shared = array.view(SharedArray)
            shared.lender = self._exporter
            return shared
        if array.flags.writeable:
            return array
        private = self._map(array) if self._access is Access.PRIVATE else None
        return array.copy() if private is None else private

    def lend_column(self, column: Column) -> Column:
        """Return a column of a batch with the requested access."""
        if isinstance(column, Lists):
            return Lists(self.lend(column.values), self.lend(column.offsets))
        return self.lend(column) if isinstance(column, np.ndarray) else column

    def _map(self, array: Array) -> Array | None:
        """Return the array in a private mapping of its memory.

        Return None if the array does not lie in shared memory, shares bytes with an array that was mapped before, or
        has a negative stride.
        """
        if not array.size or not array.flags.aligned or min(array.strides, default=0) < 0:
            return None
        start, stop = _extent(array)
        region = self._find(start)
        if region is None or region.file is None:
            return None
        mapping = self._mapping
        if mapping is None or region is not self._region or mapping.claims.full:
            self._region = region
            # Not `array` itself: if it is a view of a `SharedArray`, that has the lender, which has the mapping. The
            # garbage collector does not see such a cycle, since an array does not report its base to it.
            source = array
            while isinstance(source.base, np.ndarray):
                source = source.base
            self._mapping = mapping = region.file.map_private(region.size, source)
        base = region.memory.address
        if mapping is None or not mapping.claims.add(start - base, stop - base):
            return None
        return np.ndarray(array.shape, array.dtype, mapping, start - base, array.strides)


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """A read-only array, which may lie in the server's memory.

    DLPack exports it as read-only, and from a private mapping of that memory. So a consumer that ignores this and
    writes changes only what it sees itself. Writing to the server's memory would end the process.
    """

    lender: Lender | None = None  # makes the private mappings for DLPack; None if no epoch has lent this array

    def __array_finalize__(self, source: object) -> None:
        # A writable array is a copy, such as of `copy`, `astype` or an index, and needs no memory of the server.
        self.lender = None if self.flags.writeable else getattr(source, "lender", None)

    def __array_wrap__(
        self, array: Array, context: tuple[np.ufunc, tuple[Any, ...], int] | None = None, return_scalar: bool = False
    ) -> Any:
        """Return the result of a calculation as a plain array or scalar, which keeps no memory of the server."""
        if not array.flags.owndata:  # such as a result of np.squeeze
            return super().__array_wrap__(array, context, return_scalar)
        return array[()] if return_scalar else array

    def __dlpack__(self, **options: Any) -> Any:
        array = self.view(np.ndarray)
        if self.lender is not None and not array.flags.writeable and options.get("max_version"):
            array = self.lender.lend(array)
            array.flags.writeable = False
        return array.__dlpack__(**options)


def _extent(array: Array) -> tuple[int, int]:
    """Return the addresses at which the bytes of `array` begin and end. Its strides must not be negative."""
    if array.flags.c_contiguous:
        buffer = pa.py_buffer(array)  # ten times faster than NumPy's array interface
        return buffer.address, buffer.address + buffer.size
    start: int = array.__array_interface__["data"][0]
    last = sum((length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True))
    return start, start + last + array.itemsize

"""Access to the arrays of a batch: whether they can be written to, and which memory they lie in."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import numpy as np
import pyarrow as pa

from dissociated.memory.private import PrivateMapping
from dissociated.memory.region import Region
from dissociated.training.columns import Array


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
    """The conversion of the arrays of one epoch to the requested access.

    No two arrays that can be written to share a byte. `find` returns the region of shared memory that contains an
    address of this process, or None.
    """

    def __init__(self, access: Access, find: Callable[[int], Region | None]) -> None:
        self._access = access
        self._find = find
        self._region: Region | None = None
        self._mapping: PrivateMapping | None = None  # a private mapping of `_region`

    def lend(self, array: Array) -> Array:
        """Return an array of the same values with the requested access.

        A writable `array` is returned as it is, since it has memory of its own already.
        """
        if self._access is Access.READ_ONLY:
            array.flags.writeable = False
            return array
        if array.flags.writeable:
            return array
        private = self._map(array) if self._access is Access.PRIVATE else None
        return array.copy() if private is None else private

    def _map(self, array: Array) -> Array | None:
        """Return the array in a private mapping of its memory.

        Return None if the array does not lie in shared memory, or shares bytes with an array that was mapped before.
        """
        if not array.size or not array.flags.aligned:
            return None
        start, stop = _extent(array)
        region = self._find(start)
        if region is None or region.file is None:
            return None
        mapping = self._mapping
        if mapping is None or region is not self._region or mapping.claims.full:
            self._region = region
            self._mapping = mapping = region.file.map_private(region.size, array)
        base = region.memory.address
        if mapping is None or not mapping.claims.add(start - base, stop - base):
            return None
        return np.ndarray(array.shape, array.dtype, mapping, start - base, array.strides)


def _extent(array: Array) -> tuple[int, int]:
    """Return the addresses at which the bytes of `array` begin and end. Its strides must not be negative."""
    if array.flags.c_contiguous:
        buffer = pa.py_buffer(array)  # ten times faster than NumPy's array interface
        return buffer.address, buffer.address + buffer.size
    start: int = array.__array_interface__["data"][0]
    last = sum((length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True))
    return start, start + last + array.itemsize

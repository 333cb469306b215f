"""What may be done with the arrays of a batch, and whose memory they lie in."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import numpy as np
import pyarrow as pa

from dissociated.memory.private import PrivateMapping
from dissociated.memory.region import Region
from dissociated.training.columns import Array


class Access(Enum):
    """What may be done with the arrays of a batch."""

    #: They lie in the server's memory where they can, and nobody can write to them.
    READ_ONLY = auto()
    #: They lie there, too, and can be written to: that changes the array alone, and nothing that anybody else sees.
    PRIVATE = auto()
    #: They can be written to, and have memory of their own.
    COPIED = auto()


class Lender:
    """Gives the arrays of one epoch, with the access that is wanted. An array that can be written to lies alone.

    `find` tells in which region of shared memory an address of this process lies.
    """

    def __init__(self, access: Access, find: Callable[[int], Region | None]) -> None:
        self._access = access
        self._find = find
        self._region: Region | None = None
        self._mapping: PrivateMapping | None = None  # of that region

    def lend(self, array: Array) -> Array:
        """The same values. An array that can be written to has memory of its own already."""
        if self._access is Access.READ_ONLY:
            array.flags.writeable = False
            return array
        if array.flags.writeable:
            return array
        private = self._map(array) if self._access is Access.PRIVATE else None
        return array.copy() if private is None else private

    def _map(self, array: Array) -> Array | None:
        """In a mapping of this process alone; None where it does not lie in shared memory, or shares bytes there."""
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
    """Where its bytes begin and end. No stride is negative."""
    if array.flags.c_contiguous:
        buffer = pa.py_buffer(array)  # NumPy takes ten times as long to tell
        return buffer.address, buffer.address + buffer.size
    start: int = array.__array_interface__["data"][0]
    last = sum((length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True))
    return start, start + last + array.itemsize

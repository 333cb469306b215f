"""Reuse of memory that is slow to allocate: pinned host memory, and device memory to which a network writes."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa


class MemoryRing:
    """A pool of blocks, each of which is free again when the last buffer in it is collected. Any thread may use it.

    Blocks have sizes that are powers of 2. They stay allocated until the ring is collected.

    Args:
        get: Allocates a block, given its size in bytes. The block exists for as long as it is referred to.
        limit: Most bytes of all blocks together.
        smallest: Size of the smallest block, in bytes.
    """

    def __init__(self, get: Callable[[int], pa.Buffer], limit: int, smallest: int = 1 << 16) -> None:
        self._get = get
        self._limit = limit
        self._smallest = smallest
        self._lock = threading.Lock()
        self._free: defaultdict[int, deque[pa.Buffer]] = defaultdict(deque)
        #: Total size of the blocks, in bytes.
        self.nbytes = 0

    def allocate(self, length: int) -> pa.Buffer | None:
        """Return a writable buffer of `length` bytes, or None if the ring is full."""
        size = max(self._smallest, 1 << (length - 1).bit_length()) if length else 0
        free = self._free[size]
        try:
            block = free.popleft()
        except IndexError:
            with self._lock:
                if not length or self.nbytes + size > self._limit:
                    return None
                self.nbytes += size
            try:
                block = self._get(size)
            except BaseException:
                with self._lock:
                    self.nbytes -= size
                raise
        memory: Any = (ctypes.c_char * length).from_address(block.address)
        memory.loan = _Loan(block, free)
        return pa.py_buffer(memory)


class _Loan:
    def __init__(self, block: pa.Buffer, free: deque[pa.Buffer]) -> None:
        self._block = block
        self._free = free

    def __del__(self) -> None:
        self._free.append(self._block)

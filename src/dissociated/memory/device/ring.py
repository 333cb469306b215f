"""Memory that takes long to get, and is used again and again: pinned, or for a network to write to on a device."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa


class MemoryRing:
    """Blocks of such memory, at most `limit` bytes of them. Each is free again when the last buffer in it is collected.

    Any thread may use it. `get` gives a block of so many bytes, which it keeps for as long as it is referred to. Blocks
    are powers of 2, and at least `smallest` bytes.
    """

    def __init__(self, get: Callable[[int], pa.Buffer], limit: int, smallest: int = 1 << 16) -> None:
        self._get = get
        self._limit = limit
        self._smallest = smallest
        self._lock = threading.Lock()
        self._free: defaultdict[int, deque[pa.Buffer]] = defaultdict(deque)
        #: Bytes of all blocks.
        self.nbytes = 0

    def allocate(self, length: int) -> pa.Buffer | None:
        """A buffer of so many bytes that can be written to; None where the blocks are all taken."""
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

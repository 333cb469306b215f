"""A copy of messages in shared memory, which clients can read while it is still being written."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.format.encapsulated import encapsulate, end_of_stream
from dissociated.format.message import Header, buffer_extents
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing, create_memfd, reopen_read_only, seal, write_parts

#: Bytes that are written in one step. Waiting threads are notified after each step.
STEP = 1 << 26
#: The constant of Linux 5.14 and later, for which Python has no name.
_MADV_POPULATE_READ = 22


class CopiedSegment(ProcessBound):
    """An IPC stream of `messages` in a memfd, which is sealed when all of the stream has been written.

    The addresses of all buffers are known at once, and `wait` returns when the bytes are there. A waiting thread
    writes the missing bytes itself unless another thread already does. A background thread may therefore write ahead
    with `advance`, but no reader depends on it. A failed write raises in the thread that tried, and the next thread
    tries again. Safe to use from many threads.

    Raises StoreError if there is no memory for it.
    """

    def __init__(
        self, name: str, messages: Sequence[tuple[bytes, Header, Sequence[Buffer] | None]], alignment: int
    ) -> None:
        """Lay out the stream. Each message is a flatbuffer, its parsed header, and the parts of its body."""
        self._name = name
        self._starts: list[int] = []  # the position of each piece
        self._pieces: list[list[Buffer]] = []  # the parts of each message; empty when everything is written
        bodies, end = [], 0
        for header, parsed, body in messages:
            head = encapsulate(header, alignment=alignment, at=end)
            self._starts.append(end)
            self._pieces.append([head, *(body or ())])
            bodies.append(end + len(head))
            end = bodies[-1] + parsed.body_length
        size = end + len(end_of_stream())
        self._starts += (end, size)
        self._pieces.append([end_of_stream()])
        with store_errors(f"shared memory for {name}"), ExitStack() as undo:
            self._writable = create_memfd(name)
            undo.callback(os.close, self._writable)
            os.ftruncate(self._writable, size)
            seal(self._writable, Backing.LIVE)
            #: A read-only descriptor, which is closed when the segment is no longer referenced.
            self.descriptor = reopen_read_only(self._writable)
            weakref.finalize(self, os.close, self.descriptor)
            self._mapping = mmap.mmap(self.descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            undo.pop_all()
        self._close = weakref.finalize(self, os.close, self._writable)
        # The region has the addresses of this process: peers that fetch over a network use these.
        memory = pa.py_buffer(self._mapping)
        self.region = Region(memory.address, memory)
        #: The address and length of each buffer, by message; None for a message without a body.
        self.extents = [
            [
                (self.region.base + at + offset, length)
                for offset, length in zip(*buffer_extents(header, parsed), strict=True)
            ]
            if parsed.has_body
            else None
            for (header, parsed, _), at in zip(messages, bodies, strict=True)
        ]
        self._changed = threading.Condition()
        self._written = 0  # number of pieces
        self._writing = False
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        self._close()

    @property
    def backing(self) -> Backing:
        """`SEALED` after everything is written; until then `LIVE`, although no hole is ever punched into it."""
        with self._changed:
            self._seal()
            return Backing.LIVE if self._close.alive else Backing.SEALED

    @property
    def missing(self) -> int:
        """The number of bytes that are still to be written."""
        return self.region.size - self._starts[self._written]

    def wait(self, until: int) -> None:
        """Wait until all bytes below the address `until` are written. Raises StoreError."""
        while not self._is_written(until):
            self._advance(until)

    def advance(self) -> None:
        """Write the next step of about STEP bytes, or wait until another thread has. Raises StoreError."""
        self._advance(self.region.base + self._starts[self._written] + 1)

    def _is_written(self, until: int) -> bool:
        return self.region.base + self._starts[self._written] >= until

    def _advance(self, until: int) -> None:
        """Write the next step. If another thread is writing, wait until it is past `until`, has ended or has failed."""
        self.check_process()
        with self._changed:
            if self._writing:
                self._changed.wait_for(lambda: not self._writing or self._is_written(until))
                return
            self._writing = True
        try:
            self._write_step()
        finally:
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _write_step(self) -> None:
        first = last = self._written
        if not self._pieces:
            return
        start, parts = self._starts[first], []
        while last < len(self._pieces) and self._starts[last] - start < STEP:
            parts += self._pieces[last]
            last += 1
        with store_errors(f"shared memory for {self._name}"):
            write_parts(self._writable, parts, start)
        self._populate(start, self._starts[last])
        self._written = last
        if last == len(self._pieces):
            self._pieces = []
            with self._changed:
                self._seal()

    def _populate(self, start: int, stop: int) -> None:
        """Map these pages in this process: page faults of clients are a tenth cheaper if a page is mapped already."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        with suppress(OSError):  # an older kernel
            self._mapping.madvise(_MADV_POPULATE_READ, first, stop - first)

    def _seal(self) -> None:
        """Seal the memfd if all of it is written.

        The kernel refuses while a device or a socket of a client has some of its pages pinned. The next use of
        `backing` then tries again. Nothing is written any more in either case.
        """
        if self._close.alive and not self._pieces:
            with suppress(OSError):
                seal(self._writable, Backing.SEALED)
                self._close()

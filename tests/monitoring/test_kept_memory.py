"""Memory that clients keep: it is counted, and kept only as long as they have it, on any machine."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.memory.region import Region, reserve_base
from dissociated.memory.shared import Backing, create_memfd, map_read_only, reopen_read_only
from dissociated.monitoring.kept_memory import KeptMemory
from support.helpers import Serve, connections_left, descriptors, no_threads

SIZE = 1 << 20


class Segment:
    """A segment that is no longer served when it is collected."""

    backing = Backing.SEALED

    def __init__(self) -> None:
        self.descriptor = create_memfd("kept")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, SIZE)
        self.region = Region(reserve_base(SIZE), map_read_only(self.descriptor, SIZE))

    def wait(self, until: int) -> None:
        """Return at once, since all of the segment is written."""

    def client(self) -> pa.Buffer:
        """Return the memory of the segment as a client maps it."""
        opened = reopen_read_only(self.descriptor)
        memory = map_read_only(opened, SIZE)
        os.close(opened)
        return memory


@contextmanager
def watching() -> Iterator[KeptMemory]:
    """Yield the count of kept memory, and check that it leaves no descriptors."""
    before = descriptors()
    with closing(KeptMemory()) as kept:
        yield kept
    assert descriptors() == before


def left() -> int:
    """Return the number of open descriptors of segments."""
    return sum("dissociated:kept" in path for path in descriptors().values())


def test_without_a_thread_whoever_asks_looks() -> None:
    with watching() as kept:
        for _ in range(3):
            segment = Segment()
            held = segment.client()
            with no_threads():
                kept.watch(segment)
            del segment
            assert kept.nbytes == SIZE
            del held
            assert kept.nbytes == 0
        for _ in range(3):  # without any request for the count
            segment = Segment()
            with no_threads():
                kept.watch(segment)
            del segment
        assert left() == 1


def test_no_memory_counts_as_kept_without_kernel_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fcntl.fcntl

    def without_leases(descriptor: int, command: int, *arguments: Any) -> Any:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "there are no leases in this sandbox")
        return asked(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", without_leases)
    with watching() as kept:
        segment = Segment()
        held = segment.client()
        kept.watch(segment)
        del segment
        assert kept.nbytes == 0
        del held
        assert left() == 0


def test_a_server_that_never_asks_the_kernel_needs_no_memfd(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", none_left)
    assert serve("tcp:").status().kept == 0


def test_a_limit_of_nothing_lets_readers_in_while_nothing_is_kept(serve: Serve) -> None:
    server = serve("shm:", kept_limit=0)
    table = pa.table({"n": [1, 2]})
    for _ in range(2):
        server.publish("data", table)
        assert dis.open_stream(server.locations("data")[0], server.ticket("data")).read_all() == table
        assert connections_left(server) == 0

"""Slow readers: they get the requested data, although it was removed and its pages were recycled."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.control.access import security
from dissociated.errors import DissociatedError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.certificates import Certificates
from support.helpers import case, connections_left, wait_until
from support.machine import media
from support.nodes import put

ROWS = 100_000  # 800 kB in each batch; a TCP socket holds two
FEW_ROWS = 18_000  # 144 kB; a Unix socket holds one
#: Media on which the server closes a connection as soon as the kernel has all data. On others it waits for the reader.
QUEUED = ("tcp", "tls", "shm, packed")
MEDIA = (*QUEUED, "shm", "ucx", "ucx, rma", "fabric", "inproc")
ENDS = ("drop", "replace", "append", "expire", "restart")


def numbers(first: int, rows: int, batches: int) -> pa.Table:
    made = [pa.record_batch({"n": np.arange(rows) + first + at * rows}) for at in range(batches)]
    return pa.Table.from_batches(made)


def inodes(store: Path) -> set[int]:
    return {path.stat().st_ino for path in store.glob("segments/*/*.arrows")}


@pytest.mark.parametrize("medium", media(MEDIA))
def test_a_slow_reader_sees_nothing_of_what_came_later(memory: Path, trusted: Certificates, medium: str) -> None:
    """The reader has taken one batch of A when A is removed in one of several ways.

    Then B is put, over the pages of A if possible.
    """
    written_over = 0
    # On the other media, the server keeps the pages as long as the reader's connection is open, whatever came later.
    for number, end in enumerate(ENDS if medium in QUEUED else ENDS[::2]):
        with case(end):
            written_over += _round(memory / str(number), medium, end, trusted)
    assert written_over or medium not in QUEUED, "nothing was written over: this test would see nothing"


def _round(directory: Path, medium: str, end: str, trusted: Certificates) -> bool:
    """Return whether B was written over A before the reader had taken everything."""
    scheme, _, kind = medium.partition(", ")
    place = {"tcp": "tcp://127.0.0.1:0", "tls": "tls://127.0.0.1:0"}.get(scheme, f"{scheme}:")
    access = security(**trusted.options) if scheme == "tls" else None
    rows, batches = (FEW_ROWS, 2) if medium == "shm, packed" else (ROWS, 3)
    a, b = numbers(0, rows, batches), numbers(10_000_000, rows, batches)
    with ExitStack() as nodes:
        node = nodes.enter_context(Node(Store(directory), [place], retain=0.0, security=access))
        put(node.uri, "a", a)
        lay = inodes(directory)
        bodies = "any" if kind == "rma" or medium == "shm" else "packed"
        (location,) = node.server.locations("a", bodies=bodies)
        for _ in range(20):
            reader = dis.open_stream(location, node.server.ticket("a"), allow_rma=kind == "rma")
            held = [reader.read_next_batch()]
            # A full Unix socket only accepts data again when most of it is free, for which one batch may be too little.
            if medium not in QUEUED or not connections_left(node.server, patience=1.0):
                break
        else:
            pytest.fail("the kernel never took the rest of the stream")
        with dis.connect(node.uri) as client:
            if end == "replace":
                put(node.uri, "a", b.slice(0, 1))
            elif end == "expire":
                put(node.uri, "a", b.slice(0, 1), mode="append", ttl=0.2)  # expires now, and not before the read begins
                wait_until(lambda: client.list() == [], "it expires")
            else:
                if end == "append":
                    put(node.uri, "a", b.slice(0, 1), mode="append")
                client.drop("a")
        if end == "restart":
            nodes.close()
            node = nodes.enter_context(Node(Store(directory), [place], retain=0.0, security=access))
        put(node.uri, "b", b)
        written_over = bool(inodes(directory) & lay)
        try:
            held += reader
        except DissociatedError:
            assert (end, medium in QUEUED) == ("restart", False)  # a server that ends may abort the stream
        assert pa.Table.from_batches(held).equals(a.slice(0, len(held) * rows)), "bytes of another dataset"
        assert len(held) == batches or end == "restart"
        del held, reader
    return written_over

"""Live streams that fill more than one region, and clients that leave in the middle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.memory import live
from dissociated.server.sending import Sending
from support.helpers import Serve, connections_left, descriptors

SCHEMA = pa.schema([("n", pa.int64())])


def batches(count: int, rows: int = 10_000) -> Iterator[pa.RecordBatch]:
    return (pa.record_batch({"n": np.full(rows, number)}, SCHEMA) for number in range(count))


def live_source(count: int) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(SCHEMA, batches(count))


@pytest.mark.parametrize("keep", [False, True])
def test_a_live_stream_goes_on_in_another_region(serve: Serve, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    monkeypatch.setattr(live, "SPAN", 1 << 20)  # 13 batches of 80 kB
    monkeypatch.setattr(live.LiveRegion, "size", 1 << 20)
    server = serve("shm:")
    server.publish("live", lambda: live_source(100))
    reader = dis.open_stream(server.locations("live")[0], server.ticket("live"))
    kept = []
    for number, batch in enumerate(reader):
        assert batch["n"].to_pylist() == [number] * 10_000
        if keep:
            kept.append(batch)
    assert number == 99
    for number, batch in enumerate(kept):
        assert batch["n"][0].as_py() == batch["n"][-1].as_py() == number


def test_the_limit_counts_what_is_held_in_all_regions(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SPAN", 1 << 20)
    monkeypatch.setattr(live.LiveRegion, "size", 1 << 20)
    server = serve("shm:", live_limit=1 << 21)
    server.publish("live", lambda: live_source(100))  # 8 MB
    kept = list(dis.open_stream(server.locations("live")[0], server.ticket("live")))
    assert [batch["n"][-1].as_py() for batch in kept] == list(range(100))
    # Nothing was freed, so the pages of the regions are the bodies that were ever held. One region has 1 MB.
    memory = [os.stat(f"/proc/self/fd/{number}") for number, what in descriptors().items() if ":live" in what]
    held = sum({file.st_ino: file.st_blocks * 512 for file in memory}.values())
    assert 1 << 20 < held <= (1 << 21) + 2 * 81_920  # a region accepts two bodies in any case


def test_what_arrived_of_a_group_that_is_cut_off_is_held(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []  # leases when a session begins to wait for freed addresses
    drain = Sending.drain
    server = serve("shm:", inline_limit=10_000)

    def draining(sending: Sending, *timeout: Any) -> Any:
        held.append(server.status().leases)
        return drain(sending, *timeout)

    monkeypatch.setattr(Sending, "drain", draining)
    small, large = ({f"c{n}": [n] * rows for n in range(400)} for rows in (1, 100))
    # The first batch is inline, so nothing is read in place. The rest has megabytes of addresses.
    server.publish("wide", pa.Table.from_batches([pa.record_batch(small), *[pa.record_batch(large)] * 150]))
    uri, ticket = server.locations("wide")[0], server.ticket("wide")
    reader = dis.open_stream(uri, ticket)
    kept = [reader.read_next_batch() for _ in range(2)]
    assert server.connections == 1
    del reader  # the server is still sending
    assert kept[1].num_rows == 100
    del kept
    assert connections_left(server) == 0
    assert len(held) == 1
    assert held[0] >= 1
    assert dis.open_stream(uri, ticket).read_all().num_rows == 15_001

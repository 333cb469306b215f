"""Live streams that outlast a region, and clients that leave in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.memory import live
from helpers import Serve, connections_left

SCHEMA = pa.schema([("n", pa.int64())])


def batches(count: int, rows: int = 10_000) -> Iterator[pa.RecordBatch]:
    return (pa.record_batch({"n": np.full(rows, number)}, SCHEMA) for number in range(count))


def live_source(count: int) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(SCHEMA, batches(count))


@pytest.mark.parametrize("keep", [False, True])
def test_a_live_stream_goes_on_in_another_region(serve: Serve, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    monkeypatch.setattr(live, "_SPAN", 1 << 20)  # 13 batches of 80 kB
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


def test_what_arrived_of_a_group_that_is_cut_off_can_be_given_back(serve: Serve) -> None:
    server = serve("shm:")
    table = pa.Table.from_batches([pa.record_batch({f"c{n}": [n] for n in range(400)})] * 600)
    server.publish("wide", table)  # megabytes of addresses: the server waits in the middle of sending
    uri, ticket = server.locations("wide")[0], server.ticket("wide")
    for _ in range(3):
        reader = dis.open_stream(uri, ticket)
        kept = reader.read_next_batch()
        del reader
        assert kept.num_columns == 400
        del kept
        assert connections_left(server) == 0
    assert dis.open_stream(uri, ticket).read_all() == table

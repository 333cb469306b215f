from __future__ import annotations

from itertools import count

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import StoreError
from helpers import connections_left, wait_until

TABLE = pa.Table.from_batches([pa.record_batch({"n": range(at, at + 50), "m": range(50)}) for at in range(0, 5000, 50)])


@pytest.mark.parametrize("listen", ["shm:", "tcp://127.0.0.1:0"])
def test_a_reader_that_is_closed_ends_its_stream_though_somebody_holds_it(listen: str) -> None:
    """However it was chosen what it reads; and what was read stays."""
    schema = TABLE.schema

    def endless() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(schema, (TABLE.to_batches()[at % 100] for at in count()))

    with dis.Server([listen]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("endless", endless)
        for options in ({}, {"columns": ["m"]}, {"filter": ["n", ">", 10]}, {"limit": 100_000}):
            with client.read("endless", **options) as reader:
                batch = reader.read_next_batch()
                kept = batch.to_pydict()
            wait_until(lambda: connections_left(server) == 0, "the stream has ended")
            with pytest.raises(StoreError, match="closed before its end"):
                reader.read_next_batch()
            assert batch.to_pydict() == kept
            del batch
        wait_until(lambda: server.status().leases == 0, "all has been given back")

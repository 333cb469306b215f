"""A server with a dataset of three parts, and a table of all of its rows."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pyarrow as pa
import pytest

import dissociated as dis
from support.helpers import connections_left, wait_until

PART = 20_000
_BATCH = 2_000


def _part(number: int) -> pa.Table:
    positions = range(number * PART, (number + 1) * PART)
    columns = {
        "n": pa.array(positions, pa.int64()),
        "third": pa.array([None if number == 1 and n % 7 == 0 else n % 3 for n in positions], pa.int32()),
        "wide": pa.array([f"{n:0100}" for n in positions]),
    }
    return pa.Table.from_batches(pa.table(columns).to_batches(max_chunksize=_BATCH))


@pytest.fixture(scope="session")
def parts() -> list[pa.Table]:
    """Return the rows of each part: `n` is the position of a row, and `wide` has most of its bytes."""
    return [_part(number) for number in range(3)]


@pytest.fixture(scope="session")
def table(parts: list[pa.Table]) -> pa.Table:
    """Return all rows."""
    return pa.concat_tables(parts)


@pytest.fixture
def server(parts: list[pa.Table]) -> Iterator[dis.Server]:
    """Yield a server with the dataset "rows", and check that every reader has disconnected at the end."""
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        with dis.connect(server.catalog_uri) as client:
            for part in parts:
                client.put("rows", part, mode="append")
        yield server
        gc.collect()  # Plans of these libraries are circular.
        wait_until(lambda: connections_left(server) == 0, "all have left")
        assert server.status().leases == 0


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    with dis.connect(server.catalog_uri) as connected:
        yield connected

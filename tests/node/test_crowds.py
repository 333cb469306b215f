"""Two hundred consumers of a node at once, and malicious clients among good ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from faults.test_crowds import harmed
from support.arrow_cases import table_of
from support.helpers import wait_until
from support.nodes import nothing_is_left_of, put
from support.processes import Start

CROWD = 200
ROWS = 1000


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return table_of(ROWS)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_two_hundred_consumers_of_one_dataset(memory: Path, start: Start, table: pa.Table, scheme: str) -> None:
    """All consumers are connected, and in the middle of the stream, before the first continues."""
    node = start("node", "--store", memory / "store", "--limit", "16MiB")
    put(node.uri, "d", table)
    with dis.connect(node.uri) as client:
        (endpoint,) = client.describe("d").endpoints
    (uri,) = (uri for uri in endpoint.locations if uri.startswith(scheme))
    everybody = threading.Barrier(CROWD + 1)

    def consume(number: int) -> bool:
        columns = [None, ["n"], ["name"]][number % 3]
        reader = dis.open_stream(uri, endpoint.ticket, columns=columns, timeout=60)
        first = reader.read_next_batch()
        everybody.wait(60)
        everybody.wait(60)  # until the consumers have been counted
        arrived = pa.Table.from_batches([first, *reader])
        arrived.validate(full=True)
        return bool(arrived == (table if columns is None else table.select(columns)))

    with ThreadPoolExecutor(CROWD) as pool:
        reading = [pool.submit(consume, number) for number in range(CROWD)]
        everybody.wait(60)
        with dis.connect(node.uri) as client:
            status = client.status()
        everybody.wait(60)
        assert [one.result() for one in reading] == [True] * CROWD
    (there,) = status.datasets
    assert there.streams == CROWD
    if scheme == "shm":
        assert status.leases == 3 * CROWD  # one for each of three batches
    nothing_is_left_of(node, memory / "store")


def test_a_good_client_reads_on_whatever_others_do(memory: Path, start: Start, table: pa.Table) -> None:
    """Four malicious clients attack again and again, beside a flood of silent connections."""
    node = start("node", "--store", memory / "store", "--limit", "16MiB")
    put(node.uri, "d", table)
    with dis.connect(node.uri) as client:
        (endpoint,) = client.describe("d").endpoints
    (uri,) = (uri for uri in endpoint.locations if uri.startswith("shm"))
    with harmed(uri, endpoint.ticket, 200):
        for _ in range(50):
            assert dis.open_stream(uri, endpoint.ticket, timeout=60).read_all() == table
    with dis.connect(node.uri) as client:
        wait_until(lambda: client.status().consumers == (), "all have gone")
    nothing_is_left_of(node, memory / "store")

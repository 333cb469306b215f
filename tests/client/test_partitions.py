"""Partitions: together they have each row once, and each is read in a process of its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client.partitions import Partition, partitions, selected_schema
from support.processes import run_script

TABLE = pa.table({"n": range(10_000), "half": [n / 2 for n in range(10_000)]})


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("even", pa.Table.from_batches(TABLE.to_batches(max_chunksize=1_000)))
        server.publish("one batch", TABLE)
        yield server


def numbers(planned: list[Partition], **selection: object) -> list[int]:
    return [n for part in planned for batch in part.read(**selection) for n in batch["n"].to_pylist()]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["even", "one batch"])
@pytest.mark.parametrize(
    ("transport", "partition_bytes"),
    [("shm", 30_000), ("tcp", 30_000), ("grpc", 30_000), ("tcp", 8_000), ("tcp", 1 << 30)],
)
def test_each_row_once(client: dis.Client, name: str, transport: str, partition_bytes: int) -> None:
    dataset = client.dataset(name, transport=transport)
    planned = partitions(dataset, partition_bytes=partition_bytes)
    assert sum(part.rows or 0 for part in planned) == 10_000
    assert numbers(planned) == [*range(10_000)]
    assert numbers(planned, filter=("n", ">", 9_990)) == [*range(9_991, 10_000)]
    assert numbers(planned, columns=["half", "n"], filter=("half", "<", 2)) == [0, 1, 2, 3]


def test_a_name_that_columns_share_selects_all_of_them(server: dis.Server, client: dis.Client) -> None:
    twice = pa.Table.from_arrays([pa.array([n, n + 1]) for n in range(3)], ["n", "m", "n"])
    server.publish("twice", twice)
    (part,) = partitions(client["twice"], columns=["n"])
    assert pa.Table.from_batches(part.read(["n"])) == twice.select([0, 2])
    assert selected_schema(twice.schema, ["n"]) == twice.select([0, 2]).schema


@pytest.mark.usefixtures("forks")
def test_a_partition_is_read_in_another_process(client: dis.Client, tmp_path: Path) -> None:
    planned = partitions(client["even"], partition_bytes=60_000)
    (tmp_path / "part").write_bytes(pickle.dumps(planned[1]))
    code = "import pickle, sys; print(sum(b.num_rows for b in pickle.load(open(sys.argv[1], 'rb')).read()))"
    done = run_script(code, tmp_path / "part")
    assert int(done.stdout) == planned[1].rows
    assert len(planned) > 1


@pytest.mark.parametrize("ticket", [b"a ticket that is used again", b"x" * 65_472])
@pytest.mark.parametrize("listener", ["tcp://127.0.0.1:0", None])
def test_a_partition_of_a_version_is_of_no_other(listener: str | None, ticket: bytes) -> None:
    """Without a listener, only Flight leads to the data."""
    with dis.Server([listener] if listener else []) as server, dis.connect(server.catalog_uri) as client:
        server.publish("again", TABLE[:2], ticket=ticket)
        first = client.dataset("again")
        (part,) = partitions(first)
        assert part.read_table(columns=["n"]) == TABLE[:2].select(["n"])
        server.publish("again", TABLE[2:4], ticket=ticket)
        with pytest.raises(dis.DatasetNotFound):
            part.read_table()
        with pytest.raises(dis.DatasetNotFound):
            client.read_endpoint(first.info, first.info.endpoints[0])
        assert client.read("again", filter=("n", ">", 2), columns=["half"]).read_all() == TABLE[3:4].select(["half"])


def test_a_stream_that_can_be_read_once_is_refused(server: dis.Server, client: dis.Client) -> None:
    server.publish("once", TABLE.to_reader(), live=dis.Live())
    (whole,) = partitions(client["once"])
    with pytest.raises(dis.errors.ReadOnce):
        numbers([whole])


def test_tensors_have_no_partitions(server: dis.Server, client: dis.Client) -> None:
    import numpy as np

    server.publish("weights", pa.Tensor.from_numpy(np.eye(3)))
    with pytest.raises(dis.errors.WrongKind, match="read_tensors"):
        partitions(client["weights"])

"""The steps of a batch write, one by one, with real catalogs, nodes and stores."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import TaskContext

import dissociated as dis
from dissociated.errors import CatalogError, CatalogUnreachable
from dissociated.spark.writer import Catalog, DatasetWriter, Written
from dissociated.store.node import Node
from dissociated.store.store import Store
from helpers import wait_until
from processes import Start, free_port

SCHEMA = pa.schema({"id": pa.int64()})

Run = Callable[..., Written]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """One attempt of a task of a write."""

    def attempt(writer: DatasetWriter, *numbers: int, partition: int = 0, attempt: int = 0) -> Written:
        context = SimpleNamespace(partitionId=lambda: partition, taskAttemptId=lambda: attempt)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        batch = pa.record_batch({"id": pa.array(numbers, pa.int64())})
        return writer.write(iter([batch.slice(0, 0), batch]))

    return attempt


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def writing(uri: str, mode: str = "overwrite") -> DatasetWriter:
    return DatasetWriter(Catalog(uri), "x", SCHEMA, mode)


def staged(stage: Path) -> list[str]:
    return sorted(os.listdir(stage))


def numbers(uri: str, transport: str | None = None) -> list[int]:
    with dis.connect(uri) as client:
        read: list[int] = client.read("x", transport).read_all()["id"].to_pylist()
    return read


def test_every_partition_writes_a_segment_of_its_own(catalog: str, stage: Path, run: Run) -> None:
    writer = writing(catalog)
    messages = [run(writer, 1, 2, partition=1), run(writer, 3, partition=0)]
    assert staged(stage) == sorted(message.segment or "" for message in messages)
    assert [message.rows for message in messages] == [2, 1]
    assert all(message.nbytes >= 8 * message.rows for message in messages)
    writer.commit(messages)
    assert numbers(catalog) == [3, 1, 2]


def test_a_partition_without_rows_writes_nothing(catalog: str, stage: Path, run: Run) -> None:
    writer = writing(catalog)
    message = run(writer)
    assert (message.segment, message.rows, staged(stage)) == (None, 0, [])
    writer.commit([message])
    assert numbers(catalog) == []


def test_attempts_that_lost_are_swept_away_at_commit(catalog: str, stage: Path, run: Run) -> None:
    writer = writing(catalog)
    _, winner = (run(writer, 7, attempt=attempt) for attempt in (1, 2))
    assert len(staged(stage)) == 2
    writer.commit([winner])
    assert staged(stage) == []
    assert numbers(catalog) == [7]


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_attempt_that_ends_after_its_job_leaves_nothing(catalog: str, stage: Path, run: Run, end: str) -> None:
    writer = writing(catalog)
    winner = run(writer, 7, attempt=1)
    getattr(writer, end)([winner])
    run(writer, 8, attempt=2)
    wait_until(lambda: staged(stage) == [], "the loser's segment is gone")


def test_a_loser_that_still_writes_is_told_and_leaves_nothing(memory: Path, run: Run) -> None:
    with Node(Store(memory / "store"), ["shm:"]) as node:
        writer = writing(node.uri)

        def batches() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"id": [1]})
            assert len(staged(node.store.staging)) == 1
            writer.abort([])
            assert staged(node.store.staging) == []
            yield pa.record_batch({"id": pa.array(range(100_000), pa.int64())})

        run(writer)  # so that there is a task
        with pytest.raises(CatalogError, match="No such file"):
            writer.write(batches())
        assert staged(node.store.staging) == []


def test_an_abort_takes_the_files_of_killed_tasks_of_this_job_alone(catalog: str, stage: Path) -> None:
    writer, other = writing(catalog), writing(catalog)
    for key in (writer.key, other.key):
        (stage / f"{key}-000000-0.arrows").write_bytes(b"half of a segm")
    writer.abort([None])
    assert staged(stage) == [f"{other.key}-000000-0.arrows"]


def test_a_repeated_commit_changes_nothing(catalog: str, run: Run) -> None:
    writer = writing(catalog, "append")
    messages = [run(writer, 1, 2)]
    writer.commit(messages)
    writer.commit(messages)
    assert numbers(catalog) == [1, 2]


def test_an_abort_after_the_commit_takes_nothing_away(catalog: str, run: Run) -> None:
    writer = writing(catalog)
    writer.commit([run(writer, 1, 2)])
    writer.abort([])
    assert numbers(catalog) == [1, 2]


def test_a_commit_after_the_abort_is_refused(catalog: str, run: Run) -> None:
    writer = writing(catalog)
    message = run(writer)
    writer.abort([])
    with pytest.raises(CatalogError, match=r"'x' has been aborted: write it again"):
        writer.commit([message])
    with dis.connect(catalog) as client:
        assert client.list() == []


def test_a_catalog_that_is_not_there_is_told_before_any_task() -> None:
    with pytest.raises(CatalogUnreachable, match="no catalog answers at"):
        writing(f"grpc://127.0.0.1:{free_port()}")


# Nodes


@pytest.fixture
def outer(tmp_path: Path, start: Start) -> str:
    """A catalog that has no node yet."""
    return start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0").uri

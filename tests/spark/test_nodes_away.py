"""Nodes that are killed before or amid a job of Spark, and started again while its tasks wait, or not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import dissociated as dis
from dissociated.spark import publish
from support.helpers import PATIENCE, wait_until
from support.nodes import put, read, segments, table
from support.processes import Start, free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The seconds for which a job waits for a node that does not come back; by default, 50.
WAIT = 2
BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"


def test_jobs_wait_for_the_node_of_their_host(
    spark: SparkSession, start: Start, memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {memory / 'second'}")
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    flight, tcp = (f"{scheme}://127.0.0.1:{free_port()}" for scheme in ("grpc", "tcp"))
    arguments = ("node", "--store", memory / "store", "--catalog", catalog.uri, "--flight", flight, "--listen", tcp)
    node = start(*arguments)
    put(catalog.uri, "in", table(1, 2, 3))

    def job() -> None:
        rows = spark.read.format("dissociated").option("catalog", catalog.uri).load("in")
        rows.write.format("dissociated").option("catalog", catalog.uri).mode("overwrite").save("out")

    for _ in range(2):  # the catalog takes the killed node for alive, and for dead
        with ThreadPoolExecutor(1) as pool, dis.connect(catalog.uri) as client:
            node.kill()
            if _ == 1:
                wait_until(lambda: not client.nodes()[0]["alive"], "the catalog has noticed", 2 * PATIENCE)
            running = pool.submit(job)
            node = start(*arguments)
            running.result(3 * PATIENCE)
            assert len(client.nodes()) == 1
        assert read(catalog.uri, "out") == [1, 2, 3]
    assert not (memory / "second").exists()


def test_a_commit_waits_for_a_node_that_has_segments(
    spark: SparkSession, start: Start, memory: Path, tmp_path: Path
) -> None:
    """The node of one of the two tasks is killed between its task and the commit."""
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    flight = f"grpc://127.0.0.1:{free_port()}"
    arguments = ("node", "--store", memory / "store", "--catalog", catalog.uri, "--flight", flight)
    node = start(*arguments)
    gate = tmp_path / "gate"

    def gated(batches):
        import time

        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1:
            while not gate.exists():
                time.sleep(0.01)
        yield from batches

    rows = spark.range(10, numPartitions=2).mapInArrow(gated, "id long")
    with ThreadPoolExecutor(1) as pool:
        writer = rows.write.format("dissociated").option("catalog", catalog.uri).mode("overwrite")
        running = pool.submit(writer.save, "out")
        staging = memory / "store" / "staging"
        wait_until(lambda: [*staging.glob("*.arrows")], "the first task has ended", 3 * PATIENCE)
        node.kill()
        gate.touch()
        start(*arguments)
        running.result(3 * PATIENCE)
    with dis.connect(catalog.uri) as client:
        assert sorted(client.read("out").read_all()["id"].to_pylist()) == [*range(10)]
    assert len(segments(memory / "store" / "segments")) == 2


@pytest.mark.parametrize(("in_jvm", "options"), [(True, ()), (True, ("--limit", "1GiB")), (False, ())])
def test_a_write_fails_if_its_standalone_node_is_gone_for_good(
    spark: SparkSession,
    use_jvm: Callable[[bool], None],
    start: Start,
    memory: Path,
    tmp_path: Path,
    in_jvm: bool,
    options: tuple[str, ...],
) -> None:
    """The node is its own catalog. It is killed while both tasks write, and the job waits for it and fails."""
    use_jvm(in_jvm)
    node = start("node", "--store", memory / "store", *options)
    writing, gate = tmp_path / "writing", tmp_path / "gate"
    writing.mkdir()

    def gated(batches):
        import time

        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for number in range(48):
            if number == 32:  # The rows before this one do not fit into sockets, so the task has written some of them.
                (writing / f"{context.partitionId()}").touch()
                while not gate.exists():
                    time.sleep(0.01)
            yield pa.record_batch({"data": [bytes(1 << 20)]})

    spark.conf.set(BATCH_ROWS, 1)  # so that no rows wait for more
    rows = spark.range(2, numPartitions=2).mapInArrow(gated, "data binary")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(publish, rows, "out", node.uri, wait=WAIT)
        try:
            wait_until(lambda: len([*writing.iterdir()]) == 2, "both tasks write", 3 * PATIENCE)
            node.kill()
        finally:
            gate.touch()
            spark.conf.unset(BATCH_ROWS)
        error = running.exception(WAIT + 2 * PATIENCE)
    assert "no catalog answers at" in str(error)

"""Writers of Spark that are killed at named points: no row is lost or doubled, and nothing is left in memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.catalog.local import LocalCatalog
from dissociated.control.commit import Commit
from dissociated.node.node import Node
from dissociated.spark import publish
from dissociated.store.store import Store
from support.helpers import case, wait_until
from support.jvm import java_pid

from . import processes
from .conftest import plug_in
from .processes import sidecar
from .test_faults import leaves_nothing, numbers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

cloudpickle = pytest.importorskip("pyspark.cloudpickle")
for module in (sys.modules[__name__], processes):
    cloudpickle.register_pickle_by_value(module)  # Spark's workers cannot import these modules.

#: The rows of each write, in PARTITIONS partitions.
ROWS, PARTITIONS = 60_000, 2
#: The batches of a partition before which a process is killed, and the mode of the write.
POINTS = {"before its file": (0, "append"), "amid its file": (1, "overwrite"), "before its end": (2, "append")}


@pytest.fixture
def node(memory: Path) -> Iterator[Node]:
    """Yield a node that soon forgets the segments that a killed process has staged."""
    with Node(Store(memory / "store", staging_timeout=5.0), ["shm:"], retain=0.0, heartbeat_interval=0.1) as node:
        yield node


Batches = Iterator[pa.RecordBatch]


def is_gone(process: str) -> bool:
    return not Path("/proc", process).exists()


def killing(victim: str, java: int, at: int, killed: Path) -> Callable[[Batches], Batches]:
    """Return a function of tasks that kills a process once, before batch `at`, and writes its id to `killed`."""

    def through(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            if number == at:
                with suppress(FileExistsError), killed.open("x") as told:  # both partitions get here
                    pid = sidecar(java) if victim == "sidecar" else os.getpid()
                    told.write(str(pid))
                    told.flush()
                    os.kill(pid, signal.SIGKILL)
            yield batch

    return through


@pytest.mark.parametrize("victim", ["sidecar", "worker"])
def test_a_task_that_is_killed_is_done_again_once(
    spark: SparkSession, use_jvm: Callable[[bool], None], node: Node, tmp_path: Path, victim: str
) -> None:
    """Kill the sidecar of Spark's JVM, which owns the files, or a Python worker while Python writes."""
    use_jvm(victim == "sidecar")
    expected: list[int] = []
    for point, (number, mode) in POINTS.items():
        killed = tmp_path / f"{number}"
        with case(point):
            frame = spark.range(0, ROWS, numPartitions=PARTITIONS).mapInArrow(
                killing(victim, java_pid(spark), number, killed), "id long"
            )
            publish(frame, "x", node.uri, mode)
            expected = sorted([*(expected if mode == "append" else ()), *range(ROWS)])
            wait_until(partial(is_gone, killed.read_text()), "it is dead")
            assert numbers(node.uri) == expected
    leaves_nothing(node)


def test_a_commit_whose_sidecar_is_killed_before_its_answer_succeeds(
    spark: SparkSession, use_jvm: Callable[[bool], None], node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who is told of a failure tries again, and would append the rows twice."""
    commit = LocalCatalog.commit
    killed: list[str] = []

    def kill(catalog: LocalCatalog, requested: Commit) -> None:
        commit(catalog, requested)
        if requested.key not in killed:
            killed.append(requested.key)
            pid = sidecar(java_pid(spark))
            os.kill(pid, signal.SIGKILL)
            wait_until(partial(is_gone, str(pid)), "it is dead")

    use_jvm(True)
    with dis.connect(node.uri) as client:
        client.put("x", pa.table({"id": [7]}))
    monkeypatch.setattr(LocalCatalog, "commit", kill)
    spark.range(3).write.format("dissociated").option("catalog", node.uri).mode("append").save("x")
    assert numbers(node.uri) == [0, 1, 2, 7]
    spark.sql(f"CREATE TABLE {plug_in(spark, node.uri)}.created (n INT)")
    assert len(killed) == 2

"""Writers of Spark that are killed at named points: no row is lost or doubled, and nothing is left in memory."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.node.node import Node
from dissociated.spark import publish
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, files_below, wait_until
from support.injection import Fault, calls
from support.processes import Fork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The rows of each write, in PARTITIONS partitions.
ROWS, PARTITIONS = 60_000, 2
#: The batches of a partition before which a process is killed: at the start, amid the file, and before its end.
POINTS = {"before its file": 0, "amid its file": 1, "before its end": 2}

#: A write of two partitions by this process alone: see test_faults.py.
CHILD = """
import sys
from spark import test_faults
getattr(test_faults, sys.argv[1])(sys.argv[2])
print("acknowledged", flush=True)
"""


@pytest.fixture
def node(memory: Path) -> Iterator[Node]:
    """Yield a node that soon forgets the segments that a killed process has staged."""
    with Node(Store(memory / "store", forgotten=5.0), ["shm:"], retain=0.0, heartbeat_interval=0.1) as node:
        yield node


def read(uri: str) -> list[int]:
    with dis.connect(uri) as client:
        ids: list[int] = client.read("x").read_all()["id"].to_pylist()
    return sorted(ids)


def leaves_nothing(node: Node) -> None:
    """Drop the dataset, and wait until no file of it is there or open."""
    store = node.store.directory
    wait_until(lambda: not os.listdir(node.store.staging), "nothing is staged any more")
    with dis.connect(node.uri) as client:
        client.drop("x")
    wait_until(lambda: not [*(store / "segments").rglob("*.arrows")], "no segment is left")
    wait_until(lambda: not files_below(store / "segments"), "nothing is open or mapped")


@pytest.mark.parametrize("write", ["in_python", "in_the_jvm"])
def test_a_process_killed_at_any_call_has_written_everything_or_nothing(node: Node, forks: None, write: str) -> None:
    with dis.connect(node.uri) as client:
        for at in calls(4):
            client.put("x", pa.record_batch({"id": pa.array([9], pa.int64())}))
            fault = Fault(str(node.store.directory), at, None)
            arguments = ("-c", CHILD, write, node.uri)
            with Fork(*arguments, stdout=subprocess.PIPE, env=fault.environment()) as process:
                said, _ = process.communicate(timeout=PATIENCE)
            with case(f"call {at}"):
                assert process.returncode in (0, -signal.SIGKILL)
                assert read(node.uri) == ([1, 2, 3] if said else [9])
                leaves_nothing(node)
            if process.returncode == 0:
                assert at > 5
                return


Batches = Iterator[pa.RecordBatch]


def killing(victim: str, at: int, killed: Path) -> Callable[[Batches], Batches]:
    """Return a function of tasks that kills a process once, before batch `at`, and writes its id to `killed`.

    Python workers cannot import this module, so everything that they need is within the function.
    """

    def sidecar() -> int:
        """Return the sidecar of the JVM that this Python worker belongs to."""
        jvm = parent(os.getppid())
        for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError):  # it has just ended
                command = Path(f"/proc/{process}/cmdline").read_bytes()
                if b"dissociated.spark.sidecar" in command and parent(process) == jvm:
                    return process
        raise AssertionError("there is no sidecar")

    def parent(pid: int) -> int:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])

    def through(batches: Batches) -> Batches:
        for number, batch in enumerate(batches):
            if number == at:
                with suppress(FileExistsError), killed.open("x") as told:  # both partitions get here
                    pid = sidecar() if victim == "sidecar" else os.getpid()
                    told.write(str(pid))
                    told.flush()
                    os.kill(pid, signal.SIGKILL)
            yield batch

    return through


@pytest.mark.parametrize(("victim", "mode"), [("sidecar", "overwrite"), ("sidecar", "append"), ("worker", "append")])
def test_a_task_that_is_killed_is_done_again_once(
    spark: SparkSession, use_jvm: Callable[[bool], None], node: Node, tmp_path: Path, victim: str, mode: str
) -> None:
    """Kill the sidecar of Spark's JVM, which owns the files, or a Python worker while Python writes."""
    use_jvm(victim == "sidecar")
    expected: list[int] = []
    for point, number in POINTS.items():
        killed = tmp_path / f"{number}"
        with case(point):
            frame = spark.range(0, ROWS, numPartitions=PARTITIONS).mapInArrow(
                killing(victim, number, killed), "id long"
            )
            publish(frame, "x", node.uri, mode)
            expected = sorted([*(expected if mode == "append" else ()), *range(ROWS)])
            assert not Path("/proc", killed.read_text()).exists()
            assert read(node.uri) == expected
            wait_until(lambda: not os.listdir(node.store.staging), "nothing is staged any more")
    leaves_nothing(node)

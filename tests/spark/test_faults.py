"""File system faults and kills while Spark's tasks write and its driver commits: a write is whole, or has no effect."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql.types import LongType, StructField, StructType

import dissociated as dis
from dissociated.control.commit import Commit
from dissociated.errors import DissociatedError
from dissociated.node.node import Node
from dissociated.spark.catalog_config import CatalogConfig
from dissociated.spark.staging import Writes
from dissociated.spark.target import WriteTarget
from dissociated.spark.writer import DatasetWriter, Written
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, files_below, wait_until
from support.injection import Fault, calls, child_environment
from support.processes import Fork

SCHEMA = pa.schema({"id": pa.int64()})
#: The numbers of each partition.
NUMBERS = ([1, 2], [3])


#: A process that writes for each fault that it reads, in a fork, and prints the exit status of the fork.
WRITERS = "from spark.test_faults import write_in_forks as run; run()"


def is_empty(directory: Path) -> bool:
    return not os.listdir(directory)


def is_closed(directory: Path) -> bool:
    return not files_below(directory)


def batch(numbers: list[int]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, pa.int64())], SCHEMA)


def in_python(uri: str) -> None:
    """Write like Spark with the Python data source."""
    writer = DatasetWriter(WriteTarget(CatalogConfig(uri), Commit("x")), SCHEMA)
    written: list[Written] = []
    try:
        with pytest.MonkeyPatch.context() as patch:
            for partition, numbers in enumerate(NUMBERS):
                context = SimpleNamespace(partitionId=lambda number=partition: number, taskAttemptId=lambda: 7)
                patch.setattr(TaskContext, "get", lambda context=context: context)
                written.append(writer.write(iter([batch(numbers)])))
        writer.commit(written)
    except DissociatedError:
        writer.abort(written)
        raise


def in_the_jvm(uri: str) -> None:
    """Write like Spark's JVM, which asks the sidecar for files and writes record batches into them."""
    call = {call.__name__: call for call in Writes().calls}
    schema = StructType([StructField("id", LongType())]).json()
    plan = call["write"]({"path": "x", "catalog": uri}, schema, "overwrite", False)
    written = []
    try:
        for partition, numbers in enumerate(NUMBERS):
            segment = f"{plan['key']}-{partition:06}.7.arrows"
            message = batch(numbers).serialize()
            try:
                place = call["stage"](plan["writer"], segment, None)
                end = place["position"] + message.size
                if end > place["room"]:
                    call["reserve"](segment, end)
                with open(place["path"], "r+b") as file:
                    file.seek(place["position"])
                    file.write(message)
                nbytes = call["finish"](segment, end)
            except DissociatedError:
                call["discard"](segment)
                raise
            told = {"partition": partition, "node": place["node"], "segment": segment}
            written.append({**told, "rows": len(numbers), "nbytes": nbytes})
        call["commit"](plan["writer"], None, written)
    except DissociatedError:
        call["abort"](plan["writer"], None, written)
        raise


def write_in_forks() -> None:
    """Write in a fork for each fault on standard input. The function and the URI are arguments of the process."""
    write, uri = {"in_python": in_python, "in_the_jvm": in_the_jvm}[sys.argv[1]], sys.argv[2]
    for line in sys.stdin:
        if not (fork := os.fork()):
            Fault(**json.loads(line)).arm()
            write(uri)
            print("acknowledged", end=" ", flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)


def numbers(uri: str) -> list[int]:
    with dis.connect(uri) as client:
        found: list[int] = client.read("x").read_all()["id"].to_pylist()
    return sorted(found)


def leaves_nothing(node: Node) -> None:
    """Drop the dataset, and wait until no file of it is there or open."""
    store = node.store.directory
    wait_until(lambda: not os.listdir(node.store.staging), "nothing is staged any more")
    with dis.connect(node.uri) as client:
        client.drop("x")
    wait_until(lambda: not [*(store / "segments").rglob("*.arrows")], "no segment is left")
    wait_until(lambda: not files_below(store / "segments"), "nothing is open or mapped")


@pytest.mark.parametrize("write", ["in_python", "in_the_jvm"])
def test_a_process_killed_at_any_call_has_written_everything_or_nothing(memory: Path, forks: None, write: str) -> None:
    # The node soon forgets the segments that a killed process has staged.
    with (
        Node(Store(memory / "store", staging_timeout=5.0), ["shm:"], retain=0.0, heartbeat_interval=0.1) as node,
        dis.connect(node.uri) as client,
        Fork("-c", WRITERS, write, node.uri, stdin=PIPE, stdout=PIPE, env=child_environment()) as writers,
    ):
        assert writers.stdin is not None
        assert writers.stdout is not None
        for at in calls(7):
            client.put("x", batch([9]))
            fault = {"below": str(node.store.directory), "at": at, "error": None}
            writers.stdin.write(json.dumps(fault) + "\n")
            said = writers.stdout.readline()
            with case(f"call {at}"):
                assert said in ("acknowledged 0\n", f"{-signal.SIGKILL}\n")
                assert numbers(node.uri) == ([1, 2, 3] if said.startswith("acknowledged") else [9])
            if said.startswith("acknowledged"):
                assert at > 5
                break
        leaves_nothing(node)
        writers.communicate(timeout=PATIENCE)
        assert writers.returncode == 0


@pytest.mark.parametrize("write", [in_python, in_the_jvm])
@pytest.mark.parametrize(("error", "times"), [(errno.EIO, 1), (errno.ENOSPC, 40)], ids=["once", "for a while"])
def test_a_write_of_spark_is_there_as_a_whole_or_not_at_all(
    memory: Path, write: Callable[[str], None], error: int, times: int
) -> None:
    for at in calls(15 if times == 1 else 40):
        store = memory / str(at)
        with Node(Store(store), ["shm:"], retain=0.0, heartbeat_interval=0.2) as node, dis.connect(node.uri) as client:

            def read(client: dis.Client) -> list[int]:
                return list(client.read("x").read_all()["id"].to_pylist())

            client.put("x", batch([9]))
            expected = [9]
            with Fault(str(store), at, error, times=times) as fault, suppress(DissociatedError):
                write(node.uri)
                expected = [1, 2, 3]
            with case(f"{fault.calls[at : at + 1]}, call {at}"):
                assert fault.came or expected == [1, 2, 3]
                assert read(client) == expected
                wait_until(partial(is_empty, store / "staging"), "nothing is left")
        with Node(Store(store), ["shm:"]) as node, dis.connect(node.uri) as client, case(f"call {at}, after a restart"):
            assert read(client) == expected
            assert [info.name for info in client.list()] == ["x"]
        wait_until(partial(is_closed, store), "all is closed")
        if not fault.came:
            assert at > 30
            return

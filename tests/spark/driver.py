"""A Spark driver in a process of its own: reads jobs as lines of JSON, and answers each with a line of JSON.

The jobs really kill the processes around them: these are the failures that Spark must survive.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from dissociated.spark import map_in_arrow, publish, read, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PATIENCE = 60.0


def wait_for(condition: Callable[[], Any]) -> Any:
    """Wait until `condition()` is true, and return its result."""
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
    return found


def writer_of(segment: str, stores: str) -> int | None:
    """Return the Python process that writes the segment named `segment`, or that created its file for Spark's JVM."""
    for part in Path(stores).glob(f"*/staging/*{segment}.part"):
        for process in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):  # The process has ended, or is closing a descriptor. The caller looks again.
                if "python" in os.readlink(f"/proc/{process}/exe") and any(
                    os.path.samefile(link, part) for link in Path(f"/proc/{process}/fd").iterdir() if link.exists()
                ):
                    return int(process)
    return None


def executor() -> int:
    """Return the process ID of the executor that this Python worker belongs to, which called the daemon of workers."""
    pid = int(os.environ["DISSOCIATED_TEST_CALLER"])
    assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid


def mapped(spark: SparkSession, rows: int, partitions: int, function: Callable[..., Iterator[pa.RecordBatch]]) -> Any:
    """Return numbers from 0 whose batches pass through `function`, which also gets partition, attempt and its ID."""

    def through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return function(batches, context.partitionId(), context.attemptNumber(), context.taskAttemptId())

    return spark.range(0, rows, numPartitions=partitions).mapInArrow(through, "id long")


def write(df: DataFrame, name: str, uri: str, mode: str = "overwrite") -> None:
    """Write overwrites in Spark's JVM and appends in Python, so that both ways meet the failures."""
    df.sparkSession.conf.set("spark.dissociated.jvm", str(mode != "append").lower())
    publish(df, name, uri, mode)


def count_and_sum(df: DataFrame) -> tuple[int, int]:
    """Count and add up `id` in this process. Each executor would first load Spark's compiler for an aggregate."""
    numbers = df.toArrow()["id"]
    return len(numbers), pc.sum(numbers).as_py()


def plain(spark: SparkSession, uri: str, name: str, rows: int, partitions: int, mode: str = "overwrite") -> None:
    write(spark.range(0, rows, numPartitions=partitions), name, uri, mode)


def killed_within(
    spark: SparkSession, uri: str, name: str, rows: int, partitions: int, whom: str, stores: str, killed: str, mode: str
) -> None:
    """Kill the writer or the executor of partition 1 when its segment is half written.

    The process ID of the killed process is written to the file `killed`.
    """

    def kill(
        batches: Iterator[pa.RecordBatch], partition: int, attempt: int, attempt_id: int
    ) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            if number == 4 and partition == 1 and not os.path.exists(killed):
                pid = wait_for(lambda: writer_of(f"-{partition:06}.{attempt_id}.arrows", stores))
                if whom == "executor":
                    pid = executor()
                with suppress(FileExistsError), open(killed, "x") as told:  # another attempt may do the same
                    told.write(str(pid))
                    told.flush()
                    os.kill(pid, signal.SIGKILL)
            yield batch

    write(mapped(spark, rows, partitions, kill), name, uri, mode)


def raced(spark: SparkSession, uri: str, name: str, rows: int, partitions: int, meeting: str, mode: str) -> None:
    """Run partition 0 twice, with both attempts finishing at the same time."""

    def meet(
        batches: Iterator[pa.RecordBatch], partition: int, attempt: int, attempt_id: int
    ) -> Iterator[pa.RecordBatch]:
        yield from batches
        if partition == 0:
            Path(meeting, str(attempt)).touch()
            wait_for(lambda: len(os.listdir(meeting)) == 2)

    write(mapped(spark, rows, partitions, meet), name, uri, mode)


def spread(spark: SparkSession, uri: str, name: str, rows: int, partitions: int, meeting: str, executors: int) -> None:
    """Make all executors begin to write a partition at the same time."""

    def meet(
        batches: Iterator[pa.RecordBatch], partition: int, attempt: int, attempt_id: int
    ) -> Iterator[pa.RecordBatch]:
        if partition < executors:
            if not attempt:
                Path(meeting, str(partition)).touch()
            # A second attempt on the other executor yields nothing: Spark cancels it when the first attempt is done.
            wait_for(lambda: not attempt and len(os.listdir(meeting)) == executors)
        yield from batches

    write(mapped(spark, rows, partitions, meet), name, uri)


def never_ending(spark: SparkSession, uri: str, name: str, rows: int, partitions: int, mode: str) -> None:
    """Write all partitions but the last, which waits for more rows without end."""

    def wait(
        batches: Iterator[pa.RecordBatch], partition: int, attempt: int, attempt_id: int
    ) -> Iterator[pa.RecordBatch]:
        yield from batches
        while partition == partitions - 1:
            signal.pause()

    write(mapped(spark, rows, partitions, wait), name, uri, mode)


def summed(spark: SparkSession, uri: str, name: str, rows: int, partitions: int) -> None:
    """Check the sum of a dataset that Spark's own executors read, each in its JVM."""
    assert count_and_sum(read(spark, name, uri, partitions=partitions)) == (rows, sum(range(rows)))


def function_killed(spark: SparkSession, rows: int, killed: str) -> None:
    """Kill an executor while the function of its task holds a result, and check the rows.

    The process IDs of the executor and its Python worker are written to the file `killed`.
    """

    def kill(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            yield pa.concat_batches([batch, batch])  # new memory, which the task maps
            if number == 1 and batch["id"][0].as_py() < rows / 2:
                with suppress(FileExistsError), open(killed, "x") as told:  # another attempt may do the same
                    told.write(f"{executor()} {os.getpid()}")
                    told.flush()
                    os.kill(executor(), signal.SIGKILL)

    spark.conf.set("spark.dissociated.jvm", "true")  # `write` may have left the other: Spark's own mapInArrow
    mapped = map_in_arrow(spark.range(0, rows, numPartitions=2), kill, "id long")
    assert count_and_sum(mapped) == (2 * rows, 2 * sum(range(rows)))


def function_never_ends(spark: SparkSession, rows: int, started: str) -> None:
    """Run a function that never ends. Each of two Python workers makes a file in `started`, named by its process ID."""

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            yield pa.concat_batches([batch, batch])
            while number == 1:
                Path(started, str(os.getpid())).touch()
                signal.pause()

    spark.conf.set("spark.dissociated.jvm", "true")
    map_in_arrow(spark.range(0, rows, numPartitions=2), wait, "id long").write.format("noop").mode("overwrite").save()


JOBS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (plain, killed_within, raced, spread, summed, function_killed, function_never_ends)
}


def main() -> None:
    os.setsid()  # so that a test kills this process and its Java by their group
    conf = json.loads(sys.argv[1])
    with session("tests", conf.pop("master"), **{"spark.log.level": "OFF", **conf}) as spark:
        print("{}", flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            error = ""
            try:
                JOBS[asked.pop("job")](spark, **asked)
            except Exception as raised:
                error = str(raised)
            print(json.dumps({"error": error}), flush=True)


if __name__ == "__main__":
    main()

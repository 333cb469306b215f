"""Data between Spark and this process, in shared memory: it passes neither through a socket nor through the JVM's heap.

Both directions need Spark in local mode, because memory is shared on one host. In a cluster or over Spark Connect,
Spark's own `toArrow` and `createDataFrame` stand in.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from dissociated.base.once import once
from dissociated.errors import SourceError
from dissociated.memory.shared import Backing, map_received, sealed_memfd
from dissociated.spark.functions import map_in_arrow
from dissociated.spark.session import has_jvm_source, read
from dissociated.spark.types import TIMEZONE, conform, function_schema

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from pyspark.sql import DataFrame, SparkSession

    from dissociated.server.server import Server

_TIMEOUT = 30.0  # seconds that a task may take to hand over a partition that is written already


def to_arrow(df: DataFrame) -> pa.Table:
    """Return the rows of `df` as a Table, in the order of the partitions.

    Spark's tasks write their rows into shared memory, and the Table maps it. The memory is freed when the last array in
    it is collected. The schema is that of `df.toArrow()`.
    """
    if not _is_local(df.sparkSession):
        return df.toArrow()
    try:
        schema = function_schema(df.schema, TIMEZONE)
    except SourceError:
        return df.toArrow()  # Spark itself knows whether it takes these types
    with _Receiver() as receiver:
        keys = map_in_arrow(df, _sender(receiver.address), "partition int, attempt bigint").collect()
        partitions = [receiver.received[row.partition, row.attempt] for row in sorted(keys)]
    batches = (batch for memory in partitions for batch in pa.ipc.open_stream(memory))
    return pa.Table.from_batches([conform(batch, schema) for batch in batches], schema)


def to_polars(df: DataFrame) -> pl.DataFrame:
    """Return the rows of `df` as a DataFrame of Polars. See `to_arrow`."""
    import polars as pl

    frame = pl.from_arrow(to_arrow(df), rechunk=False)
    assert isinstance(frame, pl.DataFrame), "a Table becomes a DataFrame"
    return frame


def to_pandas(df: DataFrame) -> pd.DataFrame:
    """Return the rows of `df` as a DataFrame of pandas: that of pyarrow's `Table.to_pandas`. See `to_arrow`."""
    return to_arrow(df).to_pandas()


def create_dataframe(spark: SparkSession, data: Any) -> DataFrame:
    """Return a DataFrame of Spark with the rows of `data`, which Spark's tasks read in shared memory.

    The rows are copied into shared memory once. It is freed some time after the last plan with this DataFrame is gone,
    when Java collects its garbage, and when this process ends.

        create_dataframe(spark, pl.read_parquet("flights.parquet")).groupBy("dest").count()

    Args:
        spark: The session.
        data: A Table, RecordBatch or RecordBatchReader; a DataFrame of Polars or pandas; another object with
            `__arrow_c_stream__`; or a handle on a dataset, which is read where it lies, in its version.

    Raises:
        SourceError: `data` is of another kind, or Spark has no type for a column.
        StoreError: There is no shared memory for the data.
    """
    from dissociated.client.dataset import DatasetHandle  # imports pyarrow.dataset

    if isinstance(data, DatasetHandle):
        version: dict[str, Any] = {"version": data.info.version} if data.info.version else {}
        return read(spark, data.name, data.catalog_uri, **version)
    table = _table(data)
    if not _is_local(spark) or not has_jvm_source(spark):
        return spark.createDataFrame(table)
    server, name = _server(), f"dataframe-{secrets.token_hex(8)}"
    server.publish(name, table, wait=True)
    try:
        df = read(spark, name, server.catalog_uri)
        jvm: Any = spark._jvm
        jvm.org.apache.spark.sql.dissociated.Temporary.watch(df._jdf, server.catalog_uri, name)
    except BaseException:
        server.drop(name)
        raise
    return df


def _table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if type(data).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data).read_all()
    raise SourceError(
        f"data of the type {type(data).__name__} is not a table: "
        "give a Table, a reader, or a DataFrame of Polars or pandas"
    )


def _is_local(spark: SparkSession) -> bool:
    """Return whether Spark's tasks run on this host."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and str(spark.sparkContext.master).startswith("local")


@once
def _server() -> Server:
    """Return the server of this process for `create_dataframe`, which only this user can reach."""
    from dissociated.server.server import Server

    directory = tempfile.mkdtemp(prefix="dissociated-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    server = Server(["shm:"], catalog=f"grpc+unix://{directory}/flight.sock")
    atexit.register(server.close)
    return server


def _sender(address: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a function for `map_in_arrow` that sends the batches of each partition to `address`, in a memfd."""

    def send(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        first = next(batches, None)
        if first is None:
            return
        context = TaskContext.get()
        assert context is not None, "Spark calls this in a task"
        key = {"partition": context.partitionId(), "attempt": context.taskAttemptId()}

        def write(descriptor: int) -> None:
            with (
                os.fdopen(os.dup(descriptor), "wb") as file,
                pa.ipc.new_stream(pa.PythonFile(file, "w"), first.schema) as stream,
            ):
                stream.write_batch(first)
                for batch in batches:
                    stream.write_batch(batch)

        memfd = sealed_memfd("spark", write)
        with socket.socket(socket.AF_UNIX) as link:
            try:
                link.settimeout(_TIMEOUT)
                link.connect(address)
                socket.send_fds(link, [json.dumps(key).encode()], [memfd])
            finally:
                os.close(memfd)
            link.recv(1)  # the driver holds the memory now
        yield pa.record_batch(
            [pa.array([key["partition"]], pa.int32()), pa.array([key["attempt"]], pa.int64())], ["partition", "attempt"]
        )

    return send


class _Receiver:
    """An address of this process to which the tasks of one query send memfds with their batches.

    Only processes of this user are heard. `received` has the memory by partition and attempt.
    """

    def __init__(self) -> None:
        self.address = f"\0dissociated-{secrets.token_hex(16)}"  # abstract: it is no file
        self.received: dict[tuple[int, int], pa.Buffer] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address)
        self._socket.listen(socket.SOMAXCONN)
        self._thread = threading.Thread(target=self._receive, name="dissociated-receiver", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        while True:
            try:
                link, _ = self._socket.accept()
            except OSError:
                return  # it is closed
            with link, suppress(OSError, ValueError, KeyError):  # the task was killed, and another attempt follows
                link.settimeout(_TIMEOUT)
                self._take(link)

    def _take(self, link: socket.socket) -> None:
        _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if user != os.geteuid():
            return
        message, descriptors, _, _ = socket.recv_fds(link, 1024, 1)
        try:
            (descriptor,) = descriptors
            key = json.loads(message)
            memory = map_received(descriptor, os.fstat(descriptor).st_size, Backing.SEALED)
            self.received[key["partition"], key["attempt"]] = memory
        finally:
            for received in descriptors:
                os.close(received)
        link.sendall(b"\1")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # this wakes the thread
        self._thread.join()
        self._socket.close()

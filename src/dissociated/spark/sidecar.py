"""A helper process of Spark's JVM, which handles catalogs, tickets, leases and shared memory for it.

The JVM starts the process, and the process ends with the JVM. Requests are lines of JSON on stdin, such as
`{"id": 1, "call": "next", "with": {"stream": 1}}`. Answers are lines on stdout, in any order, with a "result" or an
"error":

    describe(options)                       on the driver: {"schema", "version", "lineage"}, and "rows" and "nbytes" if
                                            known
    plan(options, schema, columns, version, lineage, conditions, share, tasks)
                                            on the driver: {"reader", "partitions": [{"partition", "hosts", "rows"}]};
                                            `share` is the columns' fraction of the bytes of a row, and `tasks` the
                                            number of tasks that run at once
    open(reader, partition, direct)         in a task: {"stream": its number}; or {"server": the request for a server
                                            that sends rows to the JVM itself}, if there is such a server and `direct`
    unresponsive(host, port)                in a task: remembers that this server did not accept the JVM's connection in
                                            time, so that it is tried last for a while
    layout(reader, schema)                  in a task: the layout of the arrays of that server's stream, whose schema is
                                            given; null if the JVM cannot read it
    decode(reader, schema, header, body, max_body)
                                            {"stream"} for one message of that server, whose body is in the file `body`
    next(stream)                            {"regions": new files to map, "batches", "ended"}; the end comes without
                                            batches, and proves that the previous batches were held until then
    close(stream)                           releases the batches and their memory

    begin_export(name), end_export(name)    on the driver: files for the rows of a DataFrame, until the end
    export_file(name)                       in a task: the path of a new file for the rows of its partition
    seal_export(name, path)                 in a task: nobody can change the file any more

and the calls of `dissociated.spark.staging`, for writing, and of `dissociated.spark.catalog`, for Spark's catalog
plug-in.

Schemas are Spark's JSON, and "rows" of a partition is 0 if the number is unknown.

An array of a batch is `[length, offset, nulls, [region, at, size of each buffer], [its children], kind, width]`,
like a struct of Arrow's C data interface, with places in files instead of addresses. Both processes can map these
files: the shared memory of the server if this process has mapped it, or else a memfd with a copy.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from dissociated.base.oserrors import store_errors
from dissociated.client.connection import remember_unresponsive
from dissociated.codec.reader import read_schema
from dissociated.errors import DissociatedError, RemoteProtocolError
from dissociated.memory.region import AddressSpace
from dissociated.memory.shared import Backing, seal
from dissociated.spark.catalog import TABLE_CALLS
from dissociated.spark.columns import spark_schema
from dissociated.spark.exchange import JvmMemfd, pickled, unpickled
from dissociated.spark.filters import as_filters
from dissociated.spark.layouts import stream_layout
from dissociated.spark.reader import DatasetReader
from dissociated.spark.request import DatasetRequest, PlannedVersion
from dissociated.spark.staging import Writes
from dissociated.spark.stream import SharedStream
from dissociated.uri import Uri

_MAX_THREADS = 256  # the largest number of tasks of one executor
_MAX_READERS = 64  # kept for later tasks
#: The bytes of a slice for a task: Spark's default for files.
SLICE_BYTES = 128 << 20
_MAX_BATCH_ROWS = 1 << 20  # of one batch


class Sidecar:
    """The calls of the JVM, by name in `calls`, and the state of their streams and readers."""

    def __init__(self) -> None:
        self._streams: dict[int, SharedStream] = {}  # by number
        self._readers: dict[str, DatasetReader] = {}  # by pickled text; they remember their dataset for the next task
        self._stream_count = 0  # the number of the last stream
        self._exports: dict[str, dict[str, JvmMemfd]] = {}  # by name: the memfds, by path
        self._lock = threading.Lock()
        reads = self.describe, self.plan, self.open, self.unresponsive, self.layout, self.decode, self.next, self.close
        exports = self.begin_export, self.export_file, self.seal_export, self.end_export
        calls: Sequence[Callable[..., Any]] = (*reads, *exports, *Writes().calls, *TABLE_CALLS)
        self.calls = {call.__name__: call for call in calls}

    def describe(self, options: Mapping[str, str]) -> Any:
        request = DatasetRequest.parse(options)
        with request.catalog.connect() as client:
            info = request.describe(client)
        sizes = {"rows": info.rows, "nbytes": info.nbytes} if request.filters is None else {}
        known_sizes = {name: size for name, size in sizes.items() if size is not None}
        schema = spark_schema(info.schema, request.columns).json()
        return {"schema": schema, "version": info.version, "lineage": info.lineage_id, **known_sizes}

    def plan(
        self,
        options: Mapping[str, str],
        schema: str,
        columns: str,
        version: int,
        lineage: str,
        conditions: Sequence[Any],
        share: float,
        tasks: int,
    ) -> Any:
        request = DatasetRequest.parse(options)
        request.check_columns(StructType.fromJson(json.loads(schema)))
        reader = DatasetReader(request, StructType.fromJson(json.loads(columns)), as_filters(conditions))
        partitions = [
            {
                "partition": pickled(partition),
                "hosts": [*partition.hosts],
                "rows": partition.rows if request.filters is None else 0,
            }
            for partition in reader.partitions(PlannedVersion(version, lineage), SLICE_BYTES, share, tasks)
        ]
        return {"reader": pickled(reader), "partitions": partitions}

    def open(self, reader: str, partition: str, direct: bool) -> Any:
        dataset_reader, planned = self._reader(reader), unpickled(partition)
        with suppress(DissociatedError):  # opening the stream here repairs or reports the error
            if direct and (request := dataset_reader.direct_request(planned)) is not None:
                return {"server": request}
        spaces: list[AddressSpace] = []
        batches = dataset_reader.batches(planned, _MAX_BATCH_ROWS, spaces, in_place=True)
        return self._add_stream(SharedStream(batches, spaces, dataset_reader.arrow_schema.types))

    def unresponsive(self, host: str, port: int) -> None:
        remember_unresponsive(Uri("tcp", host=host, port=port))

    def decode(self, reader: str, schema: str, header: str, body: str, max_body: int) -> Any:
        dataset_reader = self._reader(reader)
        with pa.memory_map(body) as file:
            content = memoryview(file.read_buffer())
        messages = base64.b64decode(schema), base64.b64decode(header)
        batches = dataset_reader.decoded(*messages, content, max_body, _MAX_BATCH_ROWS)
        return self._add_stream(SharedStream(batches, [], dataset_reader.arrow_schema.types))

    def _add_stream(self, stream: SharedStream) -> Any:
        with self._lock:
            self._stream_count += 1
            self._streams[self._stream_count] = stream
            return {"stream": self._stream_count}

    def layout(self, reader: str, schema: str) -> Any:
        stream_schema = read_schema(base64.b64decode(schema), RemoteProtocolError)
        dataset_reader = self._reader(reader)
        layout = stream_layout(stream_schema, dataset_reader.arrow_schema)
        return None if layout is None or not dataset_reader.readable(stream_schema) else layout.to_json()

    def _reader(self, reader: str) -> DatasetReader:
        with self._lock:
            dataset_reader = self._readers.pop(reader) if reader in self._readers else unpickled(reader)
            self._readers[reader] = dataset_reader  # the most recently used is the last
            while len(self._readers) > _MAX_READERS:
                del self._readers[next(iter(self._readers))]
            return dataset_reader

    def next(self, stream: int) -> Any:
        return self._streams[stream].next()

    def close(self, stream: int) -> None:
        self._streams.pop(stream).close()

    def begin_export(self, name: str) -> None:
        with self._lock:
            self._exports[name] = {}

    def export_file(self, name: str) -> str:
        with self._lock, store_errors("shared memory for the rows of a partition"):
            files = self._exports[name]  # KeyError: a task that continues after its export has ended
            memfd = JvmMemfd(writable=True)
            files[memfd.path] = memfd
        return memfd.path

    def seal_export(self, name: str, path: str) -> None:
        with self._lock:
            seal(self._exports[name][path].descriptor, Backing.SEALED)

    def end_export(self, name: str) -> None:
        with self._lock:
            for memfd in self._exports.pop(name, {}).values():
                memfd.close()


def main() -> None:
    """Answer requests until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # prints of libraries go to stderr, not among the answers
    sidecar = Sidecar()
    writing = threading.Lock()

    def answer(request: Any) -> None:
        try:
            reply = {"result": sidecar.calls[request["call"]](**request["with"])}
        except DissociatedError as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        with writing:
            print(json.dumps({"id": request["id"], **reply}), file=answers)

    threads = ThreadPoolExecutor(_MAX_THREADS)
    try:
        for line in sys.stdin.buffer:  # bytes: JSON is UTF-8, independent of the locale
            threads.submit(answer, json.loads(line))
    finally:
        os._exit(0)  # the JVM is gone, perhaps within a line, and needs no answers from running calls


if __name__ == "__main__":
    main()

"""The process beside a JVM of Spark that knows catalogs, tickets and leases for it, and finds memory.

The JVM starts it, and it ends with the JVM. Requests are lines of JSON on stdin, such as
`{"id": 1, "call": "next", "with": {"stream": 1}}`. Answers are lines on stdout, in any order, with a "result" or an
"error":

    describe(options)                       on the driver: {"schema", "version", "lineage"}, and "rows" and "nbytes" if
                                            known
    plan(options, schema, columns, version, lineage, conditions, share, tasks)
                                            on the driver: {"reader", "partitions": [{"what", "hosts", "rows"}]}; the
                                            columns are this `share` of a row, and there are so many `tasks` at once
    open(reader, partition, direct)         in a task: {"stream": its number}; or {"server": who sends the rows, "skip",
                                            "rows"}, where the JVM can ask it and `direct` allows that
    layout(reader, schema)                  what arrays that server's stream consists of, as its schema has come; null
                                            where the JVM cannot read it
    decode(reader, schema, header, body, max_body)
                                            {"stream"} with one message of that server, whose body is in the file `body`
    next(stream)                            {"regions": new files to map, "batches", "ended"}; the end comes alone,
                                            so who has it knows that all before was held while it was looked at
    close(stream)                           gives back what it holds

    tables(options), table_exists(options, name), table_schema(options, name), create_table(options, name, schema),
    drop_table(options, name)               the datasets of a catalog as tables, for Spark's catalog plug-in, whose
                                            `options` say where the catalog is

and the calls of `dissociated.spark.staging`, by which it writes.

Schemas are Spark's JSON, and "rows" of a partition is 0 where nobody knows.
An array of a batch is `[length, offset, nulls, [region, at, size of each buffer], [its children], kind, width]`, as
Arrow's C data interface has it, but for addresses: a buffer lies in a file that both processes have. That is the memory
of the server where this process has mapped it, and a memfd to which it is copied otherwise.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from dissociated.codec.reader import read_schema
from dissociated.control.commit import Publication
from dissociated.errors import DatasetNotFound, DissociatedError, RemoteProtocolError
from dissociated.memory.region import AddressSpace
from dissociated.spark.catalog import CatalogConfig
from dissociated.spark.columns import spark_schema
from dissociated.spark.filters import as_filters
from dissociated.spark.layouts import ArrayLayout, BufferLocator, stream_layout
from dissociated.spark.pickled import pickled, unpickled
from dissociated.spark.reader import DatasetReader
from dissociated.spark.request import PlannedVersion, Request
from dissociated.spark.staging import Writes
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema
from dissociated.spark.writer import commit

_MAX_THREADS = 256  # tasks of one executor
_MAX_READERS = 64  # that are kept for the next tasks
_MAX_BATCHES = 64  # of one answer
_SLICE_BYTES = 128 << 20  # that one task reads: as many as of files, if Spark reads those
_MAX_BATCH_ROWS = 1 << 20  # of one batch
_MAX_BATCH_BYTES = 1 << 29  # of one batch: Java maps no more than 2 GiB at once


class Sidecar:
    """What the JVM can ask for."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._readers: dict[str, DatasetReader] = {}  # which know their dataset for the next task
        self._opened = 0
        self._lock = threading.Lock()
        self.calls: Mapping[str, Callable[..., Any]] = {
            "describe": self.describe,
            "plan": self.plan,
            "open": self.open,
            "layout": self.layout,
            "decode": self.decode,
            "next": self.next,
            "close": self.close,
            **Writes().calls,
            **{call.__name__: call for call in _TABLE_CALLS},
        }

    def describe(self, options: Mapping[str, str]) -> Any:
        request = Request.parse(options)
        with request.catalog.connect() as client:
            info = request.describe(client)
        sizes = {"rows": info.rows, "nbytes": info.nbytes} if request.filters is None else {}
        known = {name: size for name, size in sizes.items() if size is not None}
        schema = spark_schema(info.schema, request.columns).json()
        return {"schema": schema, "version": info.version, "lineage": info.lineage_id, **known}

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
        request = Request.parse(options)
        request.check_columns(StructType.fromJson(json.loads(schema)))
        reader = DatasetReader(request, StructType.fromJson(json.loads(columns)), as_filters(conditions))
        partitions = [
            {"what": pickled(one), "hosts": [*one.hosts], "rows": one.rows if request.filters is None else 0}
            for one in reader.partitions(PlannedVersion(version, lineage), _SLICE_BYTES, share, tasks)
        ]
        return {"reader": pickled(reader), "partitions": partitions}

    def open(self, reader: str, partition: str, direct: bool) -> Any:
        found, wanted = self._reader(reader), unpickled(partition)
        with suppress(DissociatedError):  # which are told, or mended, where it is opened here
            if direct and (request := found.direct_request(wanted)) is not None:
                return {"server": request}
        spaces: list[AddressSpace] = []
        return self._opened_stream(
            _Stream(found.batches(wanted, _MAX_BATCH_ROWS, spaces), spaces, found.arrow_schema.types)
        )

    def decode(self, reader: str, schema: str, header: str, body: str, max_body: int) -> Any:
        found = self._reader(reader)
        with pa.memory_map(body) as file:
            content = memoryview(file.read_buffer())
        batches = found.decoded(base64.b64decode(schema), base64.b64decode(header), content, max_body, _MAX_BATCH_ROWS)
        return self._opened_stream(_Stream(batches, [], found.arrow_schema.types))

    def _opened_stream(self, stream: _Stream) -> Any:
        with self._lock:
            self._opened += 1
            self._streams[self._opened] = stream
            return {"stream": self._opened}

    def layout(self, reader: str, schema: str) -> Any:
        found, wanted = read_schema(base64.b64decode(schema), RemoteProtocolError), self._reader(reader)
        layout = stream_layout(found, wanted.arrow_schema)
        return None if layout is None or not wanted.readable(found) else layout.to_json()

    def _reader(self, reader: str) -> DatasetReader:
        with self._lock:
            found = self._readers.pop(reader) if reader in self._readers else unpickled(reader)
            self._readers[reader] = found  # the last
            while len(self._readers) > _MAX_READERS:
                del self._readers[next(iter(self._readers))]
            return self._readers[reader]

    def next(self, stream: int) -> Any:
        return self._streams[stream].next()

    def close(self, stream: int) -> None:
        self._streams.pop(stream).close()


class _Stream:
    """The batches of one partition, as places. Spark has these `types`.

    Each batch is held until the next answer, and the last of all until this is closed.
    """

    def __init__(
        self, batches: Iterator[pa.RecordBatch], spaces: Sequence[AddressSpace], types: Sequence[pa.DataType]
    ) -> None:
        self._batches = batches
        self._types = types
        self._spaces = spaces
        self._locator = BufferLocator(spaces)
        self._held: list[pa.RecordBatch] = []
        self._layouts: list[ArrayLayout] = []
        self._next_count = 1  # batches of the next answer: a query with a limit may want no more
        self._lock = threading.Lock()  # a task that is killed closes what it still waits for
        self._closed = False

    def next(self) -> Any:
        try:
            with self._lock:
                return self._next()
        finally:
            if self._closed:
                self.close()

    def _next(self) -> Any:
        del self._held[:-1]
        self._locator.forget()
        answer: list[Any] = []
        while not self._closed and len(answer) < self._next_count and not self._locator.copied:
            batch = next(self._batches, None)
            if batch is None:
                break
            if batch.num_rows:
                if not answer:
                    self._held.clear()
                self._held.append(batch)
                answer += [self._place(portion) for portion in _cut_to_map(batch)]
        # Memory that is used again the server may need back before it can send more.
        live = any(space.live for space in self._spaces)
        self._next_count = 1 if live else min(2 * self._next_count, _MAX_BATCHES)
        return {"regions": self._locator.new_regions(), "batches": answer, "ended": not answer}

    def _place(self, batch: pa.RecordBatch) -> Any:
        self._layouts = self._layouts or [*map(ArrayLayout.of, batch.schema.types, self._types)]
        return {"rows": batch.num_rows, "columns": [*map(self._locator.of, batch.columns, self._layouts)]}

    def close(self) -> None:
        """Give back what it holds. Where somebody still waits for more, they do so, with the next batch."""
        self._closed = True
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._batches.close()  # type: ignore[attr-defined]  # it is a generator
            self._held.clear()
            self._locator.close()
        finally:
            self._lock.release()


def _cut_to_map(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows of a batch in pieces that Java can map."""
    size = batch.get_total_buffer_size()  # `nbytes` would trust the offsets
    step = batch.num_rows if size <= _MAX_BATCH_BYTES else max(1, batch.num_rows * _MAX_BATCH_BYTES // size)
    for first in range(0, batch.num_rows, step):
        yield batch.slice(first, step)


def tables(options: Mapping[str, str]) -> Sequence[str]:
    """Return the names of all tables; datasets of tensors are none."""
    with CatalogConfig.parse(options).connect() as client:
        return [info.name for info in client.list() if info.tensors is None]


def table_exists(options: Mapping[str, str], name: str) -> bool:
    """Return whether there is a dataset of this name, also of tensors."""
    with CatalogConfig.parse(options).connect() as client:
        return name in client


def table_schema(options: Mapping[str, str], name: str) -> str:
    """Return the schema of a table as Spark's JSON."""
    return Request(CatalogConfig.parse(options), name).schema().json()


def create_table(options: Mapping[str, str], name: str, schema: str) -> None:
    """Publish a dataset without rows."""
    target = WriteTarget(CatalogConfig.parse(options), Publication(name))
    commit(target, uuid.uuid4().hex, arrow_schema(StructType.fromJson(json.loads(schema))), ())


def drop_table(options: Mapping[str, str], name: str) -> bool:
    """Drop a table. Returns whether it existed."""
    with CatalogConfig.parse(options).connect() as client:
        try:
            client.drop(name)
        except DatasetNotFound:
            return False
        return True


_TABLE_CALLS: Sequence[Callable[..., Any]] = (tables, table_exists, table_schema, create_table, drop_table)


def main() -> None:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what anybody prints is no answer
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

    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        for line in sys.stdin.buffer:  # UTF-8, whatever the encoding of this machine
            threads.submit(answer, json.loads(line))
        os._exit(0)  # the JVM is gone, and nobody waits for what still runs


if __name__ == "__main__":
    main()

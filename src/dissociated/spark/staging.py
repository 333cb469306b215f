"""What the JVM of Spark asks for where it writes: on the driver plans and commits, in tasks files for segments.

It writes into files that are made here, as `SegmentWriter` makes them: in the stage of the node on this host, which is
started where there is none, with room reserved before it is used. Until they are finished they belong to this process:
where it ends, nothing is left of them.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as types
from pyspark.sql.types import StructType

from dissociated.errors import StoreError
from dissociated.node.local import stage_here
from dissociated.oserrors import store_errors
from dissociated.spark.catalog import CatalogConfig, wait_for_catalog
from dissociated.spark.pickled import pickled, unpickled
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema
from dissociated.spark.writer import DatasetWriter, Written
from dissociated.store.files import NewFile, StagedFile

if TYPE_CHECKING:
    from dissociated.spark.streaming import DatasetStreamWriter

#: Names of segments. A task that is killed while its file is made comes back for it within seconds, or never.
_MAX_UNWANTED = 1 << 16


class Writes:
    """The calls, by their names:

    write(options, schema, mode)            on the driver: a plan of a write, see `_plan`
    commit(writer, written)                 makes what tasks have written a dataset
    abort(writer)                           removes it
    write_stream(options, schema, mode)     on the driver: the same for a streaming query, whose micro-batches have a
    commit_stream(writer, key, written)     commit each
    abort_stream(writer, key, written)
    committed(writer, key)                  whether there was a commit with this key
    stage(writer, segment)                  in a task: a new file {"path", "room", "node"}, of which `room` bytes may be
    reserve(segment, size)                  written; more room, at least so much
    finish(segment, size)                   the file is whole, and has so many bytes
    discard(segment)                        it is not needed, if there is one
    """

    def __init__(self) -> None:
        self._segments: dict[str, _StagedSegment] = {}
        self._unwanted: dict[str, None] = {}  # whose tasks were killed while they were made, the oldest first
        self._lock = threading.Lock()
        calls: Sequence[Callable[..., Any]] = (
            *(write, commit, abort, write_stream, commit_stream, abort_stream, committed),
            *(self.stage, self.reserve, self.finish, self.discard),
        )
        self.calls = {call.__name__: call for call in calls}

    def stage(self, writer: str, segment: str) -> Any:
        staged = _StagedSegment(unpickled(writer).target.catalog, segment)
        with self._lock:
            wanted = segment not in self._unwanted
            if wanted:
                self._segments[segment] = staged
        if not wanted:
            staged.abort()
            raise StoreError(f"the task that writes {segment} was killed")
        return {"path": staged.path, "room": staged.reserve(0), "node": staged.node}

    def reserve(self, segment: str, size: int) -> int:
        return self._segments[segment].reserve(size)

    def finish(self, segment: str, size: int) -> None:
        self._take(segment).commit(size)

    def discard(self, segment: str) -> None:
        with self._lock:
            if segment not in self._segments:
                self._unwanted[segment] = None
                if len(self._unwanted) > _MAX_UNWANTED:
                    del self._unwanted[next(iter(self._unwanted))]
                return
        self._take(segment).abort()

    def _take(self, segment: str) -> _StagedSegment:
        with self._lock:
            return self._segments.pop(segment)


class _StagedSegment:
    """A file that the JVM writes, by a name that it can open for as long as this process has it open."""

    def __init__(self, catalog: CatalogConfig, segment: str) -> None:
        stage = wait_for_catalog(lambda: stage_here(catalog.uri, catalog.connect))
        self.node = stage.node
        place = Path(stage.directory, segment)
        self._what = f"writing {place}"
        with ExitStack() as stack, store_errors(f"creating {place}"):
            self._file = (
                StagedFile(place, stack.enter_context(catalog.connect(stage.flight)).reserve)
                if stage.limited
                else NewFile(place)
            )
            self._connection = stack.pop_all()
        self.path = f"/proc/{os.getpid()}/fd/{self._file.descriptor}"

    def reserve(self, size: int) -> int:
        with store_errors(self._what):
            return self._file.reserve(size)

    def commit(self, size: int) -> None:
        with self._connection, store_errors(self._what):
            try:
                self._file.commit(size)
            except BaseException:
                self._file.abort()
                raise

    def abort(self) -> None:
        with self._connection, store_errors(self._what):
            self._file.abort()


def write(options: Mapping[str, str], schema: str, mode: str) -> Any:
    writer = DatasetWriter(WriteTarget.parse(options, mode, '.save("NAME")'), _arrow_schema(schema))
    return _plan(writer, writer.key)


def commit(writer: str, written: Sequence[Mapping[str, Any]]) -> None:
    unpickled(writer).commit([Written(**one) for one in written])


def abort(writer: str) -> None:
    unpickled(writer).abort(())


def write_stream(options: Mapping[str, str], schema: str, mode: str) -> Any:
    from dissociated.spark.streaming import DatasetStreamWriter  # needs Spark 4.2

    return _plan(DatasetStreamWriter(WriteTarget.parse(options, mode, '.start("NAME")'), _arrow_schema(schema)), "")


def commit_stream(writer: str, key: str, written: Sequence[Mapping[str, Any]]) -> None:
    unpickled(writer).commit(_task_commits(key, written), 0)


def abort_stream(writer: str, key: str, written: Sequence[Mapping[str, Any]]) -> None:
    unpickled(writer).abort(_task_commits(key, written), 0)


def committed(writer: str, key: str) -> bool:
    catalog: CatalogConfig = unpickled(writer).target.catalog

    def ask() -> bool:
        with catalog.connect() as client:
            return client.committed(key)

    return wait_for_catalog(ask)


def _arrow_schema(schema: str) -> pa.Schema:
    return arrow_schema(StructType.fromJson(json.loads(schema)))


def _plan(writer: DatasetWriter | DatasetStreamWriter, key: str) -> Any:
    """Whether rows can go in as they are. Then both schemas as messages: those of the segments, and of their
    statistics, which these columns have.
    """
    if not writer.fitting.is_identity(writer.schema):
        return {"fits": False}
    schema = writer.fitting.schema
    ordered = [number for number, field in enumerate(schema) if _is_ordered(field.type)]
    return {
        "fits": True,
        "writer": pickled(writer),
        "key": key,
        "schema": _message(schema),
        "statistics": ordered,
        "statistics_schema": _message(_statistics_schema(schema, ordered)),
    }


def _statistics_schema(schema: pa.Schema, columns: Sequence[int]) -> pa.Schema:
    fields = [pa.field("num_rows", pa.int64())]
    for number in columns:
        kind = schema.field(number).type
        fields += pa.field(f"{number}.null_count", pa.int64()), pa.field(f"{number}.min", kind)
        fields.append(pa.field(f"{number}.max", kind))
    return pa.schema(fields)


def _is_ordered(kind: pa.DataType) -> bool:
    return not types.is_nested(kind) and not types.is_null(kind)


def _message(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def _task_commits(key: str, written: Sequence[Mapping[str, Any]]) -> list[Any]:
    from dissociated.spark.streaming import TaskCommit

    return [TaskCommit(key, Written(**one)) for one in written]

"""What the JVM of Spark asks for where it writes: on the driver plans and commits, in tasks files for segments.

It writes into files that are made here, as `SegmentWriter` makes them: in the stage of the node on this host, which is
started where there is none, with room reserved before it is used. Until they are finished they belong to this process:
where it ends, nothing is left of them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from dissociated.base.buffers import Buffer
from dissociated.base.oserrors import store_errors
from dissociated.codec.filter.statistics import StatisticsCollector
from dissociated.errors import StoreError
from dissociated.format.encapsulated import end_of_stream
from dissociated.memory.shared import map_read_only, reopen_read_only, write_parts
from dissociated.node.local import stage_here
from dissociated.spark.catalog import CatalogConfig, wait_for_catalog
from dissociated.spark.pickled import pickled, unpickled
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema
from dissociated.spark.writer import DatasetWriter, Written
from dissociated.store.files import NewFile, StagedFile

#: Names of segments that are remembered. A task that is killed while its file is made comes back for it within
#: seconds, or never.
_MAX_UNWANTED = 1 << 16


class Writes:
    """The calls, by their names:

    write(options, schema, mode, streaming) on the driver: {"fits": whether rows can go in as they are, "writer", "key"}
    commit(writer, key, written)            on the driver: makes what tasks have written a dataset. Each micro-batch of
                                            a streaming query has a commit with a `key` of its own
    abort(writer, key, written)             on the driver: removes what tasks have written
    stage(writer, segment, key)             in a task: a new file {"path", "node", "position", "room"}: batches go there
                                            from the position on, up to `room`; null after a commit with this key
    reserve(segment, size)                  more room, at least so much
    finish(segment, size)                   all batches are there, up to `size`: how many bytes the stream has
    discard(segment)                        it is not needed, if there is one
    """

    def __init__(self) -> None:
        self._segments: dict[str, _StagedSegment] = {}
        self._unwanted: dict[str, None] = {}  # whose tasks were killed while they were made, the oldest first
        self._lock = threading.Lock()
        calls: Sequence[Callable[..., Any]] = (
            *(write, commit, abort, self.stage, self.reserve, self.finish, self.discard),
        )
        self.calls = {call.__name__: call for call in calls}

    def stage(self, writer: str, segment: str, key: str | None) -> Any:
        plan = unpickled(writer)
        if key is not None and _is_committed(plan.target.catalog, key):
            return None
        staged = _StagedSegment(plan.target.catalog, segment)
        try:
            position = staged.append(0, plan.fitting.schema.serialize())
            room = staged.reserve(position)
            with self._lock:  # from here on `discard` may close it, so it is written to no more
                if segment in self._unwanted:
                    raise StoreError(f"the task that writes {segment} was killed")
                self._segments[segment] = staged
        except BaseException:
            staged.abort()
            raise
        return {"path": staged.path, "node": staged.node, "position": position, "room": room}

    def reserve(self, segment: str, size: int) -> int:
        return self._segments[segment].reserve(size)

    def finish(self, segment: str, size: int) -> int:
        return self._take(segment).finish(size)

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
        self._what = f"writing {stage.directory}/{segment}"
        with stage.open() as staging, ExitStack() as stack, store_errors(self._what):
            place = staging / segment
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

    def append(self, at: int, part: Buffer) -> int:
        """Write `part` at this position. Returns where it ends."""
        end = at + len(part)
        with store_errors(self._what):
            self._file.reserve(end)
            write_parts(self._file.descriptor, [part], at)
        return end

    def finish(self, size: int) -> int:
        with self._connection, store_errors(self._what):
            try:
                end = nbytes = self.append(size, end_of_stream())
                statistics = self._statistics(nbytes)
                with suppress(StoreError):  # there is no room, so without: nobody needs them
                    end = self.append(nbytes, statistics)
                self._file.commit(end)
                return nbytes
            except BaseException:
                self._file.abort()
                raise

    def _statistics(self, size: int) -> bytes:
        descriptor = reopen_read_only(self._file.descriptor)
        try:
            stream = map_read_only(descriptor, size)
        finally:
            os.close(descriptor)
        with pa.ipc.open_stream(stream) as reader:
            batches = [*reader]  # views: what cannot be read is an error of the task
        with suppress(pa.ArrowException):  # of values that cannot be compared: nobody needs statistics
            collector = StatisticsCollector(reader.schema, thorough=True)
            for batch in batches:
                collector.add(batch)
            found = collector.statistics()
            return b"" if found is None else found.encode()
        return b""

    def abort(self) -> None:
        with self._connection, store_errors(self._what):
            self._file.abort()


def write(options: Mapping[str, str], schema: str, mode: str, streaming: bool) -> Any:
    method = '.start("NAME")' if streaming else '.save("NAME")'
    target = WriteTarget.parse(options, mode, method)
    columns = arrow_schema(StructType.fromJson(json.loads(schema)))
    writer = _stream_writer(target, columns) if streaming else DatasetWriter(target, columns)
    if not writer.fitting.is_identity(writer.schema):
        return {"fits": False}
    return {"fits": True, "writer": pickled(writer), "key": "" if streaming else writer.key}


def _stream_writer(target: WriteTarget, schema: pa.Schema) -> Any:
    from dissociated.spark.streaming import DatasetStreamWriter  # needs Spark 4.2

    return DatasetStreamWriter(target, schema)


def commit(writer: str, key: str | None, written: Sequence[Mapping[str, Any]]) -> None:
    unpickled(writer).commit(*_messages(key, written))


def abort(writer: str, key: str | None, written: Sequence[Mapping[str, Any]]) -> None:
    unpickled(writer).abort(*_messages(key, written))


def _messages(key: str | None, written: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """The arguments of `commit` and `abort` of a writer; of a streaming one, where there is a key."""
    messages = [Written(**one) for one in written]
    if key is None:
        return (messages,)
    from dissociated.spark.streaming import TaskCommit

    return [TaskCommit(key, one) for one in messages], 0


def _is_committed(catalog: CatalogConfig, key: str) -> bool:
    def ask() -> bool:
        with catalog.connect() as client:
            return client.committed(key)

    return wait_for_catalog(ask)

"""Calls of Spark's JVM for writing: the driver plans and commits, tasks get files for segments.

The JVM writes into files that a `SharedSegmentWriter` of this process creates in the stage of the node on this host. If
there is no such node, it is started. Space is reserved before it is used. Until a segment is finished, its file belongs
to this process and disappears if the process ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from dissociated.client.staging import staged_file
from dissociated.errors import StoreError
from dissociated.node.local import stage_here
from dissociated.spark.exchange import pickled, unpickled
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import schema_from_json
from dissociated.spark.writer import DatasetWriter, Written, is_committed
from dissociated.store.segment import SharedSegmentWriter

#: Names of discarded segments to remember. A killed task's `discard` may overtake its `stage`, by seconds at most.
_MAX_UNWANTED = 1 << 16


class Writes:
    """The functions that the JVM calls, and the segments that are being written.

    write(options, schema, mode, streaming) on the driver: {"fits": whether rows need no conversion, "writer", "key"}
    commit(writer, key, written)            on the driver: publishes the dataset that the tasks have written. Each
                                            micro-batch of a streaming query has a commit with a `key` of its own
    abort(writer, key, written)             on the driver: removes the segments that the tasks have written
    stage(writer, segment, key)             in a task: a new file {"path", "node", "position", "room"} for batches from
                                            the position on, up to `room`; null after a commit with this key
    reserve(segment, size)                  reserves at least `size` bytes, and returns the new `room`
    finish(segment, size)                   ends the segment after its batches, up to `size`: returns its size in bytes
    discard(segment)                        removes the segment, or prevents it if it does not exist yet
    """

    def __init__(self) -> None:
        self._segments: dict[str, _StagedSegment] = {}  # that are being written, by name
        self._unwanted: dict[str, None] = {}  # discarded before they existed, the oldest first
        self._lock = threading.Lock()
        on_driver = write, commit, abort
        in_tasks = self.stage, self.reserve, self.finish, self.discard
        #: The functions, which the JVM calls by name.
        self.calls: Sequence[Callable[..., Any]] = (*on_driver, *in_tasks)

    def stage(self, writer: str, segment: str, key: str | None) -> Any:
        plan = unpickled(writer)
        if key is not None and is_committed(plan.target.catalog, key):
            return None
        staged = _StagedSegment(plan.target, segment, plan.fitting.schema)
        try:
            position = staged.writer.nbytes
            place = {"path": staged.writer.path, "position": position, "room": staged.writer.reserve(position)}
            with self._lock:  # after this, `discard` may close the writer at any time
                if segment in self._unwanted:
                    raise StoreError(f"the task that writes {segment} was killed")
                self._segments[segment] = staged
        except BaseException:
            staged.abort()
            raise
        return {"node": staged.node, **place}

    def reserve(self, segment: str, size: int) -> int:
        return self._segments[segment].writer.reserve(size)

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
    """A segment in the stage of the node on this host, whose record batches the JVM writes."""

    def __init__(self, target: WriteTarget, segment: str, schema: pa.Schema) -> None:
        catalog = target.catalog
        stage = catalog.retry(lambda: stage_here(catalog.uri, catalog.connect))
        self.node = stage.node
        with ExitStack() as stack:
            path, reserve = stack.enter_context(staged_file(stage, segment, catalog.connect, target.commit))
            self.writer = stack.enter_context(SharedSegmentWriter(path, schema, reserve and catalog.retrying(reserve)))
            self._resources = stack.pop_all()

    def finish(self, size: int) -> int:
        with self._resources:
            self.writer.adopt(size)
        return self.writer.nbytes

    def abort(self) -> None:
        with self._resources:
            self.writer.abort()


def write(options: Mapping[str, str], schema: str, mode: str, streaming: bool) -> Any:
    """Answer the call `write`: see `Writes`."""
    method = '.start("NAME")' if streaming else '.save("NAME")'
    target = WriteTarget.parse(options, mode, method)
    columns = schema_from_json(schema)
    writer = _stream_writer(target, columns) if streaming else DatasetWriter(target, columns)
    if not writer.fitting.is_identity(writer.schema):
        return {"fits": False}
    return {"fits": True, "writer": pickled(writer), "key": "" if streaming else writer.key}


def _stream_writer(target: WriteTarget, schema: pa.Schema) -> Any:
    from dissociated.spark.streaming import DatasetStreamWriter  # needs Spark 4.2

    return DatasetStreamWriter(target, schema)


def commit(writer: str, key: str | None, written: Sequence[Mapping[str, Any]]) -> None:
    """Answer the call `commit`: see `Writes`."""
    unpickled(writer).commit(*_messages(key, written))


def abort(writer: str, key: str | None, written: Sequence[Mapping[str, Any]]) -> None:
    """Answer the call `abort`: see `Writes`."""
    unpickled(writer).abort(*_messages(key, written))


def _messages(key: str | None, written: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the arguments of a writer's `commit` and `abort`. A writer of a streaming query has a `key`."""
    messages = [Written(**segment) for segment in written]
    if key is None:
        return (messages,)
    from dissociated.spark.streaming import TaskCommit

    return [TaskCommit(key, message) for message in messages], 0

"""Python functions over the batches of a DataFrame, without a socket for the data.

Spark's own Python worker runs the function. References travel over a socket between the task and the worker, and the
batches lie in memory that both map:

    task      writes the rows of its partition into a memfd of the worker, one batch at a time, when the function asks
    worker    maps the batch, or the segments of a dataset that is read directly, and calls the function
    task      maps each batch that the function yields where it lies; the worker copies a batch into a memfd if needed

The function runs only while the task waits for its next batch, so there is never more than one batch on its way. A
function may end before the task has written the batch that its thread requested. The worker then waits for the task:
Spark uses the worker again, and the path of a closed memfd may soon lead to a memfd of another task.

`jvm/Functions.scala` is the other half.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from dissociated.base.fork import ProcessBound
from dissociated.errors import OptionError, SourceError
from dissociated.memory.private import SharedFile
from dissociated.memory.region import AddressSpace, Region, reserve_base
from dissociated.memory.shared import map_read_only
from dissociated.spark.columns import is_readable, spark_type
from dissociated.spark.exchange import JvmMemfd, unpickled
from dissociated.spark.stream import SharedStream
from dissociated.spark.types import conform, function_schema, is_alike

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

#: A function that maps the batches of a partition.
MapFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

_NAME = "dissociated_map_in_arrow"  # by which Spark's JVM recognizes the function
_COLUMN = "dissociated.conversation"  # the only column of the row that tells the function how to reach its task
_MIN_MAPPED_SIZE = 1 << 24  # bytes of a memfd that are mapped, most of them unused
_GRACE = 5.0  # seconds that a function may run after its task has ended
_MAX_REUSED = 64  # memfds of one partition; each takes two descriptors


def map_in_arrow(
    df: DataFrame, function: MapFunction, schema: StructType | str, barrier: bool = False, profile: Any = None
) -> DataFrame:
    """Map the batches of each partition by a Python function, as `DataFrame.mapInArrow` does, in shared memory.

    The data source for Spark's JVM is needed. Without it, and for types that it does not have, this is `mapInArrow`.

        def late(batches):
            for batch in batches:
                yield batch.filter(pc.field("dep_delay") > 60)

        map_in_arrow(df, late, df.schema)

    Args:
        df: The DataFrame.
        function: A function that takes an iterator of the pyarrow.RecordBatch of a partition, and returns an iterator
            of result batches. Spark's Python workers run it, lazily and again after a failure.
        schema: Spark's schema of the results, or its text. Columns are matched by position.
        barrier: Must be False.
        profile: Must be None.

    Returns:
        The results, for use in any plan.

    Raises:
        OptionError: `barrier` or `profile` is given.
    """
    from pyspark.sql.types import DataType, StructType

    if barrier or profile is not None:
        raise OptionError(
            "map_in_arrow has no barrier mode and no resource profile: use DataFrame.mapInArrow for these"
        )
    fields = DataType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(fields, StructType):
        return df.mapInArrow(function, schema)  # Spark itself refuses it
    timezone = df.sparkSession.conf.get("spark.sql.session.timeZone")
    assert timezone is not None, "it has a default"
    try:
        mapped = MappedFunction(function, function_schema(df.schema, timezone), function_schema(fields, timezone))
    except SourceError:
        return df.mapInArrow(function, schema)  # Spark itself knows whether it takes these types
    return df.mapInArrow(mapped, schema)


class MappedFunction:
    """A user's function in the form that Spark calls in its workers.

    Spark calls it with the batches of a partition; or, by the data source for its JVM, with one row that tells how to
    reach the task.
    """

    def __init__(self, function: MapFunction, input_schema: pa.Schema, output_schema: pa.Schema) -> None:
        self.__name__ = _NAME
        self._function = function
        self._input_schema = input_schema
        self._output_schema = output_schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        first = next(batches, None)
        if first is None or first.schema.names != [_COLUMN]:
            yield from self._results(batches if first is None else chain([first], batches))
        else:
            start = json.loads(first.column(0)[0].as_py())
            with _Conversation(start["socket"]) as conversation:
                self._converse(conversation, start)
            yield from batches  # There are none, but Spark uses a worker again only if its input was read to the end.

    def _converse(self, conversation: _Conversation, start: Mapping[str, Any]) -> None:
        """Answer the task with batches until all are sent, or the task has enough."""
        with ExitStack() as stack:
            memory = stack.enter_context(_InputMemory())
            spaces = [memory.space]
            inputs = _Inputs(
                self._read_dataset(start, spaces) if "reader" in start else self._receive(conversation, memory)
            )
            stack.enter_context(closing(inputs))
            results = self._checked_results(inputs)
            stream = SharedStream(results, spaces, self._output_schema.types, max_batches=1, static_only=True)
            stack.enter_context(closing(stream))
            stack.callback(memory.keep)  # the stream gives the last batch back, which the JVM may still read
            stack.callback(conversation.end)  # the function may still read its batches in a thread of its own
            while conversation.receive("next") is not None:
                answer = stream.next()
                if answer["ended"]:
                    conversation.has_ended = True  # the task answers no request that it receives after this message
                conversation.send(answer)

    def _receive(self, conversation: _Conversation, memory: _InputMemory) -> Generator[pa.RecordBatch, None, None]:
        """Yield the batches that the task writes."""
        while not conversation.has_ended:
            memfd = memory.take()
            size = conversation.write(memfd)
            if not size or conversation.has_ended:
                return
            yield pa.ipc.read_record_batch(pa.ipc.read_message(memfd.read(size)), self._input_schema)

    def _read_dataset(
        self, start: Mapping[str, Any], spaces: list[AddressSpace]
    ) -> Generator[pa.RecordBatch, None, None]:
        """Yield the batches of a partition of a dataset, in the memory of its segments."""
        reader, partition = unpickled(start["reader"]), unpickled(start["partition"])
        with closing(reader.batches(partition, start["max_rows"], spaces)) as batches:
            for batch in batches:
                if batch.num_rows:
                    yield conform(batch, self._input_schema)

    def _results(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        results = self._function(batches)
        if not isinstance(results, Iterator):
            raise SourceError(
                f"the function returns {type(results).__name__}, not an iterator of batches: yield each batch"
            )
        return results

    def _checked_results(self, batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
        for batch in self._results(batches):
            if not isinstance(batch, pa.RecordBatch):
                raise SourceError(f"the function yields {type(batch).__name__}, not pyarrow.RecordBatch")
            yielded, declared = batch.schema.types, self._output_schema
            if len(yielded) != len(declared):
                raise SourceError(f"the function yields {len(yielded)} columns, and its schema has {len(declared)}")
            for type_, field in zip(yielded, declared, strict=True):
                if not is_alike(type_, field.type) and not (
                    is_readable(type_) and is_alike(spark_type(type_), field.type)
                ):
                    raise SourceError(f"the function yields column {field.name!r} as {type_}, not as {field.type}")
            batch.validate()
            yield batch


class _Inputs:
    """The batches of a partition. The function may read them in a thread of its own, which may outlive it."""

    def __init__(self, batches: Generator[pa.RecordBatch, None, None]) -> None:
        self._batches = batches
        self._is_closed = False
        self._lock = threading.Lock()  # of the generator

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            with self._lock:
                return next(self._batches)
        finally:
            if self._is_closed:  # another thread called `close`, which may have left the work to this one
                self.close()

    def close(self) -> None:
        """Close the generator. If a thread waits for a batch for longer than `_GRACE`, that thread closes it."""
        self._is_closed = True
        if self._lock.acquire(timeout=_GRACE):
            try:
                self._batches.close()
            finally:
                self._lock.release()


class _Conversation(ProcessBound):
    """The connection to the task whose function runs in this worker: lines of JSON, in both directions.

    Several threads may receive, since a function may ask for its batches in a thread of its own.

    If the task ends while the function runs, nobody needs the function any more, and Spark itself ends only workers
    that write to it. So a worker whose function does not return within `_GRACE` kills itself.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._unparsed = b""  # received bytes after the last line
        self._received: dict[str, Any] = {}  # messages for which no thread has asked yet, by each of their keys
        self.has_ended = False  # whether the task has enough, or the function gives it no more
        self._unwritten: _Memfd | None = None  # stays open, because the task is about to open its path
        self._sending = threading.Lock()
        self._lock = threading.Lock()  # of receiving
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="dissociated-watcher", daemon=True)
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        self.has_ended = True  # the messages are for the parent
        self._unwritten = None
        self._sending, self._lock = threading.Lock(), threading.Lock()  # threads of the parent may hold them
        if (descriptor := self._socket.detach()) >= 0:
            os.close(descriptor)

    def _watch(self) -> None:
        """Kill this process if the function runs on for long after the task has closed the connection."""
        hang_up = select.poll()
        hang_up.register(self._socket, 0)  # both directions are closed
        hang_up.poll()
        if not self._closed.wait(_GRACE):
            os.kill(os.getpid(), signal.SIGKILL)

    def send(self, message: Mapping[str, Any]) -> None:
        with self._sending:
            if not self.is_inherited:
                self._send(message)

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            self.has_ended = True  # the task has ended: `receive` tells the caller

    def write(self, memfd: _Memfd) -> int:
        """Let the task write its next batch to `memfd`. Return the size of the batch, or 0 if there is none."""
        with self._sending:
            if self.has_ended:
                return 0
            self._unwritten = memfd
            self._send({"write": memfd.path})
        written = self.receive("size")
        return written["size"] if written is not None else 0

    def receive(self, kind: str) -> Any:
        """Return the next message with the key `kind`; None if the task has enough."""
        with self._lock:
            while kind not in self._received and not self.has_ended:
                self._receive()
            return self._received.pop(kind, None)

    def _receive(self) -> None:
        """Receive one message, or the end of the task. The caller holds the lock.

        A signal handler of the function may raise any error here, and no message is lost then.
        """
        while b"\n" not in self._unparsed:
            try:
                received = self._socket.recv(1 << 16)
            except ConnectionError:
                received = b""
            if not received:
                self.has_ended = True
                self._unwritten = None  # the task opens no path after it has closed the connection
                return
            self._unparsed += received
        line, _, self._unparsed = self._unparsed.partition(b"\n")
        message = json.loads(line)
        self._received.update(dict.fromkeys(message, message))
        if "size" in message:
            self._unwritten = None

    def end(self) -> None:
        """Request no more batches, and wait until the task has written the last one that was requested.

        There is no time limit: the task itself needs that batch to go on. If the task fails or is killed instead, it
        closes the connection.
        """
        with self._sending:
            self.has_ended = True
        with self._lock:
            while self._unwritten is not None:
                self._receive()

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_inherited:
            return
        self._closed.set()
        with suppress(OSError):  # the task has closed it
            self._socket.shutdown(socket.SHUT_RDWR)  # this wakes the watcher
        self._watcher.join()
        self._socket.close()


class _InputMemory(ProcessBound):
    """The memfds into which a task writes the batches of its function.

    A memfd is written again when no object in this process holds its batch any more. Mappings stay until the end of the
    partition, because the places of result batches refer to their addresses.
    """

    def __init__(self) -> None:
        self.space = AddressSpace()
        self._free: list[_Memfd] = []
        self._all: list[_Memfd] = []
        self._is_kept = False
        self.bind_to_process()

    def take(self) -> _Memfd:
        """Return a memfd whose batch nobody holds."""
        if self._free:
            return self._free.pop()
        if len(self._all) == _MAX_REUSED:
            return _Memfd()
        memfd = _ReusedMemfd(self.space, self._give_back)
        self._all.append(memfd)
        return memfd

    def _give_back(self, memfd: _ReusedMemfd) -> None:
        """Take a memfd back. This is called in any thread that drops a batch, and in forked children."""
        if self._is_kept or self.is_inherited:
            return
        if self._free:
            memfd.discard()
        self._free.append(memfd)

    def keep(self) -> None:
        """From now on, leave the contents of memfds as they are: the JVM may still read the last result batch."""
        self._is_kept = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep()
        # No memfd is closed here: another thread may use it. Each is closed when it is collected. A worker that waits
        # for its next partition collects no garbage, so no reference cycle may be left.
        self._all.clear()
        self._free.clear()


class _Memfd(JvmMemfd):
    """A memfd for one batch, whose memory is freed when the batch is collected."""

    def __init__(self) -> None:
        super().__init__("function", writable=True)

    def read(self, size: int) -> pa.Buffer:
        """Return the first `size` bytes, which the task has written."""
        memory = map_read_only(self.descriptor, size)
        self.close()
        return memory


class _ReusedMemfd(_Memfd):
    """A memfd that is written again when its batch was collected. It is a region of `space`."""

    def __init__(self, space: AddressSpace, give_back: Callable[[_ReusedMemfd], None]) -> None:
        super().__init__()
        self._space = space
        self._give_back = give_back
        self._memory = pa.py_buffer(b"")

    def read(self, size: int) -> pa.Buffer:
        if size > self._memory.size:
            whole = max(_MIN_MAPPED_SIZE, 1 << (size - 1).bit_length())
            os.ftruncate(self.descriptor, whole)
            self._memory = map_read_only(self.descriptor, whole)
            self._space.add(Region(reserve_base(whole), self._memory, file=SharedFile(os.dup(self.descriptor))))
        holder = _Holder(self._memory)
        weakref.finalize(holder, self._give_back, self).atexit = False
        return pa.foreign_buffer(self._memory.address, size, holder)

    def discard(self) -> None:
        """Free the memory. The mappings stay."""
        size = os.fstat(self.descriptor).st_size
        os.ftruncate(self.descriptor, 0)
        os.ftruncate(self.descriptor, size)


class _Holder:
    """The owner of the memory of one batch."""

    def __init__(self, memory: pa.Buffer) -> None:
        self.memory = memory

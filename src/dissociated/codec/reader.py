"""libarrow's reader of IPC streams with the errors of this library, and the files that it reads."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, ClassVar, Self, TypeVar

import pyarrow as pa

from dissociated.base.buffers import MAX_METADATA, Buffer
from dissociated.base.exit import hold_at_exit, section
from dissociated.codec.options import ReadOptions, check_options
from dissociated.errors import (
    DissociatedError,
    Failure,
    FormatError,
    OptionError,
    RemoteProtocolError,
    StoreError,
    TransportError,
)
from dissociated.format.encapsulated import CONTINUATION, FILE_MAGIC, encapsulate
from dissociated.format.message import MISREAD, is_before_v5, is_misread

T = TypeVar("T")

#: Text of libarrow's error for a file: it reads the magic as the length of the first message.
_FILE_MAGIC_ERROR = f"to read {int.from_bytes(FILE_MAGIC[:4], 'little')} metadata bytes"
_CONTENT_ERRORS = (pa.ArrowException, OSError, UnicodeError)  # libarrow's IOError arrives as an OSError


class Readable:
    """A readable file, with the methods that pyarrow's PythonFile calls."""

    closed = False

    def close(self) -> None:
        """Close the file."""
        self.closed = True

    def readable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return False."""
        return False

    def seekable(self) -> bool:
        """Return whether libarrow may move the position: False unless a subclass overrides it."""
        return False


@contextmanager
def arrow_errors(error_type: type[DissociatedError]) -> Iterator[None]:
    """Turn libarrow's errors about content, also for lack of memory, into errors of `error_type`."""
    try:
        yield
    except _CONTENT_ERRORS as error:
        raise _translated(error, error_type) from None


def _translated(error: Exception, error_type: type[DissociatedError]) -> Exception:
    if isinstance(error, (DissociatedError, pa.ArrowCancelled)):  # ours come from below, through libarrow
        return error
    # libarrow raises ArrowInvalid for all errors of content. Only the text tells these two cases apart: the source may
    # be a pipe, whose schema cannot be read beforehand and then once more.
    if str(error).startswith("Out of bounds field index"):  # an error of the caller, not of the content
        return OptionError(f"included_fields has a field that is not in the schema: {error}")
    if _FILE_MAGIC_ERROR in str(error):
        return error_type("this begins like an Arrow IPC file, which is no stream: read it as a file")
    peer = error_type is RemoteProtocolError
    if isinstance(error, MemoryError):  # compressed buffers state their size, perhaps falsely
        return (TransportError if peer else error_type)(
            f"there is no memory for what {'the peer sent' if peer else 'this holds'}: {error}"
        )
    return error_type(f"{'the peer sent what libarrow cannot read' if peer else 'libarrow cannot read this'}: {error}")


def read_schema(header: bytes, error_type: type[DissociatedError]) -> pa.Schema:
    """Return the schema of this flatbuffer. Raises an error of `error_type` if libarrow cannot read it."""
    with arrow_errors(error_type):
        return check_field_names(pa.ipc.read_schema(pa.py_buffer(encapsulate(header))))


def check_field_names(schema: pa.Schema) -> pa.Schema:
    """Return `schema`. Raises UnicodeDecodeError if the name of a column is not UTF-8."""
    assert schema.names is not None
    return schema


def close_idle(source: Generator[object, None, None]) -> None:
    """Close the source of a reader, unless another thread is reading from it.

    That thread then closes the source itself.
    """
    try:
        source.close()
    except ValueError as error:
        # Python refuses to close a running generator without entering its frame, so the traceback ends here. A check
        # before the call could be outdated.
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise


class _CheckedFile(Readable):
    """A file of a stream. Reading raises FormatError for a message that libarrow would misread.

    libarrow reads the length of the metadata, four bytes, then the metadata, and then the whole body.
    """

    def __init__(self, file: Any) -> None:
        self._read: Callable[[int], Buffer] = file.read_buffer if isinstance(file, pa.NativeFile) else file.read
        self._length = -1  # the value of the last four bytes, if they were read by themselves

    def read(self, size: int) -> Buffer:
        content = self._read(size)
        if size == self._length and is_misread(bytes(content)):
            raise FormatError(MISREAD)
        self._length = int.from_bytes(content, "little") if size == 4 else -1
        return content


def _checked_source(source: Any) -> Any:
    """Return a source that refuses messages which libarrow would misread, for any source that pyarrow accepts.

    Memory and files of libarrow are only wrapped if their stream begins with metadata older than V5. Calls into Python
    are slow, and a thread of libarrow that calls Python while the interpreter exits ends the process.
    """
    if isinstance(source, pa.NativeFile):
        if isinstance(source, pa.PythonFile) or not source.seekable():
            return _CheckedFile(source)
        start = source.tell()
        is_old = _begins_before_v5(lambda at, size: source.read_at(size, start + at))
        source.seek(start)
        return _CheckedFile(source) if is_old else source
    try:
        memory = pa.py_buffer(source)
    except TypeError:
        pass
    else:
        view = memoryview(memory).cast("B")
        is_old = _begins_before_v5(lambda at, size: view[at : at + size])
        return _CheckedFile(pa.BufferReader(memory)) if is_old else source
    if hasattr(source, "read"):
        return _CheckedFile(source)
    if not os.path.isfile(source):
        return source
    with pa.input_stream(source) as file:
        is_compressed = isinstance(file, pa.CompressedInputStream)
        is_old = is_compressed or _begins_before_v5(lambda at, size: file.read_at(size, at))
    return _CheckedFile(pa.input_stream(source)) if is_old else source


def _begins_before_v5(read_at: Callable[[int, int], Buffer]) -> bool:
    """Return whether the first message of a stream may have metadata older than V5.

    Args:
        read_at: Returns the bytes of the stream at a position, up to a size.
    """
    if bytes(read_at(0, 4)) != CONTINUATION:
        return True  # the format before Arrow 0.15
    length = int.from_bytes(read_at(4, 4), "little")
    if length > MAX_METADATA:
        return True
    try:
        return is_before_v5(read_at(8, length))
    except (struct.error, IndexError):
        return False  # libarrow reports the damage


class Reading:
    """The state of a reader: open, ended, failed, interrupted or closed. Only an open reader reads on.

    A single thread reads at a time. Any thread may close the reader meanwhile, and Ctrl-C may come between any two
    bytecodes.
    """

    def __init__(self) -> None:
        self.at_end = False
        self._failed: Failure | None = None
        self._closed = False
        self._taking = Lock()  # held while an item is taken; if it stays held, taking was interrupted

    def take(self, take: Callable[[], T]) -> T:
        """Return the result of `take`, which takes an item from the source.

        Raises:
            StopIteration: The source has ended.
            StoreError: The reader was closed before or during the call. An item that was taken after that may lie in
                memory with another owner already.
            BaseException: `take` failed. Every later call raises the same error.
        """
        if self._failed is not None or self._closed:
            self.check()
        if self.at_end:
            raise StopIteration
        if not self._taking.acquire(blocking=False):
            raise self._interrupted()
        try:
            item = take()
            if self._closed:
                self.check_open()
        except BaseException as error:
            self.stop_by(error)
            raise
        # Not `release()`: Ctrl-C takes effect after a call, and would lose the item of a reader that goes on.
        self._taking = Lock()
        return item

    def check(self) -> None:
        """Raise the error that prevents taking more items, if there is one. The end is not an error."""
        if self._failed is not None:
            raise self._failed.error()
        self.check_open()
        if self._taking.locked() and not self.at_end:
            raise self._interrupted()

    def _interrupted(self) -> StoreError:
        return StoreError(
            "this reader was interrupted during a read, or another thread reads from it now: read again from the "
            "beginning"
        )

    def check_open(self) -> None:
        """Raise StoreError if the reader was closed before its end."""
        if self._closed:
            raise StoreError("this reader was closed before its end") from None

    def stop_by(self, error: BaseException) -> None:
        """Record the end or the failure of the source. Raises StoreError if the reader was closed meanwhile."""
        if isinstance(error, Exception):
            self.check_open()
        if isinstance(error, StopIteration):
            self.at_end = True
        else:
            self._failed = Failure.of(error)

    def close(self) -> None:
        """Close the reader. Call this before closing the source, whose end must not look like the regular end."""
        self._closed = not self.at_end


class OneTimeReader:
    """A reader that remembers whether it was read to its end. Reading it again raises StoreError."""

    _at_end = False

    def _begin(self) -> None:
        """Raise StoreError if all batches were read already."""
        if self._at_end:
            raise StoreError(
                "this reader was read to its end, and can be read once: open a new one, or use a handle, "
                "client.dataset(name), which can be read again and again"
            )


class StreamReader(OneTimeReader, pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]  # pyarrow has no type hints
    """A reader of an IPC stream, from any source that pyarrow accepts. `stats` counts the messages read.

    Raises:
        FormatError: The content is invalid, or nests deeper than `options` allow.
        StoreError: The stream was read to its end before.
    """

    error_type: ClassVar[type[DissociatedError]] = FormatError
    _failed: Failure | None = None

    @section
    def __init__(self, source: Any, options: ReadOptions | None = None) -> None:
        hold_at_exit()
        options = check_options(options, ReadOptions)
        with arrow_errors(self.error_type):
            source = self._checked(source)
            super().__init__(source, options=options.to_pyarrow(), memory_pool=options.memory_pool)
        options.check_depth(self.schema)

    def _checked(self, source: Any) -> Any:
        """Return a source of the same stream that refuses messages which libarrow would misread."""
        return source if isinstance(source, Readable) else _checked_source(source)

    def __iter__(self) -> Self:
        self._begin()
        return self

    @section
    def read_next_batch(self) -> pa.RecordBatch:
        """Return the next batch. Raises StopIteration at the end."""
        return self._read(super().read_next_batch)

    @section
    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        """Return the next batch and the metadata of its message. Raises StopIteration at the end."""
        read = super().read_next_batch_with_custom_metadata
        both: tuple[pa.RecordBatch, pa.KeyValueMetadata | None] = self._read(read)
        return both

    def _read(self, read: Callable[[], T]) -> T:
        hold_at_exit()
        self._check_failed()
        try:
            return read()
        except StopIteration:
            self._at_end = True
            raise
        except _CONTENT_ERRORS as error:
            raise self._fail(error) from None

    def _begin(self) -> None:
        self._check_failed()
        super()._begin()

    def _check_failed(self) -> None:
        """Raise the error of an earlier read again: libarrow would continue after the batch that it could not read."""
        if self._failed is not None:
            raise self._failed.error()

    def _fail(self, error: Exception) -> Exception:
        translated = _translated(error, self.error_type)
        self._failed = Failure.of(translated)
        return translated

    @section
    def read_all(self) -> pa.Table:
        """Return all remaining batches as one table."""
        hold_at_exit()
        self._begin()
        try:
            table: pa.Table = super().read_all()
            self._at_end = True
            return table
        except _CONTENT_ERRORS as error:
            raise self._fail(error) from None

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        self._begin()
        self._at_end = True  # the consumer of the stream reads all batches
        return super().__arrow_c_stream__(requested_schema)


class PeerReader(StreamReader):
    """A StreamReader of data that a peer sent.

    Raises:
        RemoteProtocolError: The content is invalid.
        TransportError: There is not enough memory for the content.
    """

    error_type = RemoteProtocolError

    def _checked(self, source: Any) -> Any:
        return source  # the receiver has checked the messages

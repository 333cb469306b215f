"""libarrow's reader of IPC streams, whose complaints about content come out as ours, and the files it reads from."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self, TypeVar

import pyarrow as pa

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
from dissociated.format.encapsulated import FILE_MAGIC, encapsulate

T = TypeVar("T")

#: libarrow takes the magic of a file for the length of the first message.
_FILE_MAGIC_ERROR = f"to read {int.from_bytes(FILE_MAGIC[:4], 'little')} metadata bytes"
_CONTENT_ERRORS = (pa.ArrowException, OSError, UnicodeError)  # libarrow's IOError arrives as an OSError


class Readable:
    """A file to be read, as pyarrow's PythonFile expects it."""

    closed = False

    def close(self) -> None:
        """Be read no more."""
        self.closed = True

    def readable(self) -> bool:
        """Always."""
        return True

    def writable(self) -> bool:
        """Never."""
        return False

    def seekable(self) -> bool:
        """Whether libarrow may move the position: not unless a subclass says so."""
        return False


@contextmanager
def arrow_errors(error_type: type[DissociatedError]) -> Iterator[None]:
    """Turn what libarrow raises about content into `error_type`, also where there is not enough memory for it."""
    try:
        yield
    except _CONTENT_ERRORS as error:
        raise _translated(error, error_type) from None


def _translated(error: Exception, error_type: type[DissociatedError]) -> Exception:
    if isinstance(error, (DissociatedError, pa.ArrowCancelled)):  # ours come from below, through libarrow
        return error
    # libarrow raises ArrowInvalid for both of these, as for everything else about content: only its text tells more.
    if str(error).startswith("Out of bounds field index"):  # the caller's mistake, not the content's
        return OptionError(f"included_fields has a field that the schema has not: {error}")
    if _FILE_MAGIC_ERROR in str(error):
        return error_type("this begins like an Arrow IPC file, which is no stream: read it as a file")
    peer = error_type is RemoteProtocolError
    if isinstance(error, MemoryError):  # compressed buffers say themselves how long they will be: that may be a lie
        return (TransportError if peer else error_type)(
            f"there is no memory for what {'the peer sent' if peer else 'this holds'}: {error}"
        )
    return error_type(f"{'the peer sent what libarrow cannot read' if peer else 'libarrow cannot read this'}: {error}")


def read_schema(header: bytes, error_type: type[DissociatedError]) -> pa.Schema:
    """The schema of this flatbuffer. Raises an error of `error_type` where libarrow cannot read it."""
    with arrow_errors(error_type):
        return check_field_names(pa.ipc.read_schema(pa.py_buffer(encapsulate(header))))


def check_field_names(schema: pa.Schema) -> pa.Schema:
    """The schema itself. Raises UnicodeDecodeError where the name of a column is no UTF-8, before it is asked for."""
    assert schema.names is not None
    return schema


def close_idle(source: Generator[object, None, None]) -> None:
    """Close what a reader reads from, unless another thread takes something from it now: that one will close it."""
    try:
        source.close()
    except ValueError as error:
        if str(error) != "generator already executing":  # to ask before would be too early
            raise


class Reading:
    """Whether a reader goes on. It does not after its end, nor after it has failed, was interrupted, or was closed.

    One thread reads at a time. Any thread may close it meanwhile, and Ctrl-C may come between any two bytecodes.
    """

    def __init__(self) -> None:
        self.ended = False
        self._failed: Failure | None = None
        self._closed = False
        self._taking = False  # where it stays true, taking was interrupted

    def take(self, take: Callable[[], T]) -> T:
        """What `take` takes from the source, which raises StopIteration at the end.

        Raises what that raises, and the same again from then on; and StoreError if the reader is closed, also
        meanwhile: what was taken after that may lie in memory that is others' already.
        """
        self.check()
        self._taking = True
        try:
            taken = take()
            self.check_open()
        except BaseException as error:
            self.stop_by(error)
            raise
        self._taking = False
        return taken

    def check(self) -> None:
        """Raise why nothing can be taken any more. The end is no reason."""
        if self._failed is not None:
            raise self._failed.error()
        self.check_open()
        if self._taking and not self.ended:
            raise StoreError(
                "this reader was interrupted while it read, or another thread reads from it now: read again from the "
                "beginning"
            )

    def check_open(self) -> None:
        """Raise StoreError where the reader was closed before its end."""
        if self._closed:
            raise StoreError("this reader was closed before its end") from None

    def stop_by(self, error: BaseException) -> None:
        """Remember by what the source has ended, or has failed. Raises StoreError if it was closed meanwhile."""
        if isinstance(error, Exception):
            self.check_open()
        if isinstance(error, StopIteration):
            self.ended = True
        else:
            self._failed = Failure.of(error)

    def close(self) -> None:
        """To be called before the source is closed: what that raises, or ends, must not look like the end."""
        self._closed = not self.ended


class ReadOnce:
    """Remembers whether a reader was read to its end. Reading it again would give nothing, and raises StoreError."""

    _ended = False

    def _begin(self) -> None:
        """Raise StoreError where all has been read already."""
        if self._ended:
            raise StoreError(
                "this reader was read to its end, and can be read once: read it again, or take a handle, "
                "client.dataset(name), which can be read again and again"
            )


class StreamReader(ReadOnce, pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]  # pyarrow has no type hints
    """Reads an IPC stream from whatever pyarrow reads from. `stats` says how much so far.

    Raises FormatError where the content is invalid, or nests deeper than `options` allow, and StoreError where it was
    read to its end before.
    """

    error_type: ClassVar[type[DissociatedError]] = FormatError

    @section
    def __init__(self, source: Any, options: ReadOptions | None = None) -> None:
        hold_at_exit()
        options = check_options(options, ReadOptions)
        with arrow_errors(self.error_type):
            super().__init__(source, options=options.to_pyarrow(), memory_pool=options.memory_pool)
        options.check_depth(self.schema)

    def __iter__(self) -> Self:
        self._begin()
        return self

    @section
    def read_next_batch(self) -> pa.RecordBatch:
        """The next batch. Raises StopIteration at the end."""
        hold_at_exit()
        try:
            return super().read_next_batch()
        except StopIteration:
            self._ended = True
            raise
        except _CONTENT_ERRORS as error:
            raise _translated(error, self.error_type) from None

    @section
    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        """The next batch, and the metadata that its message carries. Raises StopIteration at the end."""
        hold_at_exit()
        try:
            both: tuple[pa.RecordBatch, pa.KeyValueMetadata | None] = super().read_next_batch_with_custom_metadata()
            return both
        except StopIteration:
            self._ended = True
            raise
        except _CONTENT_ERRORS as error:
            raise _translated(error, self.error_type) from None

    @section
    def read_all(self) -> pa.Table:
        """All batches that are left, as one table."""
        hold_at_exit()
        self._begin()
        try:
            table: pa.Table = super().read_all()
            self._ended = True
            return table
        except _CONTENT_ERRORS as error:
            raise _translated(error, self.error_type) from None

    def __arrow_c_stream__(self, requested_schema: object = None) -> Any:
        self._begin()
        self._ended = True  # whoever takes it reads all
        return super().__arrow_c_stream__(requested_schema)


class PeerReader(StreamReader):
    """A StreamReader over what a peer sent.

    Raises RemoteProtocolError where the content is invalid, TransportError where there is no memory for it.
    """

    error_type = RemoteProtocolError

"""The input of `put` and `serve`: files and the standard input, in the formats that `get` writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from dissociated.cli import streams
from dissociated.codec.batches import BatchReader
from dissociated.codec.filter.statistics import MAX_STATISTICS
from dissociated.codec.reader import StreamReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.datasets.base import Dataset
from dissociated.datasets.file import PARQUET, check_rest, foreign_kind
from dissociated.datasets.sources import make_dataset
from dissociated.datasets.text import TEXT_FORMATS, open_text, text_file
from dissociated.errors import FormatError, OptionError, SourceError, StoreError

_STDIN = Path("-")


def open_input(path: Path, written: str | None, owned: ExitStack) -> Dataset:
    """Open a file, or the standard input, as a dataset.

    Args:
        path: The file or directory, or "-" for the standard input.
        written: The format of a text; by default the ending of the file decides.
        owned: The stack that closes the input. The dataset is valid until then.

    Raises:
        SourceError: The input cannot be read.
        OptionError: The standard input is a terminal.
    """
    if path == _STDIN:
        return _open_stdin(written, owned)
    if (written is not None or path.suffix in TEXT_FORMATS) and path.is_file():
        return text_file(path.name, path, format=written)
    check_arrow(path, "give --format csv or jsonl for text")
    return make_dataset(path.name, path)


def check_arrow(path: Path, advice: str, parquet: bool = True) -> None:
    """Raise SourceError with the kind of a file if it is not Arrow IPC, nor Parquet if `parquet` is set."""
    kind = foreign_kind(path)
    if kind is not None and not (parquet and kind == PARQUET):
        raise SourceError(f"{str(path)!r} is {kind}, not Arrow IPC{' or Parquet' if parquet else ''}: {advice}")


def _open_stdin(written: str | None, owned: ExitStack) -> Dataset:
    if not streams.has_input():
        raise OptionError('"-" is the standard input, which is closed or this terminal: pipe data into the command')
    stdin = owned.enter_context(streams.open_stdin())
    if written == "csv":
        return make_dataset("-", open_text("the standard input", stdin, written))
    if written is not None or stdin.peek()[:4] in (b"ARRO", b"PAR1"):  # these formats are read twice, or from the end
        memory = owned.enter_context(os.fdopen(os.memfd_create("stdin"), "wb"))
        shutil.copyfileobj(stdin, memory)
        memory.flush()
        path = f"/proc/self/fd/{memory.fileno()}"
        if written is not None:
            return make_dataset("-", open_text("the standard input", path, written))
        try:
            return make_dataset("-", Path(path))
        except (SourceError, StoreError) as error:
            raise SourceError(f"the standard input cannot be published: {error}") from None
    if not stdin.peek():
        raise SourceError("the standard input is empty")
    try:
        file = _StreamFile(stdin)
        reader = StreamReader(file)
    except FormatError:
        raise SourceError(
            "the standard input is not Arrow IPC or Parquet: give --format csv or jsonl for text"
        ) from None
    return make_dataset("-", BatchReader(reader.schema, file.checked(reader)))


class _StreamFile:
    """A file from which libarrow reads an IPC stream, to check that the stream ends with an end-of-stream marker.

    By the specification, and for libarrow, a stream may also end without a marker. Then it cannot be told from a stream
    whose writer died. libarrow also ignores data after the marker, such as a second stream.
    """

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._lacks_marker = False  # whether the file ended without a marker: libarrow reads no further than the marker

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._lacks_marker = self._lacks_marker or len(content) < size
        return content

    def checked(self, reader: pa.RecordBatchReader) -> Iterator[BatchAndMetadata]:
        """Pass the batches on. After the last, raise SourceError if there is no marker, or other data follows it."""
        yield from batches(reader)
        if self._lacks_marker:
            raise SourceError(
                "the Arrow IPC stream on the standard input has no end-of-stream marker, so it may be incomplete: "
                "run its writer again"
            )
        trailing_bytes = bytearray()
        while len(trailing_bytes) <= MAX_STATISTICS and (more := self._file.read(1 << 20)):
            trailing_bytes += more
        check_rest("the standard input", trailing_bytes)

    def close(self) -> None: ...

"""The output formats of rows: Arrow, Parquet, CSV, JSON lines, and a table for people."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.cli.rows import has_inexact_times, plain_rows
from dissociated.errors import OptionError

#: Opens a writer of batches of a schema. Its last argument is `FileFormat.choose`. If the `with` block raises, the file
#: is made invalid, so that no program takes it for a complete one. Text formats cannot be made invalid.
_Open: TypeAlias = Callable[[Any, pa.Schema, str], AbstractContextManager[Any]]

#: The bytes that make an incomplete IPC stream invalid, since a stream without an end marker is valid. They are no
#: message. They are longer than the possibly missing rest of the last message, and their number is odd, unlike the
#: length of any part of a stream.
_INVALID_MESSAGE = b"\xff" * 4099
#: The bytes that make an incomplete file invalid, since readers of files begin at the end.
_INVALID_FOOTER = b"broken off"


class FileFormat(NamedTuple):
    """An output format: a function that opens a writer, the endings of files, and whether it is Arrow IPC or text.

    Outputs of a format that `holds_several` can follow each other. Messages say that users choose columns by `choose`.
    """

    open: _Open
    endings: tuple[str, ...] = ()
    is_ipc: bool = False
    is_text: bool = False
    holds_several: bool = False
    choose: str = "--columns A,B"


@contextmanager
def _arrow_stream(sink: Any, schema: pa.Schema, choose: str) -> Iterator[Any]:
    writer = pa.ipc.new_stream(sink, schema)
    try:
        yield writer
        writer.close()
        sink.flush()  # If a later flush failed between two messages, the stream would look complete.
    except BaseException:
        _invalidate(sink, _INVALID_MESSAGE)
        raise


def _arrow_file(sink: Any, schema: pa.Schema, choose: str) -> AbstractContextManager[Any]:
    return _with_footer(sink, _ArrowFile(sink, schema))


def _parquet(sink: Any, schema: pa.Schema, choose: str) -> AbstractContextManager[Any]:
    import pyarrow.parquet

    return _with_footer(sink, pyarrow.parquet.ParquetWriter(sink, schema))


@contextmanager
def _with_footer(sink: Any, writer: Any) -> Iterator[Any]:
    try:
        yield writer
    except BaseException:
        # An open Parquet writer would add its footer when it is collected.
        _invalidate(sink, _INVALID_FOOTER, writer.close)
        raise
    writer.close()


def _invalidate(sink: Any, invalid_end: bytes, before: Callable[[], object] = lambda: None) -> None:
    for _ in range(2):  # A signal can interrupt this once, unless a signal was the reason for it: see EndingSignals.
        with suppress(KeyboardInterrupt, SystemExit):
            with suppress(pa.ArrowException, OSError, ValueError):
                before()
            with suppress(pa.ArrowException, OSError, ValueError):  # the reader may have closed the pipe
                sink.write(invalid_end)
                sink.flush()
            return


def _csv(sink: Any, schema: pa.Schema, choose: str) -> AbstractContextManager[Any]:
    import pyarrow.csv

    try:
        writer = pyarrow.csv.CSVWriter(sink, schema)
    except pa.ArrowInvalid:
        refused = ", ".join(f"column {field.name!r} of the type {field.type}" for field in schema if not _is_csv(field))
        raise OptionError(f"CSV cannot hold {refused}: choose {choose}, or --format jsonl") from None
    return closing(_Csv(writer, choose))


def _is_csv(field: pa.Field) -> bool:
    """Return whether CSV can hold values of a column."""
    import pyarrow.csv

    try:
        pyarrow.csv.CSVWriter(pa.BufferOutputStream(), pa.schema([field])).close()
    except pa.ArrowInvalid:
        return False
    return True


def _json_lines(sink: Any, schema: pa.Schema, choose: str) -> AbstractContextManager[Any]:
    return closing(_JsonLines(sink, schema, choose))


def _table(sink: Any, schema: pa.Schema, choose: str) -> AbstractContextManager[Any]:
    from dissociated.cli.rows import RowPrinter

    return closing(RowPrinter(schema, choose))


FILE_FORMATS = {
    "arrow": FileFormat(_arrow_file, (".arrow", ".feather"), is_ipc=True),
    "arrows": FileFormat(_arrow_stream, (".arrows",), is_ipc=True),
    "parquet": FileFormat(_parquet, (".parquet",)),
    "csv": FileFormat(_csv, (".csv",), is_text=True),
    "jsonl": FileFormat(_json_lines, (".jsonl", ".ndjson"), is_text=True, holds_several=True),
    "table": FileFormat(_table, is_text=True, holds_several=True),
}


def of_file(path: Path) -> FileFormat:
    """Return the format of a file by its ending. Raises OptionError if the ending is unknown."""
    for file_format in FILE_FORMATS.values():
        if path.suffix in file_format.endings:
            return file_format
    endings = ", ".join(ending for file_format in FILE_FORMATS.values() for ending in file_format.endings)
    raise OptionError(f"{str(path)!r} has none of the endings {endings}: rename the file, or give --format")


class _ArrowFile:
    """A writer of an Arrow IPC file, in which a column has the same dictionary in all batches."""

    def __init__(self, sink: Any, schema: pa.Schema) -> None:
        self._writer = pa.ipc.new_file(sink, schema)
        self.close = self._writer.close

    def write_batch(self, batch: pa.RecordBatch, custom_metadata: Any = None) -> None:
        try:
            self._writer.write_batch(batch, custom_metadata=custom_metadata)
        except pa.ArrowInvalid as error:
            raise OptionError(
                f"an Arrow IPC file cannot hold these batches: give --format arrows, for a stream, or parquet ({error})"
            ) from None


class _Csv:
    """A writer of CSV. Raises OptionError if the text of a time is not this time."""

    def __init__(self, writer: Any, choose: str) -> None:
        self._writer = writer
        self._choose = choose
        self.close = writer.close

    def write_batch(self, batch: pa.RecordBatch) -> None:
        _check_times(batch, self._choose)
        self._writer.write_batch(batch)


def _check_times(batch: pa.RecordBatch, choose: str) -> None:
    """Raise OptionError if the text of a time is not this time."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if has_inexact_times(column):
            raise OptionError(
                f"column {name!r} has times that text cannot hold, beyond the calendar, or in a zone whose offset from "
                f"UTC had seconds: choose {choose}, or --format parquet"
            )


class _JsonLines:
    """A writer of one JSON object for each row.

    Raises OptionError if two columns have the same name, or if the text of a time is not this time.
    """

    def __init__(self, sink: Any, schema: pa.Schema, choose: str) -> None:
        if len({*schema.names}) < len(schema.names):
            raise OptionError(f"two columns have the same name, which a JSON object cannot have: choose {choose}")
        self._sink = sink
        self._choose = choose

    def write_batch(self, batch: pa.RecordBatch) -> None:
        _check_times(batch, self._choose)
        for row in plain_rows(batch):
            self._sink.write(json.dumps(row, ensure_ascii=False, default=_encode).encode() + b"\n")

    def close(self) -> None: ...


def _encode(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"JSON cannot hold a {type(value).__name__}")

"""The formats in which rows are written: Arrow, Parquet, CSV, JSON lines, and a table for people."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from dissociated.cli.rows import plain_rows
from dissociated.errors import OptionError

#: Opens a file for batches of a schema. Where the `with` is left by an exception, no program takes it for all there is.
_Open: TypeAlias = Callable[[Any, pa.Schema], AbstractContextManager[Any]]

#: What follows an IPC stream that breaks off, since one that simply ends is whole, too. It is no message, and longer
#: than what may be missing of the last one where that broke off in its last buffer; odd, as nothing in a stream is.
_NO_MESSAGE = b"\xff" * 4099
#: What follows a file that breaks off: whoever reads one begins at its end.
_NO_FOOTER = b"broken off"


class FileFormat(NamedTuple):
    """How to write it; what its files end in; and whether it is Arrow IPC, or text."""

    open: _Open
    endings: tuple[str, ...] = ()
    is_ipc: bool = False
    is_text: bool = False


@contextmanager
def _arrow_stream(sink: Any, schema: pa.Schema) -> Iterator[Any]:
    writer = pa.ipc.new_stream(sink, schema)
    try:
        yield writer
        writer.close()
        sink.flush()  # what stays in its buffer could be cut off between two messages, and nobody would tell
    except BaseException:
        _spoil(sink, _NO_MESSAGE)
        raise


def _arrow_file(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    return _with_footer(sink, pa.ipc.new_file(sink, schema))


def _parquet(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    import pyarrow.parquet

    return _with_footer(sink, pyarrow.parquet.ParquetWriter(sink, schema))


@contextmanager
def _with_footer(sink: Any, writer: Any) -> Iterator[Any]:
    try:
        yield writer
    except BaseException:
        _spoil(sink, _NO_FOOTER, writer.close)  # that of Parquet would write its footer when it is collected
        raise
    writer.close()


def _spoil(sink: Any, spoiler: bytes, before: Callable[[], object] = lambda: None) -> None:
    for _ in range(2):  # a signal may end this once, if none was the reason for it: see EndingSignals
        with suppress(KeyboardInterrupt, SystemExit):
            with suppress(pa.ArrowException, OSError, ValueError):
                before()
            with suppress(pa.ArrowException, OSError, ValueError):  # nobody may be reading any more
                sink.write(spoiler)
                sink.flush()
            return


def _csv(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    import pyarrow.csv

    try:
        writer: AbstractContextManager[Any] = pyarrow.csv.CSVWriter(sink, schema)
    except pa.ArrowInvalid as error:
        refused = ", ".join(f"{field.name!r}, {field.type}" for field in schema if str(field.type) in str(error))
        raise OptionError(f"CSV cannot hold column {refused}: choose --columns, or --format jsonl") from None
    return writer


def _json_lines(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    return closing(_JsonLines(sink, schema))


def _table(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    from dissociated.cli.rows import RowPrinter

    return closing(RowPrinter(schema))


FILE_FORMATS = {
    "arrow": FileFormat(_arrow_file, (".arrow", ".feather"), is_ipc=True),
    "arrows": FileFormat(_arrow_stream, (".arrows",), is_ipc=True),
    "parquet": FileFormat(_parquet, (".parquet",)),
    "csv": FileFormat(_csv, (".csv",), is_text=True),
    "jsonl": FileFormat(_json_lines, (".jsonl", ".ndjson"), is_text=True),
    "table": FileFormat(_table, is_text=True),
}


def of_file(path: Path) -> FileFormat:
    """The format that the ending of a file says. Raises OptionError where it says none."""
    for one in FILE_FORMATS.values():
        if path.suffix in one.endings:
            return one
    endings = ", ".join(ending for one in FILE_FORMATS.values() for ending in one.endings)
    raise OptionError(f"{path} has none of the endings {endings}: give it one, or say --format")


class _JsonLines:
    """Writes an object a line. Raises OptionError where two columns have one name, which an object cannot have."""

    def __init__(self, sink: Any, schema: pa.Schema) -> None:
        if len({*schema.names}) < len(schema.names):
            raise OptionError("two columns have one name, and an object of JSON has no name twice: choose --columns")
        self._sink = sink

    def write_batch(self, batch: pa.RecordBatch) -> None:
        for row in plain_rows(batch):
            self._sink.write(json.dumps(row, ensure_ascii=False, default=_encode).encode() + b"\n")

    def close(self) -> None: ...


def _encode(value: object) -> object:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"JSON has no {type(value).__name__}")

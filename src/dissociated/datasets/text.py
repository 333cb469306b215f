"""CSV and JSON lines: text whose types are inferred, and which is read anew for each client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.datasets.base import Dataset
from dissociated.datasets.file import FileState, file_state
from dissociated.datasets.source_errors import source_errors
from dissociated.datasets.streamed import LiveDataset
from dissociated.errors import SourceError

#: The format of a text by the ending of its file, since the content does not show it.
TEXT_FORMATS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_BLOCK_SIZE = 16 << 20  # bytes of text; the types of the columns are inferred from the first block


def text_file(name: str, path: Path, options: WriteOptions | None = None, format: str | None = None) -> Dataset:
    """Make a dataset of a file of CSV or JSON lines; the ending of the file decides if no `format` is given.

    Raises:
        SourceError: if the file cannot be read, also later, if it was modified after this call.
    """
    format = format or TEXT_FORMATS[path.suffix]
    with source_errors(name):
        state = file_state(path.stat())
        if not path.stat().st_size:
            raise SourceError(f"cannot publish {str(path)!r}: the file is empty")
        return LiveDataset(name, lambda: _open_unchanged(name, path, format, state), options)


def _open_unchanged(name: str, path: Path, format: str, state: FileState) -> pa.RecordBatchReader:
    """Open a reader that fails if the file was modified before or during the reading."""

    def check() -> None:
        if file_state(path.stat()) != state:
            raise SourceError.for_peer(f"{str(path)!r} was modified after it was published: publish the file anew")

    check()
    reader = open_text(name, str(path), format)

    def checked() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            check()
            yield batch
        check()

    return pa.RecordBatchReader.from_batches(reader.schema, checked())


def open_text(name: str, source: Any, format: str) -> pa.RecordBatchReader:
    """Open a reader over CSV or JSON lines.

    Args:
        name: the name of the dataset, for errors.
        source: the path of a file, or an open CSV file. JSON lines are opened twice.
        format: `csv` or `jsonl`.

    Raises:
        SourceError: if the text cannot be read.
    """
    with source_errors(name):
        if format == "csv":
            import pyarrow.csv

            return pyarrow.csv.open_csv(source, pyarrow.csv.ReadOptions(block_size=_BLOCK_SIZE))
        import pyarrow.json

        options = pyarrow.json.ReadOptions(block_size=_BLOCK_SIZE)
        schema = _without_times(pa.struct(pyarrow.json.open_json(source, options).schema))
        parsing = pyarrow.json.ParseOptions(explicit_schema=pa.schema(schema.fields))
        reader = pyarrow.json.open_json(source, options, parsing)
        return pa.RecordBatchReader.from_batches(reader.schema, _checked(reader))


def _checked(reader: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Validate each batch and pass it on. Raise ArrowInvalid for text that is not UTF-8, which libarrow accepts."""
    for batch in reader:
        batch.validate(full=True)
        yield batch


def _without_times(guessed: pa.DataType) -> pa.DataType:
    """Replace inferred timestamps in a type by strings: for text that looks like a time, libarrow drops the zone."""
    if pa.types.is_timestamp(guessed):
        return pa.string()
    if pa.types.is_list(guessed):
        return pa.list_(_without_times(guessed.value_type))
    if pa.types.is_struct(guessed):
        return pa.struct([field.with_type(_without_times(field.type)) for field in guessed.fields])
    return guessed

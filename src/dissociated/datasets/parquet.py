"""Parquet files, which are read anew for each client.

A file may be replaced or rewritten in place, even while it is read. A reading gives rows of a single state of the
file, with the schema and the number of rows that it was published with. Otherwise the reading fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dissociated.codec.columns import even_batches, select_columns, select_fields
from dissociated.codec.options import WriteOptions
from dissociated.codec.schemas import schema_difference
from dissociated.datasets.base import Dataset
from dissociated.datasets.file import PARQUET_MAGIC, FileState, file_state
from dissociated.datasets.source_errors import source_errors
from dissociated.datasets.streamed import SourceDataset
from dissociated.errors import SourceError

#: Limits of a batch: its rows, and roughly the bytes of its largest column.
_ROWS, _BYTES = 1 << 16, 1 << 30
_CHUNK_HEADERS = 1 << 9  # bytes of a column chunk that may be headers instead of values
_BUFFER_SIZE = 1 << 20  # bytes of a column that are read in one call
_DIRECTORY = "a directory must have Parquet files only: give such a directory, or the files by name"


def is_parquet(path: Path) -> bool:
    """Return whether the file begins with Parquet's magic bytes. Raise SourceError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(PARQUET_MAGIC)) == PARQUET_MAGIC
    except OSError as error:
        raise SourceError(f"cannot read {str(path)!r}: {error.strerror}") from error


def parquet_file(name: str, path: Path, options: WriteOptions | None) -> Dataset:
    """Make a dataset of one Parquet file. Raise SourceError if it cannot be read."""
    try:
        reading = _Reading(path)
        rows = reading.rows
        return SourceDataset(
            name,
            lambda: _Reading(path, rows).reader(),
            options,
            open_columns=lambda indices: _Reading(path, rows).reader(indices),
            rows=rows,
            min_size=reading.min_size,
        )
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"cannot read {str(path)!r}: {error}") from error


class _Reading:
    """A single reading of a Parquet file.

    Raises SourceError if the file does not have the published number of `rows`, and pyarrow's errors if it is invalid.
    """

    def __init__(self, path: Path, rows: int | None = None) -> None:
        import pyarrow.parquet

        self._path = path
        self._source = pa.OSFile(str(path))  # not mapped, since truncating a mapped file would crash this process
        self._opened = self._state()
        self._file = pyarrow.parquet.ParquetFile(self._source, buffer_size=_BUFFER_SIZE)
        self.rows: int = self._file.metadata.num_rows
        self.min_size = _min_size(self._file.schema_arrow, self._file.metadata)
        _check_rows(path, self.rows, rows)

    def reader(self, indices: Sequence[int] | None = None) -> pa.RecordBatchReader:
        """Open a reader of the columns at these positions, or of all columns. Skip positions that do not exist."""
        schema = self._file.schema_arrow
        columns = None
        if indices is not None:
            names = schema.names
            # The file may have been replaced by one with fewer columns. The caller compares the schemas.
            indices = [index for index in indices if index < len(names)]
            if len(set(names)) < len(names) or any("." in name for name in names):
                # pyarrow selects Parquet columns by name or dotted path, which is ambiguous for these names.
                return select_columns(self.reader(), indices)
            schema = select_fields(schema, indices)
            columns = schema.names
        unchanged = _unchanged(self._batches(columns), lambda: self._state() == self._opened, self._path)
        return pa.RecordBatchReader.from_batches(schema, unchanged)

    def _batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        size = _batch_rows(self._file.metadata)
        for number in range(self._file.num_row_groups):
            yield from even_batches(self._file.iter_batches(size, [number], columns), size)

    def _state(self) -> FileState:
        return file_state(os.fstat(self._source.fileno()))


def parquet_directory(name: str, path: Path, options: WriteOptions | None) -> Dataset:
    """Make a dataset of all Parquet files in a directory, in the order of their names.

    Subdirectories called NAME=VALUE add a column NAME each (Hive partitioning).

    Raises:
        SourceError: There are no Parquet files, there are other files, or the schemas of the files differ.
    """
    import pyarrow.dataset

    files = [*_parquet_files(path)]
    if not files:
        raise SourceError(f"cannot publish {str(path)!r}: it has no files, and {_DIRECTORY}")

    def states() -> list[FileState]:
        return [file_state(file.stat()) for file in files]

    def open_files(schema: pa.Schema | None = None) -> Any:
        return pyarrow.dataset.dataset(
            [str(file) for file in files], schema, "parquet", partitioning="hive", partition_base_dir=str(path)
        )

    def inspect() -> tuple[pa.Schema, int, int]:
        inspected = open_files()
        fragments = [*inspected.get_fragments()]
        common = fragments[0].physical_schema
        # pyarrow itself would silently drop columns that only some files have.
        for file, fragment in zip(files, fragments, strict=True):
            if not fragment.physical_schema.equals(common):
                difference = schema_difference(common, fragment.physical_schema)
                raise SourceError.for_peer(
                    f"{str(file)!r} and {str(files[0])!r} have different schemas: {difference}",
                    f"the files have different schemas: {difference}",
                )
        rows = sum(fragment.metadata.num_rows for fragment in fragments)
        return inspected.schema, rows, sum(_min_size(common, fragment.metadata) for fragment in fragments)

    def open_reader() -> pa.RecordBatchReader:
        with source_errors(name):
            opened = states()
            schema, found_rows, _ = inspect()
            _check_rows(path, found_rows, rows)
            # The files are opened anew. The dataset that was inspected caches the position of columns in each file, and
            # would read at these positions even after a file was replaced.
            reader = open_files(schema).scanner().to_reader()
            unchanged = _unchanged(reader, lambda: states() == opened, path)
            return pa.RecordBatchReader.from_batches(reader.schema, unchanged)

    with source_errors(name):
        _, rows, min_size = inspect()
    return SourceDataset(name, open_reader, options, rows=rows, min_size=min_size)


def _parquet_files(directory: Path) -> Iterator[Path]:
    """Yield the Parquet files in `directory` and in its subdirectories NAME=VALUE.

    Raises:
        SourceError: Another file or subdirectory is found.
    """
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith((".", "_")):  # not data, by a convention of Spark and pyarrow
            continue
        if entry.is_dir() and "=" in entry.name:
            yield from _parquet_files(entry)
        elif entry.is_file() and is_parquet(entry):
            yield entry
        else:
            raise SourceError(f"cannot publish {str(directory)!r}: {_DIRECTORY} ({entry.name!r} is not a Parquet file)")


def _check_rows(path: Path, found_rows: int, published_rows: int | None) -> None:
    """Raise SourceError if the number of rows has changed since publication, since clients rely on that number."""
    if published_rows is not None and found_rows != published_rows:
        changed = f"has {found_rows:,} rows, and had {published_rows:,} at publication: publish the file anew"
        raise SourceError.for_peer(f"{str(path)!r} {changed}", f"the file {changed}")


def _unchanged(
    batches: Iterator[pa.RecordBatch], is_unchanged: Callable[[], bool], path: Path
) -> Iterator[pa.RecordBatch]:
    """Yield `batches`, each only after the file is found unchanged.

    Raises:
        SourceError: The file was modified or deleted since it was opened.
    """
    while True:
        failed: Exception | None = None
        batch = None
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            failed = error
        if not _is_true(is_unchanged):
            changed = "was modified during a read: read the dataset again"
            raise SourceError.for_peer(f"{str(path)!r} {changed}", f"the file {changed}") from failed
        if failed is not None:
            raise failed
        if batch is None:
            return
        yield batch


def _is_true(is_unchanged: Callable[[], bool]) -> bool:
    try:
        return is_unchanged()
    except OSError:  # a file is gone
        return False


def _min_size(schema: pa.Schema, metadata: Any) -> int:
    """Return a lower bound of the bytes that a file takes as Arrow, computed from its footer.

    For text, the footer has the length of each encoded column chunk. Encoded text is never longer than the text itself,
    and the headers and statistics of pages are assumed to take less than half of a chunk, apart from a few bytes. So
    half of the encoded length counts.
    """
    size = sum(_min_array_size(field.type, metadata.num_rows) for field in schema)
    if metadata.num_columns != len(schema):
        return size  # with nested columns, columns of the file and of the schema do not correspond
    for number, field in enumerate(schema):
        if _is_text(field.type):
            groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
            chunks = (int(group.column(number).total_uncompressed_size) for group in groups)
            size += sum(max(0, chunk - _CHUNK_HEADERS) // 2 for chunk in chunks)
    return size


def _is_text(type_: pa.DataType) -> bool:
    return type_ in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def _min_array_size(type_: pa.DataType, rows: int) -> int:
    """Return a lower bound of the bytes that `rows` values of a type take. Text and lists count as 0."""
    if isinstance(type_, pa.BaseExtensionType):
        return _min_array_size(type_.storage_type, rows)
    if pa.types.is_dictionary(type_):
        return _min_array_size(type_.index_type, rows)
    if pa.types.is_struct(type_):
        return sum(_min_array_size(field.type, rows) for field in type_)
    if pa.types.is_fixed_size_list(type_):
        return _min_array_size(type_.value_type, rows * type_.list_size)
    try:
        return int(type_.bit_width) * rows // 8
    except ValueError:  # a type of variable width
        return 0


def _batch_rows(metadata: Any) -> int:
    """Return the number of rows of a batch, such that no column should exceed the capacity of one Arrow array."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    widest = max(
        (
            group.column(number).total_uncompressed_size / group.num_rows
            for group in groups
            if group.num_rows
            for number in range(group.num_columns)
        ),
        default=0,
    )
    return max(1, min(_ROWS, int(_BYTES / max(1, widest))))

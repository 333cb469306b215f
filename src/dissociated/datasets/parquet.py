"""Parquet files, which are read anew for each client.

A file may be replaced or rewritten in place, even while it is read. Readings then fail: a version has the same rows,
in the same batches, each time that it is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from dissociated.codec.columns import even_batches, select_columns, select_fields
from dissociated.codec.options import WriteOptions
from dissociated.codec.schemas import schema_difference
from dissociated.datasets.base import Dataset
from dissociated.datasets.file import PARQUET_MAGIC, FileState, file_state, unchanged_reader
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
        published = _Reading(path)
        state, file = published.state(), published.file()

        def open_reader(indices: Sequence[int] | None = None) -> pa.RecordBatchReader:
            with source_errors(name):
                reading = _Reading(path)
                return unchanged_reader(path, lambda: reading.state() == state, lambda: reading.reader(indices))

        return SourceDataset(
            name,
            open_reader,
            options,
            open_columns=open_reader,
            rows=file.metadata.num_rows,
            min_size=_min_size(file.schema_arrow, file.metadata),
        )
    except (OSError, pa.ArrowInvalid, UnicodeDecodeError) as error:  # the last for names of columns
        raise SourceError(f"cannot read {str(path)!r}: {error}") from error


class _Reading:
    """A single reading of a Parquet file. It goes on if another file is renamed over the file."""

    def __init__(self, path: Path) -> None:
        self._source = pa.OSFile(str(path))  # not mapped, since truncating a mapped file would crash this process

    def state(self) -> FileState:
        return file_state(os.fstat(self._source.fileno()))

    def file(self) -> Any:
        """Read the footer."""
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self._source, buffer_size=_BUFFER_SIZE)

    def reader(self, indices: Sequence[int] | None) -> pa.RecordBatchReader:
        """Open a reader of the columns at these positions, or of all columns."""
        file = self.file()
        schema = file.schema_arrow
        columns = None
        if indices is not None:
            names = schema.names
            if len(set(names)) < len(names) or any("." in name for name in names):
                # pyarrow selects Parquet columns by name or dotted path, which is ambiguous for these names.
                return select_columns(self.reader(None), indices)
            schema = select_fields(schema, indices)
            columns = schema.names
        return pa.RecordBatchReader.from_batches(schema, _batches(file, columns))


def _batches(file: Any, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
    size = _batch_rows(file.metadata)
    for number in range(file.num_row_groups):
        yield from even_batches(file.iter_batches(size, [number], columns), size)


def parquet_directory(name: str, path: Path, options: WriteOptions | None) -> Dataset:
    """Make a dataset of all Parquet files in a directory, in the order of their names.

    Subdirectories called NAME=VALUE add a column NAME each, unless the files have it (Hive partitioning).

    Raises:
        SourceError: There are no Parquet files, there are other files, the schemas of the files differ, or nested
            directories add the same column.
    """
    import pyarrow.dataset

    files = [*_parquet_files(path)]
    if not files:
        raise SourceError(f"cannot publish {str(path)!r}: it has no files, and {_DIRECTORY}")

    def states() -> list[FileState]:
        return [file_state(file.stat()) for file in files]

    def open_files(schema: pa.Schema | None = None) -> Any:
        return pyarrow.dataset.dataset(
            [str(file) for file in files], schema, "parquet", partitioning=paths, partition_base_dir=str(path)
        )

    def open_reader() -> pa.RecordBatchReader:
        with source_errors(name):
            return unchanged_reader(
                path, lambda: states() == published, lambda: open_files(inspected.schema).scanner().to_reader()
            )

    with source_errors(name):
        published = states()
        paths = pyarrow.dataset.partitioning(_path_columns(path, files), flavor="hive")
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
        min_size = sum(_min_size(common, fragment.metadata) for fragment in fragments)
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


def _path_columns(directory: Path, files: Sequence[Path]) -> pa.Schema:
    """Return the columns that directories NAME=VALUE add to the files. The files may have such a column themselves.

    Raises:
        SourceError: Nested directories add the same column. pyarrow would take the value of the outermost directory.
    """
    import pyarrow.dataset
    import pyarrow.fs

    factory = pyarrow.dataset.FileSystemDatasetFactory(
        pyarrow.fs.LocalFileSystem(),
        [str(file) for file in files],
        pyarrow.dataset.ParquetFileFormat(),
        pyarrow.dataset.FileSystemFactoryOptions(str(directory), pyarrow.dataset.HivePartitioning.discover()),
    )
    in_files, in_paths = factory.inspect_schemas()
    added = pa.schema([field for field in in_paths if field.name not in in_files.names])
    for file in files:
        names = [unquote(part.partition("=")[0]) for part in file.relative_to(directory).parent.parts if "=" in part]
        for name in added.names:
            if names.count(name) > 1:
                raise SourceError.for_peer(
                    f"the path of {str(file)!r} has several values of the column {name!r}: rename a directory, or give "
                    "the files by name",
                    f"the path of a file has several values of the column {name!r}",
                )
    return added


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

"""What a user publishes, as a dataset: tables, readers, files, callables, tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from dissociated.codec.columns import select_columns, select_fields
from dissociated.codec.options import WriteOptions, check_options
from dissociated.datasets.base import Dataset, Source
from dissociated.datasets.source_errors import source_errors
from dissociated.datasets.static import SegmentsDataset, TableDataset
from dissociated.datasets.streamed import LiveDataset
from dissociated.errors import SourceError
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment


def make_dataset(name: str, source: Source, options: WriteOptions | None = None) -> Dataset:
    """A dataset of whatever `source` is.

    A Table or a RecordBatch is held. A path to an Arrow IPC stream or file is mapped and served from where it
    lies; one to a Parquet file is read anew by each client. A RecordBatchReader can be read by one client, once.
    A callable is called once to learn the schema and again for each client; it gives a reader, or anything with
    `__arrow_c_stream__`, and the same stream each time. Anything else with `__arrow_c_stream__` (a
    DataFrame of Polars or pandas, a relation of DuckDB) is asked for a new stream each time. A Tensor, a sparse one,
    or a list of them is held, and read with `read_tensors` or `open_tensors`.

    Raises SourceError for what is none of these, and FormatError for a schema deeper than `options` allow.
    """
    if options is not None:
        check_options(options, WriteOptions)
    dataset = _make_dataset(name, source, options)
    if options is not None:
        options.check_depth(dataset.schema)
    return dataset


def _make_dataset(name: str, source: Source, options: WriteOptions | None) -> Dataset:
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return TableDataset(name, source, options)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not path.is_file():
            raise SourceError(f"cannot publish {path}: {_no_file(path)}")
        if _is_parquet(path):
            return _parquet(name, path, options)
        if options is not None:
            raise SourceError(
                f"cannot publish {path} with options: an Arrow IPC file is served as it is. Publish a callable that "
                "opens it, whose batches are then written anew"
            )
        return SegmentsDataset(name, [Segment.open(path)])
    if isinstance(source, pa.RecordBatchReader):
        return LiveDataset(name, lambda: source, options, one_shot=True)
    from dissociated.datasets.tensors import TensorDataset, as_tensors

    if (tensors := as_tensors(source)) is not None:
        return TensorDataset(name, tensors, options)
    return LiveDataset(name, lambda: open_source(name, source), options)


def open_source(name: str, source: Source) -> pa.RecordBatchReader:
    """A reader over `source`, or over what it gives if it is a callable. Raises SourceError."""
    with source_errors(name):
        return _reader(source() if callable(source) else source)


def _reader(source: Source) -> pa.RecordBatchReader:
    if isinstance(source, pa.RecordBatchReader):
        return source
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    raise SourceError(
        f"cannot publish a {type(source).__name__}: give a Table, a RecordBatchReader, an object with "
        "__arrow_c_stream__, a callable that returns one of these, the path of an Arrow IPC or Parquet file, "
        "or one or more tensors"
    )


def isolate_columns(whole: Dataset, columns: Sequence[str]) -> Dataset:
    """These columns of `whole`, for one reading, in memory that holds no others. Raises ColumnNotFound.

    `select` spares bytes, and lets clients map segments and regions that hold the other columns too.
    """
    reader = whole.select(Selection(tuple(columns))).open_reader()
    return LiveDataset(whole.name, lambda: reader, one_shot=True)


def _no_file(path: Path) -> str:
    if path.is_dir():
        return "it is a directory, and a dataset is made of files: name them"
    return "it is neither a file nor a directory" if path.exists() else "there is no such file"


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PAR1"
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error


def _parquet(name: str, path: Path, options: WriteOptions | None) -> Dataset:
    import pyarrow.parquet

    def open_reader() -> pa.RecordBatchReader:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        return pa.RecordBatchReader.from_batches(file.schema_arrow, file.iter_batches())

    def open_columns(indices: Sequence[int]) -> pa.RecordBatchReader:
        file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        names = file.schema_arrow.names
        if len(set(names)) < len(names) or any("." in name for name in names):
            return select_columns(open_reader(), indices)  # names stand for paths too, so these would be ambiguous
        schema = select_fields(file.schema_arrow, indices)
        return pa.RecordBatchReader.from_batches(schema, file.iter_batches(columns=schema.names))

    try:
        dataset = LiveDataset(name, open_reader, options, open_columns=open_columns)
        dataset.rows = pyarrow.parquet.read_metadata(path).num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise SourceError(f"cannot read {path}: {error}") from error
    return dataset

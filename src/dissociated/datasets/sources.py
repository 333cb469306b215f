"""Conversion of the sources that users publish (tables, readers, files, callables, tensors) into datasets."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.options import WriteOptions, check_options
from dissociated.codec.schemas import schema_difference
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.codec.tensor import TENSOR_FORMATS, Tensor, split_tensor
from dissociated.control.dataset_info import TensorInfo, tensors_schema
from dissociated.datasets.base import Dataset, IsGone, Source
from dissociated.datasets.file import check_whole, file_dataset, foreign_kind
from dissociated.datasets.parquet import is_parquet, parquet_directory, parquet_file
from dissociated.datasets.source_errors import foreign_errors, foreign_reader, source_errors
from dissociated.datasets.static import SegmentsDataset, StaticDataset
from dissociated.datasets.static_message import MappedMessages, StaticMessage
from dissociated.datasets.streamed import SourceDataset
from dissociated.datasets.table import TableDataset
from dissociated.datasets.text import TEXT_FORMATS, text_file
from dissociated.errors import FormatError, OptionError, SourceError
from dissociated.format.index import Index
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment, TensorSegment


def make_dataset(
    name: str, source: Source, options: WriteOptions | None = None, schema: pa.Schema | None = None
) -> Dataset:
    """Make a dataset of a source.

    The kind of the source decides how the dataset is held and read:

    - A Table, a RecordBatch, or a list of these is held in memory. So is Arrow IPC in a Buffer, in bytes or in a
      RecordBatchFileReader; no other data may follow the stream or file in it.
    - A path to an Arrow IPC stream or file is mapped and served in place. A stream must end with its end-of-stream
      marker, and no other data may follow. A path to a Parquet file, or to a directory of them, is read anew for each
      client. So is a path that ends in `.csv`, `.jsonl` or `.ndjson` (JSON lines); types are inferred from its first
      16 MB. After any change of these files, reading them raises an error until they are published anew.
    - A RecordBatchReader, or an iterator of record batches such as a generator, can be read once, by one client.
    - A callable is called once to learn the schema, and again for each client. It must return the same stream each
      time: a reader, an object with `__arrow_c_stream__`, or an iterator or a list of record batches.
    - Another object with `__arrow_c_stream__` (a DataFrame of Polars or pandas, a relation of DuckDB), or a dataset or
      scanner of pyarrow, is asked for a new stream for each client.
    - An object with `__arrow_c_device_stream__` or `__arrow_c_device_array__`, a list of such objects, or a dict of
      columns with `__dlpack__` is held on its device.
    - A Tensor, a sparse tensor, or a list of tensors is held in memory. Clients read it with `read_tensors` or
      `open_tensors`.

    Args:
        name: The name of the dataset.
        source: The source.
        options: How batches are written.
        schema: The schema of an iterator or list, which may then be empty.

    Raises:
        SourceError: The source is of another kind, or cannot be read.
        StoreError: A path holds no valid Arrow IPC.
        FormatError: The schema is nested deeper than `options` allow.
        OptionError: `options` is invalid, or `schema` is given for a source that has its own.
    """
    if options is not None:
        check_options(options, WriteOptions)
    check_schema(source, schema)
    dataset = _make_dataset(name, source, options, schema)
    if options is not None:
        options.check_depth(dataset.schema)
    return dataset


def check_schema(source: Source, schema: pa.Schema | None) -> None:
    """Raise OptionError if `schema` is given for a source that has its own."""
    takes_schema = isinstance(source, list | tuple | Iterator) or callable(source)
    if schema is not None and (isinstance(source, pa.RecordBatchReader) or not takes_schema):
        raise OptionError(
            f"a {type(source).__name__} has its own schema: give schema= only with iterators and lists of record "
            "batches"
        )


def _make_dataset(name: str, source: Source, options: WriteOptions | None, schema: pa.Schema | None) -> Dataset:
    if _are_batches(source, schema):
        with source_errors(name):
            return TableDataset(name, _open_reader(iter(source), schema).read_all(), options)
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if isinstance(source, pa.Table):
        return TableDataset(name, source, options)
    if isinstance(source, pa.Buffer | bytes | bytearray | memoryview | pa.ipc.RecordBatchFileReader):
        with source_errors(name):
            return _in_memory(name, source, options)
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if path.is_dir():
            return parquet_directory(name, path, options)
        if not path.is_file():
            raise SourceError(f"cannot publish {str(path)!r}: {_why_no_file(path)}")
        if is_parquet(path):
            return parquet_file(name, path, options)
        if path.suffix in TEXT_FORMATS:
            return text_file(name, path, options)
        if (kind := foreign_kind(path)) is not None:
            raise SourceError(
                f"cannot publish {str(path)!r}, which is {kind}: give Arrow IPC, Parquet, CSV (.csv), JSON lines "
                "(.jsonl, .ndjson), or the Table that another library reads from it"
            )
        if options is not None:
            raise SourceError(
                f"cannot publish {str(path)!r} with options: an Arrow IPC file is served unchanged; publish a "
                "callable that opens the file, whose batches are then encoded anew"
            )
        return file_dataset(name, path)
    if not isinstance(source, pa.RecordBatchReader):
        from dissociated.datasets.device import as_device_dataset  # imported on first use, since few servers need it

        with source_errors(name):
            on_device = as_device_dataset(name, source, options)
        if on_device is not None:
            return on_device
    if isinstance(source, pa.RecordBatchReader | Iterator):
        reader = open_source(name, source, schema)
        return SourceDataset(name, lambda: reader, options, one_shot=True)
    if (tensors := _as_tensors(source)) is not None:
        return TensorDataset(name, tensors, options)
    if callable(source):
        source = _NewEachTime(source)
    rows = getattr(source, "num_rows", None)  # known for a dataset handle of this library, for example
    rows = rows if isinstance(rows, int) else None
    return SourceDataset(name, lambda: open_source(name, source, schema), options, rows=rows)


def open_source(name: str, source: Source, schema: pa.Schema | None = None) -> pa.RecordBatchReader:
    """Open a reader over `source`, or over its result if it is a callable. Raise SourceError on failure."""
    with foreign_errors(name):
        reader = foreign_reader(name, _open_reader(source() if callable(source) else source, schema))
    if schema is not None:
        _check_schemas(schema, reader.schema)
    return reader


class _NewEachTime:
    """A callable that calls `source` and checks that a result that can be read only once is new each time.

    Raises SourceError if the result is the same object as before. Otherwise, the second client would receive the rest
    of the first client's stream, or no rows, as if that were the whole dataset.
    """

    def __init__(self, source: Callable[[], Source]) -> None:
        self._source = source
        self._last: Callable[[], Any] = lambda: None

    def __call__(self) -> Source:
        source = self._source()
        if not isinstance(source, pa.RecordBatchReader | Iterator):
            return source
        if source is self._last():
            raise SourceError.for_peer(
                f"the callable gave the same {type(source).__name__} again, which can be read once: create a new one "
                f"in each call, or publish the {type(source).__name__} itself"
            )
        try:
            self._last = weakref.ref(source)
        except TypeError:  # iterators that are implemented in C allow no weak references
            self._last = lambda: source
        return source


def _open_reader(source: Source, schema: pa.Schema | None = None) -> pa.RecordBatchReader:
    if isinstance(source, pa.RecordBatchReader):
        return source
    if isinstance(source, Iterator) or _are_batches(source, schema):
        return _chain_batches(iter(source), schema)
    # A dataset handle or scanner of this library. Its C stream would lose the custom metadata of batches.
    if hasattr(source, "open_reader"):
        return source.open_reader()
    if hasattr(source, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(source)
    if hasattr(source, "scanner"):  # a dataset of pyarrow
        source = source.scanner()
    if hasattr(source, "to_reader"):
        return source.to_reader()
    raise SourceError.for_peer(
        f"cannot publish a {type(source).__name__}: give a Table (see pyarrow.table), record batches, "
        "a RecordBatchReader, an object with __arrow_c_stream__, a pyarrow dataset, a callable that returns one of "
        "these, or, without live= and without a callable, the path of an Arrow IPC, Parquet, CSV or JSON lines file, "
        "or one or more tensors"
    )


def _are_batches(source: Source, schema: pa.Schema | None) -> bool:
    """Return whether `source` is a list of record batches or tables. It may be empty if `schema` is given."""
    if not isinstance(source, list | tuple):
        return False
    return all(isinstance(piece, pa.RecordBatch | pa.Table) for piece in source) and bool(source or schema is not None)


def _chain_batches(pieces: Iterator[Any], schema: pa.Schema | None) -> pa.RecordBatchReader:
    """Open a reader over record batches and tables, which must all have `schema`, or else that of the first piece."""
    if schema is None:
        first = next(pieces, None)
        if first is None:
            raise SourceError.for_peer("the source has no record batch, so its schema is unknown: give schema=...")
        _check_piece(first, None)
        schema, pieces = first.schema, chain([first], pieces)
    common = schema

    def pairs() -> Iterator[BatchAndMetadata]:
        for piece in pieces:
            _check_piece(piece, common)
            for batch in piece.to_batches() if isinstance(piece, pa.Table) else [piece]:
                yield batch, None

    return BatchReader(common, pairs())


def _check_piece(piece: Any, schema: pa.Schema | None) -> None:
    if not isinstance(piece, pa.RecordBatch | pa.Table):
        raise SourceError.for_peer(f"the source gave a {type(piece).__name__} instead of a record batch")
    if schema is not None:
        _check_schemas(schema, piece.schema)


def _check_schemas(schema: pa.Schema, other: pa.Schema) -> None:
    if not other.equals(schema):
        raise SourceError.for_peer(f"the record batches have different schemas: {schema_difference(schema, other)}")


def _in_memory(name: str, source: Any, options: WriteOptions | None) -> Dataset:
    """Make a dataset of Arrow IPC in memory. Batches are kept in place, or copied if they have custom metadata."""
    if not isinstance(source, pa.ipc.RecordBatchFileReader):
        may_change = isinstance(source, bytearray) or (isinstance(source, memoryview) and not source.readonly)
        buffer = pa.py_buffer(bytes(source) if may_change else source)
        index = Index(buffer)
        check_whole(f"the Arrow IPC in memory for {name!r}", index)
        if not index.is_file:
            return _in_memory_batches(name, pa.ipc.open_stream(buffer), options)
        for number in range(len(index)):
            index.message(number)  # raises FormatError for one that libarrow would misread
        source = pa.ipc.open_file(buffer)
    pairs = (source.get_batch_with_custom_metadata(number) for number in range(source.num_record_batches))
    return _in_memory_batches(
        name, BatchReader(source.schema, ((pair.batch, pair.custom_metadata) for pair in pairs)), options
    )


def _in_memory_batches(name: str, reader: pa.RecordBatchReader, options: WriteOptions | None) -> Dataset:
    pairs = [*batches(reader)]
    if any(metadata for _, metadata in pairs):
        return SegmentsDataset(name, [Segment.in_memory(name, BatchReader(reader.schema, iter(pairs)), options)])
    return TableDataset(name, pa.Table.from_batches([batch for batch, _ in pairs], reader.schema), options)


def _as_tensors(source: Source) -> Sequence[Tensor] | None:
    """Return `source` as a sequence of tensors, or None if it is neither a tensor nor a sequence of tensors."""
    if type(source) in TENSOR_FORMATS:
        return [source]
    if isinstance(source, (list, tuple)) and source and all(type(tensor) in TENSOR_FORMATS for tensor in source):
        return source
    return None


class TensorDataset(StaticDataset):
    """A dataset of tensors, which are sent inline from their own memory, and to clients that map memory from one copy.

    The copy is made when the first such client connects. Raises SourceError if a tensor cannot be encoded.
    """

    filterable = False

    def __init__(self, name: str, tensors: Sequence[Tensor], options: WriteOptions | None = None) -> None:
        described = [
            TensorInfo(
                TENSOR_FORMATS[type(tensor)].value, str(tensor.type), tuple(tensor.shape), tuple(tensor.dim_names)
            )
            for tensor in tensors
        ]
        super().__init__(name, tensors_schema(described))
        try:
            self._messages = [split_tensor(tensor, options) for tensor in tensors]
        except FormatError as error:
            raise SourceError(f"cannot publish {name!r}: {error}") from None
        self.nbytes = sum(message.parsed.body_length for message in self._messages)
        self._packed = [StaticMessage(*message) for message in self._messages]
        self._mapped: Sequence[MappedMessages] | None = None
        self._copying = threading.Lock()

    def select(self, selection: Selection) -> Dataset:
        return self  # tensors have no columns; a client that expects batches sees that in the first message

    def open_reader(self) -> pa.RecordBatchReader:
        raise SourceError(
            f"{self.name!r} holds tensors, for which Flight has no messages: use read_tensors, over another transport"
        )

    def packed(self) -> Sequence[StaticMessage]:
        return self._packed

    def mapped(self) -> Sequence[MappedMessages]:
        with self._copying:
            if self._mapped is None:
                segment = TensorSegment(self.name, self._messages)
                messages = [
                    message._replace(extents=extents)
                    for message, extents in zip(self._packed, segment.addresses, strict=True)
                ]
                self._mapped = [MappedMessages(segment, messages)]
            return self._mapped


def isolate_columns(whole: Dataset, columns: Sequence[str], is_gone: IsGone) -> Dataset:
    """Return a dataset of some columns, for one reading, in memory that holds no other column.

    `Dataset.select` is no protection: clients of its result can map memory that holds the other columns, too.

    Raises:
        ColumnNotFound: `whole` lacks one of the columns.
    """
    reader = whole.select(Selection(tuple(columns))).open_reader_for(is_gone)
    isolated = SourceDataset(whole.name, lambda: reader, one_shot=True)
    isolated.loses_batches = whole.loses_batches
    return isolated


def _why_no_file(path: Path) -> str:
    return "the path is neither a file nor a directory" if path.exists() else "the file does not exist"

"""Every kind of source, and the data that a reader receives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from support.helpers import as_big_endian, case

from .conftest import Route

TABLE = pa.table(
    {
        "n": pa.array([1, None, 3, 4, 5]),
        "s": ["a", "", None, "more than twelve bytes", "e"],
        "d": pa.array(["x", "y", None, "x", "y"]).dictionary_encode(),
        "l": [[1.5], [], None, [None, 2.0], [3.0]],
    }
)
BATCHES = TABLE.to_batches(max_chunksize=2)


def ipc_stream(path: Path, **options: Any) -> Path:
    with pa.ipc.new_stream(path, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE, 2)
    return path


def ipc_file(path: Path, **options: Any) -> Path:
    with pa.ipc.new_file(path, TABLE.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(TABLE, 2)
    return path


def parquet(path: Path) -> Path:
    pq.write_table(TABLE, path, row_group_size=2)
    return path


class Capsule:
    """A source with nothing but the Arrow PyCapsule interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return TABLE.to_reader(2).__arrow_c_stream__(requested_schema)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "table": lambda path: TABLE,
    "batch": lambda path: TABLE.combine_chunks().to_batches()[0],
    "callable giving a reader": lambda path: lambda: TABLE.to_reader(2),
    "callable giving a table": lambda path: lambda: TABLE,
    "capsule": lambda path: Capsule(),
    "ipc stream": ipc_stream,
    "ipc stream as a string": lambda path: str(ipc_stream(path)),
    "ipc stream, legacy prefix": lambda path: ipc_stream(path, use_legacy_format=True),
    "ipc stream, version 4": lambda path: ipc_stream(path, metadata_version=pa.ipc.MetadataVersion.V4),
    "ipc stream, compressed": lambda path: ipc_stream(path, compression="zstd"),
    "ipc file": ipc_file,
    "ipc file, compressed": lambda path: ipc_file(path, compression="lz4"),
    "ipc file, deltas": lambda path: ipc_file(path, emit_dictionary_deltas=True, unify_dictionaries=False),
    "parquet": parquet,
}


def read(route: Route, source: Any, times: int) -> None:
    route.publish(source)
    for _ in range(times):
        arrived = route.open().read_all()
        arrived.validate(full=True)
        assert arrived.schema.equals(TABLE.schema)
        assert arrived == TABLE


def test_a_source_can_be_read_again_and_again(quick: Route, tmp_path: Path) -> None:
    for number, (name, source) in enumerate(SOURCES.items()):
        with case(name):
            read(quick, source(tmp_path / f"{number}"), times=3)


def test_memory_a_file_and_what_is_read_anew_go_every_way(route: Route, tmp_path: Path) -> None:
    sources = (ipc_stream(tmp_path / "source"), TABLE, lambda: TABLE.to_reader(2))
    for source in sources if route.is_quick else sources[:1]:
        read(route, source, times=1)


FRAMES: dict[str, Any] = {
    "polars": pl.from_arrow(TABLE),
    "pandas": pd.DataFrame(
        {"n": [1, 2, 3], "s": ["a", None, "ccc"], "t": pd.to_datetime(["2024-02-29"] * 3, utc=True)}
    ),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_data_frame(either: Route, kind: str) -> None:
    frame = FRAMES[kind]
    either.publish(frame)
    for _ in range(2):
        arrived = either.open().read_all()
        arrived.validate(full=True)
        assert arrived == pa.table(frame)


def test_a_duckdb_relation(either: Route) -> None:
    with duckdb.connect() as database:
        either.publish(database.sql("select range as n, 'row ' || range as s from range(5000)"))
        assert either.open().read_all().to_pylist() == [{"n": n, "s": f"row {n}"} for n in range(5000)]


def test_ipc_files_whose_dictionaries_grow(quick: Route, tmp_path: Path) -> None:
    """Publish a file whose dictionary arrives in deltas between the batches."""
    words = ["a", "bb", "ccc", "dddd"]
    batches = [
        pa.record_batch({"d": pa.DictionaryArray.from_arrays(pa.array([size - 1, 0], pa.int8()), words[:size])})
        for size in (1, 3, 4)
    ]
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_file(tmp_path / "file", batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    _, arrived = quick.read(tmp_path / "file")
    assert [batch["d"].to_pylist() for batch in arrived] == [["a", "a"], ["ccc", "a"], ["dddd", "a"]]


def by_polars(compression: Any) -> bytes:
    sink = io.BytesIO()
    FRAMES["polars"].write_ipc(sink, compression=compression)
    return sink.getvalue()


BY_POLARS = {compression: by_polars(compression) for compression in ("uncompressed", "zstd")}


@pytest.mark.parametrize("compression", BY_POLARS)
def test_files_of_polars(either: Route, tmp_path: Path, compression: str) -> None:
    """Publish files of Polars 2, which have their schema only in the footer."""
    (tmp_path / "file").write_bytes(BY_POLARS[compression])
    schema, arrived = either.read(tmp_path / "file")
    assert schema == pa.ipc.open_file(tmp_path / "file").schema
    assert pl.from_arrow(pa.Table.from_batches(arrived)).equals(FRAMES["polars"])


def test_a_stream_of_the_other_byte_order(quick: Route, tmp_path: Path) -> None:
    numbers = np.array([1, -2, 2**40], ">i8").view("<i8")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("n", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"n": numbers}))
    path = tmp_path / "stream"
    path.write_bytes(as_big_endian(sink.getvalue().to_pybytes()))
    assert pa.ipc.open_stream(path).read_all().to_pydict() == {"n": [1, -2, 2**40]}
    _, arrived = quick.read(path)
    assert [batch.to_pydict() for batch in arrived] == [{"n": [1, -2, 2**40]}]


def test_a_file_is_read_where_it_lies_after_it_was_unlinked(quick: Route, tmp_path: Path) -> None:
    path = ipc_stream(tmp_path / "source")
    quick.publish(path)
    path.unlink()
    assert quick.open().read_all() == TABLE


def test_a_reader_can_be_read_once(either: Route) -> None:
    either.publish(TABLE.to_reader(2))
    assert either.open().read_all() == TABLE
    with pytest.raises(dis.errors.RemoteError, match="'data' was published from a reader, which can be read once"):
        either.open()


def test_a_source_that_fails_in_the_middle_says_why(route: Route) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from BATCHES
        raise OSError("the disk is on fire")

    route.publish(lambda: pa.RecordBatchReader.from_batches(TABLE.schema, batches()))
    reader = route.open()
    with pytest.raises(dis.errors.RemoteError, match=r"source of 'data' failed \(OSError\): the log"):
        reader.read_all()


def test_a_source_that_failed_does_not_look_complete_to_one_who_goes_on(either: Route) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield BATCHES[0]
        raise OSError("the disk is on fire")

    either.publish(lambda: pa.RecordBatchReader.from_batches(TABLE.schema, batches()))
    reader = either.open()
    assert reader.read_next_batch() == BATCHES[0]
    for _ in range(3):
        with pytest.raises(dis.errors.RemoteError, match=r"source of 'data' failed \(OSError\)"):
            reader.read_next_batch()


def test_a_source_that_fails_to_open_again_says_why(either: Route) -> None:
    readers = [TABLE.to_reader(), TABLE.to_reader()]  # the first is for the schema
    either.publish(lambda: readers.pop())
    assert either.open().read_all() == TABLE
    with pytest.raises(dis.errors.RemoteError, match=r"source of 'data' failed \(IndexError\)"):
        either.open()


def test_a_source_whose_schema_has_changed_says_so(either: Route) -> None:
    tables = [pa.table({"other": [1]}), TABLE, TABLE]  # the last is for the schema
    either.publish(lambda: tables.pop())
    assert either.open().read_all() == TABLE
    with pytest.raises(dis.errors.RemoteError, match="source of 'data' has another schema"):
        either.open()

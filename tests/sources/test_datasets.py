"""Sources that can be published, and the descriptions of datasets."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.codec.options import WriteOptions
from dissociated.codec.split import batches as split_batches
from dissociated.datasets.base import Dataset
from dissociated.datasets.sources import make_dataset
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import CatalogError, FormatError, ReadOnce, SourceError, StoreError
from dissociated.format.encapsulated import encapsulate, end_of_stream
from dissociated.format.record_batch import encode_record_batch
from dissociated.protocol.request import Selection
from dissociated.store.segment import Segment, SegmentWriter
from dissociated.training import Batches
from ipc.vectors import BATCH, END, SCHEMA
from support.certificates import Certificates
from support.helpers import case, misnamed
from support.processes import Start

TABLE = pa.table({"n": [1, 2, 3], "s": ["a", None, "c"]}, metadata={"a": "b"})


def stream(path: Path) -> Path:
    with pa.ipc.new_stream(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 2)
    return path


def file(path: Path) -> Path:
    with pa.ipc.new_file(path, TABLE.schema) as writer:
        writer.write_table(TABLE, 2)
    return path


def parquet(path: Path) -> Path:
    pq.write_table(TABLE, path)
    return path


SOURCES: dict[str, tuple[Any, int | None]] = {
    "table": (lambda path: TABLE, 3),
    "stream": (stream, 3),
    "file": (file, 3),
    "parquet": (parquet, 3),
    "reader": (lambda path: TABLE.to_reader(), None),
    "callable": (lambda path: TABLE.to_reader, None),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_dataset_knows_its_schema_and_perhaps_its_rows(kind: str, tmp_path: Path) -> None:
    source, rows = SOURCES[kind]
    made = make_dataset("data", source(tmp_path / "source"))
    assert (made.name, made.rows) == ("data", rows)
    assert made.schema.equals(TABLE.schema, check_metadata=kind != "parquet")
    assert made.open_reader().read_all() == TABLE


@pytest.mark.parametrize("kind", ["table", "stream", "file"])
def test_a_dataset_knows_its_bytes(kind: str, tmp_path: Path) -> None:
    made = make_dataset("data", SOURCES[kind][0](tmp_path / "source"))
    assert made.nbytes is not None
    assert 3 * 8 <= made.nbytes <= 1000


def test_tickets_are_unguessable_and_of_one_publication_alone() -> None:
    tickets = {make_dataset("data", TABLE).ticket for _ in range(100)}
    assert len(tickets) == 100
    assert {len(ticket) for ticket in tickets} == {16}


def test_a_callable_is_called_for_each_reader_and_no_more() -> None:
    calls: list[None] = []

    def source() -> pa.Table:
        calls.append(None)
        return TABLE

    made = make_dataset("data", source)
    assert len(calls) == 1  # for the schema
    for count in (2, 3, 4):
        assert made.open_reader().read_all() == TABLE
        assert len(calls) == count


def failing() -> Any:
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (42, "cannot publish a int: give a Table"),
        (lambda: 42, "cannot publish a int: give a Table"),
        (None, "cannot publish a NoneType: give a Table"),
        (failing, "the source of 'data' failed: RuntimeError: no more"),
        ("/no/such/file", "'/no/such/file': the file does not exist"),
        ("/", "cannot publish '/': a directory must have Parquet files only"),
    ],
)
def test_what_cannot_be_published(source: Any, problem: str) -> None:
    with pytest.raises(SourceError, match=problem):
        make_dataset("data", source)


def test_columns_with_names_that_are_not_utf8_cannot_be_published(tmp_path: Path) -> None:
    """A client could list no dataset of a catalog with such a column."""
    table = misnamed(pa.table({"NAME": [1]}))
    sources: dict[str, Any] = {"table": table, "batch": table.to_batches()[0], "callable": table.to_reader}
    for name, content in (("a.csv", b"id,Gr\xf6\xdfe\n1,2\n"), ("a.jsonl", b'{"\xff": 1}\n')):
        sources[name] = tmp_path / name
        sources[name].write_bytes(content)
    sources["parquet"] = tmp_path / "a.parquet"
    pq.write_table(pa.table({"NAME": [1]}), sources["parquet"], store_schema=False)
    sources["parquet"].write_bytes(sources["parquet"].read_bytes().replace(b"NAME", b"N\xffME"))
    with dis.Server([], catalog=None) as server:
        for kind, source in sources.items():
            with case(kind), pytest.raises(SourceError, match="'utf-8' codec can't decode"):
                server.publish("misnamed", source)
        with pytest.raises(SourceError, match="the name of a column is not UTF-8"):
            server.publish("misnamed", table.to_reader(), live=dis.Live())


def test_a_table_of_very_deep_types_cannot_be_published() -> None:
    """A Table is measured before it is encoded, which checks the depth."""
    deep = pa.int8()
    for _ in range(500):
        deep = pa.list_(deep)
    refused = pytest.raises(FormatError, match="field 'a' is nested 501 levels deep; max_recursion_depth is 64")
    with dis.Server([], catalog=None) as server, refused:
        server.publish("deep", pa.schema([("a", deep)]).empty_table())


@pytest.mark.parametrize("once", [iter(TABLE.to_batches()), (batch for batch in TABLE.to_batches()), TABLE.to_reader()])
def test_a_callable_that_gives_the_same_reader_again(once: Any) -> None:
    """The reader would yield the rest, or nothing, as if that were the whole."""
    made = make_dataset("data", lambda: once)
    with pytest.raises(SourceError, match=r"the callable gave the same .* again"):
        made.open_reader()


def test_a_column_of_a_path_may_be_in_the_files_too(tmp_path: Path) -> None:
    """DuckDB and Polars can write it into both. pyarrow would refuse another type, or take the value of the path."""
    paths = {"k=5/d=2024-01-31/x%20y=1": date(2024, 1, 31), "k=6/d=2024-02-01/x%20y=2": date(2024, 2, 1)}
    for path, day in paths.items():
        file = tmp_path / path / "rows.parquet"
        file.parent.mkdir(parents=True)
        pq.write_table(pa.table({"n": [1, 2], "d": [day, day], "k": ["z", None]}), file)
    columns = {"n": [1, 2] * 2, "d": [day for day in paths.values() for _ in "nd"], "k": ["z", None] * 2}
    read = make_dataset("data", tmp_path).open_reader().read_all()
    assert read.schema.names == ["n", "d", "k", "x y"]
    assert read.to_pydict() == {**columns, "x y": [1, 1, 2, 2]}


def test_a_path_must_not_give_a_column_two_values(tmp_path: Path) -> None:
    """pyarrow would take the value of the outermost directory."""
    (directory := tmp_path / "k=1" / "k=2").mkdir(parents=True)
    pq.write_table(pa.table({"n": [1]}), directory / "rows.parquet")
    with pytest.raises(SourceError, match=r"rows.parquet' has several values of the column 'k'"):
        make_dataset("data", tmp_path)
    pq.write_table(pa.table({"k": [3]}), directory / "rows.parquet")
    assert make_dataset("data", tmp_path).open_reader().read_all().to_pydict() == {"k": [3]}


def test_a_parquet_file_that_is_damaged(tmp_path: Path) -> None:
    path = parquet(tmp_path / "data.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"data\.parquet"):
        make_dataset("data", path)


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_parquet_that_is_written_anew_is_not_read_until_it_is_published_anew(kind: str, tmp_path: Path) -> None:
    """The file is overwritten in place, as is common: truncating a mapped file would crash the process."""
    file = tmp_path / "data.parquet"
    source = file if kind == "file" else tmp_path

    def write(value: int, rows: int) -> None:
        table = pa.table({"n": [value] * rows, "more": [value] * rows})
        pq.write_table(table, file, row_group_size=2, compression="none", use_dictionary=False)
        os.utime(file, (value, value))  # the timestamps of file systems are coarse

    modified = partial(pytest.raises, SourceError, match="was modified after it was published: publish the file anew")
    write(1, 6)
    made = make_dataset("data", source)
    for rows in (6, 2):
        write(1, 6)
        readers = made.open_reader(), made.select(Selection(("n",))).open_reader()
        if kind == "file":
            assert [reader.read_next_batch()["n"].to_pylist() for reader in readers] == [[1, 1], [1, 1]]
        write(2, rows)
        for reader in readers:
            with modified():
                reader.read_all()
        with modified():
            made.open_reader()
        with modified():
            made.select(Selection(("n",))).open_reader()
        assert make_dataset("data", source).open_reader().read_all()["n"].to_pylist() == [2] * rows
    write(1, 6)
    reader = made.open_reader()
    file.write_bytes(b"PAR1")
    with modified():
        reader.read_all()
    with modified():
        made.open_reader()


def test_a_reading_of_parquet_goes_on_after_another_file_was_renamed_over_it(tmp_path: Path) -> None:
    file, numbers = tmp_path / "data.parquet", pa.table({"n": range(6)})
    pq.write_table(numbers, file, row_group_size=2)
    made = make_dataset("data", file)
    reader = made.open_reader()
    pq.write_table(pa.table({"n": range(10, 16)}), tmp_path / "new.parquet", row_group_size=2)
    (tmp_path / "new.parquet").rename(file)
    assert reader.read_all() == numbers
    with pytest.raises(SourceError, match="was modified after it was published"):
        made.open_reader()


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_an_epoch_has_rows_of_one_state_of_a_parquet_file(tmp_path: Path, transport: str) -> None:
    """Each block is a reading of its own. A filter selects by the positions that passed when the epoch was planned."""
    file, numbers = tmp_path / "data.parquet", np.arange(100_000)
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        for number, condition in enumerate((None, ("n", "<", 50_000))):
            with case(condition):
                pq.write_table(pa.table({"n": numbers}), file, row_group_size=5_000)
                server.publish("data", file)
                dataset = client.dataset("data", transport=transport)
                begun = iter(Batches(dataset, columns=["n"], batch_size=1_000, filter=condition))
                assert next(begun)["n"].tolist() == [*range(1_000)]
                pq.write_table(pa.table({"n": numbers[::-1].copy()}), file, row_group_size=5_000)
                os.utime(file, (number, number))
                with pytest.raises(dis.DissociatedError, match="was modified after it was published"):
                    list(begun)


def test_a_stream_that_shows_its_damage_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    nodes = bytes.fromhex("0300000000000000 0000000000000000")  # three rows, no nulls
    header = BATCH.header.replace(nodes, b"\x04" + nodes[1:])
    path.write_bytes(SCHEMA.whole + BATCH.prefix + header + (BATCH.body or b"") + END)
    reader = make_dataset("damaged", path).open_reader()
    with pytest.raises(SourceError, match="'damaged' failed: libarrow cannot read this: Array length"):
        reader.read_next_batch()


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("a,b\n1,2\n")
    with pytest.raises(SourceError, match=r"data\.txt', which is text: give Arrow IPC, Parquet, CSV \(\.csv\)"):
        make_dataset("data", tmp_path / "data.txt")
    (tmp_path / "data").write_bytes(b"\0\1\2")
    with pytest.raises(StoreError, match=r"data: not an Arrow IPC stream"):
        make_dataset("data", tmp_path / "data")


def test_a_reader_is_given_once() -> None:
    made: Dataset = make_dataset("data", TABLE.to_reader())
    made.open_reader()
    with pytest.raises(SourceError, match="which can be read once and was read"):
        made.open_reader()


def test_some_batches_of_a_reader_are_refused_and_all_are_given() -> None:
    made: Dataset = make_dataset("data", TABLE.to_reader())
    for selected in (made, made.select_positions([0])):
        for first, stop in ((0, 1), (1, sys.maxsize)):
            with pytest.raises(ReadOnce, match="would lose the others"):
                selected.slice_batches(first, stop)
    assert made.slice_batches(0, sys.maxsize).open_reader().read_all() == TABLE


def test_more_segments_than_can_be_shared_are_refused(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "one", TABLE.schema) as writer:
        writer.write(TABLE.to_batches()[0])
    one = Segment.open(tmp_path / "one")
    assert SegmentsDataset("many", [one] * 4096).rows == 4096 * TABLE.num_rows
    with pytest.raises(SourceError, match=r"'many' would have 4097 segments; at most 4096 .* df\.coalesce"):
        SegmentsDataset("many", [one] * 4097)


def bytes_read() -> int:
    """Return the bytes that this process has read by `read` and `pread`, of which those of sockets are no part."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_file_that_is_shortened_while_it_is_read_ends_no_server(
    tmp_path: Path, certified: Certificates, start: Start
) -> None:
    """The files exceed the buffers of sockets. Bodies are small, read by the kernel, or encrypted or decoded here."""
    large = pa.table({name: np.arange(1 << 16) for name in "nm"}).to_batches() * 32
    files = {"small": [TABLE.to_batches()[0][:1]] * 40_000, "tcp": large}
    paths = {name: tmp_path / f"{name}.arrows" for name in ("small", "tcp", "column", "tls", "grpc")}
    for name, batches in files.items():
        with pa.ipc.new_stream(paths[name], batches[0].schema) as writer:
            writer.write_table(pa.Table.from_batches(batches))
    for name in ("column", "tls", "grpc"):
        os.link(paths["tcp"], paths[name])
    secured = ("--tls-cert", certified.cert, "--tls-key", certified.key)
    served = start("serve", *paths.values(), "--listen", "tcp://127.0.0.1:0", "--listen", "tls://127.0.0.1:0", *secured)
    with dis.connect(served.uri, tls_roots=certified.roots) as client:
        begun = {
            "small, tcp": client.read("small", transport="tcp"),
            "small, tls": client.read("small", transport="tls"),
            **{scheme: client.read(scheme, transport=scheme) for scheme in ("tcp", "tls", "grpc")},
            "column": client.read("column", columns=["m"], transport="tcp"),
            "column, grpc": client.read("column", columns=["m"], transport="grpc"),
            "filter": client.read("column", columns=["m"], filter=[("n", ">=", 0)], transport="tcp"),
        }
        client.put("small", TABLE, mode="append")
        begun["appended"] = client.read("small", transport="tcp")
        for what, reader in begun.items():
            with case(what):
                first = files["small" if what in ("appended", "small, tcp", "small, tls") else "tcp"][0]
                assert reader.read_next_batch() == first.select(reader.schema.names)
        for path in paths.values():
            os.truncate(path, 4096)
        modified = partial(pytest.raises, dis.DissociatedError, match="was modified after it was published")
        for what, reader in begun.items():
            if what.endswith("grpc"):  # gRPC may have received all: then the rest is right
                with case(what), suppress(CatalogError):
                    assert reader.read_all() == pa.Table.from_batches(large[1:]).select(reader.schema.names)
            else:
                with case(what), modified():
                    reader.read_all()
        with modified():
            client.read("small", transport="grpc").read_all()
        client.put("other", TABLE)
        assert client.read("other", transport="tcp").read_all() == TABLE


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_some_columns_and_batches_of_a_file_are_read_without_the_others(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / "t", 1 << 14
    batches = []
    for number in range(4):
        words = pa.array([f"word {row % (number + 1)}" for row in range(rows)])
        numbers = {f"n{column}": np.arange(rows) + number * rows for column in range(20)}
        batches.append(pa.record_batch({"word": words.dictionary_encode(), "text": words, **numbers}))
    schema, table = batches[0].schema, pa.Table.from_batches(batches)
    if kind == "stream":
        writer = SegmentWriter(path, schema, WriteOptions(emit_dictionary_deltas=True))
    else:
        writer = pa.ipc.new_file(path, schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True))
    with writer:
        for number, batch in enumerate(batches):
            writer.write_batch(batch, {"number": str(number)})

    made = make_dataset("t", path)
    for names, first, stop in (("n3",), 0, 4), (("word", "text"), 0, 4), (None, 2, 3), (("n9",), 3, 4):
        with case(f"columns {names} of batches {first} to {stop}"):
            selection = Selection(names, batches=None if stop - first == 4 else (first, stop))
            before = bytes_read()
            pairs = [*split_batches(made.select(selection).open_reader())]
            nbytes = bytes_read() - before
            expected = [batch.select(names or schema.names) for batch in batches[first:stop]]
            assert [batch.to_pydict() for batch, _ in pairs] == [batch.to_pydict() for batch in expected]
            assert [metadata for _, metadata in pairs] == [{b"number": b"%d" % n} for n in range(first, stop)]
            assert nbytes < 1.2 * sum(batch.nbytes for batch in expected)
    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("t", path)
        for _ in range(2):  # the first time imports modules, which are files, too
            before = bytes_read()
            read = client.read("t", transport="tcp", columns=["n2"], filter=[("n1", ">=", 3 * rows)]).read_all()
            nbytes = bytes_read() - before
        assert read == table.select(["n2"])[3 * rows :]
        assert nbytes < 1.2 * 2 * 8 * rows * (1 if kind == "stream" else 4)  # only the stream has statistics


def test_a_small_file_whose_columns_overlap_does_not_fill_the_memory(tmp_path: Path) -> None:
    """The columns share one buffer. So reading all but one of them apart would take many times the size of the file."""
    path, columns, rows = tmp_path / "t.arrows", 50, 1 << 20
    schema = pa.schema([(f"n{number}", pa.int8()) for number in range(columns)])
    nodes, extents = [(rows, 0)] * columns, [(0, 0), (0, rows)] * columns
    header = encode_record_batch(rows, nodes, extents, [], rows)
    with path.open("wb") as file:
        file.write(schema.serialize())
        file.write(encapsulate(header) + bytes(rows) + end_of_stream())
    assert make_dataset("t", path).open_reader().read_all().num_columns == columns
    with pytest.raises(SourceError, match="overlap: read all columns"):
        make_dataset("t", path).select(Selection(tuple(schema.names[1:]))).open_reader().read_all()


def test_nothing_is_kept_of_a_file_that_is_modified_while_it_is_read(tmp_path: Path) -> None:
    """Modify the metadata of later batches, and restore the file with its time. Clients read the file by address."""
    path, batch = tmp_path / "t.arrows", pa.record_batch({"n": range(7)})
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_table(pa.Table.from_batches([batch] * 8_000))
    original, status = path.read_bytes(), path.stat()
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("t", path)
        begun = client.read("t", transport="shm")
        assert begun.read_next_batch() == batch
        with path.open("r+b") as file:
            file.write(original.replace((7).to_bytes(8, "little"), (3).to_bytes(8, "little")))
        with pytest.raises(dis.DissociatedError, match="was modified after it was published"):
            begun.read_all()
        with path.open("r+b") as file:
            file.write(original)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert client.read("t", transport="shm").read_all().num_rows == 7 * 8_000


def test_batches_that_were_passed_by_reference_are_no_part_of_a_modified_file(tmp_path: Path) -> None:
    path, numbers = tmp_path / "t.arrows", np.arange(1 << 20)  # 8 MiB
    batch = pa.record_batch({"n": numbers})
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_table(pa.Table.from_batches([batch] * 3))
    with dis.Server(["inproc:"], catalog=None) as server:
        server.publish("t", path)
        received = []
        with dis.open_stream(server.locations("t")[0], server.ticket("t")) as reader, suppress(dis.DissociatedError):
            received.append(reader.read_next_batch())
            with path.open("r+b") as file:
                file.write(bytes(path.stat().st_size))
            received += reader
    assert received
    assert all(copy == batch for copy in received)


def test_bodies_that_travel_by_address_are_sent_together(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, batch = tmp_path / "t.arrows", pa.record_batch({"n": range(1000)})
    with pa.ipc.new_stream(path, batch.schema) as writer:
        writer.write_table(pa.Table.from_batches([batch] * 600))
    with dis.Server(["shm:"], inline_limit=100) as server, dis.connect(server.catalog_uri) as client:
        server.publish("t", path)
        with caplog.at_level("DEBUG", "dissociated"):
            assert client.read("t", transport="shm").read_all().num_rows == 600_000
    assert len(re.findall("sent a run of", caplog.text)) <= 3


@pytest.mark.parametrize("kind", ["stream", "file"])
@pytest.mark.parametrize(
    "column", [pa.array(range(1000)), pa.array(["a", "b"] * 500).dictionary_encode()], ids=["plain", "words"]
)
def test_compressed_bodies_with_metadata_before_v5_are_refused(tmp_path: Path, kind: str, column: pa.Array) -> None:
    """Libarrow writes them for those who ask it to, and then takes the compressed bytes for values."""
    table, path = pa.table({"n": column}), tmp_path / "old.arrow"
    options = pa.ipc.IpcWriteOptions(compression="lz4", metadata_version=pa.ipc.MetadataVersion.V4)
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, table.schema, options=options) as writer:
        writer.write_table(table)
    for source in (path, path.read_bytes()):
        with pytest.raises((StoreError, SourceError), match="a body is compressed and its metadata is older than V5"):
            make_dataset("old", source)


def test_streams_in_a_row_are_refused(tmp_path: Path) -> None:
    with pa.BufferOutputStream() as sink:
        for _ in range(2):
            with pa.ipc.new_stream(sink, TABLE.schema) as writer:
                writer.write_table(TABLE)
        stream = sink.getvalue().to_pybytes()
    end = b"\xff\xff\xff\xff\0\0\0\0"
    assert stream.count(end) == 2
    path = tmp_path / "both.arrows"
    path.write_bytes(stream.replace(end, b"", 1))
    refused = pytest.raises(dis.DissociatedError, match="publish each stream by itself")
    with dis.Server(["tcp:"], catalog=None) as server, refused:
        server.publish("both", path)


def test_a_file_that_is_written_anew_in_its_place_is_not_read_as_what_it_was(tmp_path: Path) -> None:
    """Overwrite a published file. A file that replaces it by a rename leaves the published file intact."""
    path, numbers = tmp_path / "t.arrow", np.arange(1 << 22)  # 32 MiB: more than sockets buffer
    old, new = pa.table({"n": numbers}), pa.table({"n": numbers[::-1].copy()})

    def write(path: Path, table: pa.Table) -> None:
        """Write a file without truncating it first, because truncation may crash a server."""
        with path.open("r+b" if path.exists() else "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=1 << 19)

    write(path, old)
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("t", path)
        write(tmp_path / "new.arrow", old)
        (tmp_path / "new.arrow").rename(path)
        assert client.read("t").read_all() == old
        server.publish("t", path)
        begun = client.read("t", transport="tcp")
        assert begun.read_next_batch().num_rows == 1 << 19
        write(path, new)
        with pytest.raises(dis.DissociatedError, match="was modified after it was published"):
            begun.read_all()
        for transport in ("shm", "tcp", "grpc"):
            with pytest.raises(dis.DissociatedError, match="the file was modified after it was published") as refused:
                client.read("t", transport=transport).read_all()
            assert str(tmp_path) not in str(refused.value)
        server.publish("t", path)
        assert client.read("t").read_all() == new

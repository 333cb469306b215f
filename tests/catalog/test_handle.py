"""A handle on one version of a dataset: every tool can read it repeatedly, and never sees rows of another version."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

import dissociated as dis
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import ColumnNotFound, DatasetNotFound, DissociatedError, OptionError, StoreError, WrongKind
from support.helpers import connections_left, location

TABLE = pa.table({"n": range(100), "x": [n / 2 for n in range(100)], "s": [str(n) for n in range(100)]})
TRANSPORTS = ("shm", "tcp", "grpc")


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as made:
        made.publish("data", pa.Table.from_batches(TABLE.to_batches(max_chunksize=10)))
        yield made


def test_a_handle_says_what_its_version_is(client: dis.Client) -> None:
    handle = client["data"]
    assert (handle.name, handle.schema, handle.num_rows, handle.version) == ("data", TABLE.schema, 100, 1)
    assert handle.nbytes == TABLE.nbytes
    assert handle.created is not None
    assert timedelta(0) <= datetime.now(UTC) - handle.created < timedelta(minutes=10)
    assert handle.tags == {}
    assert [one["version"] for one in handle.versions()] == [1]
    assert "data" in client
    assert "other" not in client
    assert 7 not in client
    assert [*client] == ["data"]
    with pytest.raises(DatasetNotFound):
        client["other"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_handle_is_read_again_and_again(client: dis.Client, transport: str) -> None:
    with client.dataset("data", transport=transport) as handle:
        for _ in range(2):
            assert handle.to_table() == TABLE
            assert pa.table(handle) == TABLE
            assert handle.to_table(["s", "n"]) == TABLE.select(["s", "n"])
            assert pa.Table.from_batches(handle.to_batches(["s"], limit=25)) == TABLE.select(["s"])[:25]
            assert handle.to_reader(batch_size=7).read_all() == TABLE
            assert handle.head(3) == TABLE[:3]
            assert handle.head(3, ["s"], pc.field("n") > 40) == TABLE.select(["s"])[41:44]
            assert handle.take([5, 2]) == TABLE.take([5, 2])
            assert handle.count_rows() == 100
            assert handle.count_rows(("n", "<", 17)) == 17
            assert handle.to_table({"twice": pc.field("n") * 2})["twice"].to_pylist() == [*range(0, 200, 2)]
            assert handle.to_pandas().equals(TABLE.to_pandas())
            assert handle.to_polars().equals(pl.DataFrame(TABLE))
        scanner = handle.scanner(["s"], filter=pc.field("n") >= 90, limit=5)
        assert scanner.projected_schema.names == ["s"]
        for _ in range(2):
            assert scanner.to_table() == TABLE.select(["s"])[90:95]
            assert scanner.count_rows() == 5
        assert pickle.loads(pickle.dumps(handle)).to_table() == TABLE


def test_columns_that_share_a_name(server: dis.Server, client: dis.Client) -> None:
    table = pa.table([[1, 2, 3], [4, 5, 6], [3, 2, 1]], names=["n", "m", "n"])
    server.publish("twins", table)
    with client["twins"] as twins:
        assert pa.Table.from_batches([*twins.to_batches(batch_size=2)]) == table
        assert twins.to_table(["m", "n"], batch_size=1) == table.select([1, 0, 2])
        assert twins.to_table(["m"], ("m", ">", 4)) == table.select([1])[1:]
        with pytest.raises(OptionError, match="column 'n' occurs more than once"):
            twins.to_table(filter=("n", ">", 1))
    server.drop("twins")


def test_other_tools_take_a_handle(client: dis.Client) -> None:
    with client["data"] as handle:
        assert isinstance(handle, ds.Dataset)
        assert pl.DataFrame(handle).equals(pl.DataFrame(TABLE))
        assert duckdb.execute("SELECT s FROM handle WHERE n > 97 ORDER BY n").fetchall() == [("98",), ("99",)]
        assert duckdb.execute("SELECT count(*) FROM handle").fetchall() == [(100,)]
        assert pl.scan_pyarrow_dataset(handle).filter(pl.col("n") > 97).select("s").collect()["s"].to_list() == [
            "98",
            "99",
        ]
        (fragment,) = handle.filter(("n", ">", 97)).get_fragments()
        assert fragment.to_table(TABLE.schema, columns=["s"]) == TABLE.select(["s"])[98:]
        wanted = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("s", pa.large_string())])
        assert pa.RecordBatchReader.from_stream(handle, wanted).schema == wanted


def test_what_pyarrow_would_read_by_itself_is_refused_and_not_empty(client: dis.Client) -> None:
    with client["data"] as handle, pytest.raises(OptionError, match="handle"):
        ds.Scanner.from_dataset(handle).to_table()


def test_a_handle_keeps_nothing_of_who_made_it(client: dis.Client) -> None:
    """An error that pyarrow keeps would hold the frames of its traceback, and handles would never be freed."""

    def read_within_a_function() -> list[weakref.ref[Any]]:
        table, handle = pa.table({"n": [1]}), client["data"]
        assert handle.head(1).num_rows == len(table)
        return [weakref.ref(table), weakref.ref(handle)]

    assert [kept() for kept in read_within_a_function()] == [None, None]


def test_a_handle_reads_its_version_and_no_other() -> None:
    first, second = TABLE[:10], TABLE[10:]
    with dis.Server(retain=60) as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", first)
        handle = client["data"]
        server.publish("data", second)
        assert handle.to_table() == first
        assert client.dataset("data", handle.version).to_table() == first
        assert handle.refresh().to_table() == second
        unread = client.dataset("data", handle.version)
        server.drop("data")
        assert handle.to_table() == first  # it is mapped
        handle.close()
        for gone in (handle, unread):
            with pytest.raises(DatasetNotFound, match="gone"):
                gone.to_table()
        server.publish("chosen", first, ticket=b"the same for both")
        handle = client["chosen"]
        server.publish("chosen", second, ticket=b"the same for both")
        with pytest.raises(DatasetNotFound, match="gone"):
            handle.to_table()
        for transport in TRANSPORTS:  # as if it was replaced between the catalog's answer and the request
            with pytest.raises(DissociatedError, match="look the dataset up again"):
                client.read_endpoint(handle.info, handle.info.endpoints[0], transport=transport).read_all()
            assert client.read("chosen", transport=transport).read_all() == second
        port = int(server.catalog_uri.rpartition(":")[2])
    with dis.Server(["shm:"], catalog=f"grpc://127.0.0.1:{port}") as server, dis.connect(server.catalog_uri) as client:
        server.publish("data", first)
        handle = client["data"]
    with dis.Server(["shm:"], catalog=f"grpc://127.0.0.1:{port}") as server:
        server.publish("data", second)
        with dis.connect(server.catalog_uri) as client, pytest.raises(DatasetNotFound, match="gone"):
            DatasetHandle(client, handle.info).to_table()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reader_that_was_read_to_its_end_says_so(client: dis.Client, transport: str) -> None:
    first: list[Callable[[pa.RecordBatchReader], Any]] = [pa.table, list, lambda reader: reader.read_all()]
    some: tuple[dict[str, Any], ...] = {}, {"columns": ["n"]}, {"limit": 5}
    for options in some:
        for way in first:
            reader = client.read("data", transport=transport, **options)
            assert len(way(reader)) > 0
            assert next(reader, None) is None
            for again in (*first, pl.DataFrame, pa.RecordBatchReader.from_stream):
                with pytest.raises(StoreError, match="read to its end"):
                    again(reader)


def test_what_a_filter_cannot_be(server: dis.Server, client: dis.Client) -> None:
    with client["data"] as handle:
        none: tuple[Any, ...] = (5, [], [[]], "n > 5", ("n", "like", 5), ("n", ">", "a"))
        for wrong in (*none, pc.field("n") + 1, pc.field("n") > "a"):
            with pytest.raises(OptionError):
                handle.to_table(filter=wrong)
        for absent in (("y", ">", 5), pc.field("y") > 5):
            with pytest.raises(ColumnNotFound, match="there are n, x, s"):
                handle.to_table(filter=absent)
        for limit in (-1, 2.5, "3"):
            with pytest.raises(OptionError, match="limit"):
                handle.to_table(limit=limit)
        with pytest.raises(OptionError, match="no_such"):
            handle.scanner(no_such=1)
        with pytest.raises(OptionError, match="list of names"):
            handle.to_table("n")
        server.publish("tensor", pa.Tensor.from_numpy(TABLE["x"].to_numpy()))
        try:
            with pytest.raises(WrongKind):
                client["tensor"].to_table()
        finally:
            server.drop("tensor")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_filter_gives_just_the_rows_that_pass(server: dis.Server, client: dis.Client, transport: str) -> None:
    n = pc.field("n")
    for given, rows in (
        ((n > 10) & (n < 15), range(11, 15)),
        (pc.field("s") == "42", [42]),
        (n < 0, []),
        (pc.scalar(True), range(100)),
        (("n", ">=", 97), range(97, 100)),
        ([("n", ">=", 97), ("s", "!=", "98")], [97, 99]),
        ([[("n", "=", 3)], [("x", ">", 48.6), ["n", "in", (98, 99)]]], [3, 98, 99]),
    ):
        read = client.read("data", transport=transport, columns=["s"], filter=given).read_all()
        assert read == TABLE.select(["s"]).take(pa.array(rows, pa.int64()))
    assert (
        client.read("data", transport=transport, filter=n > 10, rows=range(5, 15), limit=3).read_all() == TABLE[11:14]
    )
    assert client.read("data", transport=transport, limit=0).read_all() == TABLE[:0]
    assert client.read("data", transport=transport, limit=95, rows=range(90, 200)).read_all() == TABLE[90:]
    if transport != "grpc":
        uri = location(server, "data", transport)
        ticket = server.ticket("data")
        assert dis.open_stream(uri, ticket, columns=["s"], filter=n < 5).read_all() == TABLE.select(["s"])[:5]
        assert dis.open_stream(uri, ticket, limit=15).read_all() == TABLE[:15]
        fields = dis.ReadOptions(included_fields=[1])
        assert dis.open_stream(uri, ticket, filter=n < 5, options=fields).read_all() == TABLE.select(["x"])[:5]


def test_a_batch_that_passes_whole_stays_in_place_and_a_limit_frees_the_rest(
    server: dis.Server, client: dis.Client
) -> None:
    gc.collect()  # expected errors of other tests hold their handles
    reader = client.read("data", transport="shm", filter=pc.field("n") >= 0, limit=15)
    whole, part = reader
    assert (whole.num_rows, part.num_rows) == (10, 5)
    assert {one.buffers()[1].is_mutable for one in whole.columns} == {False}  # the server's memory
    del whole, part
    assert connections_left(server) == 0


def test_people_are_shown_what_there_is(server: dis.Server, client: dis.Client) -> None:
    wide = pa.schema([(f"a column with a rather long name {n}", pa.list_(pa.decimal128(30, 2))) for n in range(100)])
    server.publish("<wide>", wide.empty_table())
    try:
        text = repr(client["data"])
        assert "data, version 1 of 20" in text
        assert "100 rows" in text
        assert "shm, tcp" in text
        assert "x       double" in text
        assert "and 60 more" in repr(client["<wide>"])
        for shown in (text, repr(client["<wide>"]), repr(client.list())):
            assert max(map(len, shown.splitlines())) <= 60
        server.publish("\x1b[2J", TABLE[:1])
        assert "\x1b" not in repr(client["\x1b[2J"]) + repr(client.list())
        server.drop("\x1b[2J")
        assert repr(client) == f"<Client of {client.uri}>"
        assert "100 rows" in repr(client["data"].info.endpoints[0])
        assert "2 published" in repr(server)
        shown_as_html: tuple[Any, ...] = client["<wide>"], client.list(), client, server
        for it in shown_as_html:
            assert "&lt;wide&gt;" in it._repr_html_()
        assert "tcp://" in client["data"].info.endpoints[0]._repr_html_()
    finally:
        server.drop("<wide>")
    with dis.connect("grpc://127.0.0.1:1", timeout=5) as nobody:
        assert "is it running?" in nobody._repr_html_()

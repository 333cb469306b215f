"""Tensors by name: their description in the catalog, and errors of reading a tensor as a table or the reverse."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.cli import main
from dissociated.control.dataset_info import TensorInfo, TensorsInfo, parse_tensors_info
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError, SourceError, WrongKind
from support.tensor_cases import CUBE, MATRIX, assert_same, some

CSR = pa.SparseCSRMatrix.from_dense_numpy(MATRIX.astype("f4"), ["row", "column"])
DENSE = pa.Tensor.from_numpy(CUBE)


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as running:
        running.publish("all", some())
        running.publish("one", DENSE)
        running.publish("pair", (DENSE, CSR))
        running.publish("table", pa.table({"n": [1, 2, 3]}))
        yield running


@pytest.mark.parametrize("transport", [None, "shm", "tcp"])
def test_tensors_are_read_by_name(client: dis.Client, transport: str | None) -> None:
    for arrived, sent in zip(client.read_tensors("all", transport=transport), some(), strict=True):
        assert_same(arrived, sent)
    (arrived,) = client.read_tensors("one", transport=transport)
    assert_same(arrived, DENSE)


def test_missing_datasets(client: dis.Client) -> None:
    with pytest.raises(DatasetNotFound):
        client.read_tensors("none")


def test_a_catalog_describes_tensors(client: dis.Client) -> None:
    pair = client.describe("pair")
    assert pair.schema.names == []
    assert pair.rows is None
    assert pair.nbytes == 24 * 8 + 64 + 64 + 24  # the cube; 5 row offsets and 5 columns, each aligned to 64; 5 floats
    assert pair.tensors == TensorsInfo(
        2,
        (TensorInfo("dense", "int64", (2, 3, 4), ()), TensorInfo("CSR", "float", (4, 6), ("row", "column"))),
    )
    assert client.describe("table").tensors is None


def test_of_many_tensors_the_first_are_described(server: dis.Server, client: dis.Client) -> None:
    server.publish("many", [DENSE] * 1000)
    described = client.describe("many").tensors
    assert described is not None
    assert described.number == 1000
    assert set(described.first) == {TensorInfo("dense", "int64", (2, 3, 4), ())}
    assert len(described.first) == 256
    server.drop("many")


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b"7", b'{"count": 1}', b'{"count": "x", "first": []}', b"\xff"])
def test_what_others_say_of_tensors_does_no_harm(said: bytes) -> None:
    assert parse_tensors_info(pa.schema([], metadata={b"dissociated.tensors": said})) == TensorsInfo(0, ())


def test_the_wrong_way_to_read_names_the_right_one(client: dis.Client) -> None:
    for transport in (None, "shm", "tcp"):
        with pytest.raises(WrongKind, match="holds tensors: read it with open_tensors, or by name with read_tensors"):
            client.read("pair", transport=transport)
        with pytest.raises(WrongKind, match="holds record batches: read it with open_stream, or by name with read"):
            client.read_tensors("table", transport=transport)
    with pytest.raises(CatalogError, match=r"'pair' holds tensors.*use read_tensors, over another transport"):
        client.read("pair", transport="grpc")
    with pytest.raises(WrongKind, match="Flight has no messages for tensors: read them over shm or tcp"):
        client.read_tensors("pair", transport="grpc")


def test_a_plain_flight_client_is_told_why_it_gets_none(server: dis.Server) -> None:
    with flight.FlightClient(server.catalog_uri) as plain:
        info = plain.get_flight_info(flight.FlightDescriptor.for_path("pair"))
        with pytest.raises(flight.FlightServerError, match="for which Flight has no messages"):
            plain.do_get(info.endpoints[0].ticket).read_all()


def test_what_cannot_be_published(server: dis.Server) -> None:
    for source in ([], [DENSE, pa.table({})], [MATRIX]):
        with pytest.raises(SourceError, match=r"cannot publish a list.*or one or more tensors"):
            server.publish("refused", source)
    outside = pa.SparseCOOTensor.from_numpy(np.array([[1.0]]), np.array([[0, 3]]), (2, 3))
    with pytest.raises(SourceError, match=r"cannot publish 'refused': .* index outside a dimension of 3"):
        server.publish("refused", [DENSE, outside])


def test_nothing_is_appended_to_tensors_and_tables(client: dis.Client) -> None:
    for name in ("pair", "table"):
        with pytest.raises(DissociatedError, match=f"'{name}' was not written in segments"):
            client.put(name, pa.table({"n": [4]}), mode="append")
    assert client.read("table").read_all() == pa.table({"n": [1, 2, 3]})


def test_ls(server: dis.Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", server.catalog_uri]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "ROWS", "SIZE", "COLUMNS", "VERSION"]
    assert [line.split()[:6] for line in lines[2:4]] == [
        ["one", "-", "192", "B", "1", "tensor"],
        ["pair", "-", "344", "B", "2", "tensors"],
    ]
    assert main(["describe", f"{server.catalog_uri}/pair"]) == 0
    described = capsys.readouterr().out.splitlines()
    assert [described[0], *described[2:6]] == [
        "pair: 2 tensors, 344 B",
        "",
        "TENSOR  TYPE   SHAPE",
        "dense   int64  2 x 3 x 4",
        "CSR     float  4 x 6      row, column",
    ]


def test_get_says_that_tensors_are_no_table(server: dis.Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", f"{server.catalog_uri}/pair", "-o", "/dev/null/x.arrow"]) == 1
    assert main(["get", f"{server.catalog_uri}/pair", "-o", "-"]) == 1
    assert "'pair' holds tensors, which have no rows: dissociated describe shows them" in capsys.readouterr().err

"""This library's client at foreign Flight servers, and its servers with foreign clients."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.cli import main
from dissociated.errors import CatalogError, DatasetNotFound
from dissociated.transport.registry import transport
from support.processes import run_script

TABLE = pa.table({"n": [1, 2, 3]})


class Foreign(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A Flight server with one dataset, which it finds by one kind of descriptor and cannot list.

    It rejects other descriptors in its own way.
    """

    def __init__(self, known: flight.FlightDescriptor, refuse: Callable[[str], Exception]) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.uri = f"grpc://127.0.0.1:{self.port}"
        self._known = known
        self._refuse = refuse

    def get_flight_info(self, context: object, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        if descriptor != self._known:
            raise self._refuse(f"what is {descriptor}?")
        endpoints = [flight.FlightEndpoint(b"ticket", ["arrow-flight-reuse-connection://?"])]
        return flight.FlightInfo(TABLE.schema, descriptor, endpoints)

    def do_get(self, context: object, ticket: flight.Ticket) -> flight.RecordBatchStream:
        return flight.RecordBatchStream(TABLE)


@pytest.mark.parametrize("refuse", [KeyError, flight.FlightServerError, pa.ArrowInvalid, NotImplementedError])
def test_a_dataset_of_a_foreign_server_is_found_and_one_that_is_not_there_is_named(
    refuse: Callable[[str], Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    for known in (flight.FlightDescriptor.for_command("d"), flight.FlightDescriptor.for_path("d")):
        with Foreign(known, refuse) as server, dis.connect(server.uri) as client:
            assert client.read("d", transport="grpc").read_all() == TABLE
            with pytest.raises(DatasetNotFound if refuse is KeyError else CatalogError) as raised:
                client.describe("no")
            assert "{" not in str(raised.value)
            assert "no" in str(raised.value)
            with pytest.raises(CatalogError, match="does not list its datasets"):
                client.list()
            assert main(["ls", server.uri]) == 1
            assert "does not list its datasets" in capsys.readouterr().err
            assert main(["ls", f"{server.uri}/d"]) == 0
            capsys.readouterr()


@pytest.mark.needs("ucx")
def test_the_reference_is_offered_no_pair_for_what_is_read_once() -> None:
    transport("ucx")
    with dis.Server(["ucx://127.0.0.1:0?err_mode=none"]) as server, flight.FlightClient(server.catalog_uri) as plain:
        server.publish("static", TABLE)
        server.publish("shared", lambda: TABLE, live=dis.Live())
        server.publish("reader", TABLE.to_reader())

        def pairs(name: str) -> list[str]:
            info = plain.get_flight_info(flight.FlightDescriptor.for_command(name))
            uris = [location.uri.decode() for location in info.endpoints[0].locations]
            return [uri for uri in uris if "stream=" in uri]

        assert len(pairs("static")) == 2
        assert pairs("shared") == pairs("reader") == []


UNIONS = {
    "sparse": pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
    "dense": pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]),
}


@pytest.mark.usefixtures("forks")
def test_tables_with_unions_without_rows_are_published(tmp_path: Path) -> None:
    """pyarrow's `nbytes` crashes on such unions that were read from IPC, so a separate process tries it."""
    files = []
    for kind, array in UNIONS.items():
        for deep in ("flat", "in a list", "in a struct"):
            column = array.slice(0, 0)
            if deep == "in a list":
                column = pa.ListArray.from_arrays(pa.array([0, 0], pa.int32()), column)
            if deep == "in a struct":
                column = pa.StructArray.from_arrays([column], ["u"])
            batch = pa.record_batch({"x": column})
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            files.append(tmp_path / f"{kind} {deep}.arrows")
            files[-1].write_bytes(sink.getvalue())
    script = """
import sys, pyarrow as pa, dissociated as dis
with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
    for path in sys.argv[1:]:
        table = pa.ipc.open_stream(path).read_all()
        server.publish("d", table)
        client.put("e", table)
        for name in "de":
            for way in ("shm", "tcp", "grpc"):
                assert client.read(name, transport=way).read_all().num_rows == table.num_rows, (path, way)
"""
    run = run_script(script, *files)
    assert run.returncode == 0, (run.returncode, run.stderr)

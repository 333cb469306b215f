"""The text of a source's exception: Flight does not send it, and the server logs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from support.helpers import case
from support.secret_sources import ERRORS, SOURCES, check, told


@pytest.mark.parametrize("live", [False, True], ids=["read anew", "live"])
def test_the_text_of_a_source_s_exception_is_not_told_over_flight(caplog: pytest.LogCaptureFixture, live: bool) -> None:
    """Neither this library's client nor any other gets the text."""
    with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
        for source in ("after a batch",) if live else SOURCES:
            # Each source with one error, and one of them with all: an error is passed on in one way, whichever it is.
            for error, make in ERRORS.items() if source == "after a batch" and not live else [*ERRORS.items()][:1]:

                def publish(source: str = source, make: Callable[[], Exception] = make) -> bytes:
                    server.publish("data", SOURCES[source](make), live=dis.Live() if live else None)
                    return server.ticket("data")

                with case((source, error)):
                    for transport in ("grpc", None):
                        publish()
                        check(caplog, client.read, "data", transport=transport)
                    ticket = publish()
                    with flight.FlightClient(server.catalog_uri) as plain:
                        check(caplog, plain.do_get, flight.Ticket(ticket))


def test_nor_is_the_path_of_a_file_that_cannot_be_read_any_more(tmp_path: Path) -> None:
    for number, spoil in enumerate((_remove, _damage, _replace)):
        directory = tmp_path / f"{number}-hunter2"
        directory.mkdir()
        paths = [directory / "alone.parquet", directory / "all" / "one.parquet"]
        paths[1].parent.mkdir()
        with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
            for path in paths:
                pq.write_table(pa.table({"n": [1, 2, 3]}), path)
            server.publish("0", paths[0])
            server.publish("1", paths[1].parent)
            for name, path in zip("01", paths, strict=True):
                spoil(path)
                for transport in ("grpc", "tcp"):
                    with case((number, name, transport)):
                        seen = told(client.read, name, transport=transport)
                        assert "hunter2" not in seen
                        assert str(tmp_path) not in seen


def _remove(path: Path) -> None:
    path.unlink()


def _damage(path: Path) -> None:
    path.write_bytes(b"PAR1")


def _replace(path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2]}), path)

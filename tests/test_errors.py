"""The codes of errors: they never change, and a refusal of a server arrives as the same class, by every transport."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated import errors
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    ColumnNotFound,
    DatasetNotFound,
    DissociatedError,
    FilterRefused,
    ReadOnce,
    RemoteError,
    ServerFull,
    SourceError,
)
from dissociated.protocol.request import RowSelection, Selection
from support.helpers import open_over_flight, wait_until

DOCS = Path(__file__).parents[1] / "docs"
MEDIA = {"inproc": "inproc:", "tcp": "tcp://127.0.0.1:0", "shm": "shm:"}
TABLE = pa.table({"n": [1, 2, 3], "s": ["a", "b", "c"]})

#: Written by hand: peers, logs and scripts have these. Add to them, and change none.
CODES = {
    1: ("failed", "DissociatedError"),
    2: ("uri", "UriError"),
    3: ("protocol", "ProtocolError"),
    4: ("local_protocol", "LocalProtocolError"),
    5: ("remote_protocol", "RemoteProtocolError"),
    6: ("transport", "TransportError"),
    7: ("connection_closed", "ConnectionClosed"),
    8: ("unsafe_memory", "UnsafeMemory"),
    9: ("forked", "ForkedError"),
    10: ("access_denied", "AccessDenied"),
    11: ("remote", "RemoteError"),
    12: ("server_full", "ServerFull"),
    13: ("deadline_exceeded", "DeadlineExceeded"),
    14: ("source_failed", "SourceError"),
    15: ("filter_refused", "FilterRefused"),
    16: ("format", "FormatError"),
    17: ("option", "OptionError"),
    18: ("read_once", "ReadOnce"),
    19: ("wrong_kind", "WrongKind"),
    20: ("column_not_found", "ColumnNotFound"),
    21: ("store", "StoreError"),
    22: ("store_full", "StoreFull"),
    23: ("not_private", "NotPrivate"),
    24: ("catalog", "CatalogError"),
    25: ("catalog_unreachable", "CatalogUnreachable"),
    26: ("catalog_damaged", "CatalogDamaged"),
    27: ("dataset_not_found", "DatasetNotFound"),
    28: ("device", "DeviceError"),
    29: ("device_not_found", "DeviceNotFound"),
    30: ("device_full", "DeviceFull"),
    31: ("pyspark_not_found", "PySparkNotFound"),
    32: ("java_not_found", "JavaNotFound"),
    33: ("jar_not_made", "JarNotMade"),
    34: ("node_unreachable", "NodeUnreachable"),
}


def test_no_code_and_no_number_changes_or_disappears() -> None:
    classes = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DissociatedError)]
    assert {kind.__name__: kind.code for kind in classes} == {name: code for code, name in CODES.values()}
    assert {number: (kind.code, kind.__name__) for number, kind in errors.NUMBERED_ERRORS.items()} == CODES
    assert len({code for code, _ in CODES.values()}) == len(CODES)


def test_the_page_on_framing_has_every_number() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \|$", (DOCS / "framing.md").read_text(), re.MULTILINE)
    assert {int(number): (code, name) for number, code, name in rows} == CODES


class Place:
    """A server that refuses, and how it is asked by one transport."""

    def __init__(self, server: dis.Server, client: dis.Client, medium: str) -> None:
        self.server, self.client, self.medium = server, client, medium

    def open(self, ticket: bytes) -> Any:
        """Read the stream of a ticket as it is."""
        if self.medium == "grpc":
            return open_over_flight(self.client, ticket)
        uri = next(one for one in self.server.locations("data") if one.startswith(self.medium))
        return dis.open_stream(uri, ticket)


@pytest.fixture(params=[*MEDIA, "grpc"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with (
        dis.Server(list(MEDIA.values()), choose_rows=False) as server,
        dis.connect(server.catalog_uri) as client,
    ):
        server.publish("data", TABLE)
        yield Place(server, client, request.param)


def no_dataset(place: Place) -> None:
    place.open(b"no such ticket").read_all()


def no_column(place: Place) -> None:
    place.open(Selection(columns=("x",)).identifier(place.server.ticket("data"))).read_all()


def no_filter(place: Place) -> None:
    place.open(Selection(rows=RowSelection(limit=1)).identifier(place.server.ticket("data"))).read_all()


def no_numbers(place: Place) -> None:
    place.server.publish("live", TABLE.to_reader(), live=dis.Live())
    place.open(Selection(batches=(0, 1)).identifier(place.server.ticket("live"))).read_all()


def no_source(place: Place) -> None:
    opened: list[pa.RecordBatchReader] = []

    def source() -> pa.RecordBatchReader:
        if opened:
            raise OSError("the password is sesame")
        opened.append(TABLE.to_reader())
        return opened[0]

    place.server.publish("bad", source)
    for _ in range(2):  # what was opened for the schema is read first
        place.open(place.server.ticket("bad")).read_all()
    place.open(place.server.ticket("bad")).read_all()


@pytest.mark.parametrize(
    ("refuse", "kind", "code"),
    [
        (no_dataset, DatasetNotFound, "dataset_not_found"),
        (no_column, ColumnNotFound, "column_not_found"),
        (no_filter, FilterRefused, "filter_refused"),
        (no_numbers, ReadOnce, "read_once"),
        (no_source, SourceError, "source_failed"),
    ],
)
def test_a_refusal_arrives_as_its_class(
    place: Place, refuse: Callable[[Place], None], kind: type[DissociatedError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        refuse(place)
    assert caught.value.code == code
    assert isinstance(caught.value, CatalogError if place.medium == "grpc" else RemoteError)


def test_a_failed_source_has_a_reference_that_the_log_has(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SourceError, match=r"the log of its server says more \[source_failed \w+\]") as caught:
        no_source(place)
    reference = caught.value.reference
    assert reference is not None
    assert "sesame" not in str(caught.value)
    wait_until(
        lambda: any("sesame" in line and f"[source_failed {reference}]" in line for line in caplog.messages),
        "the log has the reference",
    )


@pytest.mark.parametrize("medium", MEDIA)
def test_a_reader_that_has_failed_keeps_the_code_and_the_reference(medium: str) -> None:
    def fail() -> Iterator[pa.RecordBatch]:
        yield from TABLE.to_batches()
        raise OSError("the disk is on fire")

    with dis.Server([MEDIA[medium]], catalog=None) as server:
        for live in (None, dis.Live()):
            if live is None:
                server.publish("bad", lambda: pa.RecordBatchReader.from_batches(TABLE.schema, fail()))
            else:
                server.publish("bad", pa.RecordBatchReader.from_batches(TABLE.schema, fail()), live=live)
            reader = dis.open_stream(server.locations("bad")[0], server.ticket("bad"))
            assert reader.read_next_batch().num_rows == 3
            told = []
            for _ in range(2):
                with pytest.raises(SourceError) as caught:
                    reader.read_next_batch()
                assert caught.value.code == "source_failed"
                told.append(caught.value.reference)
            assert told[0] is not None
            assert told[0] == told[1]


@pytest.mark.parametrize("medium", MEDIA)
def test_a_ticket_that_was_altered_is_denied(medium: str) -> None:
    with dis.Server([MEDIA[medium]], catalog=None, ticket_lifetime=3600.0) as server:
        server.publish("data", TABLE)
        ticket = server.ticket("data")
        altered = ticket[:-1] + bytes([ticket[-1] ^ 1])
        with pytest.raises(AccessDenied) as caught:
            dis.open_stream(server.locations("data")[0], altered)
    assert caught.value.code == "access_denied"
    assert isinstance(caught.value, RemoteError)


@pytest.mark.parametrize("medium", ["tcp", "shm"])
def test_a_full_server_says_so(medium: str) -> None:
    released = threading.Event()

    def waiting() -> Iterator[pa.RecordBatch]:
        released.wait(60)
        yield from TABLE.to_batches()

    with dis.Server([MEDIA[medium]], catalog=None, max_connections=1) as server:
        server.publish("slow", lambda: pa.RecordBatchReader.from_batches(TABLE.schema, waiting()))
        (uri,) = server.locations("slow")
        first = dis.open_stream(uri, server.ticket("slow"))
        try:
            with pytest.raises(ServerFull) as caught:
                dis.open_stream(uri, server.ticket("slow"))
        finally:
            released.set()
        assert caught.value.code == "server_full"
        assert first.read_all() == TABLE


def test_an_error_that_a_peer_reported_can_be_pickled() -> None:
    with dis.Server(["tcp://127.0.0.1:0"], catalog=None) as server:
        server.publish("data", TABLE)
        with pytest.raises(DatasetNotFound) as caught:
            dis.open_stream(server.locations("data")[0], b"no such ticket")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(copy, DatasetNotFound)
    assert isinstance(copy, RemoteError)
    assert (str(copy), copy.code, copy.number) == (str(caught.value), "dataset_not_found", 27)


class Alien(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A server of somebody else's, whose error has details of its own."""

    def do_get(self, context: Any, ticket: flight.Ticket) -> Any:
        raise flight.FlightServerError("no column 'x'", ticket.ticket)


@pytest.mark.parametrize("details", [b"", b"no answer", b"column not found", b"\xff\x00", b"transport", b"forked x"])
def test_the_details_of_others_are_no_code(details: bytes) -> None:
    with Alien("grpc://127.0.0.1:0") as server, dis.connect(f"grpc://127.0.0.1:{server.port}") as client:
        with pytest.raises(CatalogError, match="no column 'x'") as caught:
            open_over_flight(client, details).read_all()
        assert caught.value.code == "catalog"

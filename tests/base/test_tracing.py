"""Spans of OpenTelemetry: of clients, servers and catalogs, across processes and transports."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from support.helpers import PATIENCE, Serve
from support.processes import Fork
from support.tracing import RecordedSpan, traced_run, traced_server

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")
pytestmark = pytest.mark.usefixtures("forks")

CLIENT = """
tracer = trace.get_tracer("app")
for scheme in "shm", "tcp", "grpc":
    with dis.connect(sys.argv[1]) as client:  # A new client asks the catalog, which its later reads need not do.
        with tracer.start_as_current_span(f"whole {scheme}"):
            assert client.read("data", transport=scheme).read_all().num_rows == 100
        with tracer.start_as_current_span(f"some {scheme}"):
            assert client.read("data", transport=scheme, columns=["n"], filter=("n", ">", 89)).read_all().num_rows == 10
        with tracer.start_as_current_span(f"handle {scheme}"):
            with client.dataset("data", transport=scheme) as handle:
                assert handle.to_table().num_rows == 100
        with tracer.start_as_current_span(f"missing {scheme}"):
            try:
                client.read("data", transport=scheme, columns=["x"])
            except dis.errors.ColumnNotFound:
                pass
with dis.connect(sys.argv[1]) as client:
    for scheme in "shm", "grpc":
        with tracer.start_as_current_span(f"put {scheme}"):
            assert client.put(f"put {scheme}", pa.table({"n": range(5)}), transport=scheme) == 5
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
VALID = f"00-{TRACE}-{SPAN}-01"
HOSTILE = [
    *("", "garbage", "00", VALID.upper(), VALID[:-1], VALID + "\n", VALID + "-x", "-" * 60_000, "\u0661" * 55),
    *(f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01"),
    *(5, 1.5, None, True, [], [VALID], {}, {"a": VALID}),
]


class Recorded(NamedTuple):
    client: list[RecordedSpan]
    server: list[RecordedSpan]

    def root(self, name: str) -> RecordedSpan:
        (span,) = [span for span in self.client if span.name == name]
        return span

    def below(self, parent: RecordedSpan, name: str) -> list[RecordedSpan]:
        """Return the spans of this name with this parent, and check that they belong to its trace."""
        found = [span for span in [*self.client, *self.server] if (span.parent, span.name) == (parent.id, name)]
        assert {span.trace for span in found} <= {parent.trace}
        return found


@pytest.fixture(scope="module")
def recorded(forks: None) -> Iterator[Recorded]:
    with traced_server() as server:
        client = traced_run(CLIENT, server.catalog_uri)
        yield Recorded(client, server.end())


@pytest.mark.parametrize("reading", ["whole", "some", "handle"])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_the_stream_of_a_server_belongs_to_the_read_of_a_client(recorded: Recorded, reading: str, scheme: str) -> None:
    (read,) = recorded.below(recorded.root(f"{reading} {scheme}"), "dissociated.read")
    (stream,) = recorded.below(read, "dissociated.stream")
    assert (read.attributes["dissociated.dataset"], read.attributes["dissociated.version"]) == ("data", 1)
    assert read.attributes["dissociated.transport"] == stream.attributes["dissociated.transport"] == scheme
    assert stream.attributes["dissociated.dataset"] == "data"
    assert stream.attributes["dissociated.outcome"] == "done"
    assert stream.attributes["dissociated.messages"] >= 2
    if reading == "whole":
        assert stream.attributes["dissociated.rows"] == 100
        assert stream.attributes["dissociated.bytes"] == 800
    assert (read.status, stream.status) == ("UNSET", "UNSET")


@pytest.mark.parametrize("scheme", ["shm", "tcp", "grpc"])
def test_the_calls_of_a_catalog_belong_to_the_read_of_a_client(recorded: Recorded, scheme: str) -> None:
    (read,) = recorded.below(recorded.root(f"whole {scheme}"), "dissociated.read")
    assert len(recorded.below(read, "dissociated.catalog/GetFlightInfo")) == 1
    assert len(recorded.below(read, "dissociated.catalog/DoGet")) == (scheme == "grpc")


@pytest.mark.parametrize("scheme", ["shm", "grpc"])
def test_the_calls_of_a_catalog_belong_to_the_put_of_a_client(recorded: Recorded, scheme: str) -> None:
    (put,) = recorded.below(recorded.root(f"put {scheme}"), "dissociated.put")
    assert (put.attributes["dissociated.dataset"], put.attributes["dissociated.rows"]) == (f"put {scheme}", 5)
    actions = [span.attributes["dissociated.action"] for span in recorded.below(put, "dissociated.catalog/DoAction")]
    assert len(recorded.below(put, "dissociated.catalog/DoPut")) == (scheme == "grpc")
    assert ("commit" in actions) == (scheme == "shm")


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_both_sides_say_how_a_read_failed(recorded: Recorded, scheme: str) -> None:
    (read,) = recorded.below(recorded.root(f"missing {scheme}"), "dissociated.read")
    (stream,) = recorded.below(read, "dissociated.stream")
    assert (read.status, read.attributes["error.type"]) == ("ERROR", "ColumnNotFound")
    assert (stream.status, stream.attributes["error.type"]) == ("ERROR", "refused")


def identifier(traceparent: object) -> bytes:
    """Return the identifier for the ticket b"data" with a trace context, as docs/framing.md describes it."""
    return b"DISSREQ\x01" + struct.pack("<I", 4) + b"data" + json.dumps({"traceparent": traceparent}).encode()


def test_an_invalid_trace_context_is_ignored() -> None:
    with traced_server() as server:
        for value in [*HOSTILE, VALID]:
            assert dis.open_stream(server.location, identifier(value)).read_all().num_rows == 100
        streams = [span for span in server.end() if span.name == "dissociated.stream"]
    assert len(streams) == len(HOSTILE) + 1
    assert [span.trace for span in streams if span.parent is not None] == [TRACE]
    assert len({span.trace for span in streams}) == len(streams)


def test_an_invalid_header_is_ignored() -> None:
    # gRPC refuses other characters and long headers by itself.
    headers = [value for value in HOSTILE if isinstance(value, str) and value.isprintable() and len(value) < 100]
    with traced_server() as server:
        with flight.FlightClient(server.catalog_uri) as client:
            for header in [*filter(str.isascii, headers), VALID]:
                options = flight.FlightCallOptions(headers=[(b"traceparent", header.encode())])
                assert [*client.list_flights(b"", options)]
        spans = server.end()
    assert {span.name for span in spans} == {"dissociated.catalog/ListFlights"}
    assert [span.trace for span in spans if span.parent is not None] == [TRACE]


@pytest.mark.parametrize("value", [VALID, *HOSTILE])
def test_a_server_that_does_not_trace_takes_any_trace_context(serve: Serve, value: object) -> None:
    server = serve("tcp://127.0.0.1:0")
    table = pa.table({"n": [1, 2]})
    server.publish("data", table, ticket=b"data")
    (location,) = server.locations("data")
    assert "trace=" not in location
    assert dis.open_stream(location, identifier(value)).read_all().equals(table)


@pytest.mark.parametrize("without_api", [False, True])
def test_a_program_that_sets_up_no_tracing_does_not_load_it(without_api: bool) -> None:
    script = (
        f"import sys; without_api = {without_api}\n"
        "if without_api: sys.modules['opentelemetry'] = None\n"
        "import dissociated as dis, pyarrow as pa\n"
        "table = pa.table({'n': [1, 2]})\n"
        "with dis.Server(['shm:', 'tcp://127.0.0.1:0']) as server:\n"
        "    server.publish('data', table)\n"
        "    with dis.connect(server.catalog_uri) as client:\n"
        "        for scheme in 'shm', 'tcp', 'grpc':\n"
        "            assert client.read('data', transport=scheme).read_all().equals(table)\n"
        "        client.put('more', table)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with Fork("-c", script, **pipes) as process:  # The library was imported before, and has not loaded it either.
        printed = process.communicate(timeout=3 * PATIENCE)
    assert printed == ("['opentelemetry']\n" if without_api else "[]\n", "")

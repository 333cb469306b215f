"""Processes that trace with the SDK of OpenTelemetry, each with a provider of its own, and the spans that they made.

OpenTelemetry sets a provider for good, so that a process which traces for one test does so for all that follow. Only
this file uses its private attribute, to undo that.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from support.helpers import rest_of
from support.processes import Fork

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_BEFORE = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
import pyarrow as pa
import dissociated as dis
"""
_AFTER = """
for span in exporter.get_finished_spans():
    parent = None if span.parent is None else format(span.parent.span_id, "016x")
    ids = format(span.context.trace_id, "032x"), format(span.context.span_id, "016x"), parent
    print(json.dumps([*ids, span.name, dict(span.attributes), span.status.status_code.name]))
"""
_SERVER = """
with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    server.publish("data", pa.table({"n": range(100)}), ticket=b"data")
    print(json.dumps([server.catalog_uri, server.locations("data")[1]]), flush=True)
    sys.stdin.read()
"""


class RecordedSpan(NamedTuple):
    """A finished span."""

    trace: str
    id: str
    parent: str | None
    name: str
    attributes: dict[str, Any]
    status: str


class TracedServer:
    """A server of the dataset `data`, with the ticket b"data" and 100 rows, in a process that traces."""

    def __init__(self, process: Fork) -> None:
        self._process = process
        assert process.stdout is not None
        #: The catalog, and a location over tcp.
        self.catalog_uri, self.location = json.loads(process.stdout.readline())

    def end(self) -> list[RecordedSpan]:
        """End the process, and return all its spans."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return _spans(rest_of(self._process))


@contextmanager
def traced_server() -> Iterator[TracedServer]:
    with _start(_SERVER) as process:
        yield TracedServer(process)


@contextmanager
def tracing() -> Iterator[Tracer]:
    """Let this process trace within the block, and yield a tracer of the application."""
    from opentelemetry.sdk.trace import TracerProvider

    provider = TracerProvider()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
        yield provider.get_tracer("app")


def traced_run(script: str, *arguments: str) -> list[RecordedSpan]:
    """Run a script in a process that traces, and return its spans."""
    with _start(script, *arguments) as process:
        return _spans(rest_of(process))


def _start(script: str, *arguments: str) -> Fork:
    return Fork("-c", _BEFORE + script + _AFTER, *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _spans(output: str) -> list[RecordedSpan]:
    return [RecordedSpan(*json.loads(line)) for line in output.splitlines()]

"""The trace context of a driver, which reaches the servers that Spark's tasks read from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from dissociated.errors import OptionError
from dissociated.spark import publish, read
from dissociated.spark.request import DatasetRequest
from support.tracing import traced_server, tracing

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")


def test_the_reads_and_writes_of_tasks_belong_to_the_span_of_the_driver(
    forks: None, spark: SparkSession, use_jvm: Callable[[bool], None]
) -> None:
    ways = {(in_jvm, scheme) for in_jvm in (True, False) for scheme in ("shm", "tcp")}
    drivers = {}
    with traced_server() as server:
        for in_jvm, scheme in ways:
            use_jvm(in_jvm)
            with tracing() as tracer, tracer.start_as_current_span("query") as span:
                rows = read(spark, "data", server.catalog_uri, transport=scheme, partitions=2).collect()
                publish(spark.range(5), f"out {in_jvm} {scheme}", server.catalog_uri)
            assert sorted(row.n for row in rows) == [*range(100)]
            context = span.get_span_context()
            drivers[f"{context.trace_id:032x}", f"{context.span_id:016x}"] = in_jvm, scheme
        spans = server.end()
    streams = [span for span in spans if span.name == "dissociated.stream"]
    assert all((span.trace, span.parent) in drivers for span in spans)
    commits = [span for span in spans if span.attributes.get("dissociated.action") == "commit"]
    assert sorted(drivers[span.trace, span.parent] for span in commits if span.parent) == sorted(ways)
    read_by = {
        (drivers[span.trace, span.parent], span.attributes["dissociated.transport"]) for span in streams if span.parent
    }
    # Planning counts the rows of batches by the nearest transport, which may be another than that of the tasks.
    assert read_by >= {(way, way[1]) for way in ways}


@pytest.mark.parametrize("value", ["", "garbage", f"00-{'0' * 32}-{'1' * 16}-01\n"])
def test_an_invalid_trace_context_is_refused_at_planning(value: str) -> None:
    with pytest.raises(OptionError, match="the option traceparent is a trace context"):
        DatasetRequest.parse({"catalog": "grpc://127.0.0.1:1", "path": "data", "traceparent": value})

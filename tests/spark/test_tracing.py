"""The trace context of a driver, which reaches the servers that Spark's tasks read from."""

from __future__ import annotations

import pytest

from dissociated.errors import OptionError
from dissociated.spark.request import DatasetRequest
from support.tracing import traced_run, traced_server

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")

DRIVER = """
from dissociated.spark import read, session
spark = session("traced", **{"spark.log.level": "OFF"})
for in_jvm in "true", "false":
    spark.conf.set("spark.dissociated.jvm", in_jvm)
    for scheme in "shm", "tcp":
        with trace.get_tracer("app").start_as_current_span(f"{scheme} {in_jvm}"):
            rows = read(spark, "data", sys.argv[1], transport=scheme, partitions=2).collect()
        assert sorted(row.n for row in rows) == [*range(100)]
spark.stop()
"""


def test_the_streams_of_tasks_belong_to_the_span_of_the_driver(java: str) -> None:
    with traced_server() as server:
        spans = {span.id: span for span in traced_run(DRIVER, server.catalog_uri)}
        streams = [span for span in server.end() if span.name == "dissociated.stream"]
    assert all(span.parent and span.trace == spans[span.parent].trace for span in streams)
    ways = {(spans[span.parent].name, span.attributes["dissociated.transport"]) for span in streams if span.parent}
    # Planning counts the rows of batches by the nearest transport, which may be another than that of the tasks.
    assert ways >= {(f"{scheme} {in_jvm}", scheme) for scheme in ("shm", "tcp") for in_jvm in ("true", "false")}


@pytest.mark.parametrize("value", ["", "garbage", f"00-{'0' * 32}-{'1' * 16}-01\n"])
def test_an_invalid_trace_context_is_refused_at_planning(value: str) -> None:
    with pytest.raises(OptionError, match="the option traceparent is a trace context"):
        DatasetRequest.parse({"catalog": "grpc://127.0.0.1:1", "path": "data", "traceparent": value})

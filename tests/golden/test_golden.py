"""The golden streams and files of the Arrow project: what libarrow reads in them is what a reader gets of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from helpers import leaving_nothing

Batches = list[tuple[pa.RecordBatch, Any]]

ROOT = Path(os.environ["ARROW_TEST_DATA"]) if os.environ.get("ARROW_TEST_DATA") else None
GOLDEN = (
    sorted(
        path
        for pattern in ("arrow-ipc-stream/integration/**/*", "arrow-ipc-file/**/*")
        for path in ROOT.glob(pattern)
        if path.suffix in (".stream", ".arrow_file")
    )
    if ROOT
    else []
)

pytestmark = pytest.mark.skipif(
    ROOT is None, reason="ARROW_TEST_DATA is not set: it is the directory `data` of apache/arrow-testing"
)


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with leaving_nothing(), dis.Server(["shm:", "tcp://127.0.0.1:0", "inproc:"], catalog=None) as running:
        yield running


def read_stream(reader: Any) -> Batches:
    batches = []
    while True:
        try:
            batch, custom = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return batches
        batches.append((batch, custom))


def read_by_libarrow(path: Path) -> tuple[pa.Schema, Batches]:
    if path.suffix == ".stream":
        reader = pa.ipc.open_stream(path)
        return reader.schema, read_stream(reader)
    file = pa.ipc.open_file(path)
    return file.schema, [file.get_batch_with_custom_metadata(index) for index in range(file.num_record_batches)]


def short(path: Path) -> str:
    assert ROOT is not None
    return str(path.relative_to(ROOT)).removeprefix("arrow-ipc-stream/integration/")


DAMAGED = (
    [path for name in ("stream", "file") for path in ROOT.glob(f"arrow-ipc-{name}/*") if path.is_file()] if ROOT else []
)


def test_damaged_streams_are_refused_when_they_are_published_or_read(server: dis.Server) -> None:
    """What the Arrow project's fuzzers found. Nobody is harmed who does something else meanwhile."""
    assert DAMAGED
    server.publish("good", pa.table({"n": [1, 2, 3]}))
    for path in DAMAGED:
        try:
            server.publish("damaged", path)
            for uri in server.locations("damaged"):
                list(dis.open_stream(uri, server.ticket("damaged")))
        except dis.DissociatedError:
            pass
        for uri in server.locations("good"):
            assert dis.open_stream(uri, server.ticket("good")).read_all().num_rows == 3


def test_there_are_some() -> None:
    assert GOLDEN, f"no golden streams below {ROOT}: is it the directory `data` of apache/arrow-testing?"


@pytest.mark.parametrize("bodies", ["any", "packed"])
@pytest.mark.parametrize("path", GOLDEN, ids=short)
def test_golden(server: dis.Server, path: Path, bodies: str) -> None:
    try:
        schema, batches = read_by_libarrow(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        pytest.skip(f"libarrow itself does not read this: {error}")
    server.publish("golden", path)
    for uri in server.locations("golden", bodies=bodies):
        reader = dis.open_stream(uri, server.ticket("golden"))
        assert reader.schema.equals(schema, check_metadata=True), uri
        assert read_stream(reader) == batches, uri

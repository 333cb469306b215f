"""The sidecar of Spark's JVM, called without a JVM."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.node.node import Node
from dissociated.spark.sidecar import Sidecar
from dissociated.store.store import Store
from support.helpers import PATIENCE, connections_left, wait_until
from support.processes import Fork

EACH, COUNT = 1_000, 6
TABLE = pa.Table.from_batches(
    [
        pa.record_batch({"n": range(first, first + EACH), "text": [f"{n:08}" for n in range(first, first + EACH)]})
        for first in range(0, COUNT * EACH, EACH)
    ]
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("data", TABLE)
        yield node


def planned(sidecar: Sidecar, node: Node, **sizes: Any) -> Any:
    options = {"path": "data", "catalog": node.uri}
    described = sidecar.describe(options)
    schema = described["schema"]
    columns = json.dumps({**json.loads(schema), "fields": json.loads(schema)["fields"][:1]})
    planned = described["version"], described["lineage"]
    return sidecar.plan(options, schema, columns, *planned, [], **{"share": 0.5, "tasks": 1, **sizes})


def test_what_lies_in_the_store_is_told_where_it_lies_and_not_copied(node: Node, tmp_path: Path) -> None:
    sidecar = Sidecar()
    plan = planned(sidecar, node)
    (partition,) = plan["partitions"]
    stream = sidecar.open(plan["reader"], partition["partition"], direct=True)["stream"]
    regions: list[str] = []
    numbers: list[int] = []
    while True:
        answer = sidecar.next(stream)
        regions += answer["regions"]
        for batch in answer["batches"]:
            ((length, offset, nulls, buffers, children, _kind, _width),) = batch["columns"]
            assert (length, offset, nulls, children) == (EACH, 0, 0, [])
            region, at, size = buffers[3:]
            with open(regions[region], "rb") as file:
                numbers += memoryview(os.pread(file.fileno(), size, at)).cast("q")[:length].tolist()
        if answer["ended"]:
            break
    assert numbers == TABLE["n"].to_pylist()
    assert {os.readlink(path).startswith(str(tmp_path)) for path in regions} == {True}
    sidecar.close(stream)
    wait_until(lambda: connections_left(node.server) == 0, "it has left")


def test_partitions_are_of_the_bytes_that_are_read_and_enough_for_all_tasks(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = Sidecar()
    nbytes = sidecar.describe({"path": "data", "catalog": node.uri})["nbytes"]
    monkeypatch.setattr("dissociated.spark.sidecar.SLICE_BYTES", -(-nbytes // COUNT))

    def partitions(share: float, tasks: int) -> int:
        return len(planned(sidecar, node, share=share, tasks=tasks)["partitions"])

    assert partitions(1.0, 1) == COUNT
    assert partitions(0.5, 1) == COUNT // 2
    assert partitions(0.01, 1) == 1
    monkeypatch.setattr("dissociated.spark.sidecar.SLICE_BYTES", nbytes)
    monkeypatch.setattr("dissociated.spark.reader.MIN_SLICE_BYTES", nbytes // COUNT)
    assert partitions(1.0, 1) == 1
    assert partitions(1.0, 2) == 2
    assert partitions(1.0, 100) == COUNT
    assert partitions(0.5, 100) == COUNT // 2
    assert partitions(0.01, 100) == 1
    monkeypatch.setattr("dissociated.spark.sidecar.SLICE_BYTES", -(-nbytes // 3))
    assert partitions(1.0, 3) == 3
    assert partitions(1.0, 2) == 4, "two rounds of two tasks"


def test_a_server_that_did_not_accept_the_jvm_in_time_is_not_asked_directly(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
        client.put("data", TABLE)
        sidecar = Sidecar()
        plan = planned(sidecar, node)
        (partition,) = plan["partitions"]
        server = sidecar.open(plan["reader"], partition["partition"], direct=True)["server"]
        sidecar.unresponsive(server["host"], server["port"])
        stream = sidecar.open(plan["reader"], partition["partition"], direct=True)["stream"]
        assert [batch["rows"] for batch in sidecar.next(stream)["batches"]] == [EACH]
        sidecar.close(stream)


def test_requests_are_utf_8_whatever_the_encoding_of_the_machine(node: Node) -> None:
    with dis.connect(node.uri) as client:
        client.put("Zürich", TABLE)
    request = {"id": 1, "call": "describe", "with": {"options": {"path": "Zürich", "catalog": node.uri}}}
    with subprocess.Popen(
        [sys.executable, "-m", "dissociated.spark.sidecar"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "iso-8859-1"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request, ensure_ascii=False).encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["result"]["rows"] == TABLE.num_rows


def test_it_ends_with_its_jvm_even_within_a_request(forks: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE)
        catalog = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        request = {"id": 1, "call": "describe", "with": {"options": {"path": "data", "catalog": catalog}}}
        with Fork("-m", "dissociated.spark.sidecar", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            with silent.accept()[0]:  # the call waits for an answer
                process.stdin.write('{"id": 2, "ca')
                process.stdin.close()
                assert process.wait(PATIENCE) == 0


def opened(sidecar: Sidecar, **options: str) -> int:
    described = sidecar.describe(options)
    schema = described["schema"]
    plan = sidecar.plan(options, schema, schema, described["version"], described["lineage"], [], 1.0, 1)
    (partition,) = plan["partitions"]
    return int(sidecar.open(plan["reader"], partition["partition"], direct=True)["stream"])


def test_of_memory_that_is_used_again_one_batch_is_held_and_the_last_until_the_end() -> None:
    """The server may wait for a batch before it sends more, and Spark may read the last batch after the end."""
    batches = [pa.record_batch({"n": range(10_000)})] * COUNT
    with dis.Server(["shm:"]) as server:
        server.publish("data", lambda: pa.RecordBatchReader.from_batches(batches[0].schema, iter(batches)))
        sidecar = Sidecar()
        stream = opened(sidecar, path="data", catalog=server.catalog_uri)
        counts = []
        while not (answer := sidecar.next(stream))["ended"]:
            counts.append(len(answer["batches"]))
        assert counts == [1] * COUNT
        assert answer["batches"] == []
        wait_until(lambda: server.status().leases == 1, "the last alone is held")
        sidecar.close(stream)
        wait_until(lambda: connections_left(server) == 0, "it has left")


def test_what_the_pieces_of_a_batch_share_is_copied_once(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.spark.stream.MAX_BATCH_BYTES", 5_000)
    sidecar = Sidecar()
    stream = opened(sidecar, path="data", catalog=node.uri, transport="grpc")
    answer = sidecar.next(stream)
    assert len(answer["batches"]) > 3
    assert len({json.dumps([column[3] for column in batch["columns"]]) for batch in answer["batches"]}) == 1
    sidecar.close(stream)


def test_closing_a_stream_does_not_wait_for_its_next_message() -> None:
    more = threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"n": [1]})
        more.wait()

    schema = pa.schema({"n": pa.int64()})
    with dis.Server(["shm:"]) as server, ThreadPoolExecutor(2) as threads:
        server.publish("data", lambda: pa.RecordBatchReader.from_batches(schema, batches()))
        sidecar = Sidecar()
        stream = opened(sidecar, path="data", catalog=server.catalog_uri)
        assert sidecar.next(stream)["batches"]
        waiting = threads.submit(sidecar.next, stream)
        try:
            wait_until(waiting.running, "it waits for more")
            threads.submit(sidecar.close, stream).result(PATIENCE)
        finally:
            more.set()
        waiting.exception(PATIENCE)
        wait_until(lambda: connections_left(server) == 0, "it has left")

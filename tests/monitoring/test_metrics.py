"""Metrics for Prometheus, read by Prometheus's own parser."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from cli.shell import run
from dissociated.errors import OptionError, TransportError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import PATIENCE, Serve, connections_left, open_live

parser = pytest.importorskip("prometheus_client.parser", reason="the extra `metrics` is not installed")

TABLE = pa.table({"n": [1, 2, 3]})
MB = 1 << 20


def scrape(uri: str) -> dict[tuple[str, str], float]:
    """Return every sample by its name and the value of its only label."""
    with urllib.request.urlopen(uri, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_everything_is_told(serve: Serve) -> None:
    server = serve("tcp:", "shm:", metrics="127.0.0.1:0")
    name = 'a "name" with\nall \\ that'
    server.publish(name, TABLE)
    server.publish("live", TABLE.to_reader)
    uri, shm = server.locations(name)
    assert dis.open_stream(uri, server.ticket(name)).read_all() == TABLE
    connections_left(server)
    kept = dis.open_stream(shm, server.ticket(name)).read_all()
    with pytest.raises(dis.errors.RemoteError):
        dis.open_stream(uri, b"wrong")
    while server.connections > 1:
        pass
    told = scrape(server.metrics_uri)
    at = uri.partition("?")[0]
    expected = {
        ("dissociated_streams_total", ""): 2,
        ("dissociated_sent_messages_total", ""): 4,
        ("dissociated_sent_bytes_total", ""): 48,
        ("dissociated_flight_streams_total", ""): 0,
        ("dissociated_leases", ""): 1,
        ("dissociated_connections_ended_total", "done"): 1,
        ("dissociated_connections_ended_total", "refused"): 1,
        ("dissociated_connections_ended_total", "gone"): 0,
        ("dissociated_connections_open", at): 0,
        ("dissociated_connections_accepted_total", at): 2,
        ("dissociated_connections_refused_total", at): 0,
        ("dissociated_connections_open", shm.partition("?")[0]): 1,
        ("dissociated_dataset_rows", name): 3,
        ("dissociated_dataset_size_bytes", name): 24,
        ("dissociated_dataset_consumers", name): 1,
        ("dissociated_dataset_streams_total", name): 2,
        ("dissociated_dataset_sent_messages_total", name): 4,
        ("dissociated_dataset_sent_bytes_total", name): 48,
        ("dissociated_dataset_leases", name): 1,
        ("dissociated_dataset_streams_total", "live"): 0,
        ("dissociated_dataset_missed_batches_total", "live"): 0,
        ("dissociated_missed_batches_total", ""): 0,
    }
    assert {key: told[key] for key in expected} == expected
    assert ("dissociated_dataset_rows", "live") not in told  # the number of rows is unknown
    assert kept == TABLE


def test_a_node_tells_how_full_its_store_is(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store", 1 << 20), ["shm:"], metrics="127.0.0.1:0") as node:
        told = scrape(node.server.metrics_uri)
        assert (told["dissociated_store_bytes", ""], told["dissociated_store_limit_bytes", ""]) == (0, 1 << 20)
        with dis.connect(node.uri) as client:
            client.put("d", TABLE.to_reader())
        assert scrape(node.server.metrics_uri)["dissociated_store_bytes", ""] == 4096
    with Node(Store(tmp_path / "store"), ["shm:"], metrics="127.0.0.1:0") as node:
        assert ("dissociated_store_limit_bytes", "") not in scrape(node.server.metrics_uri)


def test_there_is_nothing_else(serve: Serve) -> None:
    server = serve("inproc:", metrics="127.0.0.1:0")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(server.metrics_uri.replace("/metrics", "/"), timeout=10)
    request = urllib.request.Request(server.metrics_uri, method="POST", data=b"x")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=10)


def test_silent_clients_keep_no_other_client_out(serve: Serve) -> None:
    """Beyond a limit, the oldest connection is closed."""
    server = serve("inproc:", metrics="127.0.0.1:0")
    host, port = server.metrics_uri.split("/")[2].split(":")
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection((host, int(port)), PATIENCE)) for _ in range(16)]
        assert scrape(server.metrics_uri)
        assert [one.recv(1) for one in silent[:8]] == [b""] * 8


def test_clients_that_reconnect_at_once_close_no_new_client(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.monitoring.http.LEAST_TIME", PATIENCE)
    server = serve("inproc:", metrics="127.0.0.1:0")
    host, port = server.metrics_uri.split("/")[2].split(":")
    with ExitStack() as stack:
        crowd = [stack.enter_context(socket.create_connection((host, int(port)), PATIENCE)) for _ in range(9)]
        first, last = crowd[0], crowd[-1]
        for one in (last, first):
            one.sendall(f"GET /metrics HTTP/1.0\r\nHost: {host}\r\n".encode())
        last.sendall(b"\r\n")
        last.settimeout(0.3)
        with pytest.raises(TimeoutError):
            last.recv(1)  # the connection is still waiting for a place
        first.sendall(b"\r\n")
        assert first.recv(64).startswith(b"HTTP/1.0 200")
        last.settimeout(PATIENCE)
        assert last.recv(64).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("where", ["", "localhost", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:1/metrics", "http://a:1"])
def test_what_is_no_place(where: str) -> None:
    with pytest.raises((OptionError, dis.errors.UriError)):
        dis.Server([], catalog=None, metrics=where)


@pytest.mark.usefixtures("forks")
def test_missed_batches_are_told(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dissociated")
    exhausted, goes_on = threading.Event(), threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield from (pa.record_batch({"n": np.full(MB // 8, number)}) for number in range(100))
        exhausted.set()
        goes_on.wait(PATIENCE)

    server = serve("shm:", catalog="grpc://127.0.0.1:0", metrics="127.0.0.1:0", live_limit=8 * MB)
    source = pa.RecordBatchReader.from_batches(pa.schema([("n", pa.int64())]), batches())
    server.publish("live", source, live=dis.Live(policy="drop_oldest", stall_timeout=3600))
    reader = open_live(server, "shm")
    assert exhausted.wait(PATIENCE), "the source waits for the consumer"
    missing = [consumer.missed for consumer in server.status().consumers]
    told, shown = scrape(server.metrics_uri), run("status", server.catalog_uri)
    goes_on.set()
    missed = 100 - len([*reader])
    del reader
    assert connections_left(server) == 0
    assert missed > 0
    assert missing == [missed]
    for samples in (told, scrape(server.metrics_uri)):
        assert samples["dissociated_missed_batches_total", ""] == missed
        assert samples["dissociated_dataset_missed_batches_total", "live"] == missed
    assert f", {missed} missed" in shown
    ended: list[Any] = [record for record in caplog.records if record.getMessage().startswith("stream ended")]
    assert [record.missed for record in ended] == [missed]


def test_a_port_in_use_is_named(serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransportError, match=f"cannot listen on '{where}' for metrics"):
            serve("inproc:", metrics=where)


def test_a_server_without_metrics_loads_nothing_for_them(serve: Serve) -> None:
    server: Any = serve("inproc:")
    with pytest.raises(dis.DissociatedError, match="made without metrics"):
        _ = server.metrics_uri
    script = (
        "import sys, dissociated as dis\n"
        "with dis.Server(['inproc:'], catalog=None): pass\n"
        "assert not any(name.startswith(('prometheus', 'dissociated.monitoring.metrics')) for name in sys.modules)\n"
        "sys.modules['prometheus_client'] = None\n"
        "try: dis.Server([], catalog=None, metrics='127.0.0.1:0')\n"
        "except dis.errors.OptionError as error: print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("metrics need prometheus_client: pip install 'dissociated[metrics]'\n", "")

"""A node at SIGTERM: it waits for streams in progress, logs their clients, and leaves memory that clients hold."""

from __future__ import annotations

import hashlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.cli import main
from dissociated.errors import StoreError
from dissociated.monitoring.status import ServerStatus
from dissociated.node.launch import NodeAddress, ensure
from support.helpers import PATIENCE, wait_until
from support.nodes import READER, kill, put, spawn
from support.processes import Process, Start

ROWS = 200_000
BIG = 4_000_000  # rows, which no socket holds

HOLDER = """
import hashlib, sys, pyarrow as pa, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    held = client.read(sys.argv[2], transport=sys.argv[3]).read_all()
    print("reached", flush=True)
    sys.stdin.readline()
    buffers = [chunk.buffers()[1] for chunk in held["n"].chunks]
    print(held.num_rows, hashlib.sha256(b"".join(buffers)).hexdigest(), flush=True)
"""

SLOW = """
import sys, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    reader = client.read(sys.argv[2], transport="tcp")
    reader.read_next_batch()
    print("reached", flush=True)
    sys.stdin.readline()
    try:
        print(8192 + sum(batch.num_rows for batch in reader), flush=True)
    except dis.DissociatedError as error:
        print(type(error).__name__, flush=True)
"""


def numbers(rows: int) -> pa.Table:
    return pa.Table.from_batches(pa.table({"n": np.arange(rows)}).to_batches(max_chunksize=8192))


def digest(rows: int) -> str:
    return f"{rows} {hashlib.sha256(np.arange(rows).tobytes()).hexdigest()}\n"


def state(uri: str) -> ServerStatus:
    with dis.connect(uri) as client:
        return client.status()


@pytest.fixture
def log(memory: Path) -> Path:
    return memory / "log"


@pytest.fixture
def node(memory: Path, log: Path, start: Start) -> Process:
    """Start a node with a drain timeout of ten minutes that logs to a file."""
    return start("node", "--store", memory / "store", "--drain", "600", "--log-level", "info", log=log)


def test_arrays_that_clients_hold_outlive_the_node_and_hold_up_nothing(node: Process, log: Path) -> None:
    put(node.uri, "held", numbers(ROWS))
    holders = [spawn(HOLDER, node.uri, "held", "shm") for _ in range(3)]
    lagging = spawn(READER, node.uri, "held")  # the server has sent all data, of which the reader has taken one batch
    wait_until(lambda: [one.state for one in state(node.uri).consumers] == ["holding"] * 4, "all was sent")
    assert state(node.uri).state == "running"
    assert node.terminate() == 0
    for holder in holders:
        assert holder.communicate("\n", timeout=PATIENCE)[0] == digest(ROWS)
    assert lagging.communicate("\n", timeout=PATIENCE)[0] == f"{ROWS} {ROWS - 1}\n"
    assert "stopping" not in log.read_text()


def test_it_says_whom_it_waits_for(node: Process, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(node.uri, "held", numbers(ROWS))
    put(node.uri, "big", numbers(BIG))
    holder = spawn(HOLDER, node.uri, "held", "shm")
    slow = spawn(SLOW, node.uri, "big")
    node.signal(signal.SIGTERM)
    line = node.line()
    assert line.startswith("stopping: waiting up to 600 s for tcp client 127.0.0.1:")
    assert line.endswith(" (big)\n")
    assert "shm" not in line
    found = state(node.uri)
    assert found.state == "stopping"
    assert [one.dataset for one in found.consumers if one.connection in found.waits_for] == ["big"]
    assert sorted((one.dataset, one.state) for one in found.consumers) == [("big", "reading"), ("held", "holding")]
    main(["status", node.uri, "--once"])
    (number,) = found.waits_for
    assert f"\nstopping, and waits for #{number} tcp client 127.0.0.1:" in capsys.readouterr().out
    assert slow.communicate("\n", timeout=PATIENCE)[0] == f"{BIG}\n"
    assert node.wait() == 0
    assert holder.communicate("\n", timeout=PATIENCE)[0] == digest(ROWS)
    (logged,) = [one for one in log.read_text().splitlines() if "stopping" in one]
    assert f'connection={number} peer="tcp client 127.0.0.1:' in logged
    assert 'dataset="big"' in logged


@pytest.mark.usefixtures("forked_nodes")
@pytest.mark.parametrize("in_background", [True, False])
def test_the_next_node_waits_for_one_that_is_stopping(
    memory: Path, start: Start, capsys: pytest.CaptureFixture[str], in_background: bool
) -> None:
    store = memory / "store"
    options = ["--drain", "600", "--log-level", "info"]
    if in_background:
        first = ensure(store, options=options)
    else:
        first = NodeAddress((node := start("node", "--store", store, *options)).uri, node.pid)
    put(first.uri, "big", numbers(BIG))
    slow = spawn(SLOW, first.uri, "big")
    os.kill(first.pid, signal.SIGTERM)
    wait_until(lambda: not (store / "node.json").exists(), "it drains")
    log = store / "node.log"
    written = log.read_bytes() if in_background else b""
    with pytest.raises(StoreError, match=rf"its node, process {first.pid}, is stopping, and waits for streams in"):
        ensure(store, timeout=0.1)
    assert main(["ls", "--store", str(store)]) == 1
    assert f"Its node is stopping, and process {first.pid} waits for streams" in capsys.readouterr().err
    assert main(["stop", "--store", str(store), "--timeout", "0.1s"]) == 1
    assert f"process {first.pid} of the store {store} has not ended" in capsys.readouterr().err
    assert log.exists() == in_background  # by which Spark knows the nodes that it may start
    assert not in_background or log.read_bytes().startswith(written)
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(ensure, store)
        assert slow.communicate("\n", timeout=PATIENCE)[0] == f"{BIG}\n"
        second = starting.result(PATIENCE)
    assert second.pid != first.pid
    os.kill(second.pid, signal.SIGKILL)


def test_what_is_in_progress_at_the_deadline_is_cut_off(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store", "--drain", "0.3")
    put(node.uri, "big", numbers(BIG))
    slow = spawn(SLOW, node.uri, "big")
    node.signal(signal.SIGTERM)
    assert node.line().startswith("stopping: waiting up to 0.3 s for tcp client ")
    assert node.line().startswith("stopping: streams in progress are cut off after ")
    assert node.wait() == 0
    assert slow.communicate("\n", timeout=PATIENCE)[0] in ("RemoteError\n", "ConnectionClosed\n", "TransportError\n")


@pytest.mark.parametrize("live", [False, True])
def test_a_server_waits_for_who_holds_memory_that_would_be_used_again(live: bool) -> None:
    """Memory of a stream that one or several clients read is reused; the mapped copy of a table is not."""
    with dis.Server(["shm:"], catalog=None) as server:
        whole = numbers(ROWS)
        server.publish("static", whole, wait=True)
        server.publish("live", whole.to_reader if not live else whole.to_reader(), live=dis.Live() if live else None)

        def read(name: str) -> pa.Table:
            return dis.open_stream(server.locations(name)[0], server.ticket(name)).read_all()

        static, made = read("static"), read("live")
        wait_until(lambda: [one.state for one in server.status().consumers] == ["holding"] * 2, "all was sent")
        told: list[list[str | None]] = []
        assert not server.drain(0.0, lambda waited: told.append([one.dataset for one in waited]))
        assert told == [["live"]]
        assert made == whole
        del made
        assert server.drain(PATIENCE)
        assert [one.dataset for one in server.status().consumers if one.state == "holding"] == ["static"]
    assert static == whole


def test_nothing_waits_for_a_client_that_has_left(node: Process) -> None:
    put(node.uri, "big", numbers(BIG))
    slow = [spawn(SLOW, node.uri, "big") for _ in range(2)]
    node.signal(signal.SIGTERM)
    assert node.line().count("tcp client") == 2
    for one in slow:
        kill(one)
    assert node.wait() == 0

"""Byte counts of a stream while it is read, and of a stream whose reader ends early."""

from __future__ import annotations

import signal
import subprocess

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.monitoring.activity import Rate
from support.helpers import PATIENCE, Serve, case, connections_left, wait_until
from support.machine import media
from support.processes import Fork

SIZE = 1 << 28
READER = """
import sys
import dissociated as dis
reader = dis.open_stream(sys.argv[1], bytes.fromhex(sys.argv[2]))  # its first batch waits in the socket
print("begun", flush=True)
sys.stdin.read()
"""
READ_ALL = """
import os, signal, sys
import dissociated as dis
table = dis.open_stream(sys.argv[1], bytes.fromhex(sys.argv[2])).read_all()
"""
WHERE = {"ucx": "ucx:", "fabric": "fabric:?heartbeat=0.1"}
ONE_BATCH = READER.replace("print", "batch = next(reader); print")
STREAMS = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}

pytestmark = pytest.mark.usefixtures("forks")


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_bytes_are_counted_while_they_are_sent(serve: Serve, scheme: str) -> None:
    """Send one batch, and so one group, of 256 MiB: a reader at its start has received only part of it."""
    server = serve(f"{scheme}:")
    server.publish("large", pa.table({"n": pa.nulls(SIZE // 8, pa.int64()).fill_null(7)}))
    (uri,) = server.locations("large", bodies="packed")
    with Fork("-c", READER, uri, server.ticket("large").hex(), **STREAMS) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "begun\n"
        wait_until(lambda: server.status().totals.bytes, "some of it is counted")
        (consumer,) = server.status().consumers
        assert 0 < consumer.bytes < SIZE
        reader.send_signal(signal.SIGKILL)
        assert reader.wait(PATIENCE) == -signal.SIGKILL
    assert not connections_left(server)
    now = server.status()
    assert 0 < now.totals.bytes < SIZE
    assert now.datasets[0].bytes == now.totals.bytes
    assert (now.totals.gone, now.totals.failed, now.totals.done) == (1, 0, 0)
    assert dis.open_stream(uri, server.ticket("large")).read_all().num_rows == SIZE // 8
    assert not connections_left(server)
    assert server.status().totals.bytes == now.totals.bytes + SIZE


@pytest.mark.parametrize("scheme", media(WHERE))
def test_media_that_send_by_themselves_are_asked_what_they_have_sent(serve: Serve, scheme: str) -> None:
    """Send 32 messages of 4 MiB. Such a medium accepts 64 MiB at once, and bytes in flight do not count as sent."""
    server = serve(WHERE[scheme])
    batch = pa.record_batch({"n": np.full(1 << 19, 7)})
    server.publish("large", pa.Table.from_batches([batch] * 32))
    size = 32 * batch.nbytes
    (uri,) = server.locations("large", bodies="packed")
    with Fork("-c", ONE_BATCH, uri, server.ticket("large").hex(), **STREAMS) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "begun\n"
        wait_until(lambda: server.status().totals.bytes, "some of it is counted")
        (consumer,) = server.status().consumers
        assert 0 < consumer.bytes <= size // 2
        assert consumer.rate > 0
        assert consumer.peer.startswith(f"{scheme} client 127.0.0.1:")
        reader.kill()
    assert not connections_left(server)
    now = server.status()
    assert 0 < now.totals.bytes < size
    assert (now.totals.gone, now.totals.failed, now.totals.done) == (1, 0, 0)
    left = dis.open_stream(uri, server.ticket("large"))
    assert sum(left.read_next_batch().num_rows for _ in range(32)) == 32 * batch.num_rows
    # Wait before closing: UCX's last completions may be lost with the connection.
    wait_until(lambda: server.status().totals.bytes == now.totals.bytes + size, "all of it is counted")
    left.close()
    assert not connections_left(server)


@pytest.mark.parametrize("scheme", media(WHERE))
def test_a_client_that_is_killed_before_the_last_bytes_is_gone(serve: Serve, scheme: str) -> None:
    """Send 16 MiB, of which a client prefetches 4. A smaller stream could be prefetched whole."""
    server = serve(WHERE[scheme])
    batch = pa.record_batch({"n": np.full(1 << 17, 7)})
    server.publish("short", pa.Table.from_batches([batch] * 16))
    (uri,) = server.locations("short", bodies="packed")
    with Fork("-c", ONE_BATCH, uri, server.ticket("short").hex(), **STREAMS) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "begun\n"
        wait_until(lambda: [one.state for one in server.status().consumers] == ["holding"], "the medium has all of it")
        reader.kill()
    assert not connections_left(server)
    totals = server.status().totals
    assert (totals.gone, totals.failed, totals.done) == (1, 0, 0)
    dis.open_stream(uri, server.ticket("short")).read_all()
    assert not connections_left(server)
    assert server.status().totals.done == 1


def test_a_client_is_gone_if_it_ends_with_memory_and_done_if_it_freed_all(serve: Serve) -> None:
    """Count a script that exits with live arrays like a killed script: the server cannot tell them apart."""
    server = serve("shm:")
    table = pa.Table.from_batches([pa.record_batch({"n": np.full(1 << 14, 7)})] * 32)
    server.publish("static", table)
    server.publish("live", table.to_reader)
    for name in ("static", "live"):
        for end, expected in (("os.kill(os.getpid(), signal.SIGKILL)", (1, 0)), ("", (1, 0)), ("del table", (0, 1))):
            with case(f"{name}: {end}"):
                before = server.status().totals
                with Fork("-c", READ_ALL + end, server.locations(name)[0], server.ticket(name).hex()) as reader:
                    assert reader.wait(PATIENCE) == (-signal.SIGKILL if "KILL" in end else 0)
                assert not connections_left(server)
                now = server.status().totals
                assert (now.gone - before.gone, now.done - before.done) == expected


def test_a_rate_is_that_of_late_however_often_somebody_looks() -> None:
    rate = Rate(100.0)
    assert rate.at(100.0, 0) == 0
    assert [rate.at(100.5, 50), rate.at(102.0, 200)] == [100, 100]  # averaged since the start
    assert rate.at(102.5, 250) == 100  # too soon after the last call for a new rate
    assert [rate.at(103.0, 200), rate.at(104.0, 200), rate.at(105.0, 700)] == [0, 0, 500]
    assert rate.at(3705.0, 700) == 0  # an hour without data

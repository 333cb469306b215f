"""What is counted of a stream while it is read, and of one whose reader goes early."""

from __future__ import annotations

import signal
import subprocess
import sys

import pyarrow as pa
import pytest

import dissociated as dis
from helpers import PATIENCE, Serve, connections_left, wait_until

SIZE = 1 << 28
READER = """
import sys
import dissociated as dis
reader = dis.open_stream(sys.argv[1], bytes.fromhex(sys.argv[2]))  # its first batch waits in the socket
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_bytes_are_counted_while_they_are_sent(serve: Serve, scheme: str) -> None:
    """One batch, and so one group, of 256 MiB: a reader that has only begun has been sent some of it."""
    server = serve(f"{scheme}:")
    server.publish("large", pa.table({"n": pa.nulls(SIZE // 8, pa.int64()).fill_null(7)}))
    (uri,) = server.locations("large", bodies="packed")
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, uri, server.ticket("large").hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with reader:
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

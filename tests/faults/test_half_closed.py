"""Clients that shut down their sending side after the request: they still receive the whole stream."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from support.helpers import location, wait_until

from .conftest import Good, Serve
from .peer import ABORT, TAGGED, UNTAGGED, Frame, RawConnection, connect, is_end, want, want_of

BATCHES = 200
BATCH = pa.record_batch({"n": range(10_000), "s": [f"{n}" for n in range(10_000)]})


def table() -> pa.Table:
    return pa.Table.from_batches([BATCH] * BATCHES)


def reader() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(BATCH.schema, iter([BATCH] * BATCHES))


def decoded(frames: list[Frame]) -> list[pa.RecordBatch]:
    """Decode the inline messages in order. Runs do not occur, because these batches are too large."""
    headers = [frame.payload[5:] for frame in frames if frame.kind == UNTAGGED and frame.payload[0] == 1]
    bodies = {frame.tag: frame.payload for frame in frames if frame.kind == TAGGED}
    stream = b"".join(
        struct.pack("<Ii", 0xFFFFFFFF, len(header)) + header + bodies.get(number, b"")
        for number, header in enumerate(headers)
    )
    return list(pa.ipc.open_stream(stream))


def asked(good: Good, scheme: str, bodies: str) -> RawConnection:
    """Return a connection that has sent the request and shut down its sending side."""
    uri = location(good.server, "data", scheme, bodies=bodies)
    connection = connect(uri)
    connection.send(want(good.server.ticket("data"), want_of(uri)))
    connection.socket.shutdown(socket.SHUT_WR)
    return connection


#: A live stream over TCP is left out: nothing else tells its server that a consumer is gone. See docs/framing.md.
WAYS = [*((scheme, source) for scheme in ("tcp", "shm") for source in ("table", "reader", "callable")), ("shm", "live")]


@pytest.mark.parametrize(("scheme", "source"), WAYS)
def test_the_whole_stream_comes_inline(serve: Serve, scheme: str, source: str) -> None:
    good = serve(f"{scheme}:")
    live = dis.Live() if source == "live" else None
    good.server.publish("data", {"table": table, "reader": reader}.get(source, lambda: reader)(), live=live)
    with asked(good, scheme, "packed") as connection:
        batches = decoded(connection.read_frames())
    assert len(batches) == BATCHES
    assert all(batch.equals(BATCH) for batch in batches)


@pytest.mark.parametrize("source", ["static", "live"])
def test_what_comes_by_address_is_leased_until_the_client_hangs_up(serve: Serve, source: str) -> None:
    good = serve("shm:", live_limit=1 << 20)
    good.server.publish("data", table() if source == "static" else reader())
    with asked(good, "shm", "any") as connection:
        frames: list[Frame] = []
        while not frames or not is_end(frames[-1]):
            frames.append(connection.read_frame())
        by_address = [frame for frame in frames if frame.kind == TAGGED and frame.tag >> 56]
        if source == "live":  # A region that nobody frees is filled at most once.
            assert len(by_address) * BATCH.nbytes < (1 << 20) + 2 * BATCH.nbytes
        if source == "static" or by_address:
            connection.socket.settimeout(0.3)
            with pytest.raises(TimeoutError):
                connection.read_frame()  # The server waits.
            assert good.leases
    wait_until(good.alone, "the server has noticed that the client hung up")


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_a_client_that_disconnects_ends_the_reading_of_its_source(serve: Serve, scheme: str) -> None:
    good = serve(f"{scheme}:")
    good.server.publish("data", pa.RecordBatchReader.from_batches(BATCH.schema, itertools.repeat(BATCH)))
    with asked(good, scheme, "packed") as connection:
        connection.read_frame()
    wait_until(good.alone, "the server has let go of the connection")


def test_inline_bodies_of_a_client_that_also_maps_are_right_when_taken_late(serve: Serve) -> None:
    """Read inline bodies late: the server has disconnected the client by then, and has reused the memory they share."""
    good = serve("shm:", stall_timeout=1.0)
    half_closed = threading.Event()

    def numbered() -> Iterator[pa.RecordBatch]:
        for number in range(8):
            if number == 2:
                half_closed.wait()
            yield pa.record_batch({"n": np.full(1 << 17, number)})

    good.server.publish("data", numbered(), live=dis.Live())
    uri = location(good.server, "data", "shm")
    with connect(uri) as connection:
        connection.send(want(good.server.ticket("data"), want_of(uri)))
        by_address = 0
        # The client frees neither of them, so the server sends the rest inline, also after it gave the client up.
        while by_address < 2:
            by_address += connection.read_frame().kind == TAGGED
        connection.socket.shutdown(socket.SHUT_WR)
        half_closed.set()
        wait_until(lambda: good.server.status().kept, "it has been sent away for taking nothing")
        frames = [connection.read_frame()]
        while frames[-1].kind != ABORT:
            frames.append(connection.read_frame())
    assert b"took nothing for 1 s" in frames[-1].payload
    inline = {frame.tag: frame.payload for frame in frames if frame.kind == TAGGED and not frame.tag >> 56}
    assert inline
    for sequence, payload in inline.items():  # The schema has number 0.
        assert set(np.frombuffer(payload, np.int64)) == {sequence - 1}

"""Slow requests of many clients do not delay a client that sends its request at once."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import RemoteError
from dissociated.transport.framed.framing import PREAMBLE, FrameKind
from dissociated.uri import Uri
from support.certificates import Certificates
from support.helpers import PATIENCE, wait_until

from .conftest import Serve

#: Beginnings of a message and of a TLS record, sent one byte at a time and never completed.
MESSAGE = PREAMBLE + (FrameKind.TAGGED << 56 | 60_000).to_bytes(8, "little") + bytes(200)
RECORD = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc" + bytes(200)


def dialled(uri: Uri) -> socket.socket:
    if uri.scheme == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(PATIENCE)
        sock.connect(uri.path)
        return sock
    return socket.create_connection((uri.host, uri.port), PATIENCE)


def endless() -> pa.RecordBatchReader:
    batch = pa.record_batch({"n": [1]})
    return pa.RecordBatchReader.from_batches(batch.schema, itertools.repeat(batch))


@contextmanager
def trickling(uri: Uri, count: int) -> Iterator[Sequence[bool]]:
    """Keep `count` connections that send a byte now and then, and that reconnect when disconnected."""
    over, sent_away = threading.Event(), [False] * count

    def trickle(number: int) -> None:
        while not over.is_set():
            try:
                with dialled(uri) as sock:
                    for byte in RECORD if uri.scheme == "tls" else MESSAGE:
                        sock.send(bytes([byte]))
                        if over.wait(0.05):
                            return
            except OSError:
                sent_away[number] = True

    threads = [threading.Thread(target=trickle, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield sent_away
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("scheme", ["shm", "tcp", "tls"])
def test_a_client_with_a_request_is_served_beside_many_slow_ones(
    serve: Serve, certified: Certificates, scheme: str
) -> None:
    options = certified.options if scheme == "tls" else {}
    good = serve(f"{scheme}:", max_connections=4, max_pending=8, handshake_timeout=60, **options)
    uri = good.server.locations("good")[0]
    roots = f"&roots={certified.roots}" if scheme == "tls" else ""
    with trickling(Uri.parse(uri), 12):
        wait_until(lambda: good.server.connections >= 8, "they are there")
        for _ in range(3):
            dis.open_stream(uri + roots, good.server.ticket("good"), timeout=PATIENCE).read_all()
            wait_until(
                lambda: {one.state for one in good.server.status().consumers} <= {"pending"}, "its place is free"
            )
        assert good.server.connections <= 4 + 2 * 8  # Disconnected clients take a moment to close.
    wait_until(good.alone, "all have gone")


@pytest.mark.parametrize("scheme", ["shm", "tcp", "tls"])
def test_the_whole_handshake_has_one_deadline(serve: Serve, certified: Certificates, scheme: str) -> None:
    options = certified.options if scheme == "tls" else {}
    good = serve(f"{scheme}:", handshake_timeout=0.3, **options)
    with trickling(Uri.parse(good.server.locations("good")[0]), 1) as sent_away:
        wait_until(lambda: sent_away[0], "it was sent away", 5)
    wait_until(good.alone, "it is gone")


def test_places_for_who_asks_and_for_who_reads_are_counted_apart(serve: Serve) -> None:
    good = serve("tcp:", max_connections=2, max_pending=3)
    uri, ticket = good.server.locations("good")[0], good.server.ticket("good")
    good.server.publish("endless", endless)
    wanted = good.server.ticket("endless")
    with ExitStack() as open_now:
        readers = [dis.open_stream(uri, wanted) for _ in range(2)]
        silent = [open_now.enter_context(dialled(Uri.parse(uri))) for _ in range(5)]
        for _ in range(3):
            with pytest.raises(RemoteError, match="accepts no more connections"):
                dis.open_stream(uri, ticket)
        wait_until(lambda: good.server.connections <= 5, "the slowest have gone")
        assert silent[0].recv(1) == b""
        assert all(next(reader).num_rows for reader in readers)
        del readers
        wait_until(lambda: good.server.connections <= 3, "there is room")
        dis.open_stream(uri, ticket).read_all()
        (listener,) = good.server.status().listeners
        assert listener.refused == 3
    wait_until(good.alone, "all have gone")

"""Two hundred consumers at once, and hostile clients among good ones."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pyarrow as pa
import pytest

import dissociated as dis
from memory.maps import shared_bytes
from support.helpers import location, wait_until

from .conftest import ROWS, Serve
from .peer import PREAMBLE, RawConnection, connect, frame, free, free_of, head, want, want_of
from .test_client_misbehaves import read_stream

CROWD = 200


@pytest.mark.parametrize(
    ("scheme", "source"), [("shm", "table"), ("tcp", "callable"), ("shm", "live"), ("tcp", "live")]
)
def test_two_hundred_consumers_of_one_dataset(serve: Serve, table: pa.Table, scheme: str, source: str) -> None:
    """Connect all consumers, and read to the middle of the stream, before the first consumer continues."""
    good = serve("shm:", "tcp://127.0.0.1:0")
    live = dis.Live(late="refuse", consumers=CROWD, stall_timeout=60) if source == "live" else None
    good.server.publish("shared", table if source == "table" else table.to_reader, live=live)
    uri = location(good.server, "shared", scheme)
    ticket = good.server.ticket("shared")
    everybody = threading.Barrier(CROWD)

    def consume(number: int) -> bool:
        columns = [None, ["n"], ["name"]][number % 3]
        reader = dis.open_stream(uri, ticket, columns=columns, timeout=60)
        first = reader.read_next_batch()
        everybody.wait(60)
        arrived = pa.Table.from_batches([first, *reader])
        arrived.validate(full=True)
        return bool(arrived == (table if columns is None else table.select(columns)))

    with ThreadPoolExecutor(CROWD) as pool:
        assert list(pool.map(consume, range(CROWD))) == [True] * CROWD
    wait_until(good.alone, "all have been served")
    good.server.drop("shared")
    if source != "table":
        wait_until(lambda: shared_bytes("shared") == 0, "nothing is left of the stream")


# Hostile clients, each of which does one kind of harm on a connection


def foreign_tickets(connection: RawConnection, uri: str, ticket: bytes) -> None:
    guessed = bytes([ticket[0] ^ 1]) + ticket[1:]
    connection.send(want(guessed, want_of(uri)))
    assert b"no dataset has this ticket" in connection.read_rest()


def replayed_frees(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(want(ticket, want_of(uri)))
    held = read_stream(connection)
    connection.send(free(*held[:3], tag=free_of(uri)) * 2)
    assert b"which it does not hold" in connection.read_rest()


def frees_of_what_others_hold(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(want(ticket, want_of(uri)))
    held = read_stream(connection)
    connection.send(free(*range(held[0] - 100, held[0]), tag=free_of(uri)))
    assert b"which it does not hold" in connection.read_rest()


def addresses_outside(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(want(ticket, want_of(uri)))
    read_stream(connection)
    connection.send(free(2**64 - 1, 0, tag=free_of(uri)))
    assert b"which it does not hold" in connection.read_rest()


def garbage(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(bytes(range(256)))
    assert b"does not speak" in connection.read_rest()


def garbled_selection(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(want(b"DISSREQ\x01\xff\xff\xff\xff" + ticket, want_of(uri)))
    assert b"cannot be read" in connection.read_rest()


def promises(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(PREAMBLE + head(2, 2**55, want_of(uri)))
    assert b"at most 65536" in connection.read_rest()


def leaving_in_the_middle(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(want(ticket, want_of(uri)))
    connection.read_frame()


def requests_without_end(connection: RawConnection, uri: str, ticket: bytes) -> None:
    connection.send(want(ticket, want_of(uri)))
    read_stream(connection)
    connection.send(frame(2, ticket, want_of(uri)) * 100)
    assert b"a second stream" in connection.read_rest()


HARM = [
    foreign_tickets,
    replayed_frees,
    frees_of_what_others_hold,
    addresses_outside,
    garbage,
    garbled_selection,
    promises,
    leaving_in_the_middle,
    requests_without_end,
]


@contextmanager
def harmed(uri: str, ticket: bytes, silent: int) -> Iterator[None]:
    """Run four hostile clients again and again during the block, and a flood of silent connections."""
    over = threading.Event()

    def harm(number: int) -> int:
        done = 0
        while not over.is_set():
            with connect(uri) as connection:
                HARM[(number + done) % len(HARM)](connection, uri, ticket)
            done += 1
        return done

    flood = [connect(uri) for _ in range(silent)]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(harm, number) for number in range(4)]
        try:
            yield
        finally:
            over.set()
        assert sum(other.result() for other in others) > len(HARM)
    for connection in flood:
        connection.close()


def test_a_good_client_reads_on_whatever_others_do(serve: Serve, table: pa.Table) -> None:
    """Read while four hostile clients do harm again and again, and while a flood of connections is silent."""
    good = serve("shm:", max_connections=64)
    live = table.to_batches()
    endless = pa.RecordBatchReader.from_batches(table.schema, itertools.cycle(live))
    good.server.publish("live", endless, live=dis.Live(stall_timeout=60))
    uri, ticket = good.server.locations("good")[0], good.server.ticket("good")

    with harmed(uri, ticket, 40):
        reader = dis.open_stream(uri, good.server.ticket("live"), timeout=60)
        for number in range(300):
            assert reader.read_next_batch() == live[number % len(live)]
        for _ in range(30):
            assert dis.open_stream(uri, ticket, timeout=60).read_all() == table
    del reader
    wait_until(good.alone, "all have gone")
    assert ROWS * len(live) == good.server.dataset("good").rows

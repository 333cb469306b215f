"""A log that peers cannot fill: the written lines, the counts of suppressed lines, and that no count is lost."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest
from pyarrow import flight

import dissociated as dis
from dissociated.base.limited_log import LimitedLog
from support.helpers import PATIENCE, connections_left

LOGGER = logging.getLogger("dissociated.test")


class Clock:
    """A clock that advances when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(clock: Clock, caplog: pytest.LogCaptureFixture) -> LimitedLog:
    caplog.set_level(logging.INFO)
    return LimitedLog(LOGGER, burst=3, interval=10.0, clock=clock)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None, int | None]]:
    """Return the written lines, each with its peer and the number of suppressed lines before it."""
    found = [(one.getMessage(), vars(one).get("peer"), vars(one).get("suppressed")) for one in caplog.records]
    caplog.clear()
    return found


def test_a_peer_has_some_lines_and_then_one_now_and_then(
    log: LimitedLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int, peer: str = "tcp client 10.0.0.7") -> None:
        log.write(logging.WARNING, "refused %d", number, event="refused", peer=f"{peer}:{4000 + number}")

    for number in range(10):
        refuse(number)
    assert lines(caplog) == [(f"refused {n}", f"tcp client 10.0.0.7:{4000 + n}", None) for n in range(3)]
    refuse(1, "tcp client 10.0.0.8")  # another peer and another event have limits of their own
    log.write(logging.WARNING, "gone", event="gone", peer="tcp client 10.0.0.7:1")
    assert [line for line, _, _ in lines(caplog)] == ["refused 1", "gone"]
    clock.now += 10.0
    refuse(11)
    refuse(12)
    assert lines(caplog) == [("refused 11", "tcp client 10.0.0.7:4011", 7)]
    clock.now += 1000.0
    for number in range(4):
        refuse(number, "tcp client 10.0.0.9")
    assert ("lines suppressed: last=refused 12", "tcp client 10.0.0.7", 1) in lines(caplog)
    log.close()
    assert lines(caplog) == [("lines suppressed: last=refused 3", "tcp client 10.0.0.9", 1)]
    log.close()
    assert lines(caplog) == []


def test_processes_of_one_user_are_one_peer(log: LimitedLog, caplog: pytest.LogCaptureFixture) -> None:
    for pid in range(100, 200):
        log.write(logging.INFO, "sent away", event="not allowed", peer=f"shm client {pid} of user 7")
    log.write(logging.INFO, "sent away", event="not allowed", peer="shm client 100 of user 8")
    assert [peer for _, peer, _ in lines(caplog)] == [
        *(f"shm client {pid} of user 7" for pid in (100, 101, 102)),
        "shm client 100 of user 8",
    ]


def test_ever_new_peers_take_no_more_memory_and_no_count_is_lost(
    log: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5000):
        for _ in range(4):
            log.write(logging.INFO, "again", event="e", peer=f"peer {number}")
    log.close()
    found = lines(caplog)
    assert sum(1 for line, _, _ in found if line == "again") == 3 * 5000
    assert sum(suppressed or 0 for _, _, suppressed in found) == 5000


def test_a_client_that_asks_for_nonsense_again_and_again_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """The client uses TCP, shared memory and Flight, and every other request is served meanwhile."""
    caplog.set_level(logging.INFO, "dissociated")
    table = pa.table({"n": [1, 2, 3]})
    with dis.Server(["tcp:", "shm:"]) as server, flight.connect(server.catalog_uri) as client:
        server.publish("d", table)
        for _ in range(60):
            for uri in server.locations("d"):
                with pytest.raises(dis.DissociatedError):
                    dis.open_stream(uri, b"nonsense", timeout=PATIENCE).read_all()
            with pytest.raises(flight.FlightError):
                client.get_flight_info(flight.FlightDescriptor.for_command(b'{"name": 5}'))
            with pytest.raises(flight.FlightError):
                [*client.do_action(flight.Action("drop", b"nonsense"))]
        connections_left(server)
        with dis.connect(server.catalog_uri) as ours:
            for transport in ("tcp", "shm", "grpc"):
                assert ours.read("d", transport=transport).read_all() == table
    records = [vars(one) for one in caplog.records if vars(one).get("outcome") != "done" and "change" not in vars(one)]
    # Leave out the lines that say who can reach the catalog.
    records = [one for one in records if one["name"] != "dissociated.catalog.service"]
    assert 4 * 20 <= len(records) <= 4 * 30
    written = [one for one in records if not one["message"].startswith("lines suppressed")]
    assert (
        len(written) + sum(one.get("suppressed", 0) for one in records) == 5 * 60
    )  # the second call over Flight logs two lines

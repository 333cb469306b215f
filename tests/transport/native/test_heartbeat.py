from __future__ import annotations

import threading

from dissociated.transport.native.threads import Heartbeat
from support.helpers import PATIENCE


class Failing:
    """A connection that cannot send its heartbeats."""

    def __init__(self) -> None:
        self.beats = threading.Semaphore(0)

    def send_heartbeat(self) -> None:
        self.beats.release()
        raise MemoryError("there is no memory for what the peer says")


def test_one_that_fails_does_not_end_the_heartbeats() -> None:
    heart, connection = Heartbeat(), Failing()
    heart.add(connection.send_heartbeat, 0.01)
    try:
        assert all(connection.beats.acquire(timeout=PATIENCE) for _ in range(3))
    finally:
        heart.remove(connection.send_heartbeat)

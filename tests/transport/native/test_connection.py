"""What connections share whose medium has messages of its own. The real ones are in test_connections.py."""

from __future__ import annotations

import select
import time
from contextlib import closing
from typing import Any, NamedTuple

import pytest

from dissociated.errors import DeadlineExceeded, TransportError
from dissociated.protocol.message import Message
from dissociated.transport.base import Allocate, Connection, Listener
from dissociated.transport.native import listener as listening
from dissociated.transport.native import progress
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.listener import NativeListener
from helpers import Interruption, case


class Outgoing(NamedTuple):
    """A message, prepared."""

    size: int


class Quiet(NativeConnection):
    """Sends without ever saying that something happened, as UCX may when its own thread did the work."""

    def __init__(self, accepted: bool = False) -> None:
        super().__init__("nobody", accepted)
        self.looks = 0
        self.released = False

    def _encode(self, message: Message) -> Outgoing:
        return Outgoing(sum(map(len, message.parts)))

    def _progress(self) -> bool:
        return False

    def _arm(self) -> bool:
        return True

    def _sleep(self, seconds: float) -> None:
        select.select([self._waker.descriptor], [], [], min(seconds, 0.01))

    def _start(self, message: Any) -> None:
        self._posted("request", message.size, message)

    def _complete(self, request: Any) -> bool | None:
        self.looks += 1
        return self.looks > 2 or None

    def _waiting(self) -> bool:
        return False

    def _take(self, allocate: Allocate, most: int) -> bool:
        return False

    def _read(self, *arguments: Any) -> None:
        raise NotImplementedError

    def _send_abort(self, reason: str) -> bool:
        return False

    def _release(self) -> None:
        self.released = True


def test_what_completes_unnoticed_is_noticed() -> None:
    with closing(Quiet()) as connection:
        connection.send([Message(1, (b"body",))], 0.5)
        assert connection.looks == 3


class Endless(Quiet):
    """Something always happens, but nothing of what is sent ever leaves."""

    def _progress(self) -> bool:
        return True

    def _complete(self, request: Any) -> bool | None:
        return None


def test_a_peer_that_sends_without_end_keeps_no_client_that_sends() -> None:
    with closing(Endless()) as connection, pytest.raises(DeadlineExceeded, match=r"took nothing for 0\.05 s"):
        connection.send([Message(1, (b"body",))], 0.05)


def test_ending_takes_no_longer_than_it_may_whatever_the_peer_does() -> None:
    connection = Endless(accepted=True)
    connection.send([Message(1, (b"body",))], 0.05)
    before = time.monotonic()
    connection.abort("because")
    connection.close()
    assert time.monotonic() - before < 3
    assert connection.released


class Failing(Quiet):
    """Its medium breaks while it ends."""

    def _progress(self) -> bool:
        raise TransportError("out of order")


def test_a_medium_that_fails_is_given_back_all_the_same() -> None:
    connection = Failing()
    with pytest.raises(TransportError, match="out of order"):
        connection.send([Message(1, (b"body",))], 0.05)
    connection.finish(0.05)
    connection.abort("because")
    connection.close()
    assert connection.released


class QuietListener(NativeListener):
    """Nobody ever comes, and it does not wait long for them."""

    def __init__(self) -> None:
        super().__init__(exposes_memory=False)
        self.looks = 0

    def _progress(self) -> None:
        self.looks += 1
        if self.looks > 2:
            raise TransportError("nobody comes")

    def _next(self) -> Connection | None:
        return None

    def _arm(self) -> bool:
        return True

    def _sleep(self) -> None:
        pass

    def _register(self, region: Any) -> Any:
        raise NotImplementedError

    def _turn_away(self) -> None:
        pass

    def _release(self) -> None:
        pass


def test_ctrl_c_at_any_line_of_waiting_is_no_other_error_and_keeps_nobody_from_closing() -> None:
    def receive(connection: Connection, listener: Listener) -> None:
        connection.receive(0.02, lambda tag, length: bytearray(length))

    def accept(connection: Connection, listener: Listener) -> None:
        listener.accept()

    for wait, module, functions in (
        (receive, progress, ("_wait", "_wake_up")),
        (accept, listening, ("accept", "_wake_up")),
    ):
        at, interrupted = 0, True
        while interrupted:
            with case((functions, at)), closing(Quiet()) as connection, closing(QuietListener()) as listener:
                with (
                    pytest.raises((KeyboardInterrupt, DeadlineExceeded, TransportError)) as raised,
                    Interruption(module, *functions, at=at) as interruption,
                ):
                    wait(connection, listener)
                interrupted = interruption.came
                assert raised.errisinstance(KeyboardInterrupt) == interrupted
            at += 1
        assert at > 10

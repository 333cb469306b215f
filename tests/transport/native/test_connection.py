"""Connections over media with messages of their own, with emulated media. test_connections.py has the real ones."""

from __future__ import annotations

import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, NamedTuple

import pytest

from dissociated.errors import ConnectionClosed, DeadlineExceeded, TransportError
from dissociated.protocol.message import Message
from dissociated.transport.base import Allocate, Connection, Listener
from dissociated.transport.native import connection as connecting
from dissociated.transport.native import listener as listening
from dissociated.transport.native import threads
from dissociated.transport.native.channel import Channel, Traffic, WaitFor
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.listener import NativeListener
from support.helpers import PATIENCE, Interruption, case, leaving_nothing


class Outgoing(NamedTuple):
    """A prepared message."""

    size: int


class Quiet(Channel):
    """A channel that completes sends without reporting progress, as UCX may when its own thread did the work."""

    encoding = "quiet"

    def __init__(self, accepted: bool = False) -> None:
        super().__init__(Traffic("nobody", accepted))
        self.traffic.connected = True
        self.looks = 0
        self.released = 0  # number of calls
        self.sleeping = threading.Event()  # set while a thread sleeps

    def open(self) -> None:
        pass

    def connect(self, wait_for: WaitFor) -> None:
        pass

    def encode(self, message: Message) -> Outgoing:
        return Outgoing(sum(map(len, message.parts)))

    def has_room(self, size: int) -> bool:
        return True

    def progress(self) -> bool:
        return False

    def arm(self) -> bool:
        return True

    def sleep(self, seconds: float) -> None:
        self.sleeping.set()
        select.select([self.traffic.monitor.waker.descriptor], [], [], min(seconds, 0.01))
        self.sleeping.clear()

    def send(self, message: Any) -> None:
        self.traffic.track("request", message.size, message)

    def complete(self, request: Any) -> bool | None:
        self.looks += 1
        return self.looks > 2 or None

    def holds_message(self) -> bool:
        return False

    def receive(self, allocate: Allocate, most: int) -> bool:
        return False

    def read(self, *arguments: Any) -> bool:
        raise NotImplementedError

    def send_abort(self, reason: str) -> bool:
        return False

    def close(self) -> None:
        assert not self.sleeping.is_set()
        self.released += 1


def test_a_completion_without_notification_is_noticed() -> None:
    channel = Quiet()
    with closing(NativeConnection(channel)) as connection:
        connection.send([Message(1, (b"body",))], 0.5)
        assert channel.looks == 3


class Endless(Quiet):
    """A channel that always makes progress and never completes a send."""

    def progress(self) -> bool:
        return True

    def complete(self, request: Any) -> bool | None:
        return None


def test_a_peer_that_sends_without_end_keeps_no_client_that_sends() -> None:
    with (
        closing(NativeConnection(Endless())) as connection,
        pytest.raises(DeadlineExceeded, match=r"took nothing for 0\.05 s"),
    ):
        connection.send([Message(1, (b"body",))], 0.05)


def test_ending_takes_no_longer_than_it_may_whatever_the_peer_does() -> None:
    channel = Endless(accepted=True)
    connection = NativeConnection(channel)
    connection.send([Message(1, (b"body",))], 0.05)
    before = time.monotonic()
    connection.close("because")
    assert time.monotonic() - before < 3
    assert channel.released == 1


class Failing(Quiet):
    """A channel whose medium fails while it closes."""

    def progress(self) -> bool:
        raise TransportError("out of order")


def test_a_medium_that_fails_is_given_back_all_the_same() -> None:
    channel = Failing()
    connection = NativeConnection(channel)
    with pytest.raises(TransportError, match="out of order"):
        connection.send([Message(1, (b"body",))], 0.05)
    connection.close("because", linger=0.05)
    connection.close()
    assert channel.released == 1


class Slow(Quiet):
    """A channel of a server with a message under way, which takes several polls."""

    def __init__(self) -> None:
        super().__init__(accepted=True)
        self.traffic.track("request", 1, b"b")

    def complete(self, request: Any) -> bool | None:
        self.looks += 1
        return self.looks > 5 or None


def test_ctrl_c_at_any_line_of_what_closing_waits_for_gives_everything_back() -> None:
    for module, functions in (
        (connecting, ("_end", "_release_once")),
        (connecting, ("_drive", "_wait")),
        (threads, ("sleep",)),
    ):
        at, interrupted = 0, True
        while interrupted:
            with case((functions, at)), leaving_nothing():
                channel = Slow()
                connection = NativeConnection(channel)
                with suppress(KeyboardInterrupt), Interruption(module, *functions, at=at) as interruption:
                    connection.close()
                interrupted = interruption.came
                assert channel.released == 1
                connection.close()
                assert channel.released == 1
            at += 1
        assert at > 3


def ctrl_c_at_first(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` with a Ctrl-C at the start of its first call."""
    calls: list[None] = []

    def interrupted(*arguments: Any) -> Any:
        calls.append(None)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return method(*arguments)

    return interrupted


def test_ctrl_c_while_closing_waits_for_another_thread_gives_everything_back_after_it() -> None:
    with leaving_nothing(), ThreadPoolExecutor(1) as pool:
        channel = Quiet()
        lock = channel.traffic.monitor.lock
        lock.wait = ctrl_c_at_first(lock.wait)  # type: ignore[method-assign]
        connection = NativeConnection(channel)
        receiving = pool.submit(connection.receive, PATIENCE, lambda tag, length: bytearray(length))
        assert channel.sleeping.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            connection.close()
        assert channel.released == 1
        with pytest.raises(ConnectionClosed):
            receiving.result(PATIENCE)


def test_two_threads_that_close_give_back_once() -> None:
    with leaving_nothing(), ThreadPoolExecutor(1) as pool:
        channel = Slow()
        connection = NativeConnection(channel)
        first = pool.submit(connection.close)
        assert channel.sleeping.wait(PATIENCE)
        connection.close()
        first.result(PATIENCE)
        assert channel.released == 1


class QuietListener(NativeListener):
    """A listener without clients that fails after three polls."""

    def __init__(self) -> None:
        super().__init__(exposes_memory=False)
        self.looks = 0
        self.released = 0  # number of calls

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
        self.released += 1


class SleepyListener(QuietListener):
    """A listener that sleeps until a thread waits for it, which gets a Ctrl-C."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeping, self.waited_for = threading.Event(), threading.Event()
        wait = ctrl_c_at_first(self._lock.wait)
        self._lock.wait = lambda *timeout: self.waited_for.set() or wait(*timeout)  # type: ignore[method-assign,func-returns-value]

    def _progress(self) -> None:
        pass

    def _arm(self) -> bool:
        return not self._closed

    def _sleep(self) -> None:
        self.sleeping.set()
        assert self.waited_for.wait(PATIENCE)
        self.sleeping.clear()

    def _release(self) -> None:
        assert not self.sleeping.is_set()
        super()._release()


def test_ctrl_c_while_a_listener_is_closed_gives_everything_back_after_whoever_accepts() -> None:
    with leaving_nothing(), ThreadPoolExecutor(1) as pool:
        listener = SleepyListener()
        accepting = pool.submit(listener.accept)
        assert listener.sleeping.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            listener.close()
        assert listener.released == 1
        assert accepting.result(PATIENCE) is None
        listener.close()
        assert listener.released == 1


class Interrupted(QuietListener):
    """A listener whose thread gets a Ctrl-C while it turns clients away."""

    def _turn_away(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_while_clients_are_turned_away_gives_everything_back() -> None:
    with leaving_nothing():
        listener = Interrupted()
        with pytest.raises(KeyboardInterrupt):
            listener.close()
        assert listener.released == 1


def test_ctrl_c_at_any_line_of_giving_a_listener_back_gives_everything_back() -> None:
    at, interrupted = 0, True
    while interrupted:
        with case(at), leaving_nothing():
            listener = QuietListener()
            with suppress(KeyboardInterrupt), Interruption(listening, "_release_all", at=at) as interruption:
                listener.close()
            interrupted = interruption.came
            assert listener.released == 1
        at += 1
    assert at > 3


class Clinging(QuietListener):
    """It cannot turn its clients away."""

    def _turn_away(self) -> None:
        raise TransportError("they stay")


def test_a_listener_that_cannot_turn_clients_away_gives_everything_back() -> None:
    with leaving_nothing():
        listener = Clinging()
        with pytest.raises(TransportError, match="they stay"):
            listener.close()
        assert listener.released == 1


def test_ctrl_c_at_any_line_of_waiting_is_no_other_error_and_keeps_nobody_from_closing() -> None:
    def receive(connection: Connection, listener: Listener) -> None:
        connection.receive(0.5, lambda tag, length: bytearray(length))

    def accept(connection: Connection, listener: Listener) -> None:
        listener.accept()

    for wait, module, functions in (
        (receive, connecting, ("_drive", "_wait")),
        (accept, listening, ("accept",)),
        (receive, threads, ("sleep",)),
        (accept, threads, ("sleep",)),
    ):
        at, interrupted = 0, True
        while interrupted:
            with (
                case((functions, at)),
                closing(NativeConnection(Quiet())) as connection,
                closing(QuietListener()) as listener,
            ):
                with (
                    pytest.raises((KeyboardInterrupt, DeadlineExceeded, TransportError)) as raised,
                    Interruption(module, *functions, at=at) as interruption,
                ):
                    wait(connection, listener)
                interrupted = interruption.came
                assert raised.errisinstance(KeyboardInterrupt) == interrupted
            at += 1
        assert at > 3

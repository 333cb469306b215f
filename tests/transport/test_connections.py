"""Guarantees of every transport ("Requirements") between the two ends of a connection."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    RemoteError,
    RemoteProtocolError,
    SourceError,
    TransportError,
)
from dissociated.memory.shared import map_read_only
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.transport.base import Connection, Listener
from dissociated.transport.framed.connection import EncodedFrames
from dissociated.transport.framed.framing import MAX_CONTROL, encode_frames
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.registry import transport
from dissociated.transport.runs import RUN
from dissociated.uri import Uri
from support.certificates import Certificates
from support.helpers import PATIENCE, case, leaving_nothing, no_threads
from support.machine import media

STREAMS = {
    "inproc": "inproc:",
    "tcp": "tcp://127.0.0.1:0",
    "tcp6": "tcp://[::1]:0",
    "tls": "tls://127.0.0.1:0",
    "shm": "shm:",
}
#: Media with messages of their own, which may overtake each other.
NATIVE = {
    "ucx": "ucx://127.0.0.1:0",
    "ucx, none": "ucx://127.0.0.1:0?err_mode=none",
    "fabric": "fabric://127.0.0.1:0",
    "fabric, tcp": "fabric://127.0.0.1:0?provider=tcp",
}
MEDIA = STREAMS | NATIVE
#: The same media at IPv6 addresses, which matter only to connecting.
NATIVE_6 = {"ucx6": "ucx://[::1]:0", "fabric6": "fabric://[::1]:0"}


class Ends(NamedTuple):
    """The two ends of a connection."""

    client: Connection
    server: Connection


def allocate(tag: int | None, length: int) -> Any:
    return bytearray(length)


def receive(connection: Connection) -> Incoming | None:
    arrived = connection.receive(PATIENCE, allocate)
    assert not isinstance(arrived, Run)
    return arrived


def plain(incoming: Incoming | None) -> tuple[int | None, bytes] | None:
    return None if incoming is None else (incoming.tag, bytes(incoming.data))


@pytest.fixture(params=media(MEDIA))
def medium(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def listener(medium: str, trusted: Certificates) -> Iterator[Listener]:
    uri = Uri.parse((MEDIA | NATIVE_6)[medium])
    if medium == "tls":
        uri = uri.with_parameters(cert=trusted.cert, key=trusted.key)
    with leaving_nothing(), closing(transport(uri.scheme).listen(uri)) as listening:
        yield listening


def connect(listener: Listener) -> Ends:
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(transport(listener.uri.scheme).connect, listener.uri, PATIENCE)
        server = listener.accept()
        assert server is not None
        server.handshake(PATIENCE)
        while not connecting.done():
            server.arrived()  # Some media connect only while the server makes progress.
        return Ends(connecting.result(), server)


@pytest.fixture
def ends(listener: Listener) -> Iterator[Ends]:
    both = connect(listener)
    with both.client, both.server:
        yield both


MESSAGES = [
    Message(None, (b"untagged",)),
    Message(None, ()),
    Message(0, (b"tagged",)),
    Message(2**64 - 1, (b"in ", b"", b"parts of ", pa.py_buffer(b"many "), memoryview(b"kinds"))),
    Message(7, ()),
    Message(None, (b"x" * 100_001, b"y" * 33)),
    Message(8, (bytes(3 << 20), b"end")),
    *(Message(tag, (str(number).encode(),)) for number in range(300) for tag in (None, number)),
]
PLAIN = [(tag, b"".join(map(bytes, parts))) for tag, parts in MESSAGES]


def _ordered(ends: Ends, messages: list[Any]) -> list[Any]:
    """Sort the messages if the medium does not guarantee their order."""
    if not isinstance(ends.client, NativeConnection):
        return messages
    return sorted(messages, key=lambda message: (message[0] is None, message))


@pytest.mark.parametrize("medium", media(MEDIA | NATIVE_6))
@pytest.mark.parametrize("back", [False, True], ids=["to server", "to client"])
def test_messages_arrive_whole_and_in_order(ends: Ends, back: bool) -> None:
    sender, receiver = reversed(ends) if back else ends
    # A server limits metadata to the size of a client's requests.
    chosen = [index for index, (tag, data) in enumerate(PLAIN) if back or tag is not None or len(data) < 1 << 16]
    messages, expected = [MESSAGES[index] for index in chosen], [PLAIN[index] for index in chosen]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(sender.send, messages, PATIENCE)
        assert _ordered(ends, [plain(receive(receiver)) for _ in expected]) == _ordered(ends, expected)
        sending.result(PATIENCE)


def test_prepared_messages_can_be_sent_on_any_connection_of_the_same_kind(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as pool:
        prepared = None
        for _ in range(2):
            both = connect(listener)
            with both.client, both.server:
                both.client.send([Message(1, (b"ticket",))], PATIENCE)
                receive(both.server)  # The server now knows whether the client accepts runs.
                prepared = prepared or both.server.prepare(MESSAGES)
                sending = pool.submit(both.server.send, prepared, PATIENCE)
                arrived: list[Any] = []
                runs = 0
                while len(arrived) < len(PLAIN):
                    one = both.client.receive(PATIENCE, allocate)
                    runs += isinstance(one, Run)
                    arrived += map(plain, one.expand() if isinstance(one, Run) else [one])
                assert _ordered(both, arrived) == _ordered(both, PLAIN)
                assert (runs > 0) is both.server.takes_runs
                sending.result(PATIENCE)


@pytest.mark.parametrize("medium", ["tcp", "shm"])
def test_the_rest_of_what_was_sent_at_once_comes_first(ends: Ends) -> None:
    """The medium takes a part of a message. The rest is kept, although its memory changes, and the next send goes on.

    The reason for closing waits for the rest, too, or is left out: it is never taken for a part of the message.
    """
    client, server = ends
    assert server.sends_at_once
    size = 1 << 25  # more than the buffers of a TCP connection
    for number in range(2):
        memory = bytearray(number.to_bytes() * size)
        server.send_at_once(server.prepare([Message(number, (memory,))]))
        assert 0 < server.backlog < len(memory)
        memory[:] = bytes(len(memory))
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(server.send, [Message(None, (b"next",))] if number else (), PATIENCE)
            assert plain(receive(client)) == (number, number.to_bytes() * size)
            sending.result(PATIENCE)
        assert not server.backlog
        if number:
            assert plain(receive(client)) == (None, b"next")
    server.send_at_once(server.prepare([Message(7, (b"small",))]))
    assert not server.backlog
    assert plain(receive(client)) == (7, b"small")
    server.send_at_once(server.prepare([Message(8, (bytes(size),))]))
    server.close("reason")
    with pytest.raises(ConnectionClosed, match="in the middle of a message"):
        receive(client)


@pytest.mark.parametrize("medium", ["tcp", "shm"])
def test_a_message_that_found_no_room_in_time_is_not_sent_later(ends: Ends) -> None:
    """Its memory belongs to the caller again, who writes something else there before the connection is closed."""
    client, server = ends
    memory = bytearray(24_000)  # of which a Unix socket takes all, or nothing

    def sent() -> Iterator[int]:
        for number in itertools.count():
            memory[:] = number.to_bytes(2) * 12_000
            server.send(server.prepare([Message(number, (memory,))]), 0.2)
            yield number

    numbers: list[int] = []
    with pytest.raises(DeadlineExceeded):
        numbers.extend(sent())
    memory[:] = b"x" * len(memory)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(server.close, "reason")
        for number in numbers:
            assert plain(receive(client)) == (number, number.to_bytes(2) * 12_000)
        with pytest.raises((RemoteError, ConnectionClosed), match=r"reason|in the middle of a message"):
            receive(client)
        closing.result(PATIENCE)


@pytest.mark.parametrize("medium", media(["ucx", "fabric"]))
def test_runs_go_only_to_who_has_said_that_it_takes_them(listener: Listener) -> None:
    """Send runs only to clients that accept them. Clients announce that only if the URI offers runs, and send none."""
    both = connect(listener)
    with both.client, both.server:
        assert both.client.takes_runs
        both.client.send([Message(RUN, (bytes(24),))], PATIENCE)
        assert plain(receive(both.server)) == (RUN, bytes(24))
        assert both.server.takes_runs
    listener.uri = replace(listener.uri, parameters={**listener.uri.parameters, "runs": "0"})
    both = connect(listener)
    with both.client, both.server:
        assert not both.client.takes_runs
        both.client.send([Message(1, (b"ticket",))], PATIENCE)
        assert plain(receive(both.server)) == (1, b"ticket")
        assert not both.server.takes_runs
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(both.server.send, both.server.prepare(MESSAGES), PATIENCE)
            assert _ordered(both, [plain(receive(both.client)) for _ in PLAIN]) == _ordered(both, PLAIN)
            sending.result(PATIENCE)
        both.server.send([Message(RUN, (bytes(24),))], PATIENCE)
        assert plain(receive(both.client)) == (RUN, bytes(24))


@pytest.mark.parametrize("medium", media(["ucx", "fabric"]))
def test_a_connection_ends_if_no_thread_can_finish_its_sends(ends: Ends) -> None:
    with no_threads(), pytest.raises(TransportError, match=r"cannot start the thread .*: can't start new thread"):
        ends.server.send([Message(1, (bytes(1 << 24),))], PATIENCE)
    ends.server.close()


# Without error handling, UCX discards messages that a peer sent before it closed. That mode needs to linger.
@pytest.mark.parametrize("medium", media(one for one in MEDIA if one != "ucx, none"))
def test_closing_lets_what_was_sent_arrive(ends: Ends) -> None:
    ends.server.send([Message(None, (b"one",)), Message(2, (b"two",))], PATIENCE)
    ends.server.close()
    assert [plain(receive(ends.client)) for _ in range(3)] == [(None, b"one"), (2, b"two"), None]
    assert receive(ends.client) is None


def test_an_abort_arrives_after_what_was_sent(ends: Ends) -> None:
    def server() -> None:
        ends.server.send([Message(None, (b"one",))], PATIENCE)
        ends.server.close("the reason, ünïcödé")

    with ThreadPoolExecutor(1) as pool:
        aborting = pool.submit(server)
        assert plain(receive(ends.client)) == (None, b"one")
        with pytest.raises(RemoteError, match=r"^the reason, ünïcödé$"):
            receive(ends.client)
        ends.client.close()
        aborting.result(PATIENCE)


def test_lingering_lets_everything_arrive(ends: Ends, medium: str) -> None:
    bodies = [Message(number, (bytes(1 << 20),)) for number in range(20)]

    def server() -> None:
        ends.server.send([*bodies, Message(None, (b"end",))], PATIENCE)
        ends.server.close(linger=PATIENCE)
        complete = ends.server.close()
        # UCX may report an error instead if the peer closes at once, and nothing without error handling.
        assert complete or medium.startswith("ucx")

    with ThreadPoolExecutor(1) as pool:
        finishing = pool.submit(server)
        arrived = [plain(receive(ends.client)) for _ in range(21)]
        ends.client.close()
        finishing.result(PATIENCE)
    assert _ordered(ends, arrived) == [*((number, bytes(1 << 20)) for number in range(20)), (None, b"end")]


def test_a_silent_peer_exceeds_the_deadline_and_may_speak_later(ends: Ends) -> None:
    with pytest.raises(DeadlineExceeded, match=r"silent for 0\.01 s"):
        ends.client.receive(0.01, allocate)
    ends.server.send([Message(None, (b"late",))], PATIENCE)
    assert plain(receive(ends.client)) == (None, b"late")


def test_waiting_takes_no_processor_time(ends: Ends) -> None:
    before = time.process_time()
    with pytest.raises(DeadlineExceeded):
        ends.client.receive(0.5, allocate)
    assert time.process_time() - before < 0.1


def test_a_peer_that_takes_nothing_exceeds_the_deadline(ends: Ends) -> None:
    bodies = [Message(1, (bytes(1 << 20),))] * 100
    with pytest.raises(DeadlineExceeded, match=r"took nothing for 0\.01 s"):
        ends.server.send(bodies, 0.01)


def test_two_sides_that_both_send_do_not_block_each_other(ends: Ends) -> None:
    """Free leases from the client, one by one, while the server is still sending."""
    bodies = [Message(number, (bytes(1 << 20),)) for number in range(100)]
    frees = [Message(9, (bytes(8),)) for _ in range(5000)]
    ends.server.limit_tagged(8 * len(frees))

    def client() -> int:
        for free in frees:
            ends.client.send([free], PATIENCE)
        size = 0
        for _ in bodies:
            arrived = receive(ends.client)
            assert arrived is not None
            size += len(arrived.data)
        return size

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(client)
        for body in bodies:
            ends.server.send([body], PATIENCE)
        assert receiving.result(PATIENCE) == 100 << 20
    assert [plain(receive(ends.server)) for _ in frees] == [(9, bytes(8))] * len(frees)
    assert not ends.server.arrived()


@pytest.mark.parametrize(
    ("medium", "frees", "small"),
    [("tcp", False, True), ("tls", False, True), ("tls", False, False), ("shm", True, True), ("shm", False, False)],
)
def test_only_a_client_that_may_free_memory_keeps_a_send_waiting(ends: Ends, frees: bool, small: bool) -> None:
    """Take nothing, but send all the time: a message, or a byte of one."""
    end_of_drip = threading.Event()
    message = EncodedFrames([b"".join(map(bytes, encode_frames([Message(1, (bytes(4096),))])))])

    def drip() -> int:
        for at in range(50):
            if end_of_drip.wait(0.02):
                return at
            ends.client.send([Message(1, (bytes(8),))] if small else EncodedFrames([message[0][at : at + 1]]), PATIENCE)
        return 50

    with ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip)
        with pytest.raises(DeadlineExceeded, match=r"took nothing for 0\.4 s"):
            ends.server.send([Message(1, (bytes(1 << 20),))] * 100, 0.4)
        end_of_drip.set()
        assert (dripping.result(PATIENCE) == 50) == frees


def test_interrupting_ends_a_receive_in_another_thread(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive, ends.client)
        ends.client.interrupt()
        with pytest.raises(ConnectionClosed):
            receiving.result(PATIENCE)
    ends.client.close()
    with pytest.raises(ConnectionClosed):
        receive(ends.client)


def test_interrupting_ends_a_send_in_another_thread(ends: Ends) -> None:
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(
            ends.server.send, [Message(1, (bytes(1 << 28),)), Message(2, (bytes(1 << 28),))], PATIENCE
        )
        ends.server.interrupt()
        with pytest.raises(ConnectionClosed):
            sending.result(PATIENCE)


# The transport inproc buffers nothing while it sends.
@pytest.mark.parametrize("medium", media(one for one in MEDIA if one != "inproc"))
def test_a_client_that_sends_and_does_not_receive_is_cut_off(ends: Ends) -> None:
    """Send to a client that sends and never receives: its messages are buffered up to a limit."""

    def client() -> None:
        while True:
            ends.client.send([Message(1, (bytes(4096),))] * 16, PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client)
        with pytest.raises(RemoteProtocolError, match="sends data, but receives none"):
            ends.server.send([Message(None, (bytes(1 << 20),))] * 256, PATIENCE)
        ends.server.close()
        with pytest.raises(ConnectionClosed):
            sending.result(PATIENCE)


def test_a_peer_that_stops_receiving_may_continue_to_send(ends: Ends) -> None:
    ends.server.send([Message(None, (b"hello",))], PATIENCE)
    assert plain(receive(ends.client)) == (None, b"hello")
    ends.client.interrupt(sending=False)
    assert receive(ends.client) is None
    ends.client.send([Message(3, (b"still here",))], PATIENCE)
    assert plain(receive(ends.server)) == (3, b"still here")


class Ending(NamedTuple):
    """A way to end the server's side: whether that side may then send and receive, and what the client receives."""

    end: Callable[[Connection], object]
    sends: bool
    receives: bool
    client_receives: str | None


def _interrupt_while_closing(server: Connection) -> None:
    server.close(linger=PATIENCE)
    server.interrupt()


REASON = "the reason"
ENDINGS = {
    "send only": Ending(lambda server: server.interrupt(sending=False), True, False, "a message"),
    "closing": Ending(lambda server: server.close(linger=PATIENCE), False, True, None),
    "closing for a reason": Ending(lambda server: server.close(REASON, linger=PATIENCE), False, True, REASON),
    "interrupted": Ending(lambda server: server.interrupt(), False, False, None),
    "interrupted while closing": Ending(_interrupt_while_closing, False, False, None),
    "closed": Ending(lambda server: server.close(), False, False, "the end"),
    "closed for a reason": Ending(lambda server: server.close(REASON), False, False, REASON),
}


def test_each_state_allows_the_calls_of_the_table_and_shows_the_peer_what_the_table_says(listener: Listener) -> None:
    for name, ending in ENDINGS.items():
        both = connect(listener)
        with case(name), both.client, both.server, ThreadPoolExecutor(1) as pool:
            both.client.send([Message(1, (b"request",))], PATIENCE)
            assert plain(receive(both.server)) == (1, b"request")
            ending_begun = pool.submit(ending.end, both.server)
            if ending.client_receives == REASON:
                with pytest.raises(RemoteError, match=f"^{REASON}$"):
                    receive(both.client)
            elif ending.client_receives == "the end":
                with suppress(ConnectionClosed):
                    assert receive(both.client) is None
            if ending.client_receives is not None and not (ending.receives or ending.sends):
                both.client.close()
            ending_begun.result(PATIENCE)
            if ending.sends:
                sent = pool.submit(both.server.send, [Message(2, (b"a message",))], PATIENCE)
                assert plain(receive(both.client)) == (2, b"a message")
                sent.result(PATIENCE)
                assert receive(both.server) is None
            else:
                with pytest.raises(ConnectionClosed):
                    both.server.send([Message(2, (b"a message",))], PATIENCE)
            if ending.receives:
                freed = pool.submit(both.client.send, [Message(3, (bytes(8),))], PATIENCE)
                assert plain(receive(both.server)) == (3, bytes(8))
                freed.result(PATIENCE)
                both.client.close()
                assert receive(both.server) is None
                assert both.server.close()
            if not ending.sends:
                with pytest.raises(ConnectionClosed):
                    receive(both.server)
            both.server.interrupt()  # Every state takes these.
            both.server.close("too late", linger=PATIENCE)
            both.server.close()
            with pytest.raises(ConnectionClosed):
                receive(both.server)
            if name.startswith("interrupted"):  # The peer sees the end at the latest now.
                with suppress(ConnectionClosed):
                    assert receive(both.client) is None


# UCX reports small messages as received once it has sent them.
@pytest.mark.parametrize("medium", media(one for one in MEDIA if not one.startswith("ucx")))
def test_closing_waits_for_the_peer_as_long_as_it_lingers_and_no_longer(ends: Ends) -> None:
    ends.client.send([Message(1, (b"request",))], PATIENCE)
    assert plain(receive(ends.server)) == (1, b"request")
    ends.server.send([Message(2, (bytes(1 << 14),))], PATIENCE)
    ends.server.close(linger=0.01)
    assert not ends.server.close(), "the client has neither received everything nor closed"


def test_interrupting_ends_the_wait_of_a_close(ends: Ends) -> None:
    ends.client.send([Message(1, (b"request",))], PATIENCE)
    assert plain(receive(ends.server)) == (1, b"request")
    ends.server.send([Message(2, (bytes(1 << 14),))], PATIENCE)
    ends.server.close(linger=10 * PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(ends.server.close)
        ends.server.interrupt()
        assert not closing.result(PATIENCE), "the client still holds the connection"


def test_a_closed_listener_accepts_nobody_and_wakes_whoever_waits(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept)
        listener.close()
        assert accepting.result(PATIENCE) is None


@pytest.mark.parametrize("medium", ["tcp", "tls", "shm"])
def test_parts_from_a_mapped_file_arrive_in_their_place(ends: Ends, tmp_path: Path) -> None:
    """Send more than a socket buffers, between parts of other memory."""
    content = bytes(range(256)) * 20_000
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb") as file, ThreadPoolExecutor(1) as executor:
        part = memoryview(map_read_only(file.fileno(), len(content)))[1:-1]
        messages = [Message(7, (b"before", part, b"after")), Message(8, (part, part)), Message(None, (b"end",))]
        sent = executor.submit(ends.server.send, messages, PATIENCE)
        assert plain(receive(ends.client)) == (7, b"before" + content[1:-1] + b"after")
        assert plain(receive(ends.client)) == (8, content[1:-1] * 2)
        assert plain(receive(ends.client)) == (None, b"end")
        sent.result()


@pytest.mark.parametrize("medium", ["tcp", "tls", "shm"])
def test_what_a_connection_copies_may_change_once_it_is_sent(ends: Ends) -> None:
    assert ends.server.copies
    data = bytearray(b"a" * 50_000)
    ends.server.send([Message(7, (data,))], PATIENCE)
    data[:] = b"b" * len(data)
    assert plain(receive(ends.client)) == (7, b"a" * len(data))


@pytest.mark.parametrize("completed", [False, True])
@pytest.mark.parametrize("medium", ["tcp", "shm"])
def test_a_mapped_file_that_has_become_shorter_breaks_off(ends: Ends, tmp_path: Path, completed: bool) -> None:
    """Truncate a mapped file. The kernel reports the missing pages, without SIGBUS. (TLS would have to read them.)"""
    size = 2_000_000
    (tmp_path / "file").write_bytes(bytes(size))
    with (tmp_path / "file").open("rb+") as file:
        part = memoryview(map_read_only(file.fileno(), size))
        file.truncate(1_000_000)
        with ThreadPoolExecutor() as pool:
            received = pool.submit(receive, ends.client)
            with pytest.raises(SourceError, match="become shorter"):
                ends.server.send([Message(7, (b"before", part, b"after"))], PATIENCE)
            if completed:
                ends.server.send_zeros(PATIENCE)
                assert plain(received.result()) == (7, b"before" + bytes(size) + b"after")
                ends.server.close("it was modified")
                with pytest.raises(RemoteError, match="it was modified"):
                    receive(ends.client)
                return
            assert ends.server.written  # A later message would be taken for the rest.
            ends.server.close("x" * MAX_CONTROL, linger=0.01)
            ends.server.close()
            with pytest.raises(ConnectionClosed):
                received.result()


@pytest.mark.parametrize("medium", ["tcp"])
def test_little_is_sent_in_place_of_a_mapped_file_that_is_gone(ends: Ends, tmp_path: Path) -> None:
    """The peer need not receive gigabytes before it finds that the message is unusable."""
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(1 << 27)
        part = memoryview(map_read_only(file.fileno(), 1 << 27))
        file.truncate(1_000_000)
        with ThreadPoolExecutor() as pool:
            received = pool.submit(receive, ends.client)
            with pytest.raises(SourceError, match="become shorter"):
                ends.server.send([Message(7, (part,))], PATIENCE)
            ends.server.send_zeros(PATIENCE)
            ends.server.close("it was modified")
            with pytest.raises(ConnectionClosed, match="in the middle of a message"):
                received.result()
        assert ends.server.written < 2_000_000


def test_waiting_ends_with_a_message_or_when_another_thread_wakes(ends: Ends) -> None:
    client, server = ends
    server.wait(0.01)
    assert not server.arrived()
    client.send([Message(1, (b"x",))], PATIENCE)
    server.wait(PATIENCE)
    assert server.arrived()
    server.wait(PATIENCE)  # The message is still unread.
    assert plain(receive(server)) == (1, b"x")
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(server.pause, PATIENCE)
        server.wake()
        pausing.result(PATIENCE / 2)
        server.wait(PATIENCE)  # It notices that wake, too.
        for wake in (server.wake, client.close):  # Closing wakes a waiter, too.
            waiting = pool.submit(server.wait, PATIENCE)
            wake()
            waiting.result(PATIENCE / 2)
    server.wake()  # A wake before the wait counts.
    server.wait(PATIENCE)

"""The arrival of messages over one connection or two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound
from dissociated.errors import DissociatedError, RemoteProtocolError
from dissociated.protocol.message import Incoming, Run
from dissociated.transport.base import Allocate, Connection
from dissociated.transport.mailbox import Mailbox

_MAX_LEAD = 1 << 26  # bytes by which one connection may be ahead of the other
#: Receives from the stream of bodies, or of metadata; None at the end of its connection.
_ReceiveFrom: TypeAlias = Callable[[bool], Incoming | Run | None]


@contextmanager
def receiving(connections: Sequence[Connection], allocate: Allocate, timeout: float) -> Iterator[_ReceiveFrom]:
    """Provide a function that receives messages.

    If there are two connections, a thread receives from each of them.

    Args:
        connections: A connection for both streams, or one for metadata and one for bodies.
        allocate: Supplies the memory of bodies.
        timeout: Seconds for which the server may be silent.

    Returns:
        A function that takes True to receive from the stream of bodies, or False for that of metadata.
    """
    if len(connections) == 1:
        (connection,) = connections
        yield lambda bodies: connection.receive(timeout, allocate)
        return
    receivers: list[ReceiveThread] = []

    def on_misrouted(error: DissociatedError) -> None:
        for pump in receivers:  # the reader may wait for either of them
            pump.inbox.close(error)

    for bodies, connection in enumerate(connections):
        receivers.append(ReceiveThread(connection, bool(bodies), allocate, timeout, on_misrouted))
    try:
        yield lambda bodies: receivers[bodies].inbox.get(timeout)
    finally:
        for pump in receivers:
            pump.stop()
        for pump in receivers:
            pump.join()


class ReceiveThread(ProcessBound):
    """A thread that receives from one of two connections, so that neither connection can block the other."""

    def __init__(
        self,
        connection: Connection,
        bodies: bool,
        allocate: Allocate,
        timeout: float,
        on_misrouted: Callable[[DissociatedError], None],
    ) -> None:
        """Start the thread.

        Args:
            connection: The connection.
            bodies: Whether the connection carries bodies. If not, it carries metadata.
            allocate: Supplies the memory of bodies.
            timeout: Seconds for which the server may be silent.
            on_misrouted: Is called with the error if a message belongs to the other connection.
        """
        self.inbox: Mailbox[Incoming] = Mailbox(_MAX_LEAD)
        self._connection = connection
        self._bodies = bodies
        self._on_misrouted = on_misrouted
        self._thread = StreamThread(self, self._run, (allocate, timeout), "receive")
        self._thread.start()
        self.bind_to_process()

    def _run(self, allocate: Allocate, timeout: float) -> None:
        with self.inbox.filled_by("receiving"):
            while (incoming := self._connection.receive(timeout, allocate)) is not None:
                for message in incoming.expand():
                    self._check(message)
                    self.inbox.put(message, len(message.data), None)

    def _check(self, message: Incoming) -> None:
        if self._bodies is (message.tag is not None):
            return
        arrived, expected = ("metadata", "bodies") if self._bodies else ("a body", "metadata")
        error = RemoteProtocolError(
            f"the server sent {arrived} over the connection for {expected}: of two URIs the first is that of the "
            "metadata, and the second that of the bodies"
        )
        self._on_misrouted(error)
        raise error

    def stop(self) -> None:
        """Make the thread end."""
        if self.is_inherited:
            return
        self.inbox.close()
        self._connection.interrupt(sending=False)

    def join(self) -> None:
        """Wait until the thread has ended, unless it is the current one."""
        if self.is_inherited:
            return
        if self._thread is not threading.current_thread():  # the reader may be collected in that very thread
            self._thread.join()

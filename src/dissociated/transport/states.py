"""The states of a connection, seen from one side, and the calls that are allowed in each, in one table.

    state         send    receive   what the peer receives next, after all messages sent before
    OPEN          yes     yes       messages
    SEND_ONLY     yes     the end   messages; if the medium supports it, the peer's sends fail
    CLOSING       no      yes       the close reason, if there is one; the peer's own messages still arrive
    INTERRUPTED   no      no        the end of the connection, at the latest when this side is closed
    CLOSED        no      no        the close reason, or else the end of the connection

In SEND_ONLY, `receive` returns None. On some media, it first returns the messages that had arrived before.
`interrupt(sending=False)` ends receiving, `close` with a `linger` begins to close, `interrupt` and `close` end the
connection. These are allowed in every state. `send` and `receive` raise ConnectionClosed in a state that does not allow
them. A connection never goes back to an earlier state, so another thread may end it at any time.
"""

from __future__ import annotations

import threading
from enum import Enum

from dissociated.errors import ConnectionClosed


class ConnectionState(Enum):
    """The state of a connection, seen from one side."""

    # Members are singletons, and each message looks one up, so the fast hash by identity is used.
    __hash__ = object.__hash__

    OPEN = "open"
    #: `receive` returns None, while this side may continue to send.
    SEND_ONLY = "send only"
    #: This side has said why it closes, and sends nothing more. It still receives, and waits for the peer to close.
    CLOSING = "closing"
    #: Another thread has ended the connection, whose resources are still to be released.
    INTERRUPTED = "interrupted"
    CLOSED = "closed"


class Call(Enum):
    """A call of this side that needs or changes the state."""

    __hash__ = object.__hash__

    SEND = "send"
    RECEIVE = "receive"
    STOP_RECEIVING = "interrupt(sending=False)"
    INTERRUPT = "interrupt()"
    LINGER = "close(linger)"
    CLOSE = "close()"


# The calls that end a part or all of the connection, with the state after each.
_ENDINGS = {
    Call.STOP_RECEIVING: ConnectionState.SEND_ONLY,
    Call.INTERRUPT: ConnectionState.INTERRUPTED,
    Call.LINGER: ConnectionState.CLOSING,
    Call.CLOSE: ConnectionState.CLOSED,
}

#: The state after each call, by the state before it. A call that is missing here raises ConnectionClosed.
CALLS: dict[ConnectionState, dict[Call, ConnectionState]] = {
    ConnectionState.OPEN: {
        Call.SEND: ConnectionState.OPEN,
        Call.RECEIVE: ConnectionState.OPEN,
        **_ENDINGS,
    },
    ConnectionState.SEND_ONLY: {
        Call.SEND: ConnectionState.SEND_ONLY,
        Call.RECEIVE: ConnectionState.SEND_ONLY,
        **_ENDINGS,
    },
    ConnectionState.CLOSING: {
        Call.RECEIVE: ConnectionState.CLOSING,
        **_ENDINGS,
        Call.STOP_RECEIVING: ConnectionState.CLOSING,
    },
    ConnectionState.INTERRUPTED: {
        Call.STOP_RECEIVING: ConnectionState.INTERRUPTED,
        Call.INTERRUPT: ConnectionState.INTERRUPTED,
        Call.LINGER: ConnectionState.INTERRUPTED,
        Call.CLOSE: ConnectionState.CLOSED,
    },
    ConnectionState.CLOSED: dict.fromkeys(_ENDINGS, ConnectionState.CLOSED),
}


class Lifecycle:
    """The state of one side of a connection. Thread-safe."""

    def __init__(self) -> None:
        self.state = ConnectionState.OPEN
        self._lock = threading.RLock()  # reentrant, because a finalizer may close the connection of its own thread

    def take(self, call: Call) -> ConnectionState:
        """Make the transition that `CALLS` has for `call`, and return the state before it.

        Raises:
            ConnectionClosed: The state does not allow `call`.
        """
        before = self.state
        following = CALLS[before].get(call)
        if following is before:  # nearly every call: nothing changes, so no lock is needed
            return before
        with self._lock:
            before = self.state
            if (following := CALLS[before].get(call)) is None:
                raise ConnectionClosed("this side closed the connection")
            self.state = following
            return before

    @property
    def is_over(self) -> bool:
        """Return whether this side can neither send nor receive any more."""
        return self.state is ConnectionState.INTERRUPTED or self.state is ConnectionState.CLOSED

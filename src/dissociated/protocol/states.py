"""The states of a stream and the allowed transitions, for both roles, in one table.

A stream begins with want_data, runs while metadata and bodies flow, and ends in two steps: the sender announces the end
of stream, then waits until every address that it sent has been given back. A receiver that has seen the end of stream
still waits for messages that it has overtaken; it is complete when nothing is missing. A stream that failed may still
give memory back.

A step that is not in the table is an error of the side that takes it: LocalProtocolError for this side,
RemoteProtocolError for the peer.
"""

from __future__ import annotations

from enum import Enum

from dissociated.errors import ProtocolError


class State(Enum):
    """The state of a stream, seen from one side."""

    # Members are singletons, and each message looks one up, so the fast hash by identity is used.
    __hash__ = object.__hash__

    IDLE = "idle"
    STREAMING = "streaming"
    #: sender: waiting for free_data; receiver: end of stream seen, messages still missing
    ENDING = "ending"
    #: receiver only: everything arrived, addresses may still be held
    COMPLETE = "complete"
    DONE = "done"
    FAILED = "failed"


class Move(Enum):
    """The event that moves a stream from one state to the next."""

    __hash__ = object.__hash__

    WANT = "want_data"
    METADATA = "a metadata message"
    BODY = "a body"
    END = "an end of stream"
    FREE = "free_data"
    #: the receiver delivered the last message
    DELIVERED = "completion"
    #: the last address was given back
    DRAINED = "release of the last address"
    FAIL = "failure"


class Side(Enum):
    """The sides of a stream."""

    SENDER = "sender"
    RECEIVER = "receiver"


_RUNNING = {Move.METADATA: State.STREAMING, Move.BODY: State.STREAMING, Move.FREE: State.STREAMING}

TRANSITIONS: dict[Side, dict[State, dict[Move, State]]] = {
    Side.SENDER: {
        State.IDLE: {Move.WANT: State.STREAMING, Move.FAIL: State.FAILED},
        State.STREAMING: {**_RUNNING, Move.END: State.ENDING, Move.FAIL: State.FAILED},
        State.ENDING: {Move.FREE: State.ENDING, Move.DRAINED: State.DONE, Move.FAIL: State.FAILED},
        State.DONE: {},
        State.FAILED: {Move.FREE: State.FAILED, Move.FAIL: State.FAILED},
    },
    Side.RECEIVER: {
        State.IDLE: {Move.WANT: State.STREAMING, Move.FAIL: State.FAILED},
        State.STREAMING: {**_RUNNING, Move.END: State.ENDING, Move.FAIL: State.FAILED},
        State.ENDING: {
            Move.METADATA: State.ENDING,  # overtaken by the end of stream
            Move.BODY: State.ENDING,
            Move.FREE: State.ENDING,
            Move.DELIVERED: State.COMPLETE,
            Move.FAIL: State.FAILED,
        },
        State.COMPLETE: {Move.FREE: State.COMPLETE, Move.DRAINED: State.DONE, Move.FAIL: State.FAILED},
        State.DONE: {},
        State.FAILED: {Move.FREE: State.FAILED, Move.FAIL: State.FAILED},
    },
}


#: The rule of docs/framing.md that a peer breaks which makes a move too early, too late or too often.
_RULES = {
    Move.WANT: "request-once",
    Move.METADATA: "end-count",
    Move.BODY: "end-count",
    Move.END: "end-once",
    Move.FREE: "free-leased",
}


class Machine:
    """The state of one side of a stream."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.state = State.IDLE
        self._table = TRANSITIONS[side]

    def move(self, move: Move, error_type: type[ProtocolError]) -> None:
        """Make `move`, or raise `error_type` and keep the state."""
        following = self._table[self.state].get(move)
        if following is None:
            raise error_type(
                f"{move.value} is not allowed while the {self.side.value} of this stream is {self.state.value}",
                rule=_RULES.get(move),
            )
        self.state = following

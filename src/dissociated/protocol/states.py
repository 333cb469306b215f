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


class Step(Enum):
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


_RUNNING = {Step.METADATA: State.STREAMING, Step.BODY: State.STREAMING, Step.FREE: State.STREAMING}

TRANSITIONS: dict[Side, dict[State, dict[Step, State]]] = {
    Side.SENDER: {
        State.IDLE: {Step.WANT: State.STREAMING, Step.FAIL: State.FAILED},
        State.STREAMING: {**_RUNNING, Step.END: State.ENDING, Step.FAIL: State.FAILED},
        State.ENDING: {Step.FREE: State.ENDING, Step.DRAINED: State.DONE, Step.FAIL: State.FAILED},
        State.DONE: {},
        State.FAILED: {Step.FREE: State.FAILED, Step.FAIL: State.FAILED},
    },
    Side.RECEIVER: {
        State.IDLE: {Step.WANT: State.STREAMING, Step.FAIL: State.FAILED},
        State.STREAMING: {**_RUNNING, Step.END: State.ENDING, Step.FAIL: State.FAILED},
        State.ENDING: {
            Step.METADATA: State.ENDING,  # overtaken by the end of stream
            Step.BODY: State.ENDING,
            Step.FREE: State.ENDING,
            Step.DELIVERED: State.COMPLETE,
            Step.FAIL: State.FAILED,
        },
        State.COMPLETE: {Step.FREE: State.COMPLETE, Step.DRAINED: State.DONE, Step.FAIL: State.FAILED},
        State.DONE: {},
        State.FAILED: {Step.FREE: State.FAILED, Step.FAIL: State.FAILED},
    },
}


#: The rule of docs/framing.md that a peer breaks which takes a step too early, too late or too often.
_RULES = {
    Step.WANT: "request-once",
    Step.METADATA: "end-count",
    Step.BODY: "end-count",
    Step.END: "end-once",
    Step.FREE: "free-leased",
}


class Machine:
    """The state of one side of a stream."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.state = State.IDLE
        self._table = TRANSITIONS[side]

    def move(self, step: Step, error_type: type[ProtocolError]) -> None:
        """Take `step`, or raise `error_type` and keep the state."""
        following = self._table[self.state].get(step)
        if following is None:
            raise error_type(
                f"{step.value} is not allowed while the {self.side.value} of this stream is {self.state.value}",
                rule=_RULES.get(step),
            )
        self.state = following

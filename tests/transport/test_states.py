"""The table of a connection's states: which calls each allows, and that a connection never goes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dissociated.errors import ConnectionClosed
from dissociated.transport.states import CALLS, Call, ConnectionState, Lifecycle

OPEN, SEND_ONLY, CLOSING, INTERRUPTED, CLOSED = ConnectionState
ENDINGS = (Call.STOP_RECEIVING, Call.INTERRUPT, Call.LINGER, Call.CLOSE)
#: The states in which this side may send, and those in which it may call `receive`.
SENDS, RECEIVES = {OPEN, SEND_ONLY}, {OPEN, SEND_ONLY, CLOSING}


def test_every_state_takes_every_call_that_ends_a_connection() -> None:
    assert set(CALLS) == set(ConnectionState)
    for state, call in product(ConnectionState, ENDINGS):
        assert call in CALLS[state], (state, call)


def test_closing_ends_in_closed_from_every_state_and_nothing_leaves_it() -> None:
    assert {CALLS[state][Call.CLOSE] for state in ConnectionState} == {CLOSED}
    assert set(CALLS[CLOSED].values()) == {CLOSED}


class Side(RuleBasedStateMachine):
    """One side of a connection, next to the sets of things that it may still do."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = Lifecycle()
        self.sends = self.receives = True

    @rule(call=st.sampled_from(ENDINGS))
    def end(self, call: Call) -> None:
        before = self.lifecycle.state
        assert self.lifecycle.take(call) is before
        if call is not Call.STOP_RECEIVING:
            self.sends = False
        if call in (Call.INTERRUPT, Call.CLOSE):
            self.receives = False

    @rule()
    def send(self) -> None:
        self._use(Call.SEND, self.sends)

    @rule()
    def receive(self) -> None:
        self._use(Call.RECEIVE, self.receives)

    def _use(self, call: Call, allowed: bool) -> None:
        before = self.lifecycle.state
        if allowed:
            self.lifecycle.take(call)
        else:
            with pytest.raises(ConnectionClosed, match="this side closed"):
                self.lifecycle.take(call)
        assert self.lifecycle.state is before

    @invariant()
    def state_matches(self) -> None:
        state = self.lifecycle.state
        assert (state in SENDS, state in RECEIVES) == (self.sends, self.receives)
        assert self.lifecycle.is_over is not self.receives


TestSide = Side.TestCase


def test_an_interrupt_in_another_thread_is_never_undone() -> None:
    """Begin to close in one thread while another interrupts: whichever comes last, the connection is interrupted."""
    with ThreadPoolExecutor(2) as pool:
        for _ in range(500):
            lifecycle = Lifecycle()
            calls = [pool.submit(lifecycle.take, call) for call in (Call.LINGER, Call.INTERRUPT)]
            for call in calls:
                call.result()
            assert lifecycle.state is INTERRUPTED

from itertools import product

import pytest

from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.states import TRANSITIONS, Machine, Move, Side, State
from support.helpers import case

STATES = [(side, state) for side in Side for state in TRANSITIONS[side]]
LEGAL = [(*where, step, to) for where in STATES for step, to in TRANSITIONS[where[0]][where[1]].items()]
ILLEGAL = [(side, state, step) for (side, state), step in product(STATES, Move) if step not in TRANSITIONS[side][state]]


def machine(side: Side, state: State) -> Machine:
    made = Machine(side)
    made.state = state
    return made


def reachable(side: Side, start: State) -> set[State]:
    found, frontier = {start}, [start]
    while frontier:
        fresh = set(TRANSITIONS[side][frontier.pop()].values()) - found
        found |= fresh
        frontier += fresh
    return found


def test_a_step_in_the_table_is_taken():
    for side, state, step, following in LEGAL:
        moving = machine(side, state)
        moving.move(step, LocalProtocolError)
        assert moving.state is following, (side, state, step)


@pytest.mark.parametrize("error_type", [LocalProtocolError, RemoteProtocolError])
def test_a_step_outside_the_table_blames_the_side_that_took_it_and_changes_nothing(error_type):
    for side, state, step in ILLEGAL:
        moving = machine(side, state)
        with case((side, state, step)):
            with pytest.raises(error_type) as caught:
                moving.move(step, error_type)
            assert type(caught.value) is error_type
            assert step.value in str(caught.value)
            assert side.value in str(caught.value)
            assert state.value in str(caught.value)
            assert moving.state is state


@pytest.mark.parametrize("side", Side)
def test_both_sides_begin_idle_and_only_want_data_begins_a_stream(side):
    assert Machine(side).state is State.IDLE
    assert TRANSITIONS[side][State.IDLE] == {Move.WANT: State.STREAMING, Move.FAIL: State.FAILED}


@pytest.mark.parametrize(
    ("side", "states"), [(Side.SENDER, set(State) - {State.COMPLETE}), (Side.RECEIVER, set(State))]
)
def test_the_states_of_a_side_are_those_it_can_reach(side, states):
    assert reachable(side, State.IDLE) == states
    assert set(TRANSITIONS[side]) == states


@pytest.mark.parametrize("side", Side)
def test_done_and_failed_are_final_and_every_other_state_can_become_either(side):
    assert reachable(side, State.DONE) == {State.DONE}
    assert reachable(side, State.FAILED) == {State.FAILED}
    for state in set(TRANSITIONS[side]) - {State.DONE, State.FAILED}:
        assert reachable(side, state) >= {State.DONE, State.FAILED}


@pytest.mark.parametrize("side", Side)
def test_want_data_comes_once(side):
    taking = [state for state, steps in TRANSITIONS[side].items() if Move.WANT in steps]
    assert taking == [State.IDLE]


def test_a_sender_sends_nothing_after_its_end_of_stream_but_still_hears_free_data():
    assert set(TRANSITIONS[Side.SENDER][State.ENDING]) == {Move.FREE, Move.DRAINED, Move.FAIL}


def test_a_receiver_still_takes_what_the_end_of_stream_overtook_until_nothing_is_missing():
    assert {Move.METADATA, Move.BODY} <= set(TRANSITIONS[Side.RECEIVER][State.ENDING])
    assert {Move.METADATA, Move.BODY}.isdisjoint(TRANSITIONS[Side.RECEIVER][State.COMPLETE])

from itertools import product

import pytest

from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.states import TRANSITIONS, Machine, Role, State, Step
from support.helpers import case

STATES = [(role, state) for role in Role for state in TRANSITIONS[role]]
LEGAL = [(*where, step, to) for where in STATES for step, to in TRANSITIONS[where[0]][where[1]].items()]
ILLEGAL = [(role, state, step) for (role, state), step in product(STATES, Step) if step not in TRANSITIONS[role][state]]


def machine(role: Role, state: State) -> Machine:
    made = Machine(role)
    made.state = state
    return made


def reachable(role: Role, start: State) -> set[State]:
    found, frontier = {start}, [start]
    while frontier:
        fresh = set(TRANSITIONS[role][frontier.pop()].values()) - found
        found |= fresh
        frontier += fresh
    return found


def test_a_step_in_the_table_is_taken():
    for role, state, step, following in LEGAL:
        moving = machine(role, state)
        moving.move(step, LocalProtocolError)
        assert moving.state is following, (role, state, step)


@pytest.mark.parametrize("error_type", [LocalProtocolError, RemoteProtocolError])
def test_a_step_outside_the_table_blames_the_side_that_took_it_and_changes_nothing(error_type):
    for role, state, step in ILLEGAL:
        moving = machine(role, state)
        with case((role, state, step)):
            with pytest.raises(error_type) as caught:
                moving.move(step, error_type)
            assert type(caught.value) is error_type
            assert step.value in str(caught.value)
            assert role.value in str(caught.value)
            assert state.value in str(caught.value)
            assert moving.state is state


@pytest.mark.parametrize("role", Role)
def test_both_roles_begin_idle_and_only_want_data_begins_a_stream(role):
    assert Machine(role).state is State.IDLE
    assert TRANSITIONS[role][State.IDLE] == {Step.WANT: State.STREAMING, Step.FAIL: State.FAILED}


@pytest.mark.parametrize(
    ("role", "states"), [(Role.SENDER, set(State) - {State.COMPLETE}), (Role.RECEIVER, set(State))]
)
def test_the_states_of_a_role_are_those_it_can_reach(role, states):
    assert reachable(role, State.IDLE) == states
    assert set(TRANSITIONS[role]) == states


@pytest.mark.parametrize("role", Role)
def test_done_and_failed_are_final_and_every_other_state_can_become_either(role):
    assert reachable(role, State.DONE) == {State.DONE}
    assert reachable(role, State.FAILED) == {State.FAILED}
    for state in set(TRANSITIONS[role]) - {State.DONE, State.FAILED}:
        assert reachable(role, state) >= {State.DONE, State.FAILED}


@pytest.mark.parametrize("role", Role)
def test_want_data_comes_once(role):
    taking = [state for state, steps in TRANSITIONS[role].items() if Step.WANT in steps]
    assert taking == [State.IDLE]


def test_a_sender_sends_nothing_after_its_end_of_stream_but_still_hears_free_data():
    assert set(TRANSITIONS[Role.SENDER][State.ENDING]) == {Step.FREE, Step.DRAINED, Step.FAIL}


def test_a_receiver_still_takes_what_the_end_of_stream_overtook_until_nothing_is_missing():
    assert {Step.METADATA, Step.BODY} <= set(TRANSITIONS[Role.RECEIVER][State.ENDING])
    assert {Step.METADATA, Step.BODY}.isdisjoint(TRANSITIONS[Role.RECEIVER][State.COMPLETE])

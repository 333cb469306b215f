"""A check of every step in every state of a role: the next state if it is allowed, otherwise the error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest

from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.states import State
from support.helpers import case

Steps = Mapping[str, Callable[[Any], object]]


def check_steps(
    in_state: Callable[[State], Any], allowed: Mapping[State, Mapping[str, State]], theirs: Steps, ours: Steps
) -> None:
    """Take every step in each state. `allowed` has the next state; other steps must raise and change nothing."""
    for state, step in product(allowed, {**theirs, **ours}):
        with case((state, step)):
            _check_step(in_state(state), allowed[state].get(step), {**theirs, **ours}[step], step in theirs)


def _check_step(role: Any, following: State | None, take: Callable[[Any], object], is_theirs: bool) -> None:
    if following is not None:
        take(role)
        assert role.state is following
        return
    before = role.state, getattr(role, "sequence", None)
    with pytest.raises(RemoteProtocolError if is_theirs else LocalProtocolError):
        take(role)
    assert (role.state, getattr(role, "sequence", None)) == before

"""Every step in every state of a role: allowed, and what it leads to; or the fault of whoever took it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

import pytest

from dissociated.errors import LocalProtocolError, RemoteProtocolError
from dissociated.protocol.states import State
from helpers import case

Steps = Mapping[str, Callable[[Any], object]]


def check_steps(
    in_state: Callable[[State], Any], allowed: Mapping[State, Mapping[str, State]], theirs: Steps, ours: Steps
) -> None:
    """What `in_state` makes takes the steps that are `allowed`. Of any other it says whose fault it is, and stays."""
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

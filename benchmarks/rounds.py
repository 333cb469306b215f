"""Timing of calls, in rounds."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock = time.perf_counter) -> dict[str, float]:
    """Return the median of each call's seconds. See `in_turns`."""
    return in_turns({name: partial(_seconds, call, clock) for name, call in calls.items()}, rounds)


def in_turns(calls: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each call's results.

    The calls take turns in each round, so that other work on the machine disturbs all of them alike. A first round
    warms up, and does not count.
    """
    given: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            gc.collect()
            one = call()
            if turn:
                given[name].append(one)
    return {name: statistics.median(some) for name, some in given.items()}


def _seconds(call: Callable[[], Any], clock: Clock) -> float:
    started = clock()
    result = call()
    elapsed = clock() - started
    del result
    return elapsed

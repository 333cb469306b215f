"""How everything here is timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median of each call's seconds.

    The calls take turns in each round, so that what disturbs the machine disturbs all of them; a first round is for
    warming up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            gc.collect()
            started = time.perf_counter()
            result = call()
            elapsed = time.perf_counter() - started
            del result
            if turn:
                seconds[name].append(elapsed)
    return {name: statistics.median(times) for name, times in seconds.items()}

"""The events that the processes of the demo report, each a line of JSON on standard output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn


@dataclass
class Step:
    """A step of a process: its start in seconds since the epoch, its duration in seconds, and its results."""

    name: str
    begun: float
    seconds: float = 0.0
    says: str = ""  # the result, for people
    facts: dict[str, Any] = field(default_factory=dict)  # numbers, for the summary


@contextmanager
def step(name: str) -> Iterator[Step]:
    """Report a step at its begin and its end, with its duration."""
    begun, clock = time.time(), time.perf_counter()
    current = Step(name, begun)
    tell(begins=name)
    yield current
    current.seconds = time.perf_counter() - clock
    tell(done=asdict(current))


def tell(**event: Any) -> None:
    """Report an event.

    Args:
        **event: A single key and its value: `begins`, the name of a step; `share`, its progress from 0 to 1; `done`,
            the fields of the completed step; or `failed`, the reason of a failure.
    """
    print(json.dumps(event), flush=True)


def fail(error: Exception) -> NoReturn:
    """Report the reason of a failure, and end the process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    # The text of Spark's errors has a traceback, in which the error of this library is the reason.
    ours = [line for line in lines if line.startswith("dissociated.errors.")]
    tell(failed=ours[-1].partition(": ")[2] if ours else lines[0])
    sys.exit(1)

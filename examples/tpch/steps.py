"""What the processes of the demo tell: each step that they do, one line of JSON on standard output."""

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
    """Something that a process does: when, in seconds since the epoch, how long, and what came of it."""

    name: str
    begun: float
    seconds: float = 0.0
    says: str = ""  # for people
    facts: dict[str, Any] = field(default_factory=dict)  # for the summary


@contextmanager
def step(name: str) -> Iterator[Step]:
    """Do something, and tell it before and after."""
    begun, clock = time.time(), time.perf_counter()
    current = Step(name, begun)
    tell(begins=name)
    yield current
    current.seconds = time.perf_counter() - clock
    tell(done=asdict(current))


def tell(**event: Any) -> None:
    """`begins`: a step; `share`: how much of it is done, from 0 to 1; `done`: all of it; `failed`: why."""
    print(json.dumps(event), flush=True)


def fail(error: Exception) -> NoReturn:
    """Tell why this process ends."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    ours = [line for line in lines if line.startswith("dissociated.errors.")]  # Spark brings a traceback along
    tell(failed=ours[-1].partition(": ")[2] if ours else lines[0])
    sys.exit(1)

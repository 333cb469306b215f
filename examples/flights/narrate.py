"""How the demo speaks: one short line for each step that is done."""

from __future__ import annotations

import sys
import time
from typing import NoReturn


def done(step: str, what: str, start: float | None = None) -> None:
    """Print a step, and how long ago it was started."""
    took = "" if start is None else f"{time.perf_counter() - start:8.2f} s"
    print(f"  {step:<10}{what:<60}{took}".rstrip(), flush=True)


def fail(why: str) -> NoReturn:
    """End the program with one sentence."""
    sys.exit(f"flights: {_sentence(why)}")


def _sentence(text: str) -> str:
    """The line that says it: the last of a traceback that Spark brings along, otherwise the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["failed, without saying why"]
    said = [line for line in lines if line.startswith("dissociated.errors.")]
    return said[-1].partition(": ")[2] if said else lines[0]

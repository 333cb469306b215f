"""The output of the demo: a short line for each completed step."""

from __future__ import annotations

import sys
import time
from typing import NoReturn


def done(step: str, what: str, start: float | None = None) -> None:
    """Print a completed step, and the time since `start`."""
    took = "" if start is None else f"{time.perf_counter() - start:8.2f} s"
    print(f"  {step:<10}{what:<60}{took}".rstrip(), flush=True)


def fail(why: str) -> NoReturn:
    """End the program with a sentence that gives the reason."""
    sys.exit(f"flights: {_sentence(why)}")


def _sentence(text: str) -> str:
    """Return the line with the reason: the error of this library in a traceback of Spark, otherwise the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["failed, without saying why"]
    said = [line for line in lines if line.startswith("dissociated.errors.")]
    return said[-1].partition(": ")[2] if said else lines[0]

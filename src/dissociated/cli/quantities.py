"""Sizes and durations as people write them on the command line. The functions are types for argparse."""

from __future__ import annotations

import argparse
import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kKMGTP])(i?))?B?")
_DURATION = re.compile(r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+) ?(s|m|min|h|d)?")
_SECONDS = {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def size(written: str) -> int:
    """Parse a size such as 8GiB, 500MB or 4096 into bytes. Raises ArgumentTypeError."""
    match = _SIZE.fullmatch(written.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{written!r} is not a size: give 8GiB, 500MB, or a number of bytes")
    number, prefix, binary = match.groups()
    power = "_KMGTP".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def duration(written: str) -> float:
    """Parse a duration such as 90s, 15m, 1h, 2d or 0.5 into seconds. Raises ArgumentTypeError."""
    match = _DURATION.fullmatch(written.strip())
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{written!r} is not a duration: give 90s, 15m, 1h, 2d, or a number of seconds"
        )
    number, unit = match.groups()
    return float(number) * _SECONDS[unit]


def add_duration(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup, name: str, help: str, default: float | None = None
) -> None:
    """Add an option whose value is a duration."""
    parser.add_argument(name, type=duration, metavar="TIME", help=help, default=default)

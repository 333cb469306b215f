"""`python -m benchmarks`."""

from __future__ import annotations

import argparse

from benchmarks import transfer


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=transfer.__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="how much data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    arguments = parser.parse_args()
    transfer.run(arguments.gigabytes, arguments.rounds)


if __name__ == "__main__":
    main()

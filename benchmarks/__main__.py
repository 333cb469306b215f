"""`python -m benchmarks`, or `python -m benchmarks live`."""

from __future__ import annotations

import argparse

from benchmarks import live, transfer


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=transfer.__doc__)
    parser.add_argument("what", nargs="?", choices=["transfer", "live"], default="transfer", help="what to measure")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="how much data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    parser.add_argument(
        "--limit", type=int, default=256, help="live: megabytes of shared memory (default: %(default)s)"
    )
    parser.add_argument("--tcp", action="store_true", help="live: with a consumer over tcp too")
    arguments = parser.parse_args()
    if arguments.what == "live":
        live.run(arguments.gigabytes, arguments.limit << 20, arguments.tcp)
    else:
        transfer.run(arguments.gigabytes, arguments.rounds)


if __name__ == "__main__":
    main()

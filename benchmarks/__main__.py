"""`python -m benchmarks`."""

from __future__ import annotations

import argparse

from benchmarks import ipc, transfer


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"transfer: {transfer.__doc__}\nipc: {ipc.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", choices=("transfer", "ipc"), default="transfer")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="how much data is moved (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.what == "ipc":
        ipc.run(arguments.rounds)
    else:
        transfer.run(arguments.gigabytes, arguments.rounds)


if __name__ == "__main__":
    main()

"""`python -m benchmarks`."""

from __future__ import annotations

import argparse

from benchmarks import ipc, transfer, ucx

PARTS = {
    "transfer": (transfer.run, "shm, tcp, Flight and a bare socket."),
    "ipc": (ipc.run, "readers, writers, decoder and index, and pyarrow.ipc."),
    "ucx": (ucx.run, "ucx with both error modes, tcp, Flight and ucx_perftest."),
}


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Side-by-side measurements.")
    parser.add_argument(
        "part", nargs="?", choices=PARTS, default="transfer", help=" ".join(f"{k}: {v[1]}" for k, v in PARTS.items())
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="how much data (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    arguments = parser.parse_args()
    PARTS[arguments.part][0](arguments.gigabytes, arguments.rounds)


if __name__ == "__main__":
    main()

"""The command line of the benchmarks: `python -m benchmarks`, or for one part `python -m benchmarks live`.

Without a part, it measures transfers and handles.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import (
    device,
    fabric,
    handles,
    hosts,
    ipc,
    live,
    live_peers,
    many,
    migrating,
    scaling,
    spark,
    training,
    transfer,
    ucx,
)
from dissociated.errors import DeviceNotFound

PARTS = {
    "transfer": "shm, tcp, Flight and a bare socket.",
    "hosts": "processor time for each gigabyte: tcp, Flight, a bare socket and iperf3.",
    "ipc": "readers, writers, decoder and index, and pyarrow.ipc.",
    "live": "a stream through shared memory of a limited size, and batches beside ZeroMQ, Flight and iceoryx2.",
    "fabric": "fabric, by messages and by reading memory, tcp, Flight and fi_pingpong, fi_rma_bw.",
    "device": "onto a GPU from shm, tcp and Flight, beside pinned memory, and opening by handle what is there.",
    "handles": "DuckDB and Polars over datasets, their Tables and Parquet; small datasets, and first batches.",
    "scaling": "opening, by how many batches, columns, bytes, datasets, consumers and versions there are.",
    "many": "commits, by how many datasets a node has already.",
    "migrating": "processor time for each gigabyte: the ways that docs/migrating.md replaces, and ours.",
    "spark": "publishing from Spark and reading into it, beside mapInArrow, toArrow, createDataFrame and Parquet.",
    "training": "an epoch of shuffled batches, beside Parquet, arrays in memory and other loaders.",
    "ucx": "ucx with both error modes, tcp, Flight and ucx_perftest.",
}
_LIVE = ("memory", "rows", *live_peers.LOADS)


def main() -> None:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Side-by-side measurements.")
    parser.add_argument("part", nargs="?", choices=PARTS, help=" ".join(f"{k}: {v}" for k, v in PARTS.items()))
    parser.add_argument("--gigabytes", type=float, help="how much data (default: 1; training: 0.25)")
    parser.add_argument("--rounds", type=int, help="how often (default: 7; spark: 3)")
    parser.add_argument(
        "--limit", type=int, default=256, help="live: megabytes of shared memory (default: %(default)s)"
    )
    parser.add_argument("--tcp", action="store_true", help="live: with a consumer over tcp too")
    parser.add_argument("--scale", type=float, default=0.1, help="spark, handles: of TPC-H (default: %(default)s)")
    of = {"handles": handles.PARTS, "live": _LIVE, "spark": tuple(spark.PARTS)}
    told = "; ".join(f"{part}: {', '.join(names)}" for part, names in of.items())
    parser.add_argument(
        "--of", action="append", default=[], help=f"which (default: all; spark: those with goals). {told}"
    )
    parser.add_argument("--processor", action="store_true", help="handles: processor time of queries, not wall time")
    parser.add_argument("--datasets", type=int, default=10_000, help="many: how many (default: %(default)s)")
    parser.add_argument("--kind", choices=many.KINDS, action="append", help="many: of which node (default: all)")
    parser.add_argument("--filled", action="store_true", help="many: on top of a store that has as many already")
    parser.add_argument("--device", default="cuda:0", help="device: which (default: %(default)s)")
    parser.add_argument("--most", type=int, default=10_000, help="scaling: of each (default: %(default)s)")
    parser.add_argument("--curve", choices=scaling.CURVES, action="append", help="scaling: which (default: all)")
    parser.add_argument("--into", type=Path, default=Path("build/scaling"), help="scaling: where curves are drawn")
    arguments = parser.parse_args()
    if arguments.gigabytes is None:
        arguments.gigabytes = 0.25 if arguments.part == "training" else 1.0
    if arguments.rounds is None:
        arguments.rounds = 3 if arguments.part == "spark" else 7
    if unknown := {*arguments.of}.difference(of.get(arguments.part or "handles", ())):
        parser.error(f"--of: {', '.join(unknown)}: unknown; {told}")
    for part in [arguments.part] if arguments.part else ["transfer", "handles"]:
        _run(part, arguments)


def _run(part: str, arguments: argparse.Namespace) -> None:
    if part == "live":
        names = arguments.of or _LIVE
        if "memory" in names:
            live.run(arguments.gigabytes, arguments.limit << 20, arguments.tcp)
        if "rows" in names:
            live.run_rows(arguments.rounds)
        if loads := [name for name in names if name in live_peers.LOADS]:
            live_peers.run(arguments.rounds, loads)
    elif part == "device":
        try:
            device.run(arguments.gigabytes, arguments.rounds, arguments.device)
        except DeviceNotFound as error:
            sys.exit(f"benchmarks: {error}")
    elif part == "scaling":
        scaling.run(arguments.most, arguments.into, arguments.curve or ())
    elif part == "many":
        many.run(arguments.datasets, arguments.kind or many.KINDS, arguments.filled)
    elif part == "handles":
        clock = time.process_time if arguments.processor else time.perf_counter
        handles.run(arguments.scale, arguments.rounds, arguments.of or handles.PARTS, clock)
    elif part == "spark":
        spark.run(arguments.scale, arguments.rounds, arguments.of)
    else:
        parts = {"transfer": transfer, "ipc": ipc, "fabric": fabric, "hosts": hosts, "migrating": migrating}
        parts |= {"training": training, "ucx": ucx}
        parts[part].run(arguments.gigabytes, arguments.rounds)


if __name__ == "__main__":
    main()

"""UCX with error handling (tcp lanes) and without (shared memory lanes), tcp, Flight DoGet and ucx_perftest.

What is timed is from the request until there is a Table, connecting included; that alone is the first row, and is left
out where ucx_perftest, which does not count it either, is compared.
ucx_perftest has the same lanes and the same layout of bodies, and sleeps while it waits, as we do. It has less to do:
it sends one buffer again and again, and receives into one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa

import dissociated as dis
from benchmarks.peers import Shape, running
from benchmarks.rounds import medians
from dissociated.cli import text

LISTEN = ("ucx:", "ucx:?err_mode=none", "tcp://127.0.0.1:0")
GOAL = 0.9
_TRIES = 20
#: What our contexts have, so that ucx_perftest has the same lanes.
SETTINGS = {"UCX_NET_DEVICES": "lo", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


def shapes(gigabytes: float) -> list[Shape]:
    """Bodies of 1, 16 and 64 MB in one piece and in ten; 1,000 rows of 4 columns; next to nothing, to connect."""
    measured = []
    for columns, layout in ((1, "1 piece"), (10, "10 pieces")):
        for megabytes in (1, 16, 64):
            rows = (megabytes << 20) // (8 * columns)
            measured.append(
                Shape(f"{megabytes} MB, {layout}", max(2, round(gigabytes * 1000 / megabytes)), columns, rows)
            )
    return [Shape("connect", 1, 1, 1), *measured, Shape("1,000 rows", max(100, round(gigabytes * 10_000)), 4, 1_000)]


def run(gigabytes: float, rounds: int) -> None:
    """Measure and print."""
    measured = shapes(gigabytes)
    rows: list[tuple[str, ...]] = []
    connecting: dict[str, float] = {}
    with running(measured, LISTEN) as peers, dis.connect(peers.catalog) as client:
        for shape in measured:
            (endpoint,) = client.describe(shape.name).endpoints
            peer, none, tcp = (uri for uri in endpoint.locations if not uri.startswith("arrow-flight"))
            reads = {"ucx": peer, "ucx, err_mode=none": none, "tcp": tcp}
            calls: dict[str, Callable[[], Any]] = {
                name: partial(_read, uri, endpoint.ticket) for name, uri in reads.items()
            }
            calls["Flight"] = lambda name=shape.name: client.read(name, "grpc").read_all()  # type: ignore[misc]
            seconds = medians(calls, rounds)
            connecting = connecting or seconds  # of the first shape, which is nothing else
            bare = {"ucx": _perftest(shape, "-e"), "ucx, err_mode=none": _perftest(shape)} if shape.rows > 1 else {}
            for name, took in seconds.items():
                speed = shape.nbytes / took / 1e9
                sending = shape.nbytes / max(took - connecting[name], 1e-9) / 1e9
                against = f"{sending / bare[name]:.2f}x" if bare.get(name) else ""
                missed = "missed" if bare.get(name) and sending < GOAL * bare[name] else ""
                rate = f"{speed:.2f}" if shape.rows > 1 else ""
                per_second = f"{shape.batches / took:,.0f}" if shape.rows > 1 else ""
                rows.append((shape.name, name, f"{took * 1e3:.2f}", rate, per_second, against, missed))
            rows += ((shape.name, f"ucx_perftest for {name}", "", f"{s:.2f}", "", "", "") for name, s in bare.items())
    print(f"{gigabytes:g} GB, median of {rounds} rounds; the goal is {GOAL:g}x of ucx_perftest\n")
    heads = ("BATCHES OF", "OVER", "MS", "GB/S", "BATCHES/S", "OF PERFTEST", "")
    print(text.table(heads, rows, right=(2, 3, 4, 5)))


def _read(uri: str, ticket: bytes) -> pa.Table:
    return dis.open_stream(uri, ticket).read_all()


def _perftest(shape: Shape, *options: str) -> float:
    """GB/s of tagged messages with the layout of this shape's bodies; 0 where it does not run."""
    found = find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        return 0.0
    wheel = Path(found.submodule_search_locations[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    layout = ["-s", f"{shape.rows * 8}:{shape.columns}", "-D", "iov,contig"] if shape.columns > 1 else []
    common = [str(wheel / "bin" / "ucx_perftest"), "-p", port, *options]
    test = ["-t", "tag_bw", "-n", str(max(20, shape.batches)), "-w", "5", "-f", "-I", "-E", "sleep"]
    test += layout or ["-s", str(shape.rows * 8)]
    environment = {**os.environ, **SETTINGS, "LD_LIBRARY_PATH": str(wheel / "lib")}
    client = [*common[:1], "127.0.0.1", *common[1:], *test]
    with subprocess.Popen(common, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(_TRIES):  # it does not say when it listens
                done = subprocess.run(client, env=environment, capture_output=True, text=True, timeout=60)
                if not done.returncode:
                    return float(done.stdout.split()[-3]) * (1 << 20) / 1e9
                time.sleep(0.1)
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            pass
        finally:
            server.kill()
    return 0.0

"""libfabric, by messages and by reading the server's memory, tcp, Flight DoGet, fi_pingpong and fi_rma_bw.

What is timed is from the request until there is a Table, connecting included (`connect` says how long that takes). The
tools of libfabric are used where they are installed; they have the provider of the run, and the library of the system,
which is ours too unless DISSOCIATED_FABRIC_LIBRARY says otherwise. They send one buffer again and again and spin.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa

import dissociated as dis
from benchmarks.peers import Shape, running
from benchmarks.rounds import medians
from benchmarks.ucx import shapes
from dissociated.cli import text
from dissociated.transport._ofi import ofi
from dissociated.transport.fabric import PROVIDER

LISTEN = ("fabric:", "fabric:?rma=allow", "tcp://127.0.0.1:0")
GOAL = 0.9
_TRIES = 20
#: Name, arguments, and which of ours moves data like it.
TOOLS = (
    ("fi_pingpong", ["-p", PROVIDER, "-e", "rdm", "-m", "tagged"], "fabric"),
    ("fi_rma_bw", ["-p", PROVIDER, "-e", "rdm", "-o", "read"], "fabric, reads"),
)


def run(gigabytes: float, rounds: int) -> None:
    """Measure and print."""
    measured = shapes(gigabytes)
    rows: list[tuple[str, ...]] = []
    with running(measured, LISTEN) as peers, dis.connect(peers.catalog) as client:
        for shape in measured:
            (endpoint,) = client.describe(shape.name).endpoints
            uris = [uri for uri in endpoint.locations if not uri.startswith("arrow-flight")]
            plain = next(uri for uri in uris if uri.startswith("fabric:"))
            reads = next(uri for uri in uris if "remote_handle" in uri)
            tcp = next(uri for uri in uris if uri.startswith("tcp:"))
            calls: dict[str, Callable[[], Any]] = {
                "fabric": partial(_read, plain, endpoint.ticket),
                "fabric, reads": partial(_read, reads, endpoint.ticket),
                "tcp": partial(_read, tcp, endpoint.ticket),
                "Flight": lambda name=shape.name: client.read(name, "grpc").read_all(),  # type: ignore[misc]
            }
            seconds = medians(calls, rounds)
            bare = {like: _tool(tool, arguments, shape) for tool, arguments, like in TOOLS} if shape.rows > 1000 else {}
            for name, took in seconds.items():
                speed = shape.nbytes / took / 1e9
                against = f"{speed / bare[name]:.2f}x" if bare.get(name) else ""
                missed = "missed" if bare.get(name) and speed < GOAL * bare[name] else ""
                rate = f"{speed:.2f}" if shape.rows > 1 else ""
                per_second = f"{shape.batches / took:,.0f}" if shape.rows > 1 else ""
                rows.append((shape.name, name, f"{took * 1e3:.2f}", rate, per_second, against, missed))
            rows += (
                (shape.name, tool, "", f"{bare[like]:.2f}", "", "", "") for tool, _, like in TOOLS if bare.get(like)
            )
    print(f"libfabric {ofi().version}, {gigabytes:g} GB, median of {rounds} rounds; the goal is {GOAL:g}x of the tool")
    absent = [tool for tool, _, _ in TOOLS if not shutil.which(tool)]
    print(f"not installed: {', '.join(absent)}\n" if absent else "")
    heads = ("BATCHES OF", "OVER", "MS", "GB/S", "BATCHES/S", "OF THE TOOL", "")
    print(text.table(heads, rows, right=(2, 3, 4, 5)))


def _read(uri: str, ticket: bytes) -> pa.Table:
    return dis.open_stream(uri, ticket, allow_rma=True).read_all()


def _tool(tool: str, arguments: list[str], shape: Shape) -> float:
    """GB/s of one of libfabric's tools with bodies of this size; 0 where it does not run."""
    found = shutil.which(tool)
    if found is None:
        return 0.0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    size, times = str(shape.nbytes // shape.batches), str(max(20, min(200, shape.batches)))
    common = [found, *arguments, "-S", size, "-I", times]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*common, "-B", port], **quiet) as server:  # type: ignore[call-overload]
        try:
            for _ in range(_TRIES):  # it does not say when it listens
                done = subprocess.run([*common, "-P", port, "127.0.0.1"], capture_output=True, text=True, timeout=60)
                if not done.returncode and done.stdout.strip():
                    return float(done.stdout.split()[-3]) / 1e3
                time.sleep(0.1)
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            pass
        finally:
            server.kill()
    return 0.0

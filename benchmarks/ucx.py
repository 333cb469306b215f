"""Benchmarks of UCX with error handling (tcp lanes) and without (shared memory lanes), compared with ucx_perftest.

ucx_perftest runs with the same lanes and the same layout of bodies. It sleeps while it waits, like this library.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.beside import Way, compare
from benchmarks.copying import copying
from benchmarks.peers import Shape

LISTEN = ("ucx:", "ucx:?err_mode=none", "tcp://127.0.0.1:0")
_TRIES = 20
#: The settings of this library's UCX contexts, which give ucx_perftest the same lanes.
SETTINGS = {"UCX_NET_DEVICES": "lo", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}


def run(gigabytes: float, rounds: int) -> None:
    """Measure, and print the table."""
    ways = {
        "ucx": Way("ucx:", "err_mode", "ucx_perftest", partial(_perftest, "-e")),
        "ucx, err_mode=none": Way("err_mode=none", tool="ucx_perftest", measure=partial(_perftest, "")),
    }
    compare(LISTEN, ways, gigabytes, rounds)
    rates = ", ".join(f"{rate:.1f} {where}" for where, rate in copying(rounds).items())
    print(f"\nprocess_vm_readv, by which err_mode=none copies bodies of one piece, in GB/s: {rates}")


def _perftest(error_handling: str, shape: Shape) -> float:
    """Return the GB/s of tagged messages in the layout of this shape's bodies, or 0 if ucx_perftest does not run."""
    found = find_spec("libucx")
    if found is None or not found.submodule_search_locations:
        return 0.0
    wheel = Path(found.submodule_search_locations[0])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    layout = ["-s", f"{shape.rows * 8}:{shape.columns}", "-D", "iov,contig"] if shape.columns > 1 else []
    common = [str(wheel / "bin" / "ucx_perftest"), "-p", port, *error_handling.split()]
    test = ["-t", "tag_bw", "-n", str(max(20, shape.batches)), "-w", "5", "-f", "-I", "-E", "sleep"]
    test += layout or ["-s", str(shape.rows * 8)]
    environment = {**os.environ, **SETTINGS, "LD_LIBRARY_PATH": str(wheel / "lib")}
    client = [*common[:1], "127.0.0.1", *common[1:], *test]
    with subprocess.Popen(common, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            for _ in range(_TRIES):  # the tool does not tell when it listens
                done = subprocess.run(client, env=environment, capture_output=True, text=True, timeout=60)
                if not done.returncode:
                    return float(done.stdout.split()[-3]) * (1 << 20) / 1e9
                time.sleep(0.1)
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            pass
        finally:
            server.kill()
    return 0.0

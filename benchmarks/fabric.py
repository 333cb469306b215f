"""Benchmarks of libfabric, by messages and by reading the server's memory, compared with fi_pingpong and fi_rma_bw.

The two tools are used if they are installed. They run with the same provider, and poll in a busy loop. They use the
system's libfabric; with DISSOCIATED_FABRIC_LIBRARY=libfabric.so.1, this library uses it, too.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from functools import partial

from benchmarks.beside import Way, compare
from benchmarks.peers import Shape
from dissociated.transport.native.fabric.libfabric import ofi
from dissociated.transport.native.fabric.transport import PROVIDER

LISTEN = ("fabric:", "fabric:?rma=allow", "tcp://127.0.0.1:0")
_TRIES = 20
#: The tools, with their arguments.
TOOLS = {"fi_pingpong": ["-e", "rdm", "-m", "tagged"], "fi_rma_bw": ["-e", "rdm", "-o", "read"]}


def run(gigabytes: float, rounds: int) -> None:
    """Measure, and print the table."""
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    print(f"libfabric {ofi().version}; not installed: {', '.join(absent) or 'nothing'}")
    ways = {
        "fabric": Way("fabric:", "remote_handle", "fi_pingpong", partial(_tool, "fi_pingpong")),
        "fabric, reads": Way("remote_handle", tool="fi_rma_bw", measure=partial(_tool, "fi_rma_bw")),
    }
    compare(LISTEN, ways, gigabytes, rounds)


def _tool(tool: str, shape: Shape) -> float:
    """Return the GB/s of one of libfabric's tools with bodies of this size, or 0 if the tool does not run."""
    found = shutil.which(tool)
    if found is None:
        return 0.0
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    size, times = str(shape.nbytes // shape.batches), str(max(20, min(200, shape.batches)))
    common = [found, "-p", PROVIDER, *TOOLS[tool], "-S", size, "-I", times]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*common, "-B", port], **quiet) as server:  # type: ignore[call-overload]
        try:
            for _ in range(_TRIES):  # the tool does not tell when it listens
                done = subprocess.run([*common, "-P", port, "127.0.0.1"], capture_output=True, text=True, timeout=60)
                if not done.returncode and done.stdout.strip():
                    return float(done.stdout.split()[-3]) / 1e3
                time.sleep(0.1)
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            pass
        finally:
            server.kill()
    return 0.0

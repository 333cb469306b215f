"""The throughput of a reader on one link and on two: `python -m cluster.rates`, run in `tests/`.

Two nodes may each send 10 MB a second. A reader on a third host reads a dataset of one of them, and one that has a part
on each of them. Flight, a bare socket and iperf3, if it is installed, send as many bytes from one host. Nothing here
is a test: the numbers are for people.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from cluster.hosts import Cluster, Host, answer, missing
from support.forks import forking

RATE = 10_000_000  # bytes a second
SIZE = 30_000_000  # bytes of a part
ROUNDS = 3
#: A client that puts or appends a part into the node of its host.
PART = """
import sys, numpy as np, pyarrow as pa, dissociated as dis
batches = pa.table({"n": np.arange(int(sys.argv[3]) // 8)}).to_batches(125_000)
with dis.connect(sys.argv[1]) as client:
    client.put(sys.argv[2], pa.Table.from_batches(batches), mode="append", transport="shm")
"""
#: A reader that prints the seconds that reading a dataset takes, after a first small read.
READ = """
import sys, time, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    client.read("small", transport=sys.argv[3]).read_all()
    began = time.monotonic()
    client.read(sys.argv[2], transport=sys.argv[3]).read_all()
    print(time.monotonic() - began)
"""
#: A process that sends as many bytes to each client that connects.
SEND = """
import socket, sys
listener = socket.create_server(("0.0.0.0", 8900))
print("ready", flush=True)
while True:
    with listener.accept()[0] as connection:
        connection.sendall(bytes(int(sys.argv[1])))
"""
RECEIVE = """
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], 8900)) as connection:
    while connection.recv(1 << 20):
        pass
print(time.monotonic() - began)
"""


def measure(delay: float = 0.001) -> dict[str, float]:
    """Return the MB a second of each transfer, the median of some rounds. Packets take `delay` seconds each way."""
    catalog = "grpc://a:8815"
    with forking(), tempfile.TemporaryDirectory() as directory, Cluster("a", "b", "c", delay=delay) as cluster:
        listen = ("--listen", "grpc://0.0.0.0:8815", "--advertise", "a")
        cluster["a"].dissociated("catalog", "--db", Path(directory) / "db", *listen)
        store = ("--store", "/dev/shm/store", "--listen", "tcp://0.0.0.0:8816", "--flight", "grpc://0.0.0.0:8817")
        for name in "bc":
            cluster[name].dissociated("node", "--catalog", catalog, *store)
        for name, dataset, size in (("b", "small", 8), ("b", "one", SIZE), ("b", "two", SIZE), ("c", "two", SIZE)):
            cluster[name].run("-c", PART, catalog, dataset, str(size))
        for name in "bc":
            cluster.limit(name, RATE)
        assert answer(cluster["b"].start("-c", SEND, str(SIZE))) == "ready\n"
        calls = {"a bare Python socket, one host": partial(_rate, cluster["a"], 1, RECEIVE, "b")}
        if shutil.which("iperf3") is not None:
            calls["iperf3, one host"] = partial(_iperf3, cluster)
        for name, transport in (("Flight", "grpc"), ("tcp", "tcp")):
            calls[f"{name}, one host"] = partial(_rate, cluster["a"], 1, READ, catalog, "one", transport)
            calls[f"{name}, two hosts"] = partial(_rate, cluster["a"], 2, READ, catalog, "two", transport)
        rounds = [{name: call() for name, call in calls.items()} for _ in range(ROUNDS)]
        return {name: statistics.median(measured[name] for measured in rounds) for name in calls}


def main() -> None:
    """Print the throughput of each transfer, and the gain by a second host."""
    if reason := missing():
        sys.exit(f"this machine has no such hosts: {reason}")
    rates = measure()
    for name, rate in rates.items():
        print(f"{rate:6.1f} MB/s  {name}")
    if shutil.which("iperf3") is None:
        print("iperf3 is not installed, so its figure is missing")
    print(f"{rates['tcp, two hosts'] / rates['tcp, one host']:6.2f}       two hosts of one, tcp; the goal is 1.9")


def _rate(host: Host, parts: int, *program: str) -> float:
    """Run a program that prints the seconds in which it received some parts. Return the MB a second."""
    return parts * SIZE / float(host.run("-c", *program).stdout) / 1e6


def _iperf3(cluster: Cluster) -> float:
    """Return the MB a second of iperf3 from host b to host a."""
    serve = [*cluster["a"].prefix, "iperf3", "-s", "-1", "--forceflush"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    while "listening" not in server.stdout.readline():
        pass
    command = [*cluster["b"].prefix, "iperf3", "-c", "a", "-J", "-n", str(SIZE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    server.communicate()
    return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e6


if __name__ == "__main__":
    main()

"""The round trips that reads and writes take between hosts: `python -m cluster.rounds`, run in `tests/`.

A catalog, a node and a client run on hosts of their own. A round trip between two of them takes 200 ms, so the time of
a call shows how many it waits for, whatever the processor does. Nothing here is a test: the numbers are for people.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from cluster.hosts import Cluster, answer, missing
from support.forks import forking

DELAY = 0.1  # seconds each way
CLIENT = """
import sys, time, pyarrow as pa, dissociated as dis

uri, trip = sys.argv[1], float(sys.argv[2])

def count(what, call):
    began = time.monotonic()
    result = call()
    print(f"{(time.monotonic() - began) / trip:.2f}  {what}", flush=True)
    return result

rows = pa.table({"n": [1, 2, 3]})
with dis.connect(uri) as client:
    for number in range(10):
        client.put("parts", rows, mode="append" if number else "overwrite")
for _ in range(3):
    with dis.connect(uri) as client:
        count("put, the first call of a client", lambda: client.put("d", rows))
        count("put, warm", lambda: client.put("d", rows))
    with dis.connect(uri) as client:
        count("read over tcp by name, the first call of a client", lambda: client.read("d", transport="tcp").read_all())
    for transport in ("tcp", "grpc"):
        with dis.connect(uri) as client:
            read = lambda name: client.read(name, transport=transport).read_all()
            client.describe("d")
            if transport == "tcp":
                count("read over tcp by name, no connection for data", lambda: read("d"))
            read("d")
            count(f"read over {transport} by name, warm", lambda: read("d"))
            count(f"read over {transport} of ten parts, warm", lambda: read("parts"))
            count(f"read over {transport} of ten parts, again", lambda: read("parts"))
            dataset = count(f"look up a handle for {transport}, warm", lambda: client.dataset("d", transport=transport))
            count(f"read over {transport} by handle", dataset.to_table)
"""


def measure() -> dict[str, float]:
    """Return the round trips that each call takes: the fewest of three clients, since other work only adds to them."""
    fewest: dict[str, float] = {}
    with forking(), tempfile.TemporaryDirectory() as directory, Cluster("a", "b", "c", delay=DELAY) as cluster:
        database = Path(directory) / "db"
        listen = ("--listen", "grpc://0.0.0.0:8815", "--advertise", "a")
        cluster["a"].dissociated("catalog", "--db", database, *listen)
        store = ("--store", "/dev/shm/store", "--listen", "tcp://0.0.0.0:8816", "--flight", "grpc://0.0.0.0:8817")
        cluster["b"].dissociated("node", "--catalog", "grpc://a:8815", *store)
        client = cluster["c"].start("-c", CLIENT, "grpc://a:8815", str(2 * DELAY))
        while line := answer(client):
            trips, _, call = line.strip().partition("  ")
            fewest[call] = min(float(trips), fewest.get(call, float(trips)))
    return fewest


def main() -> None:
    """Print the round trips of each call."""
    if reason := missing():
        sys.exit(f"this machine has no such hosts: {reason}")
    for call, trips in measure().items():
        print(f"{trips:6.1f}  {call}")


if __name__ == "__main__":
    main()

"""A catalog, nodes and readers on hosts of their own, with links that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.hosts import Cluster, answer
from support.certificates import certificates
from support.helpers import wait_until
from support.machine import needs
from support.processes import Fork, Process

pytestmark = [pytest.mark.needs("namespaces"), pytest.mark.usefixtures("forks")]

CATALOG = "grpc://a:8815"
#: A reader that reads a batch, and reads on when it is told. It prints the number of rows.
READER = """
import sys, dissociated as dis
with dis.connect(sys.argv[1], tls_roots=sys.argv[2]) as client:
    reader = client.read("d", transport=sys.argv[3])
    rows = reader.read_next_batch().num_rows
    print("reached", flush=True)
    sys.stdin.readline()
    rows += sum(batch.num_rows for batch in reader)
    print(rows, flush=True)
    sys.stdin.readline()
"""
#: A process that prints the addresses of a server's consumers whenever it gets a line.
PEERS = """
import sys, dissociated as dis
with dis.connect(sys.argv[1], tls_roots=sys.argv[2]) as client:
    for _ in sys.stdin:
        print(*(one.peer.split()[-1].partition(":")[0] for one in client.status().consumers), flush=True)
"""
PUT = """
import sys, pyarrow as pa, dissociated as dis
batch = pa.record_batch({"n": pa.array(range(1 << 17), pa.int64())})
with dis.connect(sys.argv[1], tls_roots=sys.argv[2]) as client:
    client.put("d", pa.RecordBatchReader.from_batches(batch.schema, [batch] * 64))
"""


#: A client that appends 0, 1, 2 ... until it is told to stop, and prints the count. It repeats an append that failed
#: and was not published.
APPEND = """
import select, sys, time, pyarrow as pa, dissociated as dis
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError

def rows(client):
    while True:
        try:
            return client.describe("d").rows
        except DatasetNotFound:
            return 0
        except DissociatedError:
            time.sleep(0.2)

count = 0
with dis.connect(sys.argv[1], timeout=30) as client:
    while not select.select([sys.stdin], [], [], 0)[0]:
        try:
            client.put("d", pa.table({"n": [count]}), mode="append", transport="grpc")
        except DissociatedError:
            if rows(client) == count:
                continue
        count += 1
        print("appended", flush=True)
print(count, flush=True)
"""
#: A process that prints whether the last heartbeat of a node failed, whenever it gets a line.
PROBLEM = """
import sys, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    for _ in sys.stdin:
        print(bool(client.status().problem), flush=True)
"""
#: The ports for data of UCX and libfabric.
PORTS = range(31_000, 31_051)
#: A server of one dataset at a URI, which it announces by a name. It prints the locations.
SERVER = """
import sys, pyarrow as pa, dissociated as dis
with dis.Server([sys.argv[1]], catalog="grpc://0.0.0.0:8817", advertise=sys.argv[2]) as server:
    server.publish("d", pa.table({"n": [1, 2, 3]}))
    print(*server.locations("d"), flush=True)
    sys.stdin.read()
"""
#: A client that puts a part of a dataset into the node of its host.
PART = """
import sys, numpy as np, pyarrow as pa, dissociated as dis
first = int(sys.argv[2])
rows = pa.table({"n": np.arange(first, first + 2_000_000)})
with dis.connect(sys.argv[1]) as client:
    client.put("d", pa.Table.from_batches(rows.to_batches(100_000)), mode="append", transport="shm")
"""
#: A reader that reads two batches, and reads on when it is told. It prints whether it got all rows in order.
ORDERED = """
import sys, numpy as np, pyarrow as pa, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    reader = client.read("d", transport=sys.argv[2] or None)
    batches = [reader.read_next_batch() for _ in range(2)]
    print("reached", flush=True)
    sys.stdin.readline()
    rows = pa.Table.from_batches([*batches, *reader])["n"].to_numpy()
    print(np.array_equal(rows, np.arange(4_000_000)), flush=True)
"""
READ = """
import sys, dissociated as dis
with dis.connect(sys.argv[1], timeout=5) as client:
    print(client.read("d", transport=sys.argv[2]).read_all()["n"].to_pylist())
"""


def serve_catalog(cluster: Cluster, tmp_path: Path, *options: str | Path) -> Process:
    return cluster["a"].dissociated(
        *("catalog", "--db", tmp_path / "db", "--listen", "grpc://0.0.0.0:8815", "--advertise", "a", *options)
    )


def test_hosts_share_nothing(tmp_path: Path) -> None:
    with Cluster("a", "b") as cluster:
        facts = "import os, socket; from dissociated.base.host import boot_id; print(boot_id(), os.stat('/dev/shm'))"
        told = {cluster[name].run("-c", facts).stdout for name in "ab"}
        assert len(told) == 2
        before = cluster.packets()
        reached = "import socket; print(socket.gethostname(), socket.gethostbyname('a'))"
        assert cluster["b"].run("-c", reached).stdout == f"b {cluster.addresses['a']}\n"
        assert cluster.packets() == before


def test_a_node_that_announces_its_loopback_address_to_another_host_is_refused(tmp_path: Path) -> None:
    """Another node answers at this very address of the catalog's host."""
    with Cluster("a", "b") as cluster:
        serve_catalog(cluster, tmp_path)
        arguments = ("node", "--catalog", CATALOG, "--flight", "grpc://127.0.0.1:8817")
        store = ("--store", "/dev/shm/store")
        refused = cluster["b"].run("-m", "dissociated", *arguments, *store, check=False)
        assert refused.returncode == 1
        assert "the catalog gets no answer at grpc://127.0.0.1:8817, which this node announces" in refused.stderr
        cluster["a"].dissociated(*arguments, *store)
        refused = cluster["b"].run("-m", "dissociated", *arguments, *store, check=False)
        reason = "another server answers the catalog at grpc://127.0.0.1:8817, which this node announces"
        assert reason in refused.stderr
        listed = cluster["b"].run("-m", "dissociated", "ls", CATALOG)
        assert listed.stderr.count(f"node on b: {reason}") == 1
        cluster["b"].dissociated("node", "--catalog", CATALOG, "--flight", "grpc://0.0.0.0:8817", *store)
        assert "announces" not in cluster["b"].run("-m", "dissociated", "ls", CATALOG).stderr


@pytest.mark.parametrize("transport", ["tcp", "tls"])
def test_a_reader_whose_host_is_gone_is_noticed_and_one_that_only_pauses_is_kept(
    tmp_path: Path, transport: str
) -> None:
    """The server notices within 15 seconds, whether it waits for room to send, or for a reader that has everything.

    It used to wait for the stall timeout, which is five minutes, or for a minute. The data exceeds all socket buffers.
    """
    made = certificates(tmp_path, "b", "localhost")
    with Cluster("a", "b", "c") as cluster:
        node = ("node", "--store", "/dev/shm/store", "--listen", f"{transport}://0.0.0.0:8816")
        secured = ("--tls-cert", made.cert, "--tls-key", made.key)
        uri = "grpc+tls://{}:8817"
        cluster["b"].dissociated(*node, "--flight", uri.format("0.0.0.0"), *secured)
        cluster["b"].run("-c", PUT, uri.format("localhost"), made.roots)
        told = cluster["b"].start("-c", PEERS, uri.format("localhost"), made.roots)

        def peers() -> set[str]:
            return {*answer(told, "\n").split()}

        assert peers() == set()

        def reader(host: str) -> Fork:
            started = cluster[host].start("-c", READER, uri.format("b"), made.roots, transport)
            assert answer(started) == "reached\n"
            return started

        # Both readers of a vanish: one that has read everything, and one that would read on later. That one has paused
        # for a while, in which the kernel asks ever more seldom whether it is there.
        reader("a")
        pausing = reader("c")
        assert int(answer(reader("a"), "\n")) == 64 << 17
        assert peers() == {cluster.addresses["a"], cluster.addresses["c"]}
        cluster.cut("a")
        wait_until(lambda: peers() == {cluster.addresses["c"]}, "the readers are noticed to be gone", 45)
        printed, _ = pausing.communicate("\n\n", timeout=60)
        assert int(printed) == 64 << 17


@pytest.mark.parametrize(
    ("uri", "announced", "advice"),
    [
        pytest.param("tcp://0.0.0.0:8820", "tcp://b:8820", "", id="tcp"),
        pytest.param("ucx://0.0.0.0:8820", "ucx://b:8820", "UCX_TCP_PORT_RANGE", id="ucx", marks=needs("ucx")),
        pytest.param("ucx://0.0.0.0:8820", "ucx://a:8820", "UCX_TCP_PORT_RANGE", id="back", marks=needs("ucx")),
        pytest.param(
            "fabric://0.0.0.0:8820", "fabric://10.87.0.2:8820", "FI_TCP_PORT_LOW_RANGE", id="rxm", marks=needs("fabric")
        ),
        pytest.param(
            "fabric://0.0.0.0:8820?provider=tcp",
            "fabric://b:8820",
            "FI_TCP_PORT_LOW_RANGE",
            id="fabric",
            marks=needs("fabric, tcp"),
        ),
    ],
)
def test_a_listener_on_all_interfaces_is_read_from_another_host_and_says_which_ports_are_closed(
    monkeypatch: pytest.MonkeyPatch, uri: str, announced: str, advice: str
) -> None:
    """All connections for data go to b, which has the greater address. Else the reader's host needs no open port."""
    monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{PORTS[0]}-{PORTS[-1]}")
    monkeypatch.setenv("FI_TCP_PORT_LOW_RANGE", str(PORTS[0]))
    monkeypatch.setenv("FI_TCP_PORT_HIGH_RANGE", str(PORTS[-1]))
    with Cluster("a", "b") as cluster, ExitStack() as exits:
        server_host, reader_host = ("a", "b") if announced.endswith("//a:8820") else ("b", "a")
        serving = ("-c", SERVER, uri, server_host)
        if uri.startswith("fabric"):  # not a fork: libfabric reads its variables when it is loaded
            command = [*cluster[server_host].prefix, sys.executable, *serving]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            exits.callback(server.communicate)
            exits.callback(server.kill)
        else:
            server = cluster[server_host].start(*serving)
        assert answer(server).startswith(f"{announced}?")
        read = ("-c", READ, f"grpc://{server_host}:8817", uri.partition(":")[0])
        ports = {server_host: (8817, 8820), reader_host: ()}
        cluster.allow("a", *ports["a"])
        cluster.allow("b", *ports["b"], *PORTS)
        assert cluster[reader_host].run(*read).stdout == "[1, 2, 3]\n"
        cluster.allow("b", *ports["b"])
        done = cluster[reader_host].run(*read, check=False)
        assert (done.stdout == "[1, 2, 3]\n") != bool(advice)
        assert advice in done.stderr


def test_puts_and_appends_over_a_link_that_is_cut_count_once(tmp_path: Path) -> None:
    """The link is cut while a client appends, and mended. The client repeats only what was not published.

    A node whose link is cut gives up its heartbeat soon, and not after the deadline of a minute. By itself the kernel
    repeats a packet ever more seldom, so the catalog would count the node as away for long after the link is mended.
    """
    with Cluster("a", "b", "c", delay=0.005) as cluster:
        serve_catalog(cluster, tmp_path)
        place = ("--store", "/dev/shm/store", "--listen", "tcp://0.0.0.0:8816", "--flight", "grpc://0.0.0.0:8817")
        cluster["b"].dissociated("node", "--catalog", CATALOG, "--heartbeat", "1", *place)
        client = cluster["c"].start("-c", APPEND, CATALOG)
        told = cluster["b"].start("-c", PROBLEM, "grpc://localhost:8817")
        for name in "bcb":
            assert answer(client) == "appended\n"
            cluster.cut(name)
            if name == "b":
                wait_until(lambda: answer(told, "\n") == "True\n", "the node knows that its heartbeat is lost", 45)
            else:
                cluster["a"].run("-c", "import time; time.sleep(3)")  # no event: the client may wait for the commit
            cluster.mend(name)
        printed, _ = client.communicate("stop\n", timeout=100)
        appended = int(printed.split()[-1])
        wait_until(lambda: not cluster["c"].run("-c", READ, CATALOG, "tcp", check=False).returncode, "b is back")
        read = cluster["c"].run("-c", READ, CATALOG, "tcp")
        assert json.loads(read.stdout) == [*range(appended)]


def test_parts_on_two_hosts_are_received_at_once_and_by_flight_if_a_firewall_drops_the_data_port(
    tmp_path: Path,
) -> None:
    with Cluster("a", "b", "c") as cluster:
        serve_catalog(cluster, tmp_path)
        place = ("--store", "/dev/shm/store", "--listen", "tcp://0.0.0.0:8816", "--flight", "grpc://0.0.0.0:8817")
        for number, name in enumerate("bc"):
            cluster[name].dissociated("node", "--catalog", CATALOG, *place)
            cluster[name].run("-c", PART, CATALOG, str(number * 2_000_000))
        before = cluster.sent("c")
        reader = cluster["a"].start("-c", ORDERED, CATALOG, "tcp")
        assert answer(reader) == "reached\n"
        # The reader has two of twenty batches of the part on b, and the part on c has 16 MB.
        wait_until(lambda: cluster.sent("c") > before + 16_000_000, "all of the part on c is received ahead")
        assert answer(reader, "\n") == "True\n"
        cluster.allow("b", 8817)
        cluster.allow("c", 8817)
        printed, _ = cluster["a"].start("-c", ORDERED, CATALOG, "").communicate("\n", timeout=60)
        assert printed == "reached\nTrue\n"

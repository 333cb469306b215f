"""The nodes of a catalog on other hosts: their clocks, their addresses, and their end."""

from __future__ import annotations

import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.control.commit import StagedSegment
from dissociated.errors import AccessDenied, CatalogError
from dissociated.node.node import Node
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store
from monitoring.test_metrics import scrape
from support.helpers import PATIENCE, wait_until
from support.injection import CLOCK
from support.nodes import SCHEMA, kill, put, read, segments, spawn, table
from support.processes import Fork, Process, Start, free_port

#: A process that forwards connections from a local port to another.
FORWARD = """
import asyncio, sys

async def forward(reader, writer):
    reader_there, writer_there = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    async def copy(source, sink):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
        sink.close()
    await asyncio.gather(copy(reader, writer_there), copy(reader_there, writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(forward, "127.0.0.1", int(sys.argv[1]))
    print("reached", flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
SECRET = "a secret of more than sixteen bytes"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """Return a file with the secret of a catalog and its nodes."""
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def start_catalog(start: Start, tmp_path: Path, *options: str | Path) -> Process:
    return start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0", *options)


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a `dissociated` command that ends by itself."""
    with Fork("-m", "dissociated", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        stdout, stderr = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def problems(uri: str) -> list[str]:
    with dis.connect(uri) as client:
        return [node.problem for node in client.status().nodes]


@pytest.mark.parametrize(("ahead", "problem"), [(7200, "2 h 00 min ahead of"), (-7200, "2 h 00 min behind")])
def test_the_time_of_the_catalog_decides_on_tickets(
    memory: Path, tmp_path: Path, start: Start, secret: Path, monkeypatch: pytest.MonkeyPatch, ahead: int, problem: str
) -> None:
    signed = ("--secret-file", secret, "--ticket-lifetime", "5")
    catalog = start_catalog(start, tmp_path, *signed)
    monkeypatch.setenv(CLOCK, str(ahead))
    node = start("node", "--store", memory / "store", "--catalog", catalog.uri, "--heartbeat", "1", *signed)
    monkeypatch.delenv(CLOCK)
    put(catalog.uri, "d", table(1, 2))
    assert [read(catalog.uri, "d", transport) for transport in ("tcp", "shm", "grpc")] == [[1, 2]] * 3
    with dis.connect(catalog.uri) as client:
        endpoint = client.describe("d").endpoints[0]
    (tcp,) = [uri for uri in endpoint.locations if uri.startswith("tcp:")]

    def is_expired() -> bool:
        try:
            dis.open_stream(tcp, endpoint.ticket).close()
        except AccessDenied:
            return True
        return False

    wait_until(is_expired, "the ticket has expired")
    assert problems(catalog.uri) == [f"the node's clock is {problem} the catalog's"]
    assert run("ls", catalog.uri).stderr.endswith(f": the node's clock is {problem} the catalog's\n")
    node.kill()
    with dis.connect(catalog.uri) as client:
        wait_until(lambda: not client.status().nodes[0].alive, "the node is away")
    assert "has been away since" in run("ls", catalog.uri).stderr
    assert problems(catalog.uri) == [""]


def test_a_node_whose_clock_is_behind_takes_part_in_a_commit_that_takes_a_while(
    memory: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that it has prepared looks two hours old by its clock, and must not be taken for a forgotten one.

    Meanwhile, other datasets are committed.
    """
    catalog = start_catalog(start, tmp_path)
    monkeypatch.setenv(CLOCK, "-7200")
    behind = start("node", "--store", memory / "a", "--catalog", catalog.uri, "--heartbeat", "1")
    monkeypatch.delenv(CLOCK)
    other = start("node", "--store", memory / "b", "--catalog", catalog.uri, "--heartbeat", "1")
    parts = []
    for node, number in ((behind, 1), (other, 2), (behind, 3)):
        with dis.connect(node.uri) as client:
            place = client.stage()
            with SegmentWriter(f"{place.directory}/{number}", SCHEMA) as writer:
                writer.write(pa.record_batch({"n": pa.array([number], pa.int64())}))
        parts.append(StagedSegment(str(number), place.node))

    def commit() -> None:
        with dis.connect(catalog.uri) as client:
            client.commit(dis.Commit("d", parts[:2], SCHEMA, key="k"))

    def abort() -> bool:
        with dis.connect(catalog.uri) as client:
            client.abort("k")
            return client.committed("k")

    with ThreadPoolExecutor(2) as pool, dis.connect(catalog.uri, timeout=PATIENCE) as client:

        def seen() -> float:
            return max(float(node["seen"]) for node in client.nodes() if node["flight"] == behind.uri)

        other.signal(signal.SIGSTOP)
        committing = pool.submit(commit)
        wait_until(lambda: len(segments(memory / "a" / "segments")) == 1, "the first node has prepared its part")
        aborting = pool.submit(abort)
        client.commit(dis.Commit("e", parts[2:], SCHEMA, key="another"))  # It does not wait for the stopped node.
        before = seen()
        wait_until(lambda: seen() > before, "a heartbeat has told of it")
        before = seen()
        wait_until(lambda: seen() > before, "another has the answer")
        assert not committing.done()
        assert not aborting.done()  # It waits for the commit with its key.
        other.signal(signal.SIGCONT)
        committing.result(PATIENCE)
        assert aborting.result(PATIENCE)
        wait_until(lambda: all(node["alive"] for node in client.nodes()), "both nodes are heard again")
    assert (read(catalog.uri, "d"), read(catalog.uri, "e")) == ([1, 2], [3])


def test_a_node_that_the_catalog_cannot_reach_is_refused(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start_catalog(start, tmp_path)
    arguments = ("node", "--store", memory / "store", "--catalog", catalog.uri, "--flight", "grpc://0.0.0.0:0")
    for _ in range(2):  # The port is another one each time, and the node is listed once.
        refused_with = run(*arguments, "--advertise", "nowhere.invalid")
        assert refused_with.returncode == 1
        refusal = r"the catalog gets no answer at grpc://nowhere.invalid:\d+, which this node announces\. Let "
        assert re.search(refusal, refused_with.stderr)
    with dis.connect(catalog.uri) as client:
        (refused,) = client.status().nodes
        assert (refused.alive, refused.registered) == (False, False)
        assert refused.problem.startswith("the catalog gets no answer at ")
        with pytest.raises(CatalogError, match="no node has registered"):
            client.put("d", table(1))
    node = start(*arguments, "--advertise", "127.0.0.1")
    put(node.uri, "d", table(1))
    assert problems(catalog.uri) == [""]


def test_status_and_ls_show_a_refused_node(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start_catalog(start, tmp_path)
    arguments = ("node", "--store", memory / "store", "--catalog", catalog.uri, "--flight", "grpc://0.0.0.0:0")
    assert run(*arguments, "--advertise", "nowhere.invalid").returncode == 1
    status = run("status", catalog.uri).stdout
    assert " refused " in status
    assert "no answer at grpc://nowhere.invalid:" in status
    assert "no answer at grpc://nowhere.invalid:" in run("ls", catalog.uri).stderr


def test_an_error_of_the_catalog_names_one_catalog_however_many_passed_it_on(
    memory: Path, tmp_path: Path, start: Start
) -> None:
    catalog = start_catalog(start, tmp_path)
    node = start("node", "--store", memory / "store", "--catalog", catalog.uri)
    with dis.connect(node.uri) as client:
        client.abort("k")
        with pytest.raises(CatalogError, match=f"^the catalog at {node.uri} refused: .* was aborted") as caught:
            client.commit(dis.Commit("d", [StagedSegment("s", client.stage().node)], SCHEMA, key="k"))
    assert str(caught.value).count("refused") == 1


def test_a_catalog_tells_prometheus_of_its_nodes_and_of_what_they_took_along(
    memory: Path, tmp_path: Path, start: Start
) -> None:
    port = free_port()
    catalog = start_catalog(start, tmp_path, "--metrics", f"127.0.0.1:{port}")
    store = memory / "store"
    node = start("node", "--store", store, "--catalog", catalog.uri, "--heartbeat", "0.5", "--limit", "1MiB")

    def told() -> dict[str, float]:
        return {name: value for (name, _), value in scrape(f"http://127.0.0.1:{port}/metrics").items()}

    put(catalog.uri, "d", table(1))
    put(catalog.uri, "d", table(2), mode="append")
    alive = told()
    assert (alive["dissociated_node_alive"], alive["dissociated_node_registered"]) == (1, 1)
    assert (alive["dissociated_unreadable_parts"], alive["dissociated_refused_puts_total"]) == (0, 0)
    assert alive["dissociated_node_heartbeat_age_seconds"] < PATIENCE
    with pytest.raises(CatalogError, match="full"):
        put(catalog.uri, "e", table(*range(1 << 18)), transport="grpc")
    assert told()["dissociated_refused_puts_total"] == 1
    node.kill()
    wait_until(lambda: told()["dissociated_node_alive"] == 0, "the catalog has noticed")
    assert told()["dissociated_unreadable_parts"] == 2
    assert "2 parts cannot be read" in run("status", catalog.uri).stdout


def test_forget_removes_a_node_for_good_and_its_datasets(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start_catalog(start, tmp_path)
    arguments = ("node", "--store", memory / "store", "--catalog", catalog.uri, "--heartbeat", "0.5")
    node = start(*arguments)
    put(catalog.uri, "d", table(1))
    alive = run("forget", node.uri, catalog.uri)
    assert (alive.returncode, "is alive: stop it" in alive.stderr) == (1, True)
    node.kill()
    with dis.connect(catalog.uri) as client:
        wait_until(lambda: not client.status().nodes[0].alive, "the catalog has noticed")
        assert run("forget", "another", catalog.uri).returncode == 1
        assert run("forget", node.uri, catalog.uri).returncode == 0
        assert (client.status().nodes, client.nodes(), client.list()) == ((), [], [])
        again = start(*arguments)  # like a node that was away while its dataset was dropped
        wait_until(lambda: segments(memory / "store" / "segments") == [], "it removes what it held")
        put(again.uri, "d", table(2))
        assert client.describe("d").version == 2
        assert read(catalog.uri, "d") == [2]


@pytest.mark.parametrize("live", [None, dis.Live()], ids=["once", "live"])
def test_a_stream_that_was_read_leaves_the_list_of_a_node_too(
    memory: Path, start: Start, live: dis.Live | None
) -> None:
    """Only the catalog of a server has streams. The nodes that belong to it, and their clients, get its list."""
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        node = start("node", "--store", memory / "store", "--catalog", server.catalog_uri, "--heartbeat", "0.5")
        server.publish("stream", table(2).to_reader(), live=live)
        put(node.uri, "stored", table(1))
        with dis.connect(node.uri) as client:
            assert [*client] == ["stored", "stream"]
            assert client.read("stream").read_all() == table(2)
            wait_until(lambda: [*client] == ["stored"], "the end is known")
            with pytest.raises(dis.errors.SourceError, match=r"can be read once and was read|has ended"):
                client.read("stream").read_all()


def test_a_node_of_another_catalog_publishes_nothing_by_itself(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start_catalog(start, tmp_path)
    with Node(Store(memory / "store"), catalog=catalog.uri) as node, dis.connect(catalog.uri) as client:
        with pytest.raises(CatalogError, match="put the dataset through that catalog"):
            node.server.publish("stream", table(1).to_reader())
        assert ([*client], node.server.names()) == ([], [])


def test_a_node_behind_a_port_mapping_announces_the_mapped_ports(memory: Path, tmp_path: Path, start: Start) -> None:
    """The mapping forwards the announced ports to the ports of the listeners."""
    catalog = start_catalog(start, tmp_path)
    outside = {name: free_port() for name in ("data", "flight")}
    inside = {name: free_port() for name in ("data", "flight")}
    mappings = [spawn(FORWARD, str(outside[name]), str(inside[name])) for name in inside]
    try:
        start(
            *("node", "--store", memory / "store", "--catalog", catalog.uri),
            *("--listen", f"tcp://0.0.0.0:{inside['data']}?advertise=localhost:{outside['data']}"),
            *("--flight", f"grpc://127.0.0.1:{inside['flight']}?advertise=localhost:{outside['flight']}"),
        )
        put(catalog.uri, "d", table(1, 2))
        with dis.connect(catalog.uri) as client:
            (node,) = client.nodes()
            locations = client.describe("d").endpoints[0].locations
        assert node["flight"] == f"grpc://localhost:{outside['flight']}"
        assert [one.partition("?")[0] for one in locations if one.startswith("tcp")] == [
            f"tcp://localhost:{outside['data']}"
        ]
        assert read(catalog.uri, "d", "tcp") == [1, 2]
    finally:
        for mapping in mappings:
            kill(mapping)

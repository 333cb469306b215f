"""More datasets than a process may have descriptors: a node opens files of a store only while they are read."""

from __future__ import annotations

import json
import threading
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.catalog.service import CatalogService
from dissociated.catalog.store_backend import StoreBackend
from dissociated.control.access import Unsigned
from dissociated.control.version import Version
from dissociated.datasets.registry import Registry
from dissociated.errors import DatasetNotFound, DissociatedError
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.segment_cache import OpenSegments, SegmentCache
from dissociated.store.store import Store
from support.helpers import PATIENCE, commit_of, files_below
from support.nodes import MIB, SCHEMA, put, read, table
from support.processes import run_script

CHILD = """
import resource, sys
import pyarrow as pa, pyarrow.flight as flight
import dissociated as dis
from dissociated.node.node import Node
from dissociated.store.store import Store

resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))
COUNT = 80  # of which each takes two descriptors while it is open

def table(number, more=0):
    return pa.table({"n": pa.array([number, number + 1 + more], pa.int64())})

def check(client, transport, numbers, more=0):
    for number in numbers:
        assert client.read(f"d{number}", transport=transport).read_all() == table(number, more), number

with Node(Store(sys.argv[1]), retain=600) as node:
    with dis.connect(node.uri) as client, flight.FlightClient(node.uri) as plain:
        for number in range(COUNT):
            client.put(f"d{number}", table(number))
        check(client, "shm", range(COUNT))
        check(client, "tcp", range(0, COUNT, 3))
        check(client, "grpc", range(0, COUNT, 7))
        paths = [flight.FlightDescriptor.for_path(f"d{number}") for number in range(20)]
        tickets = [plain.get_flight_info(path).endpoints[0].ticket for path in paths]
        begun = [client.read(f"d{number}", transport="tcp") for number in range(20)]
        check(client, "shm", range(COUNT // 2, COUNT))  # so the first ones are closed
        for number in range(10):
            client.put(f"d{number}", table(number, more=7))
        for number in range(10, 20):
            client.drop(f"d{number}")
        check(client, "shm", range(COUNT // 2, COUNT))
        for number, ticket in enumerate(tickets[:10]):  # what was promised stays, though it was closed
            assert plain.do_get(ticket).read_all() == table(number)
        for number, reader in enumerate(begun):
            assert reader.read_all() == table(number)
        check(client, "shm", range(10), more=7)

with Node(Store(sys.argv[1]), retain=600) as node, dis.connect(node.uri) as client:
    assert len(client.list()) == COUNT - 10
    check(client, "shm", range(20, COUNT, 2))
    check(client, "tcp", range(21, COUNT, 8))
    check(client, "tcp", range(10), more=7)
print("well")
"""


@pytest.mark.usefixtures("forks")
def test_a_node_has_more_datasets_than_descriptors(memory: Path) -> None:
    """Each dataset is read, also after a restart, and so are retained versions that were replaced."""
    child = run_script(CHILD, memory)
    assert child.stdout == "well\n", child.stderr[-3000:]


def open_below(directory: Path) -> set[str]:
    """Return the segments below a directory that this process has open or mapped."""
    return {path for path in files_below(directory) if ".arrows" in path}


def test_few_are_open_that_nobody_reads(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.store.segment_cache.MAX_SEGMENTS", 3)
    with Node(Store(memory), ["tcp://127.0.0.1:0"], retain=0.0) as node, dis.connect(node.uri) as client:
        for number in range(8):
            put(node.uri, f"d{number}", table(number))
        for number in range(8):
            for columns in (None, ["n"]):
                assert client.read(f"d{number}", columns=columns, transport="tcp").read_all() == table(number)
        assert len(open_below(memory)) <= 3
        for number in range(8):
            client.drop(f"d{number}")
        assert open_below(memory) == set()


def test_recent_ones_go_in_turn_and_one_stays_however_large(memory: Path) -> None:
    with Store(memory) as store:
        backend = StoreBackend(store, Registry(Unsigned()))
        recent = SegmentCache(cap=2)
        opened = {}
        for name in "abc":
            with backend.writer(name, SCHEMA) as writer:
                writer.write(table(1).to_batches()[0])
            opened[name] = store.segments(store.commit(commit_of(name, [name], key=name)))
        for name in "ab":
            recent.put(name, opened[name])
        assert recent.get("a") is opened["a"]
        recent.put("c", opened["c"])
        assert (recent.get("a"), recent.get("b"), recent.get("c")) == (opened["a"], None, opened["c"])
        large = OpenSegments([*opened["a"], *opened["b"], *opened["c"]])
        recent.put("large", large)
        assert (recent.get("a"), recent.get("large")) == (None, large)
        del opened, large, recent


def test_what_was_damaged_while_it_was_closed_is_an_error_of_its_readers_alone(memory: Path) -> None:
    with Node(Store(memory)) as node:
        for name in "abcd":
            put(node.uri, name, table(1, 2, 3))
    paths = {_name(path): path for path in memory.glob("segments/*")}
    _only(paths["a"]).chmod(0o600)
    _only(paths["a"]).write_bytes(b"not an Arrow IPC stream")
    _only(paths["b"]).unlink()
    other = _only(paths["c"])  # a valid stream, but not the committed one
    other.chmod(0o600)
    with pa.ipc.new_stream(other, SCHEMA) as writer:
        writer.write_table(table(4))
    with Node(Store(memory)) as node, dis.connect(node.uri) as client:
        assert {info.name for info in client.list()} == set("abcd")
        for transport in ("shm", "tcp", "grpc"):
            for name, why in (("a", "cannot be read"), ("b", "are gone"), ("c", "were modified after the commit")):
                with pytest.raises(DissociatedError, match=why):
                    client.read(name, transport=transport).read_all()
            assert client.read("d", transport=transport).read_all() == table(1, 2, 3)


def _name(version: Path) -> str:
    return str(json.loads((version / "manifest.json").read_text())["name"])


def _only(version: Path) -> Path:
    (path,) = version.glob("*.arrows")
    return path


def test_a_commit_that_nobody_could_read_leaves_nothing(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.datasets.static.MAX_REGIONS", 1)
    with Store(memory) as store:
        backend = StoreBackend(store, Registry(Unsigned()))
        for name in ("a", "b"):
            with backend.writer(name, SCHEMA) as writer:
                writer.write(table(1).to_batches()[0])
        with pytest.raises(DissociatedError, match="at most 1 can be shared"):
            backend.prepare(commit_of("many", ["a", "b"], SCHEMA, key="key"))
        assert store.versions() == []


ROWS = MIB // 16


class Reading(threading.Thread):
    """A thread that reads four datasets again and again, each filled with a single number."""

    def __init__(self, uri: str, transport: str, over: threading.Event) -> None:
        super().__init__()
        self.whole = 0
        self.wrong: list[object] = []
        self._uri, self._transport, self._over = uri, transport, over
        self.start()

    def run(self) -> None:
        with dis.connect(self._uri) as client:
            while not self._over.is_set():
                for name in "abcd":
                    try:
                        numbers = client.read(name, transport=self._transport).read_all()["n"]
                    except DissociatedError as error:
                        if not isinstance(error, DatasetNotFound) and "look it up again" not in str(error):
                            self.wrong.append(error)
                        continue
                    if len(numbers) == ROWS and len(numbers.unique()) == 1:
                        self.whole += 1
                    else:
                        self.wrong.append(numbers.unique())


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_readers_that_begin_while_it_goes_get_its_bytes_or_an_error(
    memory: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    """Versions are opened, replaced, dropped, evicted or spilled, and their pages recycled, all at once."""
    monkeypatch.setattr("dissociated.store.segment_cache.MAX_SEGMENTS", 1)
    store = Store(memory / "store", 6 * MIB, policy, memory / "spilled" if policy is Policy.SPILL else None)
    with Node(store, ["shm:", "tcp://127.0.0.1:0"], retain=0.0) as node, dis.connect(node.uri) as client:
        over = threading.Event()
        readers = [Reading(node.uri, transport, over) for transport in ("shm", "tcp", "grpc")]
        try:
            for number in range(24):
                try:
                    client.put("abcd"[number % 4], pa.table({"n": pa.array([number] * ROWS, pa.int64())}))
                except DissociatedError as error:
                    if "is being read" not in str(error):  # a dataset that is being read cannot be evicted now
                        raise
                if number % 5 == 4:
                    with suppress(DatasetNotFound):
                        client.drop("a")
        finally:
            over.set()
            for one in readers:
                one.join(PATIENCE)
        assert [one.wrong for one in readers] == [[], [], []]
        assert sum(one.whole for one in readers)


def test_what_a_node_has_just_removed_is_gone_and_its_node_is_not(memory: Path) -> None:
    """Read between the removal of a part and the catalog's record of that."""
    with Node(Store(memory / "store")) as node, dis.connect(node.uri) as client:
        client.put("a", table(1))
        node.service.catalog.holdings.delete_parts([version.id for version in node.store.versions()])
        with pytest.raises(DatasetNotFound, match="look it up again"):
            client.read("a", transport="grpc")


def test_a_quiet_node_is_not_looked_through_at_each_beat(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages to the catalog depend on the changes, and not on the number of datasets."""
    with (
        closing(CatalogService("grpc://127.0.0.1:0")) as catalog,
        Node(Store(memory), catalog=catalog.uri, heartbeat_interval=600) as node,
    ):
        put(catalog.uri, "a", table(1))
        node.service.catalog.reconcile()  # sends the change, and learns that it is published
        node.service.catalog.reconcile()
        looked: list[object] = []
        versions = node.store.versions

        def watched() -> list[Version]:
            looked.append(1)
            return versions()

        monkeypatch.setattr(node.store, "versions", watched)
        node.service.catalog.reconcile()
        put(catalog.uri, "b", table(2))
        node.service.catalog.reconcile()
        put(node.uri, "a", table(3))
        node.service.catalog.reconcile()
        assert looked == []
        assert (read(catalog.uri, "a"), read(catalog.uri, "b")) == ([3], [2])

"""Version numbers: each keeps its meaning forever, while nodes and catalogs are killed, restarted, lost and moved."""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.cli import main
from dissociated.control.commit import StagedSegment
from dissociated.errors import CatalogError, DatasetNotFound, OptionError, StoreError
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store
from dissociated.training import Batches
from store.test_memfds import memfd
from support.helpers import commit_of
from support.injection import Fault
from support.nodes import MIB, SCHEMA, put, read, table
from support.processes import Process, Start, free_port

HOUR = 3600.0
SELDOM = 600.0  # seconds: the tests trigger each heartbeat themselves


def numbers(uri: str, name: str) -> list[int]:
    with dis.connect(uri) as client:
        return [one["version"] for one in client.versions(name)]


def version(uri: str, name: str, number: int | None = None) -> tuple[int, str, list[int]]:
    """Return the number, the lineage and the rows of a version."""
    with dis.connect(uri) as client:
        info = client.describe(name, number)
        return info.version, info.lineage_id, client.read(name, version=number).read_all()["n"].to_pylist()


class Restarting:
    """A node at a fixed address that can be killed and restarted."""

    def __init__(self, start: Start, store: Path) -> None:
        self._start, self._store = start, store
        self._flight = f"grpc://127.0.0.1:{free_port()}"
        self.node: Process = start("node", "--store", store, "--flight", self._flight)
        self.uri = self.node.uri

    def restart(self) -> None:
        self.node.kill()
        self.node = self._start("node", "--store", self._store, "--flight", self._flight)


@pytest.fixture
def node(memory: Path, start: Start) -> Restarting:
    return Restarting(start, memory / "store")


def test_numbers_go_on_after_a_node_was_killed(node: Restarting, capsys: pytest.CaptureFixture[str]) -> None:
    put(node.uri, "other", table(0))
    put(node.uri, "d", table(1))
    put(node.uri, "d", table(2, 2))
    assert version(node.uri, "d")[0] == 2  # each dataset has its own numbers
    node.restart()
    put(node.uri, "d", table(3, 3, 3))
    assert version(node.uri, "d")[0::2] == (3, [3, 3, 3])
    assert main(["cat", f"{node.uri}/d", "--version", "2"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, "no version 2 of the dataset 'd'" in printed.err) == ("", True)
    assert main(["cat", f"{node.uri}/d", "--version", "3", "--format", "csv"]) == 0
    assert capsys.readouterr().out.split() == ['"n"', "3", "3", "3"]
    assert main(["versions", f"{node.uri}/d", "--json"]) == 0
    assert [one["version"] for one in json.loads(capsys.readouterr().out)] == [3]


def test_what_was_dropped_or_lost_leaves_its_number_behind(node: Restarting, memory: Path) -> None:
    for name in ("dropped", "kept"):
        put(node.uri, name, table(1))
        put(node.uri, name, table(2))
    with dis.connect(node.uri) as client:
        _, lineage, _ = version(node.uri, "dropped")
        client.drop("dropped")
        node.restart()
        node.restart()  # a second restart must not lose what the first one recovered
        client.put("dropped", table(3), mode="append")
        client.put("kept", table(3), mode="append")
    found = version(node.uri, "dropped")
    assert (found[0], found[2]) == (3, [3])
    assert found[1] != lineage
    assert version(node.uri, "kept")[0::2] == (3, [2, 3])


def test_a_handle_goes_on_with_its_version_and_never_with_another(node: Restarting) -> None:
    put(node.uri, "d", table(1))
    put(node.uri, "d", table(2, 2))
    with dis.connect(node.uri) as client:
        handle = client["d"]
        node.restart()
        assert handle.to_table()["n"].to_pylist() == [2, 2]
        created = client["d"].created
        node.restart()
        client.put("d", table(3))
        assert handle.to_table()["n"].to_pylist() == [2, 2]  # as it was mapped
        handle.close()
        with pytest.raises(DatasetNotFound, match="version 2 of 'd' is gone"):
            handle.to_table()
        refreshed = handle.refresh()
        assert (refreshed.version, refreshed.to_table()["n"].to_pylist()) == (3, [3])
    assert handle.created == created


def test_a_handle_is_not_fooled_by_another_node_at_its_address(memory: Path, start: Start) -> None:
    node = Restarting(start, memory / "one")
    put(node.uri, "d", table(1))
    with dis.connect(node.uri) as client:
        handle = client["d"]
        state = Batches(handle, batch_size=1).state_dict()
        node.node.kill()
        start("node", "--store", memory / "two", "--flight", node.uri)
        client.put("d", table(2))
        assert client["d"].version == handle.version == 1
        with pytest.raises(DatasetNotFound, match="version 1 of 'd' is gone"):
            handle.to_table()
        with pytest.raises(OptionError, match="the state has lineage_id"):
            Batches(client["d"], batch_size=1).load_state_dict(state)


def test_a_training_run_goes_on_with_its_rows_or_not_at_all(node: Restarting) -> None:
    put(node.uri, "d", table(0))
    put(node.uri, "d", table(*range(10)))
    with dis.connect(node.uri) as client:
        first = Batches(client["d"], batch_size=2, shuffle=True)
        batches = iter(first)
        next(batches)
        state = json.loads(json.dumps(first.state_dict()))
        expected = [batch["n"].tolist() for batch in batches]
        node.restart()
        resumed = Batches(client.dataset("d", state["version"]), batch_size=2, shuffle=True)
        resumed.load_state_dict(state)
        assert [batch["n"].tolist() for batch in resumed] == expected
        node.restart()
        client.put("d", table(*range(100, 110)))
        with pytest.raises(DatasetNotFound, match="no version 2 of the dataset 'd'"):
            client.dataset("d", state["version"])
        with pytest.raises(OptionError, match="the state has version 2, and these batches have version 3"):
            Batches(client["d"], batch_size=2, shuffle=True).load_state_dict(state)


def test_memory_that_was_handed_over_leaves_its_number_behind(memory: Path) -> None:
    for number in range(1, 4):
        with Node(Store(memory / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
            with pytest.raises(DatasetNotFound):
                client.describe("d")
            if number > 1:
                with pytest.raises(CatalogError, match=f"version {number - 1} was evicted, or lost with its node"):
                    client.put("d", table(1), mode="append")
            with memfd(table(number)) as descriptor:
                client.commit(commit_of("d", [client.hand_over(descriptor)], table().schema))
            assert client.describe("d").version >= number
            assert version(node.uri, "d")[2] == [number]


def test_a_version_that_was_spilled_does_not_become_current_when_the_memory_is_lost(
    memory: Path, tmp_path: Path
) -> None:
    def node(name: str) -> Node:
        return Node(Store(memory / name, 2 * MIB, Policy.SPILL, tmp_path / "disk"), ["shm:"])

    with node("before") as running, dis.connect(running.uri) as client:
        put(running.uri, "d", table(*range(100_000)))
        lineage_id = client.describe("d").lineage_id
        running.store.ensure_room("new", int(1.9 * MIB))
        assert not running.store.usage().committed
        put(running.uri, "d", table(1))
        assert (running.store.usage().committed > 0, client.describe("d").version) == (True, 2)
    with node("after the reboot") as running, dis.connect(running.uri) as client:
        assert client.list() == []
        assert numbers(running.uri, "d") == [1]  # it is all that is left
        with pytest.raises(CatalogError, match="'d' cannot be appended to: version 2 was evicted, or lost"):
            client.put("d", table(2), mode="append")
        client.put("d", table(3))
        assert version(running.uri, "d")[0::2] == (3, [3])
        assert version(running.uri, "d")[1] != lineage_id


def test_a_commit_that_reached_the_store_and_not_the_database_is_the_last(memory: Path) -> None:
    """A node was killed between the two steps, or its database was restored from a backup."""
    path = memory / "catalog.db"

    def node() -> Node:
        return Node(Store(memory / "store"), ["shm:"], database=str(path))

    with node() as running:
        put(running.uri, "d", table(1))
    before = path.read_bytes()
    with node() as running:
        put(running.uri, "d", table(2), mode="append")
        put(running.uri, "d", table(3), mode="append")
    path.write_bytes(before)
    with node() as running:
        assert version(running.uri, "d")[0::2] == (3, [1, 2, 3])
        put(running.uri, "d", table(4), mode="append")
        assert version(running.uri, "d")[0::2] == (4, [1, 2, 3, 4])


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_a_version_whose_manifest_is_empty_leaves_its_number_behind(memory: Path, mode: str) -> None:
    """The version before it is not shown in its place, and nothing that knows the version accepts a later one."""
    with ExitStack() as running:
        with Node(Store(memory), ["shm:"]) as node:
            client = running.enter_context(dis.connect(node.uri))
            client.put("d", table(1))
            client.describe("d")  # makes the node keep the version after it is replaced
            client.put("d", table(2), mode=mode)
            handle = client["d"]
            state = Batches(handle, batch_size=1).state_dict()
            latest = node.store.named("d")[-1]
        (memory / "segments" / latest.id / "manifest.json").write_bytes(b"")
        with Node(Store(memory), ["shm:"]):
            assert client.list() == []
            with pytest.raises(CatalogError, match="'d' cannot be appended to: version 2 was evicted, or lost"):
                client.put("d", table(3), mode="append")
            client.put("d", table(4, 5))
            assert client.describe("d").version == 3
            with pytest.raises(DatasetNotFound, match="no version 2 of the dataset 'd'"):
                client.read("d", version=2)
            handle.close()
            with pytest.raises(DatasetNotFound, match="version 2 of 'd' is gone"):
                handle.to_table()
            with pytest.raises(OptionError, match="the state has version"):
                Batches(client["d"], batch_size=1).load_state_dict(state)


def start_with_database(memory: Path) -> Node:
    return Node(Store(memory / "store"), ["shm:"], database=str(memory / "catalog.db"))


def raise_refused(*arguments: Any, **options: Any) -> None:
    raise CatalogError("refused")


def lose_rows(memory: Path) -> None:
    """Put the dataset `d` on a node with a database, and damage its only version while the node is away."""
    with start_with_database(memory) as node:
        put(node.uri, "d", table(1))
        (stored,) = node.store.versions()
    (memory / "store" / "segments" / stored.id / "manifest.json").write_bytes(b"")


def test_a_dataset_that_was_lost_and_then_dropped_can_be_appended_to(memory: Path) -> None:
    lose_rows(memory)
    with start_with_database(memory) as node, dis.connect(node.uri) as client:
        client.drop("d")
        client.put("d", table(2), mode="append")
        assert client.read("d").read_all() == table(2)
        assert client.describe("d").version == 2


def test_a_commit_that_is_refused_twice_hides_no_version(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second attempt finds the version of the first one, whose removal failed as well."""
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("d", table(1))
        with node.store.writer("w", SCHEMA) as writer:
            writer.write(table(2).to_batches()[0])
        commit = dis.Commit("d", [StagedSegment("w", node.store.id)], SCHEMA, key="k")
        with monkeypatch.context() as patch:
            patch.setattr(Database, "publish", raise_refused)
            failing_removal = Fault(str(memory / "segments"), at=1, operations=("rename",), times=1000)
            with failing_removal, pytest.raises(CatalogError):
                client.commit(commit)
            with pytest.raises(CatalogError):
                client.commit(commit)
        assert client.read("d").read_all() == table(1)
    with Node(Store(memory), ["shm:"]) as node:
        assert read(node.uri, "d") == [1]


def test_nothing_is_appended_to_rows_that_are_gone_from_the_store_of_a_node_with_a_database(memory: Path) -> None:
    lose_rows(memory)
    with start_with_database(memory) as node, dis.connect(node.uri) as client:
        with pytest.raises(CatalogError, match="'d' cannot be appended to: a part of 'd' is set aside on"):
            client.put("d", table(2), mode="append")
        with pytest.raises(CatalogError, match="a part of 'd' is set aside on"):
            client.read("d")
    (entry,) = (memory / "store" / "segments").iterdir()
    shutil.rmtree(entry)
    with start_with_database(memory) as node, dis.connect(node.uri) as client:
        with pytest.raises(CatalogError, match="rows of version 1 are no longer in the store"):
            client.put("d", table(2), mode="append")
        with pytest.raises(DatasetNotFound):
            client.read("d")
        client.put("d", table(3))
        client.put("d", table(4), mode="append")
        assert client.read("d").read_all() == table(3, 4)


# Catalogs of several nodes


class Cluster:
    """A catalog without a store, which can lose its data or get them from a backup, and nodes that report to it."""

    def __init__(self, directory: Path, running: ExitStack, database: str = ":memory:", retain: float = 300.0) -> None:
        self._directory, self._running = directory, running
        self._database, self._retain = database, retain
        self._uri = f"grpc://127.0.0.1:{free_port()}"
        self.nodes: dict[str, Node] = {}
        self.start_catalog()

    @property
    def uri(self) -> str:
        return self._uri

    def start_catalog(self) -> None:
        database = Database(self._database, clock=lambda: time.time())
        self.catalog = CatalogService(self._uri, database=database, retain=self._retain)
        self._running.callback(self.catalog.close)

    def lose_catalog(self) -> None:
        self.catalog.close()
        self.start_catalog()

    def back_up(self) -> None:
        """Keep a copy of the database, which must be a file."""
        self.catalog.close()
        self._backup = Path(self._database).read_bytes()
        self.start_catalog()

    def restore(self) -> None:
        """Go on with the copy of the database."""
        self.catalog.close()
        Path(self._database).write_bytes(self._backup)
        self.start_catalog()

    def start_node(self, name: str, **options: Any) -> Node:
        store = Store(self._directory / name, **options)
        self.nodes[name] = Node(store, ["shm:"], catalog=self._uri, heartbeat_interval=SELDOM)
        self._running.callback(self.nodes[name].close)
        return self.nodes[name]

    def tell(self, *names: str) -> None:
        for name in names or self.nodes:
            self.nodes[name].service.catalog.reconcile()
            self.nodes[name].service.catalog.reconcile()


@pytest.fixture
def cluster(memory: Path) -> Iterator[Cluster]:
    with ExitStack() as running:
        yield Cluster(memory, running)


@pytest.fixture
def backed_up(memory: Path) -> Iterator[Cluster]:
    """Yield a cluster that has a database file, and keeps no version that was replaced."""
    with ExitStack() as running:
        yield Cluster(memory, running, str(memory / "catalog.db"), retain=0.0)


def commit_on(client: dis.Client, *nodes: Node) -> None:
    """Replace `d` by a version that has a part with one row on each of `nodes`: 2, 3 ..."""
    staged = []
    for number, node in enumerate(nodes, 2):
        with node.store.writer(f"part {number}", SCHEMA) as writer:
            writer.write(table(number).to_batches()[0])
        staged.append(StagedSegment(f"part {number}", node.store.id))
    client.commit(dis.Commit("d", staged, SCHEMA))


def write_segment(uri: str, name: str, number: int) -> StagedSegment:
    """Write a segment with one row to the stage of a node."""
    with dis.connect(uri) as client:
        place = client.stage()
        with SegmentWriter(f"{place.directory}/{name}", SCHEMA, reserve=client.reserve) as writer:
            writer.write(table(number).to_batches()[0])
    return StagedSegment(name, place.node)


def test_numbers_go_on_after_a_catalog_has_lost_its_database(cluster: Cluster) -> None:
    node = cluster.start_node("a")
    for number in range(3):
        put(node.uri, "d", table(number))
    put(node.uri, "dropped", table(1))
    cluster.tell()
    cluster.catalog.catalog.drop("dropped")
    cluster.tell()
    before = version(cluster.uri, "d")
    cluster.lose_catalog()
    cluster.tell()
    assert version(cluster.uri, "d") == before
    assert before[0] == 3
    put(node.uri, "d", table(7))
    put(node.uri, "dropped", table(8))
    assert version(cluster.uri, "d")[0::2] == (4, [7])
    assert version(cluster.uri, "dropped")[0::2] == (2, [8])


def test_a_number_that_was_prepared_for_a_commit_is_not_used_again(cluster: Cluster) -> None:
    a, b = cluster.start_node("a"), cluster.start_node("b")
    put(a.uri, "d", table(1))
    cluster.tell()
    with dis.connect(b.uri) as client:
        client.put("d", table(2), mode="append")  # the dataset has two parts, and no node knows both
    assert version(cluster.uri, "d")[0] == 2
    cluster.lose_catalog()
    cluster.tell()
    put(a.uri, "d", table(3))
    assert version(cluster.uri, "d")[0::2] == (3, [3])


def test_a_number_that_only_an_absent_node_knows_is_used_again_in_another_lineage_only(cluster: Cluster) -> None:
    a, b, c = (cluster.start_node(name) for name in "abc")
    put(a.uri, "d", table(1))
    cluster.tell()
    put(b.uri, "d", table(2), mode="append")
    with dis.connect(cluster.uri) as client:
        handle = client["d"]
        assert (handle.info.version, version(cluster.uri, "d")[2]) == (2, [1, 2])
        cluster.lose_catalog()
        cluster.tell("a", "c")  # node a has not heard that its version was appended to
        assert version(cluster.uri, "d") == (1, handle.info.lineage_id, [1])
        for rows in (3, 4):
            put(c.uri, "d", table(rows), mode="append")
            client.describe("d")  # makes the catalog keep the version after it is replaced
        cluster.tell("b")
        assert version(cluster.uri, "d")[0::2] == (3, [1, 3, 4])
        assert version(cluster.uri, "d", 2)[2] == [1, 3]
        lineage_ids = {version(cluster.uri, "d", number)[1] for number in (2, 3)}
        assert len(lineage_ids) == 1
        assert handle.info.lineage_id not in lineage_ids
        with pytest.raises(DatasetNotFound, match="version 2 of 'd' is gone"):
            client.describe_version("d", 2, handle.info.lineage_id)


@pytest.mark.parametrize("parts", ["ab", "bc"])
@pytest.mark.parametrize("first", ["a", "b"])
def test_a_version_that_parts_on_several_nodes_replaced_is_not_shown_again(
    cluster: Cluster, parts: str, first: str
) -> None:
    nodes = {name: cluster.start_node(name) for name in "abc"}
    put(nodes["a"].uri, "d", table(1))
    cluster.tell()
    with dis.connect(cluster.uri) as client:
        client.describe("d")  # makes the catalog keep the version after it is replaced
        commit_on(client, *(nodes[name] for name in parts))
        assert sorted(read(cluster.uri, "d")) == [2, 3]
        cluster.tell()
        assert numbers(cluster.uri, "d") == [1, 2]
        cluster.lose_catalog()
        cluster.tell(first)
        cluster.tell()
        assert client.list() == []
        with pytest.raises(CatalogError, match="'d' cannot be appended to: version 2 was evicted, or lost"):
            client.put("d", table(4), mode="append")
        assert numbers(cluster.uri, "d") == [1]  # it may be all that is left
        client.put("d", table(5))
        assert version(cluster.uri, "d")[0::2] == (3, [5])
        assert numbers(cluster.uri, "d") == [3]
        cluster.tell()
        assert not any(held.number == 1 for held in nodes["a"].store.versions())


@pytest.mark.parametrize("first", ["a", "b"])
@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_version_whose_successor_is_gone_is_not_shown_again(cluster: Cluster, is_dropped: bool, first: str) -> None:
    a, b = cluster.start_node("a"), cluster.start_node("b")
    put(a.uri, "d", table(1))
    cluster.tell()
    put(b.uri, "d", table(2))  # node a does not hear of it
    cluster.tell("b")
    with dis.connect(cluster.uri) as client:
        if is_dropped:
            client.drop("d")
        else:
            b.store.eviction.evict(*b.store.versions())
        cluster.tell("b")
        cluster.lose_catalog()
        cluster.tell(first)
        cluster.tell()
        assert client.list() == []
        if not is_dropped:
            with pytest.raises(CatalogError, match="'d' cannot be appended to: version 2 was evicted, or lost"):
                client.put("d", table(3), mode="append")
        client.put("d", table(3), mode="append" if is_dropped else "overwrite")
        assert version(cluster.uri, "d")[0::2] == (3, [3])


def test_a_node_with_a_part_of_the_last_version_does_not_show_the_one_before(memory: Path) -> None:
    with Node(Store(memory / "a"), ["shm:"]) as a, Node(Store(memory / "b"), ["shm:"], catalog=a.uri) as b:
        put(a.uri, "d", table(1))
        with dis.connect(a.uri) as client:
            client.describe("d")
            commit_on(client, a, b)
        assert numbers(a.uri, "d") == [1, 2]
    with Node(Store(memory / "a"), ["shm:"]) as a, dis.connect(a.uri) as client:
        assert client.list() == []
        client.put("d", table(5))
        assert version(a.uri, "d")[0::2] == (3, [5])


@pytest.mark.parametrize("nodes", ["b", "ab"])
def test_no_version_of_a_catalog_killed_before_it_has_confirmed_a_commit_is_made_again(
    memory: Path, start: Start, monkeypatch: pytest.MonkeyPatch, nodes: str
) -> None:
    """The catalog has a store, and its database in memory. It is killed between the publication and the manifest."""
    listen = f"grpc://127.0.0.1:{free_port()}"
    arguments = ("node", "--store", memory / "a", "--flight", listen)
    killed = Fault(str(memory / "a" / "segments"), error=None, operations=("create",))
    with monkeypatch.context() as patch:
        for variable, value in killed.environment().items():
            patch.setenv(variable, value)
        catalog = start(*arguments)
    other = start("node", "--store", memory / "b", "--catalog", listen, "--heartbeat", str(SELDOM))
    uris = {"a": catalog.uri, "b": other.uri}
    put(listen, "d", table(1))
    number, lineage_id, _ = version(listen, "d")
    assert number == 1
    parts = [write_segment(uris[name], name, 2) for name in nodes]
    with dis.connect(listen) as client, pytest.raises(CatalogError):
        client.commit(dis.Commit("d", parts, SCHEMA, key="k", mode="append"))
    other.kill()
    start(*arguments)
    with dis.connect(listen) as client:
        assert version(listen, "d") == (1, lineage_id, [1])
        client.put("d", table(3), mode="append")
        latest = version(listen, "d")
        assert (latest[0], latest[2]) == (3, [1, 3])
        assert latest[1] != lineage_id
        with pytest.raises(DatasetNotFound):
            client.describe_version("d", 2, lineage_id)


@pytest.mark.parametrize("database", [":memory:", "catalog.db"])
def test_a_failed_commit_of_other_nodes_ends_no_lineage(memory: Path, database: str) -> None:
    uri = f"grpc://127.0.0.1:{free_port()}"
    path = database if database == ":memory:" else str(memory / database)

    def catalog() -> Node:
        return Node(Store(memory / "a"), ["shm:"], flight=uri, database=path)

    with catalog():
        put(uri, "d", table(1))
        lineage_id = version(uri, "d")[1]
        with Node(Store(memory / "b"), ["shm:"], catalog=uri) as other, dis.connect(uri) as client:
            missing = StagedSegment("missing", other.store.id)
            with pytest.raises(StoreError, match="the segment 'missing' is not in"):
                client.commit(dis.Commit("d", [missing], SCHEMA, mode="append"))
    with catalog():
        put(uri, "d", table(2), mode="append")
        assert version(uri, "d")[1:] == (lineage_id, [1, 2])


@pytest.mark.parametrize("database", [":memory:", "catalog.db"])
def test_a_full_store_of_a_catalog_with_a_database_refuses_no_commit_of_other_nodes(
    memory: Path, database: str
) -> None:
    path = database if database == ":memory:" else str(memory / database)
    with (
        Node(Store(memory / "a"), ["shm:"], database=path) as catalog,
        Node(Store(memory / "b"), ["shm:"], catalog=catalog.uri) as other,
        dis.connect(catalog.uri) as client,
    ):
        commit = dis.Commit("d", [write_segment(other.uri, "w", 1)], SCHEMA, key="k")
        with Fault(str(memory / "a"), error=errno.ENOSPC, operations=("create", "write"), times=1000):
            if database == ":memory:":
                with pytest.raises(StoreError, match="no space is left for recording the number of 'd'"):
                    client.commit(commit)
            else:
                client.commit(commit)
        client.commit(commit)
        assert read(catalog.uri, "d") == [1]


def test_a_number_that_a_catalog_from_a_backup_has_forgotten_is_not_used_again(memory: Path) -> None:
    """The store of the catalog knows the number; the node with the rows is away."""
    path, uri = memory / "catalog.db", f"grpc://127.0.0.1:{free_port()}"

    def catalog() -> Node:
        return Node(Store(memory / "a"), ["shm:"], flight=uri, database=str(path))

    with catalog():
        put(uri, "d", table(1))
        lineage_id = version(uri, "d")[1]
    backup = path.read_bytes()
    with catalog(), Node(Store(memory / "b"), ["shm:"], catalog=uri) as other:
        put(other.uri, "d", table(2), mode="append")
        assert version(uri, "d") == (2, lineage_id, [1, 2])
    path.write_bytes(backup)
    with catalog():
        assert version(uri, "d") == (1, lineage_id, [1])
        put(uri, "d", table(3), mode="append")
        latest = version(uri, "d")
        assert (latest[0], latest[2]) == (3, [1, 3])
        assert latest[1] != lineage_id
        put(uri, "d", table(4), mode="append")
        assert version(uri, "d") == (4, latest[1], [1, 3, 4])
    with catalog():
        assert version(uri, "d") == (4, latest[1], [1, 3, 4])


@pytest.mark.parametrize("mode", ["append", "overwrite"])
def test_a_catalog_from_a_backup_whose_nodes_are_all_present_uses_no_number_again(
    backed_up: Cluster, mode: str
) -> None:
    """The catalog has no store, so only the node of the later version knows that there was one."""
    uri, a, b = backed_up.uri, backed_up.start_node("a"), backed_up.start_node("b")
    put(a.uri, "d", table(1))
    lineage_id = version(uri, "d")[1]
    backed_up.back_up()
    put(b.uri, "d", table(2), mode=mode)
    later = version(uri, "d")
    backed_up.tell()
    backed_up.restore()
    backed_up.tell()
    put(a.uri, "d", table(3), mode="append")
    latest = version(uri, "d")
    assert latest[0] == 3
    assert latest[1] not in (lineage_id, later[1])
    assert latest[2] == [later[2][-1] if mode == "overwrite" else 1, 3]


@pytest.mark.parametrize("writer", ["a", "catalog"])
def test_an_append_keeps_a_version_that_a_node_reports_during_the_commit(
    memory: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """The catalog was restored from a backup. The node of the later version starts while rows are committed."""
    path, uri = memory / "catalog.db", f"grpc://127.0.0.1:{free_port()}"

    def node(name: str) -> Node:
        return Node(Store(memory / name), ["shm:"], catalog=uri, heartbeat_interval=SELDOM)

    def catalog() -> Node:
        return Node(Store(memory / "catalog"), ["shm:"], flight=uri, database=str(path))

    with catalog():
        put(uri, "d", table(1))
        version(uri, "d")  # makes the catalog keep the version after it is replaced
    backup = path.read_bytes()
    with catalog(), node("b") as b:
        version(uri, "d")
        put(b.uri, "d", table(2))
        for _ in range(2):
            b.service.catalog.reconcile()
    path.write_bytes(backup)
    with ExitStack() as running:
        running.enter_context(catalog())
        written_at = uri if writer == "catalog" else running.enter_context(node(writer)).uri
        publish = Database.publish

        def publish_late(*arguments: Any, **options: Any) -> int:
            monkeypatch.setattr(Database, "publish", publish)
            running.enter_context(node("b"))
            return publish(*arguments, **options)

        monkeypatch.setattr(Database, "publish", publish_late)
        with pytest.raises(CatalogError, match=r"nothing was committed to 'd', since a node .* put the rows again"):
            put(written_at, "d", table(3), mode="append")
        assert version(uri, "d")[0::2] == (2, [2])
        put(written_at, "d", table(3), mode="append")
        assert version(uri, "d")[2] == [2, 3]


# Parts that are set aside


class Entry:
    """The only version in the store of a node, whose manifest is damaged while the node is away, and repaired."""

    def __init__(self, node: Node, directory: Path | None = None) -> None:
        (held,) = node.store.versions()
        self.path = (directory or node.store.directory) / "segments" / held.id
        self._manifest = self.path / "manifest.json"
        self._content = self._manifest.read_bytes()

    def damage(self) -> None:
        self._manifest.write_bytes(self._content[:-40])

    def damage_number(self) -> None:
        self._manifest.write_bytes(self._content.replace(b'"version": 1', b'"version": !'))

    def repair(self) -> None:
        self._manifest.write_bytes(self._content)


def set_aside_part(cluster: Cluster) -> Entry:
    """Commit `d` with parts on the nodes a and b, and restart node a, which cannot read the manifest of its part."""
    with dis.connect(cluster.uri) as client:
        commit_on(client, cluster.start_node("a"), cluster.start_node("b"))
    cluster.tell()
    entry = Entry(cluster.nodes["a"])
    cluster.nodes["a"].close()
    entry.damage()
    cluster.start_node("a")
    cluster.tell()
    return entry


def restart_node(cluster: Cluster, name: str) -> None:
    cluster.nodes[name].close()
    cluster.start_node(name)
    cluster.tell()


def test_a_part_that_is_set_aside_stays_in_its_version(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    entry = set_aside_part(cluster)
    with dis.connect(cluster.uri) as client:
        before = client.describe("d")
        handle = client["d"]
        for read_all in (lambda: client.read("d").read_all(), handle.to_table):
            with pytest.raises(CatalogError, match=r"a part of 'd' is set aside on .* the mode overwrite"):
                read_all()
        with pytest.raises(CatalogError, match="'d' cannot be appended to: a part of 'd' is set aside on"):
            client.put("d", table(4), mode="append")
        assert [len(node.store.versions()) for node in cluster.nodes.values()] == [0, 1]
        assert (client.status().unreadable_parts, client.status().unreadable_datasets) == (1, ("d",))
        with dis.connect(cluster.nodes["a"].uri) as at_node:
            store = at_node.status().store
        assert store is not None
        assert [str(entry.path) in sentence for sentence in store.set_aside] == [True]
        assert main(["ls", cluster.uri]) == 0
        assert "has set a part aside" in capsys.readouterr().out
        assert main(["describe", f"{cluster.uri}/d"]) == 0
        printed = capsys.readouterr()
        assert "none: it is set aside" in printed.out
        assert "a part of 'd' is set aside on" in printed.err
        entry.repair()
        restart_node(cluster, "a")
        assert sorted(read(cluster.uri, "d")) == [2, 3]
        assert sorted(handle.to_table()["n"].to_pylist()) == [2, 3]
        assert (client.describe("d").version, client.describe("d").lineage_id) == (before.version, before.lineage_id)
        assert client.status().unreadable_parts == 0
        client.put("d", table(4), mode="append")
        assert sorted(read(cluster.uri, "d")) == [2, 3, 4]


def test_a_client_that_knows_only_flight_is_told_that_a_part_is_set_aside(cluster: Cluster) -> None:
    set_aside_part(cluster)
    with flight.connect(cluster.uri) as client:
        info = client.get_flight_info(flight.FlightDescriptor.for_path("d"))
        (aside,) = (endpoint for endpoint in info.endpoints if not endpoint.locations)
        with pytest.raises(flight.FlightError, match="a part of 'd' is set aside on"):
            client.do_get(aside.ticket).read_all()


def test_a_part_that_was_set_aside_and_removed_counts_as_evicted(cluster: Cluster) -> None:
    entry = set_aside_part(cluster)
    with dis.connect(cluster.uri) as client:
        lineage_id = client.describe("d").lineage_id
    shutil.rmtree(entry.path)
    restart_node(cluster, "a")
    with dis.connect(cluster.uri) as client:
        assert client.list() == []
        with pytest.raises(CatalogError, match="'d' cannot be appended to: version 1 was evicted, or lost"):
            client.put("d", table(4), mode="append")
        assert not cluster.nodes["b"].store.versions()
        client.put("d", table(5))
        client.put("d", table(6), mode="append")
        assert version(cluster.uri, "d")[0::2] == (3, [5, 6])
        assert version(cluster.uri, "d")[1] != lineage_id


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_part_that_was_set_aside_during_a_drop_or_a_put_is_deleted_when_it_can_be_read(
    cluster: Cluster, is_dropped: bool
) -> None:
    entry = set_aside_part(cluster)
    with dis.connect(cluster.uri) as client:
        client.drop("d")
        if not is_dropped:
            client.put("d", table(4))
        entry.repair()
        restart_node(cluster, "a")
        assert not entry.path.exists()
        assert [read(cluster.uri, info.name) for info in client.list()] == ([] if is_dropped else [[4]])
        client.put("d", table(5), mode="append")
        assert version(cluster.uri, "d")[0::2] == ((2, [5]) if is_dropped else (3, [4, 5]))


def test_a_whole_version_that_is_set_aside_stays_and_no_older_one_is_shown(cluster: Cluster) -> None:
    node = cluster.start_node("a")
    put(node.uri, "d", table(1))
    entry = Entry(node)
    with dis.connect(cluster.uri) as client:
        client.describe("d")  # makes the catalog keep the version after it is replaced
        put(cluster.start_node("b").uri, "d", table(2))
        cluster.tell()
        latest = Entry(cluster.nodes["b"])
        cluster.nodes["b"].close()
        latest.damage()
        cluster.start_node("b")
        cluster.tell()
        with pytest.raises(CatalogError, match="a part of 'd' is set aside on"):
            client.read("d")
        with pytest.raises(CatalogError, match="'d' cannot be appended to"):
            client.put("d", table(3), mode="append")
        assert version(cluster.uri, "d", 1)[2] == [1]
        put(node.uri, "d", table(4))
        assert version(cluster.uri, "d")[0::2] == (3, [4])
        latest.repair()
        restart_node(cluster, "b")
        assert version(cluster.uri, "d")[0::2] == (3, [4])
    assert entry.path.exists()


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_manifest_without_a_readable_number_hides_no_version_and_ends_no_lineage(
    cluster: Cluster, nodes: str
) -> None:
    with dis.connect(cluster.uri) as client:
        commit_on(client, *(cluster.start_node(name) for name in nodes))
    cluster.tell()
    if nodes == "a":
        cluster.lose_catalog()  # so that the catalog has found the version in the store
        cluster.tell()
    number, lineage_id, rows = version(cluster.uri, "d")
    entry = Entry(cluster.nodes["a"])
    cluster.nodes["a"].close()
    entry.damage_number()
    cluster.start_node("a")
    cluster.tell()
    with pytest.raises(CatalogError, match="a part of 'd' is set aside on"):
        read(cluster.uri, "d")
    entry.repair()
    restart_node(cluster, "a")
    assert (number, version(cluster.uri, "d")) == (1, (1, lineage_id, rows))
    put(cluster.nodes["a"].uri, "d", table(9), mode="append")
    appended = version(cluster.uri, "d")
    assert (appended[0], appended[2]) == (2, [*rows, 9])
    assert (appended[1] == lineage_id) is (nodes == "ab")  # a version that was found begins another lineage


def test_a_dataset_that_is_dropped_while_a_part_is_set_aside_can_be_appended_to(cluster: Cluster) -> None:
    entry = set_aside_part(cluster)
    with dis.connect(cluster.uri) as client:
        client.drop("d")
        restart_node(cluster, "a")  # its store still counts the version as lost
        client.put("d", table(4), mode="append")
    entry.repair()
    restart_node(cluster, "a")
    assert not entry.path.exists()
    assert version(cluster.uri, "d")[0::2] == (2, [4])


def test_a_version_of_a_forgotten_node_is_deleted_even_if_it_was_set_aside_meanwhile(cluster: Cluster) -> None:
    node = cluster.start_node("a")
    put(node.uri, "d", table(1))
    cluster.tell()
    entry = Entry(node)
    node.close()
    entry.damage()
    with dis.connect(cluster.uri) as client:
        client.forget(node.store.id)
        cluster.start_node("a")
        cluster.tell()
        entry.repair()
        restart_node(cluster, "a")
        assert (client.list(), entry.path.exists()) == ([], False)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_version_of_the_catalog_itself_that_was_set_aside_during_a_drop_or_a_put_is_deleted(
    memory: Path, is_dropped: bool
) -> None:
    with start_with_database(memory) as node:
        put(node.uri, "d", table(1))
        entry = Entry(node)
    entry.damage()
    with start_with_database(memory) as node, dis.connect(node.uri) as client:
        if is_dropped:
            client.drop("d")
        else:
            client.put("d", table(2))
    entry.repair()
    with start_with_database(memory) as node, dis.connect(node.uri) as client:
        assert not entry.path.exists()
        assert [read(node.uri, info.name) for info in client.list()] == ([] if is_dropped else [[2]])


def test_a_version_with_a_damaged_second_copy_on_disk_is_not_set_aside(memory: Path, tmp_path: Path) -> None:
    """A move to disk was not finished."""

    def start_node() -> Node:
        store = Store(memory / "store", limit=8 * MIB, policy=Policy.SPILL, spill=tmp_path / "disk")
        return Node(store, ["shm:"], database=str(memory / "catalog.db"))

    with start_node() as node:
        put(node.uri, "d", table(1))
        entry = Entry(node)
    copy = tmp_path / "disk" / "segments" / entry.path.name
    shutil.copytree(entry.path, copy)
    (copy / "manifest.json").write_bytes(b"")
    with start_node() as node, dis.connect(node.uri) as client:
        assert client.status().unreadable_parts == 0
        client.put("d", table(2), mode="append")
        assert read(node.uri, "d") == [1, 2]


def test_a_part_of_the_catalog_itself_that_is_set_aside_stays_in_its_version(memory: Path) -> None:
    uri = f"grpc://127.0.0.1:{free_port()}"

    def catalog() -> Node:
        return Node(Store(memory / "a"), ["shm:"], flight=uri, database=str(memory / "catalog.db"))

    def tell() -> None:
        for _ in range(2):
            other.service.catalog.reconcile()

    with ExitStack() as running:
        first = catalog()
        other = running.enter_context(Node(Store(memory / "b"), ["shm:"], catalog=uri, heartbeat_interval=SELDOM))
        with dis.connect(uri) as client:
            commit_on(client, first, other)
        tell()
        entry = Entry(first)
        first.close()
        entry.damage()
        with catalog(), dis.connect(uri) as client:
            tell()
            with pytest.raises(CatalogError, match="a part of 'd' is set aside on"):
                client.read("d")
            with pytest.raises(CatalogError, match="'d' cannot be appended to: a part of 'd' is set aside on"):
                client.put("d", table(4), mode="append")
        entry.repair()
        theirs = Entry(other)
        other.close()
        theirs.damage()
        with catalog():
            other = running.enter_context(Node(Store(memory / "b"), ["shm:"], catalog=uri, heartbeat_interval=SELDOM))
            tell()
        with catalog(), dis.connect(uri) as client:  # it reads in its database that a part is set aside
            with pytest.raises(CatalogError, match="a part of 'd' is set aside on"):
                client.read("d")
            other.close()
            theirs.repair()
            other = running.enter_context(Node(Store(memory / "b"), ["shm:"], catalog=uri, heartbeat_interval=SELDOM))
            assert sorted(read(uri, "d")) == [2, 3]


def test_versions_on_disk_are_those_of_the_store_that_has_the_disk_now(cluster: Cluster, tmp_path: Path) -> None:
    """The memory of a node is lost, and with it the id of its store. The spill directory stays."""
    options: dict[str, Any] = {"limit": 2 * MIB, "policy": Policy.SPILL, "spill": tmp_path / "disk"}
    before = cluster.start_node("before", **options)
    put(before.uri, "d", table(*range(100_000)))
    cluster.tell()
    before.store.ensure_room("new", int(1.9 * MIB))
    assert not before.store.usage().committed
    cluster.nodes.pop("before").close()
    after = cluster.start_node("after", **options)
    cluster.tell()
    with dis.connect(cluster.uri) as client:
        assert client.read("d").read_all().num_rows == 100_000
        client.forget(before.store.id)
        cluster.tell()
        assert client.read("d").read_all().num_rows == 100_000
    assert len(after.store.versions()) == 1


def test_a_version_on_disk_that_is_set_aside_is_that_of_the_store_that_has_the_disk_now(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The memory of a node is lost twice, and the manifest on disk cannot be read in between."""
    options: dict[str, Any] = {"limit": 2 * MIB, "policy": Policy.SPILL, "spill": tmp_path / "disk"}
    before = cluster.start_node("before", **options)
    put(before.uri, "d", table(*range(100_000)))
    cluster.tell()
    before.store.ensure_room("new", int(1.9 * MIB))
    entry = Entry(before, tmp_path / "disk")
    cluster.nodes.pop("before").close()
    entry.damage()
    between = cluster.start_node("between", **options)
    cluster.tell()
    with dis.connect(cluster.uri) as client:
        with pytest.raises(CatalogError, match="'d' cannot be appended to: a part of 'd' is set aside on"):
            client.put("d", table(1), mode="append")
        client.forget(before.store.id)
        cluster.nodes.pop("between").close()
        entry.repair()
        cluster.start_node("after", **options)
        cluster.tell()
        client.forget(between.store.id)
        assert client.read("d").read_all().num_rows == 100_000


def test_the_order_is_that_of_the_numbers_whatever_the_clock_says(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = cluster.start_node("a")
    put(node.uri, "d", table(1))
    cluster.tell()
    with dis.connect(cluster.uri) as client:
        client.describe("d")  # makes the catalog keep the version after it is replaced
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - HOUR)
    put(node.uri, "d", table(2))
    cluster.tell()
    assert numbers(cluster.uri, "d") == [1, 2]
    cluster.lose_catalog()
    cluster.tell()
    assert version(cluster.uri, "d")[0::2] == (2, [2])


def test_a_node_alone_shows_the_last_commit_whatever_the_clock_says(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    for step in range(4):
        monkeypatch.setattr(time, "time", lambda back=step * HOUR: now() - back)
        with Node(Store(memory / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
            if step:
                assert version(node.uri, "d")[0::2] == (step, [step])
            client.put("d", table(step + 1))
            assert version(node.uri, "d")[0::2] == (step + 1, [step + 1])


def test_what_a_catalog_has_committed_is_not_replaced_by_what_it_finds(cluster: Cluster) -> None:
    """A node returns after the catalog was lost and the dataset was written again by another node."""
    a, b = cluster.start_node("a"), cluster.start_node("b")
    for number in range(3):
        put(b.uri, "d", table(number))
    cluster.tell()
    cluster.lose_catalog()
    cluster.tell("a")
    put(a.uri, "d", table(9))
    cluster.tell("b")
    for _ in range(2):
        assert version(cluster.uri, "d")[2] == [9]
        restart_node(cluster, "b")
    put(a.uri, "d", table(10))
    restart_node(cluster, "b")
    assert version(cluster.uri, "d")[0::2] == (4, [10])


def set_aside(node: Node) -> list[str]:
    """Return the sentences of a node's own status about entries of its store."""
    with dis.connect(node.uri) as client:
        store = client.status().store
    assert store is not None
    return [*store.set_aside]


def test_rows_that_others_have_taken_the_place_of_are_kept_shown_and_put_again(cluster: Cluster) -> None:
    """The catalog is lost, and rows are appended to a dataset before the node with the rest of it reports."""
    a, b = cluster.start_node("a"), cluster.start_node("b")
    put(a.uri, "d", table(1, 2, 3))
    cluster.tell()
    (held,) = a.store.versions()
    entry = a.store.directory / "segments" / held.id
    cluster.lose_catalog()
    cluster.tell("b")
    put(b.uri, "d", table(4), mode="append")
    sentence = f"'{entry}' is set aside: it is version 1 of 'd' (3 rows), which the catalog does not list"
    for _ in range(2):
        cluster.tell()
        assert read(cluster.uri, "d") == [4]
        assert set_aside(cluster.nodes["a"]) == [sentence]
        restart_node(cluster, "a")
    with dis.connect(cluster.uri) as client:
        problems = {node["id"]: node["problem"] for node in client.nodes()}
    sentence = "the node holds 1 version of datasets that the catalog does not list: see its own status"
    assert problems == {a.store.id: sentence, b.store.id: ""}
    assert main(["put", *map(str, sorted(entry.glob("*.arrows"))), f"{cluster.uri}/d", "--append"]) == 0
    cluster.tell()
    assert sorted(read(cluster.uri, "d")) == [1, 2, 3, 4]
    cluster.nodes["a"].close()
    entry.rename(a.store.directory.parent / "moved")
    cluster.start_node("a")
    cluster.tell()
    assert set_aside(cluster.nodes["a"]) == []
    assert sorted(read(cluster.uri, "d")) == [1, 2, 3, 4]


def test_parts_of_a_dataset_that_a_lost_catalog_knew_are_shown_by_their_nodes(cluster: Cluster) -> None:
    a, b = cluster.start_node("a"), cluster.start_node("b")
    with dis.connect(cluster.uri) as client:
        commit_on(client, a, b)
    cluster.tell()
    assert (set_aside(a), set_aside(b)) == ([], [])
    cluster.lose_catalog()
    cluster.tell()
    for node in (a, b):
        (sentence,) = set_aside(node)
        assert sentence.endswith("it is version 1 of 'd' (1 row), which the catalog does not list")


def test_a_catalog_from_a_backup_takes_what_it_has_committed_since(backed_up: Cluster) -> None:
    """The commit on the other node is found, too.

    The first node has not yet reported that it no longer holds the older version.
    """
    a, b = backed_up.start_node("a"), backed_up.start_node("b")
    put(a.uri, "d", table(1))
    backed_up.back_up()
    put(b.uri, "d", table(2))
    backed_up.tell()
    backed_up.restore()
    for name in "ba":
        backed_up.tell(name)
        assert version(backed_up.uri, "d")[0::2] == (2, [2])


# Evicted datasets


def put_and_evict(store: Store, uri: str, name: str) -> None:
    """Put a dataset, and then another one that takes all the room."""
    put(uri, name, table(*range(100_000)))
    put(uri, "large", table(*range(500_000)))
    assert store.current(name) is None


def test_nothing_is_appended_to_what_was_evicted(memory: Path) -> None:
    for attempt in range(2):
        with Store(memory / "store", limit=4 * MIB, policy=Policy.EVICT) as store:
            node = Node(store, ["shm:"])
            with closing(node), dis.connect(node.uri) as client:
                if not attempt:
                    put_and_evict(store, node.uri, "d")
                with pytest.raises(CatalogError, match="'d' cannot be appended to: version 1 was evicted"):
                    client.put("d", table(1), mode="append")
                with pytest.raises(DatasetNotFound):
                    client.describe("d")
    with Node(Store(memory / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("d", table(1))
        client.put("d", table(2), mode="append")
        assert version(node.uri, "d")[0::2] == (3, [1, 2])
        client.drop("d")
        client.put("d", table(3), mode="append")  # the dataset was dropped on purpose
        assert read(node.uri, "d") == [3]


def test_nothing_is_appended_on_another_node_to_what_was_just_evicted(cluster: Cluster) -> None:
    """An append that the catalog acknowledged before it heard of the eviction would be deleted."""
    node, other = cluster.start_node("a", limit=4 * MIB, policy=Policy.EVICT), cluster.start_node("b")
    put(node.uri, "d", table(*range(100_000)))
    cluster.tell()
    put_and_evict(node.store, node.uri, "e")  # since then, the nodes have not reported
    with pytest.raises(CatalogError, match="'d' cannot be appended to: version 1 was evicted"):
        put(other.uri, "d", table(1), mode="append")
    put(other.uri, "d", table(2))
    cluster.tell()
    assert read(cluster.uri, "d") == [2]


def test_a_node_of_a_catalog_does_not_evict_what_is_appended_to(cluster: Cluster) -> None:
    node = cluster.start_node("a", limit=4 * MIB, policy=Policy.EVICT)
    put(node.uri, "d", table(*range(300_000)))
    with pytest.raises(CatalogError, match="is full"):
        put(node.uri, "d", table(*range(300_000)), mode="append")
    cluster.tell()
    put(node.uri, "d", table(1), mode="append")
    assert read(cluster.uri, "d") == [*range(300_000), 1]


def test_nothing_is_appended_to_what_a_node_of_a_catalog_has_evicted(cluster: Cluster) -> None:
    node = cluster.start_node("a", limit=4 * MIB, policy=Policy.EVICT)
    put(node.uri, "d", table(*range(100_000)))
    cluster.tell()
    put(node.uri, "large", table(*range(500_000)))
    cluster.tell()
    for _ in range(2):
        with dis.connect(cluster.uri) as client, pytest.raises(CatalogError, match="'d' cannot be appended to"):
            client.put("d", table(1), mode="append")
        cluster.lose_catalog()
        cluster.tell()

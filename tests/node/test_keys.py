"""Keys of commits: an attempt that failed can be made again, and no key stands for the rows of another commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.catalog.database import PREPARE_TIMEOUT, Database
from dissociated.catalog.service import CatalogService
from dissociated.control.commit import StagedSegment
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError, StoreError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.injection import clock_step
from support.nodes import SCHEMA, put, read, segments, staged, table

BATCH = "0f0e.7"  # the key of a batch of a streaming query, which is the same each time that Spark runs the batch
SELDOM = 600.0  # seconds: the tests trigger each heartbeat themselves
MONTH = 31 * 86_400.0


class Cluster:
    """A catalog without a store, and nodes that report to it."""

    def __init__(self, directory: Path, running: ExitStack) -> None:
        self._directory, self._running = directory, running
        self._database, self._uri = directory / "catalog.db", "grpc://127.0.0.1:0"
        self.start_catalog()
        self.nodes = {name: self._start_node(name) for name in "ab"}

    def start_catalog(self) -> None:
        database = Database(str(self._database), clock=lambda: time.time())  # `clock_step` steps it
        self.catalog = CatalogService(self._uri, database=database, retain=0.0)
        self._running.callback(self.catalog.close)
        self._uri = self.catalog.uri

    def _start_node(self, name: str) -> Node:
        node = Node(Store(self._directory / name), ["shm:"], catalog=self._uri, heartbeat_interval=SELDOM)
        self._running.callback(node.close)
        return node

    @property
    def uri(self) -> str:
        return self._uri

    def restart(self, name: str) -> None:
        self.nodes[name].close()
        self.nodes[name] = self._start_node(name)

    def back_up(self) -> bytes:
        self.catalog.close()
        backup = self._database.read_bytes()
        self.start_catalog()
        return backup

    def restore(self, backup: bytes) -> None:
        self.catalog.close()
        self._database.write_bytes(backup)
        self.start_catalog()
        self.tell()

    def tell(self, names: str = "ab") -> None:
        for name in names:
            self.nodes[name].service.catalog.reconcile()
            self.nodes[name].service.catalog.reconcile()

    def stage(self, run: int, placed: str) -> list[StagedSegment]:
        """Write a segment on each of the nodes in `placed`, with the rows 2, 3 ..."""
        written = []
        for number, name in enumerate(placed):
            written.append(stage(self.nodes[name], f"{BATCH}-{run}.{number}.arrows", number + 2))
        return written


def stage(node: Node, name: str, *numbers: int) -> StagedSegment:
    with node.store.writer(name, SCHEMA) as writer:
        writer.write(table(*numbers).to_batches()[0])
    return StagedSegment(name, node.store.id)


def append(uri: str, written: list[StagedSegment]) -> None:
    with dis.connect(uri) as client:
        client.commit(dis.Commit("d", written, SCHEMA, key=BATCH, mode="append"))


def at_publication(patch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` before the next publication of a commit, after its parts were prepared."""
    publish = Database.publish

    def call(*arguments: object, **options: object) -> int:
        patch.setattr(Database, "publish", publish)
        act()
        return publish(*arguments, **options)  # type: ignore[arg-type]

    patch.setattr(Database, "publish", call)


def refuse() -> None:
    raise CatalogError("the disk is full")


@pytest.fixture
def cluster(memory: Path) -> Iterator[Cluster]:
    with ExitStack() as running:
        made = Cluster(memory, running)
        put(made.uri, "d", table(1))
        made.tell()
        yield made


def test_a_batch_whose_commit_failed_is_committed_when_it_is_written_again(cluster: Cluster) -> None:
    """The query is restarted long after its commit has failed, since a host was down."""
    written = cluster.stage(1, "ab")
    cluster.nodes["b"].close()
    with pytest.raises(DissociatedError, match="does not answer"):
        append(cluster.uri, written)
    with clock_step(PREPARE_TIMEOUT + 1):
        cluster.tell("a")
        assert [version.name for version in cluster.nodes["a"].store.prepared()] == []
        cluster.restart("b")
        written = cluster.stage(2, "ab")
        cluster.tell()
        assert len(staged(cluster.nodes["a"].store.directory)) == 1  # it waits for the commit
        append(cluster.uri, written)
        assert read(cluster.uri, "d") == [1, 2, 3]
        append(cluster.uri, cluster.stage(3, "ab"))  # Spark has not heard of the success
        cluster.tell()
        assert read(cluster.uri, "d") == [1, 2, 3]
        assert staged(cluster.nodes["a"].store.directory) == []


def test_an_attempt_whose_part_was_given_up_is_not_published(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog was suspended between the preparation and the publication, while its nodes sent heartbeats."""

    def wait_too_long() -> None:
        with clock_step(PREPARE_TIMEOUT + 1):
            cluster.tell("a")

    at_publication(monkeypatch, wait_too_long)
    with pytest.raises(CatalogError, match="came too late: a node has waited for it, and deletes its segments; write"):
        append(cluster.uri, cluster.stage(1, "ab"))
    assert read(cluster.uri, "d") == [1]
    append(cluster.uri, cluster.stage(2, "ab"))
    cluster.tell()
    assert read(cluster.uri, "d") == [1, 2, 3]


def test_a_commit_that_is_sent_again_for_long_is_made_at_last(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is an attempt of its own, so the node waits from the last one on."""
    written = cluster.stage(1, "a")
    for seconds in (0.0, 0.6 * PREPARE_TIMEOUT, 1.2 * PREPARE_TIMEOUT):
        with clock_step(seconds):
            cluster.tell("a")
            at_publication(monkeypatch, refuse)
            with pytest.raises(CatalogError, match="the disk is full"):
                append(cluster.uri, written)
    append(cluster.uri, written)
    assert read(cluster.uri, "d") == [1, 2]


@pytest.mark.parametrize(("before", "after"), [("aa", "ab"), ("ab", "aa"), ("ab", "ba")])
def test_a_batch_is_whole_when_it_is_repeated_after_a_backup_was_restored(
    cluster: Cluster, before: str, after: str
) -> None:
    """The nodes have parts of the first run, which the catalog does not know. Spark has placed the partitions anew."""
    backup = cluster.back_up()
    append(cluster.uri, cluster.stage(1, before))
    cluster.tell()
    cluster.restore(backup)
    assert read(cluster.uri, "d") == [1]
    append(cluster.uri, cluster.stage(2, after))
    assert sorted(read(cluster.uri, "d")) == [1, 2, 3]
    for name in "ab":
        cluster.restart(name)
    cluster.tell()
    assert sorted(read(cluster.uri, "d")) == [1, 2, 3]
    kept = [segments(node.store.directory / "segments") for node in cluster.nodes.values()]
    assert sum(map(len, kept)) == 3  # the parts of the first run are gone


def test_a_key_that_the_catalog_has_forgotten_does_not_stand_for_the_version_in_a_store(cluster: Cluster) -> None:
    node = cluster.nodes["a"]

    def commit(name: str, mode: str, *numbers: int) -> None:
        with dis.connect(cluster.uri) as client:
            client.commit(dis.Commit(name, [stage(node, "s", *numbers)], SCHEMA, key="nightly", mode=mode))

    commit("e", "overwrite", 1)
    cluster.tell("a")
    with clock_step(MONTH):
        cluster.tell("a")
        put(cluster.uri, "other", table(9))  # forgets the keys that are too old
        for name, mode, advice in (
            ("e", "append", "write the segments again, and use another key"),
            ("e", "overwrite", "write the segments again, and use another key"),
            ("f", "overwrite", "its key 'nightly' is that of a commit of 'e'; use another key"),
        ):
            with pytest.raises(StoreError, match=f"nothing was committed to '{name}': .*{advice}"):
                commit(name, mode, 2)
            assert staged(node.store.directory) == ["s"]
            assert read(cluster.uri, "e") == [1]
            node.store.discard(["s"])


def test_a_key_belongs_to_one_dataset(memory: Path) -> None:
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:

        def commit(name: str, segment: str, *numbers: int) -> None:
            client.commit(dis.Commit(name, [stage(node, segment, *numbers)], SCHEMA, key="nightly"))

        commit("flights", "s", 1)
        for _ in range(2):
            with pytest.raises(CatalogError, match="nothing was committed to 'airports': its key 'nightly' is that of"):
                commit("airports", "t", 2)
            assert staged(memory) == ["t"]
            node.store.discard(["t"])
        with pytest.raises(DatasetNotFound):
            client.read("airports")
        assert client.committed("nightly")
        commit("flights", "u", 3)  # a repeated commit
        assert (staged(memory), read(node.uri, "flights")) == ([], [1])


# Nodes without an upstream


def test_a_node_that_restarts_remembers_the_keys_of_all_commits(memory: Path) -> None:
    start = partial(Node, listen=["shm:"], retain=0.0)
    with start(Store(memory)) as node, dis.connect(node.uri) as client:
        put(node.uri, "d", table(1))
        append(node.uri, [stage(node, "s", 2)])
        client.put("d", table(1, 2))  # a compaction, which removes the version with the key
        client.abort("aborted")
    for _ in range(2):
        with start(Store(memory)) as node, dis.connect(node.uri) as client:
            assert client.committed(BATCH)
            append(node.uri, [stage(node, "t", 2)])
            assert (read(node.uri, "d"), staged(memory)) == ([1, 2], [])
            with pytest.raises(CatalogError, match="the commit of 'd' was aborted"):
                client.commit(dis.Commit("d", [stage(node, "aborted-s", 3)], SCHEMA, key="aborted"))
            with pytest.raises(CatalogError, match=f"its key '{BATCH}' is that of a commit of 'd'"):
                client.commit(dis.Commit("e", [stage(node, "e", 3)], SCHEMA, key=BATCH))
            node.service.catalog.reconcile()
            assert staged(memory) == ["e"]
            node.store.discard(["e"])


def test_a_node_that_was_killed_before_it_had_recorded_a_key_remembers_it(memory: Path) -> None:
    start = partial(Node, listen=["shm:"], retain=0.0)
    with start(Store(memory)) as node:
        append(node.uri, [stage(node, "s", 2)])
    (memory / "keys").unlink(missing_ok=True)
    with start(Store(memory)) as node:
        put(node.uri, "d", table(2))  # removes the version whose manifest has the key
    with start(Store(memory)) as node, dis.connect(node.uri) as client:
        assert client.committed(BATCH)


def test_no_restart_forgets_the_latest_key_for_earlier_ones(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.store.keys.MAX_KEYS", 6)
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        for number in range(6):
            client.put("d", table(number), mode="append")
        client.abort("aborted")
    for number in range(3):
        with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
            with pytest.raises(CatalogError, match="the commit of 'd' was aborted"):
                client.commit(dis.Commit("d", [stage(node, f"s{number}", 3)], SCHEMA, key="aborted"))
            assert len((memory / "keys").read_text().splitlines()) <= 6


def test_a_key_of_a_node_hides_no_version_of_another_node(memory: Path) -> None:
    """Both nodes were alone before, and used the same key for datasets of the same name."""
    with Node(Store(memory / "a"), ["shm:"]) as node, dis.connect(node.uri) as client:
        append(node.uri, [stage(node, "s", 1)])
        client.drop("d")
    with Node(Store(memory / "b"), ["shm:"]) as other:
        for _ in range(2):
            put(other.uri, "d", table(9))
        with dis.connect(other.uri) as client:
            client.commit(dis.Commit("d", [stage(other, "s", 2)], SCHEMA, key=BATCH))
    with (
        Node(Store(memory / "a"), ["shm:"], flight="grpc://127.0.0.1:0") as node,
        Node(Store(memory / "b"), ["shm:"], catalog=node.uri, heartbeat_interval=SELDOM) as other,
    ):
        other.service.catalog.reconcile()
        assert read(node.uri, "d") == [2]

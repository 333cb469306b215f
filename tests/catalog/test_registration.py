"""The catalog's knowledge of a node: it matches the node's store, although processes are killed and messages lost."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.service import CatalogService
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import Commit, StagedSegment
from dissociated.control.version import NodeRecord, Part
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    NodeUnreachable,
    StoreError,
)
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from store.test_memfds import memfd
from support.helpers import PATIENCE, case, wait_until
from support.injection import Fault
from support.nodes import SCHEMA, put, read, table

SELDOM = 600.0  # seconds: the tests trigger each heartbeat themselves


class Catalog(LocalCatalog):
    """A catalog that loses the messages of nodes, or its answers, on request."""

    losing = ""
    last_answer: Mapping[str, Any] = {}

    def _losing(self, answered: Callable[[Mapping[str, Any]], dict[str, Any]], body: Mapping[str, Any]) -> Any:
        if self.losing == "message":
            raise CatalogError("lost on the way")
        Catalog.last_answer = answer = answered(body)
        if self.losing == "answer":
            raise CatalogError("lost on the way back")
        return answer

    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._losing(super().heartbeat, body)

    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._losing(super().register, body)


class Pair:
    """A node and its catalog, each of which can be restarted.

    Args:
        directory: The directory of their files.
        running: What closes them.
        limit: The limit of the node's store, which evicts; None for no limit.
        retain: The seconds for which the catalog keeps replaced versions.
    """

    def __init__(self, directory: Path, running: ExitStack, limit: int | None = None, retain: float = 0.0) -> None:
        self._directory, self._running, self._limit = directory, running, limit
        self._files = 0
        self._retain = retain
        self._where = "grpc://127.0.0.1:0"
        self.start_catalog()
        self.start_node()

    def start_catalog(self, fresh: bool = False) -> None:
        """Start the catalog at its address, with its database or, if `fresh`, with an empty one."""
        self._files += fresh
        database = Database(str(self._directory / f"catalog-{self._files}.db"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dissociated.catalog.service.LocalCatalog", Catalog)
            self.catalog = CatalogService(self._where, database=database, retain=self._retain)
        self._running.callback(self.catalog.close)
        self._where = self.catalog.uri

    def start_node(self) -> None:
        store = Store(self._directory / "store", limit=self._limit, policy=Policy.EVICT)
        self.node = Node(store, ["shm:"], catalog=self.catalog.uri, heartbeat_interval=SELDOM, retain=0.0)
        self._running.callback(self.node.close)

    def tell(self) -> None:
        """Send a heartbeat, and another one to learn the result of the first."""
        self.node.service.catalog.reconcile()
        self.node.service.catalog.reconcile()

    def check(self, expected: Mapping[str, int]) -> None:
        with dis.connect(self.catalog.uri) as client:
            found = {info.name: client.read(info.name).read_all()["n"][0].as_py() for info in client.list()}
        assert found == expected
        versions = self.node.store.versions()
        assert sorted(version.name for version in versions) == sorted(expected)  # nothing else is kept
        assert not any(version.prepared for version in versions)


def test_a_catalog_knows_what_a_node_has_whatever_was_lost_or_killed(memory: Path) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    expected: dict[str, int] = {}
    steps = []
    with ExitStack() as running:
        pair = Pair(memory, running)
        for number in range(20):
            Catalog.losing = chance.choice(["", "", "message", "answer"])
            for _ in range(chance.randrange(3)):
                name = chance.choice("abcdef")
                if name in expected and chance.random() < 0.4:
                    with suppress(CatalogError):  # the following heartbeat is lost
                        chance.choice([pair.catalog, pair.node.service]).catalog.drop(name)
                    del expected[name]
                else:
                    put(pair.node.uri, name, table(number))
                    expected[name] = number
                steps.append((number, Catalog.losing, name, expected.get(name)))
            with suppress(CatalogError):
                pair.node.service.catalog.reconcile()
            Catalog.losing = ""
            what = chance.choice(["", "node", "catalog", "fresh catalog", "both"])
            steps.append((number, "", what, None))
            if what == "fresh catalog":
                pair.tell()  # only the old catalog knew its unconfirmed changes
            if "node" in what or what == "both":
                pair.node.close()
            if "catalog" in what or what == "both":
                pair.catalog.close()
                pair.start_catalog(fresh="fresh" in what)
            if "node" in what or what == "both":
                pair.start_node()
            pair.tell()
            try:
                pair.check(expected)
            except BaseException as error:
                error.add_note(f"seed {seed}, {steps[-8:]}")
                raise


def test_what_was_evicted_is_told(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running, limit=3 * mmap.PAGESIZE // 2)  # a dataset takes one page
        for name in "abc":
            put(pair.node.uri, name, table(1))
            pair.tell()
        pair.check({"c": 1})
        with dis.connect(pair.catalog.uri) as client:
            client.commit(dis.Commit("empty", [StagedSegment("", pair.node.store.id)], SCHEMA))
            assert [info.name for info in client.list()] == ["empty"]


def test_nothing_is_evicted_before_the_catalog_has_recorded_it(memory: Path) -> None:
    """The message is lost, or the answer, or the node is killed before the eviction."""
    with ExitStack() as running:
        pair = Pair(memory, running, limit=3 * mmap.PAGESIZE // 2)
        put(pair.node.uri, "a", table(1))
        pair.tell()
        for Catalog.losing in ("message", "answer"):
            with pytest.raises(CatalogError, match=r"stay until the catalog has recorded that: .* lost on the way"):
                put(pair.node.uri, "b", table(2))
            Catalog.losing = ""
            pair.tell()
            pair.check({"a": 1})
        with Fault(str(memory / "store" / "segments"), operations=("rename",)):
            with pytest.raises(CatalogError, match="removing 'a'"):
                put(pair.node.uri, "b", table(2))
            assert pair.catalog.catalog.current(["a"]) == {}
            pair.node.close()
        pair.start_node()
        pair.tell()
        pair.check({"a": 1})
        put(pair.node.uri, "b", table(2))
        pair.tell()
        pair.check({"b": 2})


def test_nothing_is_written_over_datasets_while_the_catalog_is_away(memory: Path) -> None:
    """The error is that of a catalog that is away, for which writers wait, and not that of a full store."""
    with ExitStack() as running:
        pair = Pair(memory, running, limit=3 * mmap.PAGESIZE // 2)
        put(pair.node.uri, "a", table(1))
        pair.tell()
        pair.catalog.close()
        with pytest.raises(CatalogUnreachable, match="stay until the catalog has recorded that: no catalog answers"):
            put(pair.node.uri, "b", table(2))
        assert [version.name for version in pair.node.store.versions()] == ["a"]


def test_a_deletion_that_the_report_before_an_eviction_brings_is_reported(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running, limit=5 * mmap.PAGESIZE // 2)
        for name in "ab":
            put(pair.node.uri, name, table(1))
        pair.tell()
        pair.catalog.catalog.drop("b")
        with dis.connect(pair.node.uri) as client:
            client.put("c", table(*range(512)))  # two pages
        pair.tell()
        pair.check({"c": 0})
        assert Catalog.last_answer["unwanted"] == []


def test_nothing_is_evicted_if_the_report_before_the_eviction_makes_room(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running, limit=7 * mmap.PAGESIZE // 2)
        for name in "ab":
            put(pair.node.uri, name, table(1))
        pair.tell()
        put(pair.node.uri, "b", table(2))  # the node does not know yet that this replaces version 1
        put(pair.node.uri, "c", table(3))
        pair.tell()
        pair.check({"a": 1, "b": 2, "c": 3})


def test_nothing_is_appended_to_memory_that_ended_with_its_node(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running)
        other = running.enter_context(
            Node(Store(memory / "other"), ["shm:"], catalog=pair.catalog.uri, heartbeat_interval=SELDOM)
        )
        with dis.connect(pair.node.uri) as client, memfd(table(1)) as descriptor:
            client.commit(dis.Commit("a", [client.hand_over(descriptor)], SCHEMA))
        put(pair.node.uri, "b", table(1))
        pair.tell()
        pair.node.close()
        with pytest.raises(CatalogError, match="'a' cannot be appended to"):
            put(other.uri, "a", table(2), mode="append")
        put(other.uri, "a", table(3))
        put(other.uri, "b", table(2), mode="append")
        pair.start_node()
        pair.tell()
        with dis.connect(pair.catalog.uri) as client:
            assert client.read("a").read_all() == table(3)
            assert client.read("b").read_all() == table(1, 2)


def test_an_append_needs_no_room_for_a_version_that_was_replaced_on_another_node(memory: Path) -> None:
    page = mmap.PAGESIZE // 8
    with ExitStack() as running:
        pair = Pair(memory, running, limit=5 * mmap.PAGESIZE // 2, retain=SELDOM)
        other = running.enter_context(
            Node(Store(memory / "other"), ["shm:"], catalog=pair.catalog.uri, heartbeat_interval=SELDOM)
        )
        with dis.connect(pair.node.uri) as here, dis.connect(other.uri) as there:
            here.put("a", table(1))
            pair.tell()
            assert there.read("a").read_all() == table(1)  # so the catalog keeps the version for the ticket
            there.put("a", table(2))
            here.put("a", table(*range(page)), mode="append")  # two pages
            assert here.read("a").read_all() == table(2, *range(page))
            there.put("a", table(3), mode="append")
            with pytest.raises(CatalogError, match="is full"):
                here.put("a", table(*range(page)), mode="append")
            assert here.read("a").read_all() == table(2, *range(page), 3)


def test_a_handle_that_was_made_while_its_node_was_away_reads_when_it_is_back(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running)
        put(pair.node.uri, "a", table(1, 2))
        pair.tell()
        pair.node.close()
        handle = running.enter_context(running.enter_context(dis.connect(pair.catalog.uri)).dataset("a"))
        assert handle.map_part(0, keep_files=False) is None
        with pytest.raises(NodeUnreachable, match="start the node again"):
            handle.to_table()
        pair.start_node()
        pair.tell()
        assert handle.to_table() == table(1, 2)
        assert handle.to_table() == table(1, 2)
        assert handle.mapped_nbytes


def test_a_deletion_that_failed_is_tried_again(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running)
        put(pair.node.uri, "a", table(1))
        pair.tell()
        pair.node.close()
        pair.catalog.catalog.forget(pair.node.store.id)  # the catalog has no row of the part any more
        with Fault(str(memory / "store" / "segments"), operations=("rename",), times=2):
            pair.start_node()  # its first report brings the deletion
            pair.node.store.sweep()
            assert os.listdir(memory / "store" / "segments")
        pair.tell()
        pair.check({})
        pair.node.store.sweep()
        assert not os.listdir(memory / "store" / "segments")


def test_a_version_that_its_node_did_not_hold_for_a_while_is_there_again(memory: Path) -> None:
    """The node starts once while its segments are not readable, and then again when they are."""
    with ExitStack() as running:
        pair = Pair(memory, running)
        for name in ("kept", "replaced", "dropped"):
            put(pair.node.uri, name, table(1))
        pair.tell()
        segments = memory / "store" / "segments"
        with dis.connect(pair.catalog.uri) as client:
            before = client.describe("kept")
            pair.node.close()
            segments.rename(memory / "elsewhere")
            pair.start_node()
            pair.tell()
            pair.check({})
            with pytest.raises(CatalogError, match="'kept' cannot be appended to"):
                put(pair.node.uri, "kept", table(3), mode="append")
            put(pair.node.uri, "replaced", table(3))
            pair.tell()
            put(pair.node.uri, "dropped", table(3))
            client.drop("dropped")
            pair.tell()
            pair.node.close()
            for path in (memory / "elsewhere").iterdir():
                path.rename(segments / path.name)
            pair.start_node()
            pair.tell()
            pair.check({"kept": 1, "replaced": 3})
            after = client.describe("kept")
            assert (after.version, after.lineage_id) == (before.version, before.lineage_id)
            put(pair.node.uri, "kept", table(3), mode="append")
            assert client.read("kept").read_all() == table(1, 3)


def test_what_was_dropped_and_could_not_be_deleted_stays_away_although_the_database_is_lost(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running)
        for name in "ab":
            put(pair.node.uri, name, table(1))
        pair.tell()
        pair.catalog.catalog.drop("a")
        with Fault(str(memory / "store" / "segments"), operations=("rename",), times=1000):
            with pytest.raises(StoreError, match="removing 'a'"):
                pair.node.service.catalog.reconcile()
            pair.node.close()
        pair.catalog.close()
        pair.start_catalog(fresh=True)
        pair.start_node()
        pair.tell()
        pair.check({"b": 1})
        put(pair.node.uri, "a", table(2))
        with dis.connect(pair.catalog.uri) as client:
            assert client.describe("a").version == 2


def test_what_was_dropped_and_could_not_be_deleted_stays_away_while_its_node_runs(memory: Path) -> None:
    with ExitStack() as running:
        pair = Pair(memory, running)
        put(pair.node.uri, "a", table(1))
        pair.tell()
        used = pair.node.store.usage().total
        pair.catalog.catalog.drop("a")
        with Fault(str(memory / "store" / "segments"), operations=("rename",), times=1000):
            with pytest.raises(StoreError, match="removing 'a'"):
                pair.node.service.catalog.reconcile()
            pair.catalog.close()
            pair.start_catalog(fresh=True)
            pair.tell()
            pair.check({})
            assert pair.node.store.usage().total == used  # the bytes are still there
        put(pair.node.uri, "a", table(2), mode="append")
        pair.tell()
        pair.check({"a": 2})
        pair.node.store.sweep()
        assert [path.name for path in (memory / "store" / "segments").iterdir()] == [
            version.id for version in pair.node.store.versions()
        ]
        pair.node.close()
        pair.start_node()
        pair.tell()
        pair.check({"a": 2})


def start_with(memory: Path, database: str) -> Node:
    return Node(Store(memory / "store"), ["shm:"], database=str(memory / database), retain=0.0)


def test_a_node_whose_deletion_failed_starts_again(memory: Path) -> None:
    for database in ("catalog.db", "another.db"):  # the second is that of a node that has lost the first
        fault = Fault(str(memory / "store" / "segments"), operations=("rename",), times=1000)
        with start_with(memory, "catalog.db") as node, dis.connect(node.uri) as client:
            client.put("a", table(1))
            number = client.describe("a").version
            fault.arm()
            client.drop("a")
            assert client.list() == []
        node = start_with(memory, database)  # it cannot delete the version either
        fault.disarm()
        with case(database), node, dis.connect(node.uri) as client:
            assert client.list() == []
            wait_until(lambda: not os.listdir(memory / "store" / "segments"), "the deletion was tried again")
            client.put("a", table(2))
            assert client.describe("a").version == number + 1
            client.drop("a")


def test_a_drop_that_cannot_even_be_recorded_is_not_acknowledged(memory: Path) -> None:
    with start_with(memory, "catalog.db") as node, dis.connect(node.uri) as client:
        client.put("a", table(1))
        for operations in (("rename", "write"), ("rename", "create")):
            with case(operations), Fault(f"{memory}/store", operations=operations, times=1000):
                with pytest.raises(CatalogError, match=r"'a' is dropped, but .*: recording that 'a' in .* error;"):
                    client.drop("a")
                with pytest.raises(DatasetNotFound):
                    client.read("a")
            client.put("a", table(1))


def test_a_catalog_that_does_not_answer_does_not_hold_up_the_end_of_a_node(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()
    monkeypatch.setattr(Catalog, "deregister", lambda *_, **__: has_ended.wait(3 * PATIENCE))
    with ExitStack() as running, ThreadPoolExecutor(1) as pool:
        pair = Pair(memory, running)
        running.callback(has_ended.set)
        pool.submit(pair.node.close).result(PATIENCE)


def test_a_call_in_progress_does_not_hold_up_the_end_of_a_node_that_is_refused(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dissociated.catalog.service.STOP_TIMEOUT", 0.2)
    store = Store(memory)

    def end(writer: Any) -> None:
        with suppress(pa.ArrowException, OSError):  # The node fails the call.
            writer.close()

    def refuse(catalog: LocalCatalog, body: Mapping[str, Any]) -> dict[str, Any]:
        client = running.enter_context(flight.connect(body["node"]["flight"]))
        writer, _ = client.do_put(flight.FlightDescriptor.for_command(b'{"name": "d"}'), SCHEMA)
        running.callback(end, writer)
        writer.write_table(table(1))
        wait_until(lambda: any(store.staging.iterdir()), "the node receives the rows")
        raise AccessDenied("refused")

    monkeypatch.setattr(LocalCatalog, "register", refuse)
    with ThreadPoolExecutor(1) as pool, ExitStack() as running:
        catalog = running.enter_context(closing(CatalogService("grpc://127.0.0.1:0")))
        node = pool.submit(Node, store, ["shm:"], catalog=catalog.uri)
        with pytest.raises(AccessDenied, match="refused"):
            node.result(PATIENCE)


def test_more_has_changed_than_is_remembered(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.store.contents.MAX_CHANGES", 3)
    with ExitStack() as running:
        pair = Pair(memory, running)
        for number in range(8):
            put(pair.node.uri, f"d{number}", table(number))
        pair.catalog.catalog.drop("d0")
        pair.tell()
        pair.check({f"d{number}": number for number in range(1, 8)})


def test_a_node_that_was_down_for_long_keeps_what_it_did_not_know_to_be_published(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the catalog knows whether the part was published, also while it does not answer."""
    with ExitStack() as running:
        pair = Pair(memory, running)
        put(pair.node.uri, "a", table(1))
        Catalog.losing = "message"
        pair.node.close()
        monkeypatch.setattr("dissociated.catalog.database.PREPARE_TIMEOUT", -1.0)
        pair.start_node()
        Catalog.losing = ""
        pair.tell()
        pair.check({"a": 1})


def test_a_part_of_a_dataset_is_not_taken_for_all_of_it(memory: Path) -> None:
    """A node that had the whole dataset learns that another node has the rest, although its own part did not change."""
    with ExitStack() as running:
        pair = Pair(memory, running)
        put(pair.node.uri, "d", table(1))
        put(pair.node.uri, "e", table(5))
        pair.tell()
        store = Store(memory / "other")
        with closing(Node(store, ["shm:"], catalog=pair.catalog.uri, heartbeat_interval=SELDOM)) as other:
            put(other.uri, "d", table(2), mode="append")
            assert read(pair.catalog.uri, "d") == [1, 2]
            other.service.catalog.reconcile()
            pair.tell()
        pair.catalog.close()
        pair.start_catalog(fresh=True)
        pair.tell()
        with dis.connect(pair.catalog.uri) as client:
            assert [info.name for info in client.list()] == ["e"]


def test_a_node_whose_store_was_copied_is_not_taken(memory: Path) -> None:
    """Each of the two nodes would report that it holds nothing else, and so remove the data of the other."""
    with ExitStack() as running:
        pair = Pair(memory, running)
        put(pair.node.uri, "d", table(1))
        shutil.copytree(memory / "store", memory / "copy", ignore=shutil.ignore_patterns("run"))
        with pytest.raises(AccessDenied, match=f"the node at {pair.node.uri} on .* has the same id"):
            Node(Store(memory / "copy"), [], catalog=pair.catalog.uri)
        pair.node.close()
        with Node(Store(memory / "copy"), ["shm:"], catalog=pair.catalog.uri):  # now it is the only node
            assert read(pair.catalog.uri, "d") == [1]


def test_a_commit_on_a_node_that_retires_is_kept_or_refused() -> None:
    """The commit comes before any of the lines by which the catalog lets the node go."""
    schema, database = bytes(SCHEMA.serialize()), Database()
    with closing(CatalogService("grpc://127.0.0.1:0", database=database)) as catalog:
        for at in range(9):
            node, lines = f"node {at}", 0

            def trace(frame: FrameType, event: str, _: object, node: str = node, at: int = at) -> Any:
                nonlocal lines
                if frame.f_code is not LocalCatalog.deregister.__code__:
                    return None
                if event == "line":
                    if lines == at:
                        with suppress(CatalogError):
                            database.publish(Commit(node, key=node), schema, [Part(node, node, node.encode())])
                    lines += 1
                return trace

            database.register(NodeRecord(node, "host", "boot", "grpc://host:1", ()), [], "", FOREVER)
            previous = sys.gettrace()
            sys.settrace(trace)
            try:
                catalog.catalog.deregister(node, retiring=True)
            finally:
                sys.settrace(previous)
            is_forgotten = node not in {record.id for record in database.nodes()}
            with case(f"line {at}"):
                assert (database.committed(node) is None) == is_forgotten
        assert lines <= at

"""Evictions: they take the right versions, and take nothing if that would not make enough room."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.service import CatalogService
from dissociated.control.version import Version
from dissociated.errors import CatalogError, DeadlineExceeded, DissociatedError, StoreError, StoreFull
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, commit_of, connections_left, wait_until
from support.machine import media
from support.nodes import MIB, small_file_system
from support.processes import Start

SCHEMA = pa.schema([("n", pa.int64())])
LARGE = pa.table({"n": pa.repeat(7, 5 * MIB // 8)})


def put(store: Store, name: str, mib: int, append: bool = False) -> Version:
    key = os.urandom(8).hex()
    with store.writer(key, SCHEMA) as writer:
        for _ in range(mib):
            writer.write(pa.record_batch({"n": pa.array([7] * (MIB // 8), pa.int64())}))
    return store.commit(commit_of(name, [key], mode="append" if append else "overwrite", key=key))


def names_on_disk(directory: Path) -> set[str]:
    return set(os.listdir(directory / "segments"))


def names(store: Store) -> list[str]:
    return [version.name for version in store.versions()]


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_nothing_is_evicted_if_that_would_not_make_enough_room(memory: Path, tmp_path: Path, policy: Policy) -> None:
    spill = tmp_path / "disk" if policy is Policy.SPILL else None
    with Store(memory / "store", 14 * MIB, policy, spill) as store:
        a, b, c = (put(store, name, 4) for name in "abc")
        store.eviction.in_use = lambda version: version == b
        (store.staging / "w").touch(0o600)
        with pytest.raises(StoreError, match="is being read"):
            store.reserve("w", 11 * MIB)  # a and c have 8 MiB, and 2 MiB are free
        assert store.versions() == [a, b, c]
        assert spill is None or names_on_disk(spill) == set()
        with pytest.raises(StoreError, match="never fit"):
            store.reserve("w", 15 * MIB)
        assert store.versions() == [a, b, c]
        assert store.reserve("w", 5 * MIB) == 5 * MIB  # a single version is enough
        spilled = set() if spill is None else names_on_disk(spill)
        assert [version for version in (a, b, c) if store.version(version.id) and version.id not in spilled] == [b, c]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_an_append_does_not_evict_the_rows_that_it_appends_to(memory: Path, transport: str) -> None:
    """The oldest dataset is the one that grows. What can never fit beside its rows evicts nothing."""
    rows = [LARGE.slice(0, mib * MIB // 8) for mib in range(6)]
    with Node(Store(memory / "store", 10 * MIB, Policy.EVICT), ["shm:"]) as node, dis.connect(node.uri) as client:

        def listed() -> dict[str, int | None]:
            return {info.name: info.rows for info in client.list()}

        client.put("log", rows[3])
        client.put("other", rows[5])
        with pytest.raises(DissociatedError, match=r"'log', to which it appends, .* can never fit$"):
            client.put("log", pa.concat_tables([rows[4], rows[4]]), mode="append", transport=transport)
        assert listed() == {"log": 3 * MIB // 8, "other": 5 * MIB // 8}
        client.put("log", rows[3], mode="append", transport=transport)
        assert listed() == {"log": 6 * MIB // 8}
        with pytest.raises(DissociatedError, match="can never fit"):
            client.put("log", rows[5].to_reader(), mode="append", transport=transport)  # a source of unknown size
        assert client.read("log").read_all() == pa.concat_tables([rows[3], rows[3]])


def test_writers_at_once_evict_different_versions(memory: Path) -> None:
    """Each of them finds the same version to be the oldest one."""
    writers = 6
    announced: list[str] = []
    meeting = threading.Barrier(2)

    @contextmanager
    def announce(versions: Sequence[Version]) -> Iterator[Sequence[Version]]:
        announced.extend(version.id for version in versions)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.1)  # until another writer has chosen, too
        yield versions

    with Store(memory / "store", writers * MIB + MIB // 2, Policy.EVICT) as store:
        for number in range(writers):
            put(store, f"old{number}", 1)
            (store.staging / f"new{number}").touch(0o600)
        store.eviction.announce = announce
        with ThreadPoolExecutor(writers) as pool:
            assert [*pool.map(lambda number: store.reserve(f"new{number}", MIB), range(writers))] == [MIB] * writers
        assert len({*announced}) == len(announced)


def test_a_writer_does_not_wait_for_long_while_the_catalog_of_another_hangs(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dissociated.store.eviction.ANNOUNCE_TIMEOUT", 0.01)
    asked, answered = threading.Event(), threading.Event()

    @contextmanager
    def announce(versions: Sequence[Version]) -> Iterator[Sequence[Version]]:
        asked.set()
        assert answered.wait(PATIENCE)
        yield versions

    with Store(memory / "store", 2 * MIB, Policy.EVICT) as store, ThreadPoolExecutor() as pool:
        put(store, "old", 1)
        store.eviction.announce = announce
        first = pool.submit(store.ensure_room, "a", 2 * MIB - 1)
        assert asked.wait(PATIENCE)
        with pytest.raises(DeadlineExceeded, match=r"is full, and the catalog has not recorded .* for 0.01 s"):
            store.ensure_room("b", 2 * MIB - 1)
        assert not first.done()
        answered.set()
        first.result(PATIENCE)
        store.ensure_room("b", 2 * MIB - 1)


def test_room_that_others_take_during_an_announcement_is_made_again(memory: Path) -> None:
    rounds = 6

    @contextmanager
    def announce(versions: Sequence[Version]) -> Iterator[Sequence[Version]]:
        if quick:
            store.reserve(quick.pop(), MIB)
        yield versions

    with Store(memory / "store", 12 * MIB, Policy.EVICT) as store:
        quick = [f"quick{number}" for number in range(rounds)]
        for name in (*quick, "large"):
            (store.staging / name).touch(0o600)
        for number in range(10):
            put(store, f"old{number}", 1)
        store.eviction.announce = announce
        assert store.reserve("large", 3 * MIB) == 3 * MIB
        assert not quick


@pytest.mark.parametrize("medium", media(("ucx", "fabric")))
def test_what_clients_fetch_from_stays_where_it_is_unless_it_goes(memory: Path, medium: str) -> None:
    """A put that cannot fit withdraws nothing; a put that can withdraws the versions that make room, and no others."""
    with (
        Node(Store(memory / "store", 14 * MIB, Policy.EVICT), ["shm:", f"{medium}:?rma=allow"]) as node,
        dis.connect(node.uri) as client,
    ):
        client.put("a", LARGE)
        client.put("b", LARGE)
        with client.read("b", transport="shm") as reader:
            held = reader.read_next_batch()
        described = client.describe("a")

        def fetch() -> pa.Table:
            (endpoint,) = described.endpoints
            return client.read_endpoint(described, endpoint, transport=medium, allow_rma=True).read_all()

        assert fetch() == LARGE
        with pytest.raises(CatalogError, match="is being read"):
            client.put("c", pa.concat_tables([LARGE, LARGE]))
        assert fetch() == LARGE
        del held, reader
        assert connections_left(node.server) == 0  # an open connection counts as a read of its dataset
        client.put("c", LARGE)
        assert [info.name for info in client.list()] == ["b", "c"]
        with pytest.raises(DissociatedError, match="no dataset has this ticket"):
            fetch()


@pytest.mark.parametrize("medium", media(("ucx", "fabric")))
def test_a_replaced_version_is_evicted_although_its_segments_are_exposed(memory: Path, medium: str) -> None:
    part = LARGE.slice(0, LARGE.num_rows // 4)

    def start(directory: Path) -> Node:
        return nodes.enter_context(Node(Store(directory, 14 * MIB, Policy.EVICT), ["shm:", f"{medium}:?rma=allow"]))

    for restarted in (False, True):
        with ExitStack() as nodes:
            node = start(memory / str(restarted))
            with dis.connect(node.uri) as client:
                client.put("a", LARGE)
                client.describe("a")
                client.put("a", part, mode="append")
            if restarted:
                nodes.close()
                node = start(memory / str(restarted))
            with dis.connect(node.uri) as client:
                client.describe("a")
                client.put("b", pa.concat_tables([LARGE, LARGE]))
                assert [info.name for info in client.list()] == ["b"]


def test_a_segment_that_two_versions_have_comes_back_with_the_last_of_them(memory: Path) -> None:
    with Store(memory / "store", 14 * MIB, Policy.EVICT) as store:
        first = put(store, "a", 6)
        second = put(store, "a", 2, append=True)
        other = put(store, "b", 2)
        store.eviction.in_use = lambda version: version == second
        (store.staging / "w").touch(0o600)
        with pytest.raises(StoreError, match="is being read"):
            store.reserve("w", 9 * MIB)  # the first has no bytes of its own, and b too few
        assert store.versions() == [first, second, other]
        store.eviction.in_use = lambda version: False
        store.reserve("w", 9 * MIB)
        assert names(store) == ["b"]


def test_a_file_counts_while_a_writer_renames_it(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be missing from the total if it was listed nowhere, and another writer would get its room."""
    walk, lstat = os.walk, os.lstat

    def walk_before_a_writer_begins(directory: str) -> Iterator[object]:
        yield from walk(directory)
        monkeypatch.setattr(os, "walk", walk)
        writers.append(store.writer("w", SCHEMA))

    def lstat_after_the_writer_has_ended(path: str) -> os.stat_result:
        monkeypatch.setattr(os, "lstat", lstat)
        writers.pop().close()
        return lstat(path)

    with Store(memory / "store", 64 * MIB) as store:
        writers: list[SegmentWriter] = []
        store.remove(put(store, "a", 2))
        monkeypatch.setattr(os, "walk", walk_before_a_writer_begins)
        assert store.usage().total >= 2 * MIB  # the writer takes the file from the trash
        assert writers
        writers[0].write_table(LARGE)
        monkeypatch.setattr(os, "lstat", lstat_after_the_writer_has_ended)
        assert store.usage().total >= 5 * MIB
        assert not writers


@pytest.mark.parametrize("same_file_system", [True, False])
def test_a_spilled_dataset_can_grow_beyond_the_memory(memory: Path, tmp_path: Path, same_file_system: bool) -> None:
    disk = (memory if same_file_system else tmp_path) / "disk"
    with Store(memory / "store", 5 * MIB, Policy.SPILL, disk) as store:
        versions = [put(store, "log", 2, append=True) for _ in range(4)]
        put(store, "other", 4)
        assert store.usage().total <= 5 * MIB
        assert store.usage().spilled >= 8 * MIB
        store.remove(*versions[:-1])
        latest = versions[-1]
    with Store(memory / "store", 5 * MIB, Policy.SPILL, disk) as store:
        assert store.current("log") == latest
        tables = [pa.ipc.open_stream(segment.region.memory).read_all() for segment in store.segments(latest)]
        assert pa.concat_tables(tables).num_rows == latest.rows == 8 * MIB // 8
        assert names_on_disk(disk) == {latest.id}


def test_indexes_survive_commits_removals_and_a_restart(memory: Path) -> None:
    """The store's indexes by key, name and bytes survive commits and removals in any order, and a restart."""
    with Store(memory / "store") as store:
        for number in range(6):
            put(store, "ab"[number % 2], 1, append=number > 2)
        store.remove(store.versions()[1])
        before = store.versions(), store.usage().committed, store.current("a"), store.current("b")
    with Store(memory / "store") as store:
        assert (store.versions(), store.usage().committed, store.current("a"), store.current("b")) == before
        for version in store.versions():
            assert store.by_key(version.key) == store.version(version.id) == version
        store.remove(*store.versions())
        assert (store.versions(), store.usage().committed, store.current("a")) == ([], 0, None)


def test_a_put_of_unknown_size_takes_no_more_than_it_has_come_to_need(memory: Path) -> None:
    """It takes free room first, then evicts as few of the oldest as the next batch needs.

    A batch that can never fit evicts nothing.
    """
    rows = pa.record_batch({"n": pa.array(range(MIB // 8), pa.int64())})
    twenty = pa.Table.from_batches([rows] * 20).combine_chunks().to_batches()[0]

    def batches(count: int, last: pa.RecordBatch | None) -> Iterator[pa.RecordBatch]:
        yield from [rows] * count
        if last is None:
            raise RuntimeError("no more comes")
        yield last

    def source(count: int, last: pa.RecordBatch | None) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(SCHEMA, batches(count, last))

    with Node(Store(memory / "store", 15 * MIB, Policy.EVICT), ["shm:"]) as node, dis.connect(node.uri) as client:
        for name in "abc":
            client.put(name, pa.Table.from_batches([rows] * 4))
        for count, last, left, why in (
            (2, None, "abc", "no more comes|broke off"),
            (2, twenty, "abc", "can never fit$"),
            (4, None, "bc", "no more comes|broke off"),
            (6, twenty, "bc", "can never fit$"),
            (8, twenty, "c", r"can never fit; evicted for the write before: 1 dataset, 'b'$"),
        ):
            with pytest.raises(DissociatedError, match=why):
                client.put("d", source(count, last))
            assert [info.name for info in client.list()] == [*left]
            assert list(node.store.staging.iterdir()) == []


def write_in_turns(tasks: Sequence[SegmentWriter], batch: pa.RecordBatch) -> None:
    for task in itertools.cycle(tasks):
        task.write(batch)


def test_the_tasks_of_one_write_are_told_what_was_evicted_for_all_of_them(memory: Path) -> None:
    """Spark writes like this: no task knows how much data there will be."""
    with Store(memory / "store", 14 * MIB, Policy.EVICT) as store:
        for name in "abc":
            put(store, name, 4)
        tasks = [store.writer(f"key-{number:06}.{number}.arrows", SCHEMA) for number in range(3)]
        batch = pa.record_batch({"n": pa.array([7] * (MIB // 8), pa.int64())})
        with pytest.raises(StoreFull, match=r"evicted for the write before: 3 datasets, 'a', 'b', 'c'$"):
            write_in_turns(tasks, batch)
        for task in tasks:
            task.abort()
        store.discard(f"key-{number:06}.{number}.arrows" for number in range(3))
        (store.staging / "key-3").touch(0o600)
        with pytest.raises(StoreError, match=r"can never fit$"):
            store.reserve("key-3", 15 * MIB)


def test_footers_of_parquet_tell_no_more_than_there_is(tmp_path: Path) -> None:
    """This holds for all types, encodings and sizes of row groups."""
    rows = 4_000
    columns: dict[str, pa.Array] = {
        "small": pa.array([number % 100 for number in range(rows)], pa.int8()),
        "flags": pa.array([number % 3 == 0 for number in range(rows)]),
        "few words": pa.array(["one", "two", None, "four"] * (rows // 4)),
        "words": pa.array([f"{number * 7919}" for number in range(rows)]),
        "dictionary": pa.array(["a long word that is said again", "b"] * (rows // 2)).dictionary_encode(),
        "lists": pa.array([[number] * (number % 3) for number in range(rows)]),
        "structs": pa.array([{"a": number, "b": f"{number}"} for number in range(rows)]),
        "vectors": pa.array([[1.0, 2.0]] * rows, pa.list_(pa.float32(), 2)),
        "decimals": pa.array([Decimal(number) for number in range(rows)], pa.decimal128(9, 2)),
        "nulls": pa.nulls(rows, pa.string()),
        "times": pa.array(range(rows), pa.timestamp("ns")),
    }
    with dis.Server([]) as server:
        for name, column in columns.items():
            for options in ({}, {"use_dictionary": False}, {"row_group_size": 50}, {"data_page_version": "2.0"}):
                with case((name, options)):
                    table = pa.table({name: column})
                    pq.write_table(table, tmp_path / "some.parquet", **options)
                    server.publish("d", tmp_path / "some.parquet")
                    dataset = server.dataset("d")
                    least = dataset.min_packed_size
                    assert least is not None
                    assert least <= sum(batch.get_total_buffer_size() for batch in dataset.open_reader())
                    assert name not in ("words", "times") or least > rows


@pytest.mark.needs("tmpfs")
def test_what_is_larger_than_its_file_system_removes_nothing(tmp_path: Path, start: Start) -> None:
    """Without a limit the file system is the limit: this one has 8 MiB."""
    root = tmp_path / "small"
    root.mkdir()
    where = ("--flight", "grpc://127.0.0.1:0")  # a socket in the store is visible only in that file system
    with small_file_system(root) as mounts:
        node = start("node", "--store", root / "store", "--policy", "evict", *where, mounts=mounts)
        some = pa.Table.from_batches([pa.record_batch({"n": pa.array(range(MIB // 8), pa.int64())})] * 16)
        with dis.connect(node.uri) as client:
            for name in "ab":
                client.put(name, some.slice(0, 3 * MIB // 8))
            with pytest.raises(DissociatedError, match=r"the file system of .* is full"):
                client.put("c", some)
            assert [info.name for info in client.list()] == ["a", "b"]
            client.put("c", some.slice(0, 4 * MIB // 8))
            assert [info.name for info in client.list()] == ["b", "c"]
        assert node.terminate() == 0


def test_a_put_that_can_never_fit_removes_nothing(memory: Path, tmp_path: Path) -> None:
    """The size of data in memory or in an IPC file is known before the put; for Parquet, its lower bound is."""
    rows = MIB // 8
    words = pa.table({"word": [f"{number:0100}" for number in range(300_000)]})  # 30 MB
    large = pa.Table.from_batches([pa.record_batch({"n": pa.array(range(rows), pa.int64())})] * 20)
    with pa.ipc.new_file(tmp_path / "large.arrow", SCHEMA) as writer:
        writer.write_table(large)
    pq.write_table(large, tmp_path / "large.parquet", row_group_size=rows)
    pq.write_table(words, tmp_path / "words.parquet", row_group_size=rows)
    (tmp_path / "large").mkdir()
    for number in range(4):
        pq.write_table(large.slice(number * 5 * rows, 5 * rows), tmp_path / "large" / f"{number}.parquet")
    with Node(Store(memory / "store", 14 * MIB, Policy.EVICT), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("a", large.slice(0, 5 * rows))
        client.put("b", large.slice(0, 5 * rows))
        for source in (large, *sorted(tmp_path.iterdir())):
            for transport in ("shm", "grpc"):
                with case((source, transport)), pytest.raises(DissociatedError, match=r"can never fit$"):
                    client.put("c", source, transport=transport)
        assert [info.name for info in client.list()] == ["a", "b"]
        assert list(node.store.staging.iterdir()) == []
        client.put("c", large.slice(0, 9 * rows))
        assert [info.name for info in client.list()] == ["c"]


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_a_version_that_a_process_has_mapped_is_not_evicted(memory: Path, tmp_path: Path, policy: Policy) -> None:
    """The kernel knows of readers of an ended node, of other programs, and of mappings by other names."""
    spill = tmp_path / "disk" if policy is Policy.SPILL else None

    def node() -> Node:
        return Node(Store(memory / "store", 14 * MIB, policy, spill), ["shm:"], retain=0.0)

    def segments() -> list[Path]:
        return [*memory.glob("store/segments/*/*.arrows")]

    @contextmanager
    def read_before() -> Iterator[None]:
        yield
        held.clear()

    @contextmanager
    def read_by_hand() -> Iterator[None]:
        maps = [pa.memory_map(str(path)) for path in segments()]
        yield
        maps.clear()

    @contextmanager
    def linked() -> Iterator[None]:
        with tempfile.TemporaryDirectory(dir=memory) as copies:
            for path in segments():
                os.link(path, f"{copies}/{path.parent.name}")
            yield

    with node() as first, dis.connect(first.uri) as client:
        held: list[object] = []
        for name in "ab":
            client.put(name, LARGE)
            held.append(client.read(name, transport="shm").read_all())
    with node() as second, dis.connect(second.uri) as client:
        for hold in (read_before, read_by_hand, linked):
            with case(hold.__name__), hold():
                with pytest.raises(CatalogError, match="is mapped by a process"):
                    client.put("c", LARGE)
                assert [info.name for info in client.list()] == ["a", "b"]
                assert second.store.usage().spilled == 0
                assert client.read("a").read_all() == LARGE  # the check has not closed anything for good
        wait_until(lambda: _is_put(client, "c"), "what was held can go")
        assert len(client.list()) == (3 if spill else 2)


def _is_put(client: dis.Client, name: str) -> bool:
    try:
        client.put(name, LARGE)
    except CatalogError as error:
        if "the rest is being read" not in str(error):
            raise
        return False
    return True


@pytest.fixture
def upstream() -> Iterator[CatalogService]:
    catalog = CatalogService("grpc://127.0.0.1:0")
    yield catalog
    catalog.close()


def test_puts_in_a_row_do_not_wait_for_the_catalog_to_be_heard(memory: Path, upstream: CatalogService) -> None:
    """A node may evict versions that the catalog has published, and asks the catalog instead of failing."""
    store = Store(memory / "store", 14 * MIB, Policy.EVICT)
    with Node(store, ["shm:"], catalog=upstream.uri, heartbeat_interval=600.0) as node:
        for uri, names in ((node.uri, "abc"), (upstream.uri, "def")):
            with dis.connect(uri) as client:
                for name in names:
                    client.put(name, LARGE)
        assert [version.name for version in store.versions()] == ["e", "f"]


def test_what_was_dropped_at_the_catalog_makes_room_at_once(memory: Path, upstream: CatalogService) -> None:
    with (
        Node(Store(memory / "store", 14 * MIB), ["shm:"], catalog=upstream.uri, heartbeat_interval=600.0) as node,
        dis.connect(upstream.uri) as there,
        dis.connect(node.uri) as here,
    ):
        for name in "ab":
            here.put(name, LARGE)
        with pytest.raises(CatalogError, match="drop datasets that are not needed"):
            here.put("c", LARGE)
        there.drop("a")
        here.put("c", LARGE)
        assert [info.name for info in here.list()] == ["b", "c"]


REFUSALS = [
    (Policy.REFUSE, CatalogError, "drop datasets that are not needed"),
    (Policy.EVICT, DeadlineExceeded, r"is full, .* has not answered an earlier report for 0.01 s"),
]


@pytest.mark.parametrize(("policy", "error", "message"), REFUSALS, ids=["refuse", "evict"])
def test_a_writer_does_not_wait_for_long_while_a_report_of_its_node_hangs(
    memory: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy, error: type[Exception], message: str
) -> None:
    heartbeat, asked, answering = LocalCatalog.heartbeat, threading.Event(), threading.Lock()

    def answer(catalog: LocalCatalog, body: Mapping[str, Any]) -> dict[str, Any]:
        asked.set()
        with answering:
            return heartbeat(catalog, body)

    monkeypatch.setattr(LocalCatalog, "heartbeat", answer)
    store = Store(memory / "store", 14 * MIB, policy)
    with (
        closing(CatalogService("grpc://127.0.0.1:0")) as upstream,
        Node(store, ["shm:"], catalog=upstream.uri, heartbeat_interval=600.0) as node,
        dis.connect(node.uri) as client,
        ThreadPoolExecutor() as pool,
    ):
        for name in "ab":
            client.put(name, LARGE)
        node.service.catalog.reconcile()
        asked.clear()
        monkeypatch.setattr("dissociated.catalog.upstream.PEER_TIMEOUT", 0.01)
        with answering:
            report = pool.submit(node.service.catalog.reconcile)
            assert asked.wait(PATIENCE)
            with pytest.raises(error, match=message):
                client.put("c", LARGE)
        report.result(PATIENCE)
        assert names(store) == ["a", "b"]


def test_what_has_expired_makes_room_at_once(memory: Path) -> None:
    with Node(Store(memory / "store", 14 * MIB), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("b", LARGE)
        for _ in range(3):  # each expires long before the node looks for expired versions
            client.put("a", LARGE, ttl=0.2)
            wait_until(lambda: [info.name for info in client.list()] == ["b"], "it expires")
        client.put("c", LARGE)


def test_a_catalog_that_is_gone_hides_no_full_store(memory: Path) -> None:
    upstream = CatalogService("grpc://127.0.0.1:0")
    with Node(
        Store(memory / "store", 14 * MIB, Policy.EVICT), ["shm:"], catalog=upstream.uri, heartbeat_interval=600.0
    ) as node:
        with dis.connect(node.uri) as client:
            for name in "ab":
                client.put(name, LARGE)
        upstream.close()
        with dis.connect(node.uri) as client, pytest.raises(CatalogError, match=r"is full: .* not committed yet"):
            client.put("c", LARGE)
        assert names(node.store) == ["a", "b"]

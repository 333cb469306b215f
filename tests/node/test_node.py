"""Nodes, catalogs, writers and readers as separate processes, killed at every step, and the state that remains."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.control.commit import StagedSegment
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError, NodeUnreachable, StoreError
from dissociated.node import launch
from dissociated.node.launch import NodeAddress, NodeProcess, ensure, running
from dissociated.node.node import Node
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store
from memory.maps import origins
from support.helpers import PATIENCE, commit_of, wait_until
from support.nodes import (
    MIB,
    READER,
    SCHEMA,
    WRITER,
    kill,
    nothing_is_left_of,
    put,
    read,
    segments,
    small_file_system,
    spawn,
    staged,
    table,
)
from support.processes import HEARTBEAT, Fork, Process, Start, free_port, run_script

# A single node


def test_a_node_killed_while_it_serves_has_everything_again_under_the_same_tickets(memory: Path, start: Start) -> None:
    store = memory / "store"
    node = start("node", "--store", store)
    put(node.uri, "d", pa.concat_tables([table(*range(1000))] * 50), tags={"of": "x"}, ttl=3600.0)
    put(node.uri, "d", table(1, 2), mode="append")
    put(node.uri, "e", table(7))
    with dis.connect(node.uri) as client:
        before = client.describe("d")
        arrived = client.read("d", transport="shm")
    reader = spawn(READER, node.uri, "e")
    files = segments(store)
    node.kill()
    assert arrived.read_all()["n"].to_pylist()[-2:] == [1, 2]  # the data lies in shared memory
    del arrived
    printed, _ = reader.communicate("\n", timeout=PATIENCE)
    assert printed == "1 7\n"
    again = start("node", "--store", store)
    with dis.connect(again.uri) as client:
        after = client.describe("d")
        assert [info.name for info in client.list()] == ["d", "e"]
    assert [endpoint.ticket for endpoint in after.endpoints] == [endpoint.ticket for endpoint in before.endpoints]
    assert (after.tags, after.rows) == ({"of": "x"}, 50_002)
    assert after.created == pytest.approx(before.created, abs=1)
    assert after.expires == pytest.approx(before.expires, abs=1)
    assert dis.open_stream(before.endpoints[0].locations[0], before.endpoints[0].ticket).read_all().num_rows == 50_002
    assert read(again.uri, "d", "tcp")[-2:] == read(again.uri, "d", "grpc")[-2:] == [1, 2]
    assert segments(store) == files
    wait_until(lambda: again.leases() == 0, "the readers have given everything back")
    nothing_is_left_of(again, store)
    assert again.terminate() == 0
    assert not list((store / "run").iterdir())
    assert not (store / "node.json").exists()


def test_a_put_in_place_needs_no_address_but_the_one_that_the_client_has(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store", "--flight", "grpc://0.0.0.0:0", "--advertise", "nowhere.invalid")
    assert node.uri.startswith("grpc://nowhere.invalid:")
    with dis.connect(node.uri.replace("nowhere.invalid", "127.0.0.1")) as client:
        client.put("d", table(1, 2), transport="shm")
        assert client.read("d", transport="shm").read_all() == table(1, 2)


def test_a_node_that_was_killed_knows_every_commit_that_is_in_its_datasets(memory: Path, start: Start) -> None:
    def commit(uri: str, key: str, number: int, mode: str) -> None:
        with dis.connect(uri) as client:
            client.commit(commit_of("d", [write(uri, f"{key}-1", number)], SCHEMA, mode=mode, key=key))

    node = start("node", "--store", memory / "store", "--retain", "0.001")
    commit(node.uri, "first", 1, "overwrite")
    for number in (2, 3):
        commit(node.uri, f"append{number}", number, "append")
    with dis.connect(node.uri) as client:
        before = client.describe("d")
    wait_until(lambda: len(segments(memory / "store" / "segments")) == 3, "what was replaced is gone")
    node.kill()
    node = start("node", "--store", memory / "store")
    with dis.connect(node.uri) as client:
        assert client.describe("d").lineage_id == before.lineage_id
        assert [client.committed(key) for key in ("first", "append2", "append3", "append4")] == [True] * 3 + [False]
        commit(node.uri, "append2", 2, "append")
        assert read(node.uri, "d") == [1, 2, 3]
        commit(node.uri, "again", 9, "overwrite")
        assert client.describe("d").lineage_id != before.lineage_id
    assert staged(memory / "store") == []


def test_segments_of_a_key_with_dashes_are_those_of_that_key_alone(memory: Path) -> None:
    keys = ("2026", "2026-11", "5f8b0a34-1c1e-4f5e-9c7e-0d6b3f1a2b3c")
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        for key in keys:
            for name in (f"{key}-0.arrows", f"{key}-1.arrows"):
                write(node.uri, name, 1)
        client.commit(commit_of("d", ["2026-0.arrows"], SCHEMA, key="2026"))
        node.service.catalog.reconcile()
        assert staged(memory) == sorted(f"{key}-{number}.arrows" for key in keys[1:] for number in (0, 1))
        client.commit(commit_of("d", ["2026-11-1.arrows"], SCHEMA, key="2026-11"))
        client.abort(keys[2])
        node.service.catalog.reconcile()
        assert staged(memory) == []


def test_a_commit_without_segments_may_come_again(memory: Path, start: Start) -> None:
    """A Spark job with empty partitions sends such commits, on the host of the node."""
    node = start("node", "--store", memory / "store")
    with dis.connect(node.uri) as client:
        nothing = [StagedSegment("", client.stage().node)]
        for _ in range(2):
            client.commit(commit_of("d", nothing, SCHEMA, key="k"))
        assert client.describe("d").version == 1
    assert read(node.uri, "d") == []


@pytest.mark.parametrize("how", ["half", "whole"])
def test_a_writer_killed_before_the_commit_publishes_nothing(memory: Path, start: Start, how: str) -> None:
    store = memory / "store"
    node = start("node", "--store", store, "--limit", "64MiB")
    put(node.uri, "d", table(1))
    kill(spawn(WRITER, node.uri, how))
    assert staged(store) == (["w.part"] if how == "half" else ["w"])
    assert read(node.uri, "d") == [1]
    node.kill()
    again = start("node", "--store", store)
    assert staged(store) == ([] if how == "half" else ["w"])  # a whole segment can still be committed
    assert len(segments(store)) == 1
    if how == "whole":
        with dis.connect(again.uri) as client:
            client.commit(commit_of("d", ["w"], SCHEMA, mode="append"))
            client.commit(commit_of("d", ["w"], SCHEMA, mode="append"))
        assert read(again.uri, "d") == [1, 5]
        assert staged(store) == []
    nothing_is_left_of(again, store)


def test_a_node_killed_at_any_moment_of_commits_keeps_each_that_it_answered(memory: Path, start: Start) -> None:
    store = memory / "store"
    done = 0
    for delay in (0.01, 0.05, 0.09):
        node = start("node", "--store", store)
        with ThreadPoolExecutor(1) as pool:
            # Commit each key again and again, by either node, until there is an answer.
            def commit(uri: str, first: int) -> int:
                count = first
                with suppress(DissociatedError), flight.FlightClient(uri) as plain:
                    while True:
                        asked = {"name": "log", "mode": "append", "key": str(count)}
                        descriptor = flight.FlightDescriptor.for_command(json.dumps(asked))
                        with suppress(flight.FlightError, pa.ArrowException):
                            writer, _ = plain.do_put(descriptor, SCHEMA)
                            with writer:
                                writer.write_table(table(count))
                            count += 1
                            continue
                        return count
                return count

            writing = pool.submit(commit, node.uri, done)
            try:
                wait_until(lambda: len(segments(store)) > 3, "the first commits")
                time.sleep(delay)  # no event to wait for: any moment will do
            finally:
                node.kill()
            done = writing.result(PATIENCE)
        again = start("node", "--store", store)
        found = read(again.uri, "log")
        assert found in (list(range(done)), list(range(done + 1)))
        assert [name for name in staged(store) if not name.endswith(".arrows")] == []
        if delay == 0.09:
            nothing_is_left_of(again, store)
        again.kill()


def test_what_a_reader_holds_is_not_evicted_until_it_is_killed(memory: Path, start: Start) -> None:
    store = memory / "store"
    node = start("node", "--store", store, "--limit", "12MiB", "--policy", "evict")
    large = pa.table({"n": pa.array(range(5 * MIB // 8), pa.int64())})
    put(node.uri, "a", large)
    reader = spawn(READER, node.uri, "a")
    put(node.uri, "b", large)
    put(node.uri, "c", large)
    with dis.connect(node.uri) as client:
        assert [info.name for info in client.list()] == ["a", "c"]
    assert node.leases() == 1  # its only batch has a single buffer
    kill(reader)
    wait_until(lambda: node.leases() == 0, "the leases of the dead reader have ended")
    wait_until(lambda: _tried(node.uri, "d", large), "what it read can go")
    with dis.connect(node.uri) as client:
        assert [info.name for info in client.list()] == ["c", "d"]
    nothing_is_left_of(node, store)


def _tried(uri: str, name: str, data: pa.Table) -> bool:
    try:
        put(uri, name, data)
    except CatalogError as error:
        if "the rest is being read" not in str(error):
            raise
        return False
    with dis.connect(uri) as client:
        return [info.name for info in client.list()] == ["c", "d"]


def test_spilled_datasets_are_served_from_disk(memory: Path, tmp_path: Path, start: Start) -> None:
    options = ("--limit", "12MiB", "--policy", "spill", "--spill", tmp_path / "disk")
    node = start("node", "--store", memory / "store", *options)
    large = pa.table({"n": pa.array(range(5 * MIB // 8), pa.int64())})
    with dis.connect(node.uri) as client:
        put(node.uri, "a", large)
        ticket = client.describe("a").endpoints[0].ticket
        reader = client.read("a", transport="shm")
        for name in "bcd":
            put(node.uri, name, large)
        assert reader.read_all() == large  # undisturbed
        assert client.describe("a").endpoints[0].ticket == ticket
        for name in "abcd":
            assert client.read(name, transport="shm").read_all() == large
    assert len(segments(tmp_path / "disk" / "segments")) >= 2
    node.kill()
    again = start("node", "--store", memory / "store", *options)
    assert read(again.uri, "a", "tcp")[-1] == 5 * MIB // 8 - 1


def test_an_ipc_file_that_any_tool_wrote_is_committed_and_served_where_it_lies(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store")
    with dis.connect(node.uri) as client:
        place = client.stage()
        with pa.ipc.new_file(f"{place.directory}/mine", SCHEMA) as writer:
            writer.write_table(table(1, 2))
        client.commit(commit_of("d", ["mine"], SCHEMA))
        for transport in ("shm", "tcp", "grpc"):
            assert read(node.uri, "d", transport) == [1, 2]
        arrived = client.read("d", transport="shm").read_all()
        (lies,) = (memory / "store").glob("segments/*/*.arrows")
        assert {path for _, path in origins(arrived.to_batches())} == {str(lies)}
        assert pa.ipc.open_file(lies).read_all() == table(1, 2)


@pytest.mark.needs("tmpfs")
def test_a_full_file_system_is_told_to_whoever_puts_and_harms_nobody(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "small"
    root.mkdir()
    where = ("--flight", "grpc://127.0.0.1:0")  # a socket in the store is visible only in that file system
    with small_file_system(root) as mounts:
        node = start("node", "--store", root / "store", *where, mounts=mounts)
        put(node.uri, "d", table(1, 2))
        large = pa.table({"n": np.arange(2 * MIB)})
        sentence = r"the file system of .*/small/store' is full: .*in Docker, --shm-size"
        for _ in range(2):
            with pytest.raises(CatalogError, match=sentence):
                put(node.uri, "large", large)
        # A segment that fits is accepted: nothing remains of the one that did not.
        put(node.uri, "e", large.slice(0, MIB // 2))
        with dis.connect(node.uri) as client:
            assert client.read("e", transport="tcp").read_all() == large.slice(0, MIB // 2)
        assert read(node.uri, "d", "tcp") == read(node.uri, "d", "grpc") == [1, 2]
        assert node.terminate() == 0


def test_sigterm_lets_readers_end_within_the_deadline(memory: Path, start: Start) -> None:
    store = memory / "store"
    node = start("node", "--store", store, "--drain", "20")
    put(node.uri, "d", pa.concat_tables([table(*range(1000))] * 50))
    reader = spawn(READER, node.uri, "d")
    node.signal(signal.SIGTERM)
    wait_until(lambda: not (store / "node.json").exists(), "it drains")
    with pytest.raises(DissociatedError), dis.connect(node.uri, timeout=2) as client:
        dis.open_stream(client.describe("d").endpoints[0].locations[0], b"x")
    printed, _ = reader.communicate("\n", timeout=PATIENCE)
    assert printed == "50000 999\n"
    assert node.wait() == 0
    slow = start("node", "--store", store, "--drain", "0.2")
    reader = spawn(READER, slow.uri, "d")
    assert slow.terminate() == 0  # although a client still holds memory
    kill(reader)


# Starting a node


@pytest.mark.usefixtures("forked_nodes")
def test_processes_that_need_a_node_start_one_and_share_it(memory: Path) -> None:
    store = memory / "store"
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: ensure(store, idle_exit=600, options=[f"--limit={64 * MIB}"]), range(3)))
    address = found[0]
    try:
        assert found == [address] * 3
        assert address.pid != os.getpid()
        put(address.uri, "d", table(1, 2))
        assert read(address.uri, "d", "shm") == [1, 2]
    finally:
        os.kill(address.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{address.pid}").exists(), "it is no zombie of this process")
    assert running(store) is None
    began = time.monotonic()
    again = ensure(store, idle_exit=0.1)  # the node ends by itself, and the data stays
    with NodeProcess(store) as process:
        assert process.wait(PATIENCE)
    assert time.monotonic() - began > 2  # a writer that has asked for the stage has time to write
    wait_until(lambda: not Path(f"/proc/{again.pid}").exists(), "it is no zombie of this process")
    assert len(segments(store / "segments")) == 1


def test_a_node_with_the_port_of_one_that_was_killed_is_not_taken_for_it(memory: Path) -> None:
    with Store(memory / "killed"), Node(Store(memory / "other"), []):
        shutil.copy(memory / "other" / "node.json", memory / "killed")
        assert running(memory / "other") is not None
        assert running(memory / "killed") is None


def test_a_node_that_is_closed_again_leaves_the_next_one_of_its_store_alone(memory: Path) -> None:
    with Node(Store(memory / "store"), []) as first:
        first.close()
        with Node(Store(memory / "store"), []) as second:
            first.close()
            found = running(memory / "store")
            assert found is not None
            assert found.uri == second.uri


@pytest.mark.usefixtures("forks")
def test_a_node_whose_starter_was_killed_runs_on(memory: Path) -> None:
    store = memory / "store"
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = ("-m", "dissociated", "node", "--store", store, "--ready-fd", str(write_end))
    with Fork(*command, descriptors={write_end: write_end}, stdout=subprocess.DEVNULL) as node:
        try:
            os.close(write_end)
            wait_until(lambda: running(store) is not None, "it answers")
            node.terminate()
            assert node.wait(PATIENCE) == 0
        finally:
            node.kill()


MANY_DESCRIPTORS = """
import os, resource, sys
from dissociated.node.launch import ensure
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, hard), hard))
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
print(ensure(sys.argv[1]).pid)
for descriptor in opened:
    os.close(descriptor)
"""


@pytest.mark.usefixtures("forked_nodes")
def test_a_node_is_started_by_a_process_with_more_than_1024_descriptors(memory: Path) -> None:
    started = run_script(MANY_DESCRIPTORS, memory / "store")
    assert int(started.stdout) != os.getpid(), started.stderr
    os.kill(int(started.stdout), signal.SIGKILL)


@pytest.mark.usefixtures("forked_nodes")
def test_a_node_that_cannot_start_says_why(memory: Path) -> None:
    with Store(memory / "store"):
        pass
    (memory / "store" / "segments").rmdir()
    (memory / "store" / "segments").write_text("in the way")
    with pytest.raises(
        StoreError, match=r"no node could be started for .*: dissociated: 'segments' is not a directory"
    ):
        ensure(memory / "store")


@pytest.fixture
def go(forked_nodes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a path that a node which the library starts in the background waits for."""
    python, go = tmp_path / "python", tmp_path / "go"
    python.write_text(f'#!/bin/sh\nuntil test -e {go}; do sleep 0.02; done\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    return go


def test_a_node_that_a_service_starts_meanwhile_is_found(memory: Path, start: Start, go: Path) -> None:
    store = memory / "store"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(ensure, store)
        wait_until((store / "node.log").exists, "nobody owns the store")
        node = start("node", "--store", store)
        go.touch()
        assert starting.result(PATIENCE) == running(store)
    assert running(store) == NodeAddress(node.uri, node.pid)
    assert not (store / "node.log").exists()  # by which Spark knows the nodes that it may start


def test_the_error_of_a_node_is_told_although_a_service_has_removed_the_log(
    memory: Path, start: Start, go: Path
) -> None:
    store = memory / "store"
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(ensure, store)
        wait_until((store / "node.log").exists, "nobody owns the store")
        assert start("node", "--store", store).terminate() == 0
        (store / "segments").rmdir()
        (store / "segments").touch()
        go.touch()
        with pytest.raises(StoreError, match=r"no node could be started for .*: 'segments' is not a directory"):
            starting.result(PATIENCE)


def test_a_store_of_a_process_that_is_no_node_is_refused_soon(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "ADDRESS_TIMEOUT", 0.1)
    began = time.monotonic()
    with Store(memory / "store"), pytest.raises(StoreError, match=r"for .*: the store belongs to another process"):
        ensure(memory / "store", timeout=2 * PATIENCE)
    assert time.monotonic() - began < PATIENCE


# A catalog and its nodes


def write(uri: str, name: str, *numbers: int) -> StagedSegment:
    with dis.connect(uri) as client:
        place = client.stage()
        with SegmentWriter(f"{place.directory}/{name}", SCHEMA, reserve=client.reserve) as writer:
            writer.write(pa.record_batch({"n": pa.array(numbers, pa.int64())}))
    return StagedSegment(name, place.node)


def read_at_last(uri: str, name: str) -> list[int]:
    """Return the rows as soon as the catalog considers its nodes alive: busy nodes may report late."""
    found: list[int] = []

    def heard() -> bool:
        try:
            found.extend(read(uri, name))
        except CatalogError as error:
            if "no node there is alive" not in str(error):
                raise
            return False
        return True

    wait_until(heard, "its nodes are heard")
    return found


def kill_half_way(catalog: Process, other: Process, commit: Callable[[], None], prepared: Callable[[], bool]) -> None:
    """Kill a catalog when a node has prepared its part of a commit, and the other node, which is stopped, has not."""
    other.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit)
        wait_until(prepared, "one has prepared")
        catalog.kill()
        with pytest.raises(CatalogError):
            committing.result(PATIENCE)
    other.signal(signal.SIGCONT)


def test_a_catalog_killed_during_a_commit_has_it_whole_or_not_at_all(
    memory: Path, tmp_path: Path, start: Start
) -> None:
    listen = f"grpc://127.0.0.1:{free_port()}"
    catalog_arguments = ("catalog", "--db", tmp_path / "db", "--listen", listen, "--retain", "0.001")
    catalog = start(*catalog_arguments)
    a, b = (start("node", "--store", memory / n, "--catalog", listen, "--heartbeat", HEARTBEAT) for n in "ab")
    with dis.connect(listen) as client:
        client.commit(commit_of("d", [write(a.uri, "old", 0)], SCHEMA, key="old"))
    parts = [write(a.uri, "1", 1), write(b.uri, "2", 2)]

    def commit() -> None:
        with dis.connect(listen) as client:
            client.commit(commit_of("d", parts, SCHEMA, key="k"))

    kill_half_way(catalog, b, commit, lambda: len(segments(memory / "a" / "segments")) == 2)
    start(*catalog_arguments)
    assert read_at_last(listen, "d") == [0]
    commit()
    commit()
    assert read_at_last(listen, "d") == [1, 2]
    wait_until(lambda: len(segments(memory / "a" / "segments")) == 1, "a has released what was replaced")
    assert len(segments(memory / "b" / "segments")) == 1
    wait_until(lambda: staged(memory / "a") == staged(memory / "b") == [], "nothing half is left")
    with dis.connect(listen) as client:
        client.drop("d")
    places = ((a, memory / "a" / "segments"), (b, memory / "b" / "segments"))
    wait_until(lambda: all(segments(place) == [] for _, place in places), "the dropped parts are gone")
    wait_until(lambda: not any(node.open_files(place) for node, place in places), "nothing is mapped")


def test_a_commit_that_stood_half_way_can_come_again_with_other_segments(
    memory: Path, tmp_path: Path, start: Start
) -> None:
    listen = f"grpc://127.0.0.1:{free_port()}"
    catalog_arguments = ("catalog", "--db", tmp_path / "db", "--listen", listen)
    catalog = start(*catalog_arguments)
    a, b = (start("node", "--store", memory / n, "--catalog", listen, "--heartbeat", HEARTBEAT) for n in "ab")

    def commit(parts: list[StagedSegment]) -> None:
        with dis.connect(listen) as client:
            client.commit(commit_of("d", parts, SCHEMA, mode="append", key="k"))

    parts = [write(a.uri, "1", 1), write(b.uri, "2", 2)]
    kill_half_way(catalog, b, lambda: commit(parts), lambda: len(segments(memory / "a" / "segments")) == 1)
    start(*catalog_arguments)
    with dis.connect(listen) as client:
        wait_until(lambda: sum(node["alive"] for node in client.nodes()) == 2, "both nodes were heard again")
    commit([write(a.uri, "3", 2), write(b.uri, "4", 1)])  # the rows that other tasks wrote elsewhere
    assert read_at_last(listen, "d") == [2, 1]
    wait_until(
        lambda: all(len(segments(memory / name / "segments")) == 1 for name in "ab"),
        "nothing is left of the first attempt",
    )


def test_nodes_that_are_killed_are_marked_and_come_back(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    arguments = ("node", "--store", memory / "a", "--catalog", catalog.uri, "--heartbeat", "1")
    node = start(*arguments)
    put(catalog.uri, "d", table(1, 2))
    node.kill()
    with dis.connect(catalog.uri) as client:
        wait_until(lambda: not client.describe("d").endpoints[0].locations, "the catalog has noticed")
        with pytest.raises(CatalogError, match="and no node there is alive"):
            client.read("d")
        start(*arguments)
        wait_until(lambda: client.describe("d").endpoints[0].locations, "it is back")
        assert read(catalog.uri, "d", "shm") == read(catalog.uri, "d", "grpc") == [1, 2]


def test_a_commit_with_a_node_that_is_stopped_fails_soon_and_holds_up_no_other(
    memory: Path, tmp_path: Path, start: Start
) -> None:
    """The kernel accepts connections for a stopped process, so without a check it is waited for until the deadline."""
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    a, b = (start("node", "--store", memory / n, "--catalog", catalog.uri, "--heartbeat", "1") for n in "ab")
    commits = [commit_of(name, [write(node.uri, "1", 1)], SCHEMA, key=name) for name, node in (("a", a), ("b", b))]
    with dis.connect(catalog.uri, timeout=15) as client:
        b.signal(signal.SIGSTOP)
        wait_until(lambda: sum(node["alive"] for node in client.nodes()) == 1, "the catalog has noticed")
        with pytest.raises(NodeUnreachable, match=f"does not answer the catalog at {b.uri}"):
            client.commit(commits[1])
        client.commit(commits[0])
        b.signal(signal.SIGCONT)
        wait_until(lambda: all(node["alive"] for node in client.nodes()), "it is back")
        client.commit(commits[1])
        wait_until(lambda: all(node["alive"] for node in client.nodes()), "both are heard")
    assert read(catalog.uri, "a") == read(catalog.uri, "b") == [1]


def test_a_catalog_that_lost_its_database_learns_from_the_nodes(memory: Path, tmp_path: Path, start: Start) -> None:
    listen = f"grpc://127.0.0.1:{free_port()}"
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", listen)
    start("node", "--store", memory / "a", "--catalog", listen, "--heartbeat", HEARTBEAT)
    put(listen, "d", table(1, 2))
    put(listen, "d", table(1, 2, 3))
    manifests = memory / "a" / "segments"
    wait_until(
        lambda: all('"prepared": false' in path.read_text() for path in manifests.glob("*/manifest.json")),
        "the node knows what was published",
    )
    catalog.kill()
    start("catalog", "--db", tmp_path / "another", "--listen", listen)

    def known() -> bool:
        try:
            return read(listen, "d") == [1, 2, 3]
        except (DatasetNotFound, CatalogError):
            return False

    wait_until(known, "the node has told it")

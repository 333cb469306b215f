"""Sealed memfds that are handed over by descriptor: their place, their share of the limit, and the permitted users."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    DatasetNotFound,
    DeadlineExceeded,
    StoreError,
    StoreFull,
    TransportError,
)
from dissociated.memory.shared import Backing
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.handover import HandoverListener, hand_over
from dissociated.store.store import Store
from memory.maps import origins
from support.helpers import PATIENCE, Serve, commit_of, descriptors, leaving_nothing, wait_until
from support.nodes import MIB, SCHEMA, kill, put, read, segments, spawn, staged, table
from support.processes import Fork, Process, Start, run_script

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextmanager
def memfd(data: pa.Table | bytes, seals: int = SEALS) -> Iterator[int]:
    """Yield a memfd that was created without this library."""
    descriptor = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            if isinstance(data, bytes):
                file.write(data)
            else:
                with pa.ipc.new_stream(file, data.schema) as writer:
                    writer.write_table(data)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        yield descriptor
    finally:
        os.close(descriptor)


def large(mib: int) -> pa.Table:
    return pa.table({"n": pa.array(range(mib * MIB // 8), pa.int64())})


def handed(store: Store, data: pa.Table) -> str:
    with memfd(data) as descriptor:
        return store.hand_over(descriptor)


def files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*/**/*") if path.is_file()]


# A store


def test_a_memfd_is_served_where_it_lies_until_the_store_is_closed(memory: Path) -> None:
    with leaving_nothing():
        with Store(memory / "store") as store:
            with memfd(table(1, 2)) as descriptor:
                version = store.commit(commit_of("d", [store.hand_over(descriptor)], key="k", tags={"of": "x"}))
                inode = os.fstat(descriptor).st_ino
            (segment,) = store.segments(version)
            assert os.fstat(segment.descriptor).st_ino == inode
            assert segment.backing is Backing.SEALED
            assert pa.ipc.open_stream(segment.region.memory).read_all() == table(1, 2)
            assert (version.rows, version.tags, store.current("d")) == (2, {"of": "x"}, version)
            assert files(store.directory) == []
            del segment
        with Store(memory / "store") as store:
            assert store.versions() == []


UNSAFE = {
    "not sealed": 0,
    "it can be written": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
    "it can shrink": fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW,
    "it can grow": fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK,
    "only later writers are kept off": fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10,
}


@pytest.mark.parametrize("seals", UNSAFE.values(), ids=UNSAFE)
def test_a_memfd_that_could_change_is_refused(memory: Path, seals: int) -> None:
    with leaving_nothing(), Store(memory / "store") as store:
        with memfd(table(1), seals) as descriptor, pytest.raises(StoreError, match="can still be modified"):
            store.hand_over(descriptor)
        assert store.usage().total == 0


def test_a_descriptor_that_is_no_memfd_is_refused(memory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with leaving_nothing(), Store(memory / "store") as store:
        read, write = os.pipe()
        file = os.open(tmp_path / "file", os.O_RDONLY)
        for descriptor in (read, write, file):
            with pytest.raises(StoreError, match="can still be modified"):
                store.hand_over(descriptor)
            os.close(descriptor)


def test_a_memfd_that_holds_no_stream_is_refused_and_nothing_has_to_go_for_it(memory: Path) -> None:
    with leaving_nothing(), Store(memory / "store", 4 * MIB, Policy.EVICT) as store:
        kept = store.commit(commit_of("d", [handed(store, large(3))], key="k"))
        with memfd(bytes(2 * MIB)) as descriptor, pytest.raises(StoreError, match="handed over: not an"):
            store.hand_over(descriptor)
        assert store.versions() == [kept]


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_a_memfd_that_holds_more_or_less_than_one_whole_stream_or_file_is_refused(memory: Path, kind: Any) -> None:
    whole = []
    for numbers in ([1, 2], [3, 4]):
        sink = io.BytesIO()
        with kind(sink, SCHEMA) as writer:
            writer.write_table(table(*numbers))
        whole.append(sink.getvalue())
    unfinished = io.BytesIO()
    writer = kind(unfinished, SCHEMA)
    writer.write_table(table(1, 2))
    with leaving_nothing(), Store(memory / "store") as store:
        for content in (b"".join(whole), unfinished.getvalue(), unfinished.getvalue()[:-8]):
            with memfd(content) as descriptor, pytest.raises(StoreError, match="memory that was handed over"):
                store.hand_over(descriptor)
        assert store.usage().total == 0
        with memfd(whole[0]) as descriptor:
            version = store.commit(commit_of("d", [store.hand_over(descriptor)], key="k"))
        assert version.rows == 2


def test_a_memfd_that_zeros_fill_up_is_taken_and_appended_to(memory: Path) -> None:
    with leaving_nothing(), Store(memory / "store") as store:
        for key, numbers in ("1", (1, 2)), ("2", (3,)):
            with memfd(table(*numbers), 0) as descriptor:
                os.ftruncate(descriptor, 1 << 16)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                both = store.commit(commit_of("d", [store.hand_over(descriptor)], mode="append", key=key))
        assert [pa.ipc.open_stream(segment.region.memory).read_all() for segment in store.segments(both)] == [
            table(1, 2),
            table(3),
        ]
        with memfd(table(1), 0) as descriptor:
            os.pwrite(descriptor, b"x", 1 << 16)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            with pytest.raises(StoreError, match="handed over has data after its end"):
                store.hand_over(descriptor)


def test_what_was_handed_over_counts_for_as_long_as_somebody_has_it_mapped(memory: Path) -> None:
    with Store(memory / "store", 8 * MIB) as store:
        version = store.commit(commit_of("d", [handed(store, large(5))], key="k"))
        assert 5 * MIB <= store.usage().committed <= 6 * MIB
        again = handed(store, large(2))
        with (
            memfd(large(3)) as descriptor,
            pytest.raises(StoreError, match=r"is full: it holds .* and the write needs"),
        ):
            store.hand_over(descriptor)
        # Handed-over files count towards the limit.
        with pytest.raises(StoreError, match="is full"), store.writer("w", SCHEMA) as writer:
            writer.write_table(large(3))
        store.discard([again])
        assert store.usage().staged == 0
        mapped = store.segments(version)[0].region.memory
        store.remove(version)
        store.sweep()
        assert store.usage().trash >= 5 * MIB
        assert pa.ipc.open_stream(mapped).read_all() == large(5)
        del mapped
        store.sweep()
        assert store.usage().total == 0


def test_the_same_memory_counts_once(memory: Path) -> None:
    with Store(memory / "store", 5 * MIB) as store, memfd(large(3)) as descriptor:
        for key in "ab":
            store.commit(commit_of(key, [store.hand_over(descriptor)], key=key))
        assert store.usage().total < 4 * MIB
        held = store.segments(store.versions()[0])
        store.remove(*store.versions())
        store.commit(commit_of("c", [store.hand_over(descriptor)], key="c"))  # a second time, from the trash
        del held
        store.remove(*store.versions())
        store.sweep()
        assert store.usage().total == 0


def test_memory_is_discarded_while_others_use_the_store(memory: Path) -> None:
    interval = sys.getswitchinterval()

    def discard_each(names: list[str]) -> None:
        for name in names:
            store.discard([name])

    with Store(memory / "store") as store, leaving_nothing(), ThreadPoolExecutor(1) as pool:
        sys.setswitchinterval(1e-5)  # seconds
        try:
            for _ in range(3):
                names = [handed(store, table(number)) for number in range(200)]
                discarding = pool.submit(discard_each, names)
                while not discarding.done():
                    store.usage()
                discarding.result()
                store.sweep()
        finally:
            sys.setswitchinterval(interval)
        assert store.usage().total == 0


def test_holes_count_for_what_they_take_when_they_are_read(memory: Path) -> None:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(table(*bytes(MIB // 4)))
    content = sink.getvalue()
    with Store(memory / "store", MIB) as store, memfd(b"", 0) as descriptor:
        os.pwrite(descriptor, content[:1024], 0)
        os.pwrite(descriptor, content[-1024:], len(content) - 1024)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        with pytest.raises(StoreError, match="can never fit"):
            store.hand_over(descriptor)


def test_memfds_are_evicted_and_spilled_as_files_are(memory: Path, tmp_path: Path) -> None:
    with Store(memory / "evict", 8 * MIB, Policy.EVICT) as store:
        for name in "abc":
            store.commit(commit_of(name, [handed(store, large(3))], key=name))
        assert [version.name for version in store.versions()] == ["b", "c"]
    with leaving_nothing():
        with Store(memory / "spill", 8 * MIB, Policy.SPILL, tmp_path / "disk") as store:
            first, *_ = (store.commit(commit_of(name, [handed(store, large(3))], key=name)) for name in "abc")
            assert [path.name for path in (tmp_path / "disk" / "segments").iterdir()] == [first.id]
            assert store.usage().total <= 8 * MIB
            assert pa.ipc.open_stream(store.segments(first)[0].region.memory).read_all() == large(3)
        with Store(memory / "spill", 8 * MIB, Policy.SPILL, tmp_path / "disk") as store:
            assert store.versions() == [first]  # the spilled copy on disk has a file name


def test_memfds_are_appended_where_they_lie_and_copied_where_they_meet_files(memory: Path) -> None:
    with leaving_nothing(), Store(memory / "store") as store:
        for key, numbers in ("1", (1, 2)), ("2", (3,)):
            both = store.commit(commit_of("d", [handed(store, table(*numbers))], mode="append", key=key))
        assert [segment.backing for segment in store.segments(both)] == [Backing.SEALED] * 2
        store.remove(store.versions()[0])
        assert [segment.rows for segment in store.segments(both)] == [2, 1]
        with store.writer("file", SCHEMA) as writer:
            writer.write_table(table(4))
        mixed = store.commit(commit_of("d", ["file"], mode="append", key="3"))
        assert [segment.backing for segment in store.segments(mixed)] == [Backing.FILE] * 3
        assert [segment.rows for segment in store.segments(mixed)] == [2, 1, 1]
    with Store(memory / "store") as store:
        assert store.versions() == [mixed]


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_making_room_for_a_copy_of_a_memfd_does_not_close_it(
    memory: Path, tmp_path: Path, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernel leases, nothing tells that the memfd is in use."""
    control = fcntl.fcntl

    def refuse_leases(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse_leases)
    disk = tmp_path / "disk" if policy is Policy.SPILL else None
    with Store(memory / "store", 5 * MIB // 2, policy, disk) as store:
        first = store.commit(commit_of("d", [handed(store, large(1))], key="1"))
        with store.writer("file", SCHEMA) as writer:
            writer.write_table(large(1))
        append = commit_of("d", ["file"], mode="append", key="2")
        if policy is Policy.SPILL:
            appended = store.commit(append)
            stored = [pa.ipc.open_stream(segment.region.memory).read_all() for segment in store.segments(appended)]
            assert stored == [large(1)] * 2
        else:
            with pytest.raises(StoreFull):
                store.commit(append)
            assert store.versions() == [first]


def test_an_ipc_file_is_copied_to_its_last_byte(memory: Path, tmp_path: Path) -> None:
    """It ends with its footer. The copy of a memfd, or of a file on disk, has room in whole pages."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(table(1, 2))
    content = sink.getvalue().to_pybytes()
    with Store(memory / "store", 4 * MIB, Policy.SPILL, tmp_path / "disk") as store, memfd(content) as descriptor:
        handed_over = store.hand_over(descriptor)
        for number, (place, names) in enumerate(((store.directory, [handed_over, "0"]), (tmp_path / "disk", ["1"]))):
            with store.writer(f"{number}", SCHEMA) as segment:
                segment.write_table(table(3))
            version = store.commit(commit_of("d", names, mode="append", key=f"{number}"))
            assert [segment.rows for segment in store.segments(version)] == [2, 1, 1][: number + 2]
            assert (place / "segments" / version.id / "0000.arrows").read_bytes() == content
            store.ensure_room("other", 4 * MIB)
            assert store.usage().spilled > 0


def test_what_is_handed_over_and_never_committed_is_forgotten_in_the_end(memory: Path) -> None:
    with leaving_nothing():
        for staging_timeout, left in (60.0, 4096), (-1.0, 0):
            with Store(memory / "store", staging_timeout=staging_timeout) as store:
                handed(store, table(1))
                store.sweep()
                assert store.usage().total == left


# A node

PRODUCER = """
import fcntl, os, sys, pyarrow as pa, dissociated as dis
descriptor = os.memfd_create("mine", os.MFD_ALLOW_SEALING)
table = pa.table({"n": pa.array(range(1000), pa.int64())})
with os.fdopen(os.dup(descriptor), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
    writer.write_table(table)
fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
with dis.connect(sys.argv[1]) as client:
    segment = client.hand_over(descriptor)
    if sys.argv[2] == "commit":
        client.commit(dis.Commit("d", [segment], table.schema))
    print("reached", flush=True)
    sys.stdin.readline()
"""


def held(node: Process) -> int:
    """Return how many descriptors of handed-over memfds a node has."""
    return sum("memfd:mine" in target for target in descriptors(node.pid).values())


def test_memory_outlives_the_process_that_handed_it_over_but_not_the_node(memory: Path, start: Start) -> None:
    store = memory / "store"
    node = start("node", "--store", store)
    put(node.uri, "e", table(7))
    kill(spawn(PRODUCER, node.uri, "commit"))
    with dis.connect(node.uri) as client:
        arrived = client.read("d", transport="shm").read_all()
        assert {path for _, path in origins(arrived.to_batches())} == {"/memfd:mine (deleted)"}  # it was not copied
        assert len(segments(store)) == 1  # the segment of e
        for transport in ("tcp", "grpc"):
            assert read(node.uri, "d", transport) == [*range(1000)]
        with flight.FlightClient(node.uri) as plain:
            info = plain.get_flight_info(flight.FlightDescriptor.for_path("d"))
            assert plain.do_get(info.endpoints[0].ticket).read_all() == arrived
        node.kill()
    assert arrived["n"].to_pylist() == [*range(1000)]
    again = start("node", "--store", store)
    assert read(again.uri, "e") == [7]
    with pytest.raises(DatasetNotFound):
        read(again.uri, "d")


def test_what_was_handed_over_to_a_node_goes_when_it_is_dropped(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store", "--limit", "16MiB")
    kill(spawn(PRODUCER, node.uri, "stage"))  # killed before the commit, which may also come from another process
    assert held(node) == 1
    kill(spawn(PRODUCER, node.uri, "commit"))
    with dis.connect(node.uri) as client:
        (there,) = client.status().datasets
        assert (there.name, there.rows) == ("d", 1000)
        client.drop("d")
        wait_until(lambda: held(node) == 1, "only what is staged is left")
        told = client.status().store
        assert told is not None
        assert (told.held, told.limit) == (12_288, 16 * MIB)  # 1000 numbers and the metadata, in pages of 4096 bytes
    assert staged(memory / "store") == []


def test_a_node_is_in_use_while_memory_waits_for_its_commit(memory: Path) -> None:
    with Node(Store(memory / "store"), []) as node, dis.connect(node.uri) as client:
        idle = [node.idle]
        with memfd(table(1)) as descriptor:
            segment = client.hand_over(descriptor)
        idle.append(node.idle)
        client.commit(dis.Commit("d", [segment], SCHEMA))
        idle.append(node.idle)
    assert idle == [True, False, True]


def test_a_node_of_a_catalog_takes_memory_too(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    arguments = ("node", "--store", memory / "a", "--catalog", catalog.uri, "--heartbeat", "0.5")
    node = start(*arguments)
    kill(spawn(PRODUCER, catalog.uri, "commit"))
    put(catalog.uri, "e", table(7))  # makes the node send another report
    with dis.connect(catalog.uri) as client:
        seen = client.nodes()[0]["seen"]
        wait_until(lambda: client.nodes()[0]["seen"] > seen, "the node was heard")
        assert read(catalog.uri, "d", "shm") == [*range(1000)]
        node.kill()
        start(*arguments)
        wait_until(lambda: [info.name for info in client.list()] == ["e"], "the catalog knows that it is gone")


def test_handing_over_what_a_node_refuses_says_why(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store", "--limit", "1MiB")
    with dis.connect(node.uri) as client:
        for data, seals, sentence in (
            (table(1), 0, "can still be modified"),
            (b"garbage", SEALS, "the memory that was handed over: "),
            (large(2), SEALS, "can never fit"),
        ):
            with memfd(data, seals) as descriptor, pytest.raises(StoreError, match=sentence):
                client.hand_over(descriptor)
        with memfd(table(1, 2)) as descriptor:
            client.commit(commit_of("d", [client.hand_over(descriptor)], SCHEMA))
        assert read(node.uri, "d") == [1, 2]


def test_silence_or_nonsense_at_the_socket_harms_no_other_client(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store")
    with dis.connect(node.uri) as client:
        path = client.stage().handover
    assert os.stat(path).st_mode & 0o777 == 0o600

    def say(data: bytes, *descriptors: int) -> bytes:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(PATIENCE)
            connection.connect(path)
            socket.send_fds(connection, [data], descriptors)
            return connection.recv(4096)

    with memfd(table(1)) as descriptor:
        assert b"no descriptor arrived" in say(b"\0")
        assert b"no descriptor arrived" in say(bytes(1 << 16))
        assert b'"segment"' in say(b"\0", descriptor, descriptor)  # the kernel drops all descriptors but the first
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
            silent.connect(path)
            hand_over(path, descriptor, PATIENCE)  # succeeds after a moment
    assert held(node) == 1  # staged twice


def test_a_store_whose_path_is_too_long_for_sockets_takes_memory_too(tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20)
    with Node(Store(deep / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        path = client.stage().handover
        assert not path.startswith(str(tmp_path))
        with memfd(table(1, 2)) as descriptor:
            client.commit(commit_of("d", [client.hand_over(descriptor)], SCHEMA))
        assert read(node.uri, "d", "shm") == [1, 2]
    assert not os.path.exists(path)


def test_a_server_publishes_memory_of_its_own_process(serve: Serve) -> None:
    server = serve("shm:")
    with memfd(table(1, 2)) as descriptor:
        server.publish("d", f"/dev/fd/{descriptor}")
    arrived = dis.open_stream(server.locations("d")[0], server.ticket("d")).read_all()
    assert {path for _, path in origins(arrived.to_batches())} == {"/memfd:mine (deleted)"}
    assert arrived == table(1, 2)


def test_a_server_without_a_store_takes_no_memory_of_others() -> None:
    with (
        dis.Server(["inproc:"]) as server,
        dis.connect(server.catalog_uri) as client,
        memfd(table(1)) as descriptor,
        pytest.raises(CatalogError, match="no node on this host"),
    ):
        client.hand_over(descriptor)


def test_a_listener_does_not_wait_for_long_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full store asks its catalog, which may not answer for a minute."""
    monkeypatch.setattr("dissociated.store.handover.STOP_TIMEOUT", 0.01)
    is_waiting, has_answered = threading.Event(), threading.Event()

    def take(descriptor: int) -> str:
        is_waiting.set()
        assert has_answered.wait(PATIENCE)
        return "name"

    path = tmp_path / "memfd.sock"
    with leaving_nothing(), memfd(table(1)) as descriptor, ThreadPoolExecutor() as pool:
        listener = HandoverListener(path, take)
        taken = pool.submit(hand_over, str(path), descriptor, PATIENCE)
        assert is_waiting.wait(PATIENCE)
        pool.submit(listener.close).result(PATIENCE / 2)
        assert not path.exists()
        has_answered.set()
        assert taken.result(PATIENCE) == "name"


def test_nothing_is_taken_from_a_writer_that_has_given_up(tmp_path: Path) -> None:
    """A full store would evict versions for it, and would keep the memory."""
    is_waiting, has_answered = threading.Event(), threading.Event()
    inodes = []

    def take(descriptor: int) -> str:
        inodes.append(os.fstat(descriptor).st_ino)
        is_waiting.set()
        assert has_answered.wait(PATIENCE)
        return "name"

    path = str(tmp_path / "memfd.sock")
    with (
        leaving_nothing(),
        memfd(table(1)) as first,
        memfd(table(2)) as second,
        memfd(table(3)) as third,
        ThreadPoolExecutor() as pool,
        closing(HandoverListener(Path(path), take)),
    ):
        taken = pool.submit(hand_over, path, first, PATIENCE)
        assert is_waiting.wait(PATIENCE)
        with pytest.raises(DeadlineExceeded):
            hand_over(path, second, 0.01)
        has_answered.set()
        assert taken.result(PATIENCE) == hand_over(path, third, PATIENCE) == "name"
        assert inodes == [os.fstat(first).st_ino, os.fstat(third).st_ino]


def test_a_node_that_is_gone_is_told(tmp_path: Path) -> None:
    with memfd(table(1)) as descriptor, pytest.raises(TransportError, match="No such file"):
        hand_over(str(tmp_path / "memfd.sock"), descriptor, PATIENCE)


AS_NOBODY = """
import os, socket, sys
os.setuid(65534)
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
print(connection.recv(4096).decode())
"""


@pytest.mark.needs("root")
def test_another_user_hands_nothing_over(memory: Path, start: Start) -> None:
    node = start("node", "--store", memory / "store")
    with dis.connect(node.uri) as client:
        path = Path(client.stage().handover)

    assert "PermissionError" in run_script(AS_NOBODY, path).stderr
    for closed in (path, *list(path.parents)[:3]):  # even if every user can reach the socket
        closed.chmod(0o777)
    assert run_script(AS_NOBODY, path).stdout == '{"error": "this node accepts no memory from user 65534"}\n'


OF_ROOT = """
import fcntl, os, sys
import pyarrow as pa
from dissociated.control.commit import Commit, StagedSegment
from dissociated.store.store import Store

descriptor = os.memfd_create("of root", os.MFD_ALLOW_SEALING)
with os.fdopen(os.dup(descriptor), "wb") as file, pa.ipc.new_stream(file, pa.schema([("n", pa.int64())])):
    pass
fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
os.chown(sys.argv[1], 65534, -1)
os.seteuid(65534)
with Store(sys.argv[1]) as store:
    version = store.commit(Commit("d", [StagedSegment(store.hand_over(descriptor))], key="k"))
    assert store.usage().total > 0
    store.remove(version)
    store.sweep()
    assert store.usage().total == 0
"""


@pytest.mark.needs("root")
@pytest.mark.usefixtures("forks")
def test_memory_of_root_is_freed_by_the_node_of_another_user(memory: Path) -> None:
    with Fork("-c", OF_ROOT, str(memory), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        printed, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, printed) == (0, "")


@pytest.mark.needs("root")
@pytest.mark.usefixtures("forks")
def test_memory_is_not_handed_over_to_another_user() -> None:
    listening = """
    import os, socket, sys
    os.setuid(65534)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(sys.argv[1])
    listener.listen()
    print("reached", flush=True)
    connection, _ = listener.accept()
    print(socket.recv_fds(connection, 1, 1))
    """
    with tempfile.TemporaryDirectory() as directory:
        place = os.path.join(directory, "s")
        os.chmod(directory, 0o777)
        process = spawn(listening, place)
        with memfd(table(1)) as descriptor, pytest.raises(AccessDenied, match="runs as user 65534"):
            hand_over(place, descriptor, PATIENCE)
        printed, _ = process.communicate(timeout=PATIENCE)
    assert printed.startswith("(b'', [], ")

"""Processes that are forked or spawned from a user of this library: they do not touch resources of the parent."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import textwrap

import pyarrow as pa
import pytest

import dissociated as dis
from support import workers
from support.helpers import PATIENCE
from support.processes import Fork

pytestmark = pytest.mark.usefixtures("forks")

#: Datasets whose values give their own positions.
BEGIN = """
    import gc, os, signal, sys, warnings
    import pyarrow as pa
    import dissociated as dis

    warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
    ROWS, BATCHES = 4096, 6

    def batch(number):
        return pa.record_batch({"n": pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())})

    WHOLE = pa.Table.from_batches(map(batch, range(BATCHES)))
"""

FORKS = """
    def right(found, number):
        return found.column("n").to_pylist() == batch(number).column("n").to_pylist()

    def refused(call):
        try:
            call()
        except dis.errors.ForkedError:
            return
        raise AssertionError("the child could use what is its parent's")

    def child(how):
        "Runs in the child, which has everything as the parent has it."
        signal.alarm(20)
        if how == "exec":
            os.execv("/bin/true", ["true"])
        if how == "use":
            refused(lambda: server.publish("other", WHOLE))
            refused(lambda: server.names())
            assert server._repr_html_() == "<div><div><b>Server of the parent process</b></div></div>"
            refused(client.status)
            refused(lambda: client.read("data"))
            refused(lambda: dis.connect(server.catalog_uri).status())
            refused(lambda: dis.Server([]))
            refused(lambda: writer.write_batch(batch(1)))
            for at in ("tcp", "live shm", "live tcp", "pair", "grpc"):
                refused(lambda: next(readers[at]))
            assert all(right(held[at], 0) for at in held)
            assert readers["shm"].read_all() == WHOLE.slice(ROWS)  # all of it is mapped
            assert client.read_endpoint(info, info.endpoints[0], transport="shm").read_all() == WHOLE
            assert client.read_endpoint(info, info.endpoints[0], transport="tcp").read_all() == WHOLE
            client.close()
            server.close()
        if how == "drop":
            readers.clear(), held.clear()
            gc.collect()
        if how == "_exit":
            os._exit(0)
        sys.exit(0)

    def opened(client):
        pair = [server.locations("data", streams=one, bodies="packed")[1] for one in ("metadata", "bodies")]
        return {
            "shm": client.read("data", transport="shm"),
            "tcp": client.read("data", transport="tcp"),
            "grpc": client.read("data", transport="grpc"),
            "live shm": client.read("live", transport="shm"),
            "live tcp": client.read("live", transport="tcp"),
            "pair": dis.open_stream(pair, server.ticket("data")),
        }

    def live():
        return pa.RecordBatchReader.from_batches(WHOLE.schema, map(batch, range(BATCHES)))

    with dis.Server(["shm:", "tcp://127.0.0.1:0"], live_limit=1 << 16, metrics="127.0.0.1:0") as server:
        server.publish("data", WHOLE)
        server.publish("live", live)
        for how in ["drop", "exit", "use", "_exit", "exec", "drop", "exit"]:
            with dis.connect(server.catalog_uri) as client, server.writer("written", WHOLE.schema) as writer:
                info = client.describe("data")
                readers = opened(client)
                held = {at: next(reader) for at, reader in readers.items()}
                writer.write_batch(batch(0))
                pid = os.fork()
                if not pid:
                    child(how)
                assert os.waitpid(pid, 0)[1] == 0, how
                assert all(right(held[at], 0) for at in held), how
                for at, reader in readers.items():
                    assert reader.read_all() == WHOLE.slice(ROWS), (how, at)
                del readers, reader, held
                writer.write_batch(batch(1))
            with dis.connect(server.catalog_uri) as client:
                for at in ("shm", "tcp", "grpc"):
                    assert client.read("data", transport=at).read_all() == WHOLE, (how, at)
                assert client.read("written").read_all() == WHOLE.slice(0, 2 * ROWS), how
"""


def run(*parts: str) -> None:
    script = "".join(map(textwrap.dedent, parts))
    with Fork("-c", script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        printed, _ = process.communicate(timeout=3 * PATIENCE)
    assert (process.returncode, printed) == (0, "")


def test_a_child_takes_nothing_from_its_parent_however_it_ends() -> None:
    run(BEGIN, FORKS)


WAITING = """
    import threading

    def child():
        signal.alarm(20)
        try:
            next(reader)
        except dis.errors.ForkedError:
            os._exit(0)

    def source():
        def batches():
            yield batch(0)
            forked.wait()
            yield batch(1)

        return pa.RecordBatchReader.from_batches(WHOLE.schema, batches())

    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("live", source)
        for at in ("shm", "tcp"):
            forked = threading.Event()
            reader = client.read("live", transport=at)
            first = next(reader)
            pid = os.fork()
            if not pid:
                child()
                os._exit(1)
            forked.set()
            assert os.waitpid(pid, 0)[1] == 0, at
            assert reader.read_all() == WHOLE.slice(ROWS, ROWS), at
"""


def test_a_child_does_not_wait_at_the_connection_of_its_parent() -> None:
    run(BEGIN, WAITING)


NODE = """
    import tempfile
    from pathlib import Path
    from dissociated.node.node import Node
    from dissociated.store.store import Store

    def child():
        signal.alarm(20)
        stolen = dis.Commit("stolen", key="k")
        for call in (store.versions, store.sweep, lambda: store.commit(stolen), lambda: node.drain(0), dis.connect):
            try:
                call()
            except dis.errors.ForkedError:
                continue
            raise AssertionError("the child could use what is its parent's")
        node.close()
        store.close()
        os._exit(0)

    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory) / "store")
        os.environ["DISSOCIATED_STORE"] = str(store.directory)
        with Node(store, ["tcp://127.0.0.1:0"]) as node, dis.connect(node.uri) as client:
            client.put("data", WHOLE)
            pid = os.fork()
            if not pid:
                child()
            assert os.waitpid(pid, 0)[1] == 0
            client.put("more", WHOLE)
            assert client.read("data").read_all() == client.read("more").read_all() == WHOLE
"""


def test_a_child_neither_changes_nor_closes_the_node_and_the_store_of_its_parent() -> None:
    run(BEGIN, NODE)


STARTING = """
    import tempfile, threading, time
    from pathlib import Path
    from dissociated.node.launch import ensure

    def attempt(start):
        try:
            start()
        except dis.errors.StoreError as error:
            return "no node could be started" in str(error)

    with tempfile.TemporaryDirectory() as directory:
        os.environ["DISSOCIATED_STORE"] = f"{directory}/store"
        pipe = Path(directory, "pipe")
        os.mkfifo(pipe)
        program = Path(directory, "node")
        program.write_text(f"#!/bin/sh\\n[ ! -p {pipe} ] || cat {pipe}\\n")
        program.chmod(0o700)
        sys.executable = str(program)
        results = []
        starter = threading.Thread(target=lambda: results.append(attempt(dis.connect)))
        starter.start()
        starting = pipe.open("wb")  # waits for the process of the node
        pipe.unlink()
        while "node" not in [thread.name for thread in threading.enumerate()]:
            time.sleep(0.01)  # a child would keep the pipe open by which the process of the node tells that it is ready
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(20)
            starting.close()
            os.read(read, 1)
            os._exit(not attempt(dis.connect))
        starting.close()
        starter.join()
        assert results == [True]
        assert attempt(lambda: ensure(timeout=0.0))  # the lock is free, although the child has it open
        os.write(write, b"x")
        assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_child_inherits_no_lock_of_a_thread_that_starts_a_node() -> None:
    run(BEGIN, STARTING)


def items(method: str, rows: workers.Rows) -> list[int]:
    context = multiprocessing.get_context(method)
    with context.Pool(2, workers.begin, (rows,)) as pool:
        return pool.map_async(workers.item, range(len(rows)), 1).get(PATIENCE)


CONNECTS = """
    import os, signal, threading, warnings
    from dissociated.transport.registry import transport
    from dissociated.uri import Uri

    warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
    inproc = transport("inproc")
    connecting = threading.Thread(target=lambda: inproc.connect(listener.uri, 5))
    binding = threading.Event()

    def profile(frame, event, argument):
        if frame.f_code.co_name == "bind_to_process":
            binding.set()

    def connect():
        threading.setprofile(profile)
        connecting.start()
        binding.wait()

    os.register_at_fork(before=connect)  # called when the fork has the lock of the first ProcessBound
    listener = inproc.listen(Uri.parse("inproc:"))
    signal.alarm(5)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    connecting.join()
    os._exit(0)
"""


def test_a_fork_does_not_wait_for_a_thread_that_connects() -> None:
    run(CONNECTS)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_of_a_loader_read_by_themselves() -> None:
    table = pa.table({"n": range(8 * workers.SIZE)})
    expected = [sum(range(n * workers.SIZE, (n + 1) * workers.SIZE)) for n in range(8)]
    with dis.Server() as server:
        server.publish("data", table)
        with dis.connect(server.catalog_uri) as client:
            rows = workers.Rows(client, "data")
            for method in ("spawn", "forkserver"):
                assert items(method, rows) == expected
            with pytest.raises(dis.errors.ForkedError, match="spawn or forkserver"):
                items("fork", rows)
            assert items("fork", workers.KnownRows(client, "data")) == expected
            assert client.read("data").read_all() == table


def test_a_client_is_pickled_with_what_it_was_made_of() -> None:
    with dis.Server(authorize=["a-token"]) as server:
        server.publish("data", pa.table({"n": [1]}))
        with dis.connect(server.catalog_uri, token="a-token", timeout=7, trusted_users=["root"]) as client:
            assert "a-token" not in repr(client)
            copied = pickle.loads(pickle.dumps(client))
        with copied:
            assert copied.read("data", transport="shm").read_all().to_pydict() == {"n": [1]}
        with pytest.raises(dis.errors.CatalogError, match="closed"):
            copied.describe("data")


UCX = """
    def child(work):
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            work()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    def refused(call):
        try:
            call()
        except dis.errors.ForkedError as error:
            assert "with spawn or forkserver" in str(error)
            return
        raise AssertionError("the child could use UCX")

    def serve():
        with dis.Server(["ucx:", "tcp://127.0.0.1:0"], catalog=None) as server:
            server.publish("data", WHOLE)
            ucx, tcp = server.locations("data", bodies="packed")
            yield ucx, tcp, server.ticket("data")

    def read():
        for ucx, tcp, ticket in serve():
            assert dis.open_stream(ucx, ticket).read_all() == WHOLE

    dis.Server(["ucx:"], catalog=None).close()
    if not os.path.exists("/sys/class/infiniband"):
        child(read)
    for ucx, tcp, ticket in serve():
        def use():
            refused(lambda: dis.open_stream(ucx, ticket))
            refused(lambda: dis.Server(["ucx:"], catalog=None))
            child(lambda: refused(lambda: dis.open_stream(ucx, ticket)))
            assert dis.open_stream(tcp, ticket).read_all() == WHOLE

        with dis.open_stream(ucx, ticket) as reader:
            held = next(reader)
            child(use)
            assert reader.read_all() == WHOLE.slice(ROWS)
        del reader, held
"""


@pytest.mark.needs("ucx")
def test_a_child_of_a_process_that_uses_ucx_is_told_so_at_once() -> None:
    run(BEGIN, UCX)


def test_a_release_that_fails_leaves_no_other_object_unmarked() -> None:
    run(
        """
        import os
        from dissociated.base.fork import ProcessBound

        class Bound(ProcessBound):
            is_released = False

            def __init__(self, fails):
                self.fails = fails
                self.bind_to_process()

            def after_fork_in_child(self):
                if self.fails:
                    os.close(-1)
                self.is_released = True

        bound = [Bound(number % 10 == 0) for number in range(20)]
        if not (child := os.fork()):
            os._exit(not all(one.is_inherited and one.is_released != one.fails for one in bound))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )

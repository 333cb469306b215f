"""The steps of a batch write, one by one, with real catalogs, nodes and stores."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shlex
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark import TaskContext

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.service import CatalogService
from dissociated.control.commit import Commit
from dissociated.errors import CatalogError, CatalogUnreachable, StoreError
from dissociated.node.launch import running
from dissociated.node.node import Node
from dissociated.spark.catalog_config import CatalogConfig
from dissociated.spark.reader import DatasetReader
from dissociated.spark.request import DatasetRequest
from dissociated.spark.target import WriteTarget
from dissociated.spark.writer import DatasetWriter, Written
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support.certificates import Certificates
from support.helpers import PATIENCE, wait_until
from support.nodes import MIB
from support.processes import HEARTBEAT, Start, free_port

SCHEMA = pa.schema({"id": pa.int64()})

Run = Callable[..., Written]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs one attempt of a task of a write."""

    def attempt(writer: DatasetWriter, *numbers: int, partition: int = 0, attempt: int = 0) -> Written:
        context = SimpleNamespace(partitionId=lambda: partition, taskAttemptId=lambda: attempt)
        monkeypatch.setattr(TaskContext, "get", lambda: context)
        batch = pa.record_batch({"id": pa.array(numbers, pa.int64())})
        return writer.write(iter([batch.slice(0, 0), batch]))

    return attempt


def writing(uri: str, mode: str = "overwrite") -> DatasetWriter:
    return DatasetWriter(WriteTarget(CatalogConfig(uri), Commit("x", mode=mode)), SCHEMA)


def staged(stage: Path) -> list[str]:
    return sorted(os.listdir(stage))


def numbers(uri: str, transport: str | None = None) -> list[int]:
    with dis.connect(uri) as client:
        read: list[int] = client.read("x", transport=transport).read_all()["id"].to_pylist()
    return read


def test_a_task_waits_for_the_catalog_of_a_full_node(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node evicts only what the catalog has recorded, and the catalog restarts while the task writes."""
    batch = pa.record_batch({"id": pa.array(range(6 * MIB // 8), pa.int64())})
    monkeypatch.setattr(TaskContext, "get", lambda: SimpleNamespace(partitionId=lambda: 0, taskAttemptId=lambda: 0))

    def start(uri: str) -> CatalogService:
        catalog = CatalogService(uri, database=Database(str(memory / "catalog.db")))
        running.callback(catalog.close)
        return catalog

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch.slice(0, 1)
        catalog.close()
        restart.start()
        yield batch

    with ExitStack() as running:
        catalog = start("grpc://127.0.0.1:0")
        restart = Timer(0.1, start, [catalog.uri])
        store = Store(memory / "store", 10 * MIB, Policy.EVICT)
        node = running.enter_context(Node(store, ["shm:"], catalog=catalog.uri, heartbeat_interval=600.0))
        with dis.connect(node.uri) as client:
            client.put("old", pa.Table.from_batches([batch]))
        node.service.catalog.reconcile()
        node.service.catalog.reconcile()  # the answer to the second heartbeat says that it is published
        writer = writing(catalog.uri)
        written = writer.write(batches())
        restart.join()
        writer.commit([written])
        assert numbers(catalog.uri) == [0, *range(6 * MIB // 8)]


def test_every_partition_writes_a_segment_of_its_own(catalog: str, stage: Path, run: Run) -> None:
    writer = writing(catalog)
    messages = [run(writer, 1, 2, partition=1), run(writer, 3, partition=0)]
    assert staged(stage) == sorted(message.segment or "" for message in messages)
    assert [message.rows for message in messages] == [2, 1]
    assert all(message.nbytes >= 8 * message.rows for message in messages)
    writer.commit(messages)
    assert numbers(catalog) == [3, 1, 2]


def test_a_partition_without_rows_writes_nothing(catalog: str, stage: Path, run: Run) -> None:
    writer = writing(catalog)
    message = run(writer)
    assert (message.segment, message.rows, staged(stage)) == (None, 0, [])
    writer.commit([message])
    assert numbers(catalog) == []


def test_attempts_that_lost_are_swept_away_at_commit(catalog: str, stage: Path, run: Run) -> None:
    writer = writing(catalog)
    _, winner = (run(writer, 7, attempt=attempt) for attempt in (1, 2))
    assert len(staged(stage)) == 2
    writer.commit([winner])
    assert staged(stage) == []
    assert numbers(catalog) == [7]


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_an_attempt_that_ends_after_its_job_leaves_nothing(catalog: str, stage: Path, run: Run, end: str) -> None:
    writer = writing(catalog)
    winner = run(writer, 7, attempt=1)
    getattr(writer, end)([winner])
    run(writer, 8, attempt=2)
    wait_until(lambda: staged(stage) == [], "the loser's segment is gone")


def test_a_loser_that_still_writes_is_told_and_leaves_nothing(memory: Path, run: Run) -> None:
    with Node(Store(memory / "store"), ["shm:"]) as node:
        writer = writing(node.uri)

        def batches() -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"id": [1]})
            assert len(staged(node.store.staging)) == 1
            writer.abort([])
            assert staged(node.store.staging) == []
            yield pa.record_batch({"id": pa.array(range(100_000), pa.int64())})

        run(writer)  # so that there is a task
        with pytest.raises(CatalogError, match="No such file"):
            writer.write(batches())
        assert staged(node.store.staging) == []


def test_an_abort_takes_the_files_of_killed_tasks_of_this_job_alone(catalog: str, stage: Path) -> None:
    writer, other = writing(catalog), writing(catalog)
    for key in (writer.key, other.key):
        (stage / f"{key}-000000.0.arrows").write_bytes(b"half of a segm")
    writer.abort([None])
    assert staged(stage) == [f"{other.key}-000000.0.arrows"]


def test_a_repeated_commit_changes_nothing(catalog: str, run: Run) -> None:
    writer = writing(catalog, "append")
    messages = [run(writer, 1, 2)]
    writer.commit(messages)
    writer.commit(messages)
    assert numbers(catalog) == [1, 2]


def test_a_commit_whose_answer_is_lost_has_succeeded(memory: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = LocalCatalog.commit

    def lost(catalog: LocalCatalog, requested: Commit) -> None:
        is_repeated = catalog.committed(requested.key)
        commit(catalog, requested)
        if not is_repeated:
            raise CatalogError("nobody hears what this says")

    monkeypatch.setattr(LocalCatalog, "commit", lost)
    with Node(Store(memory / "store"), ["shm:"]) as node:
        for count in (1, 2):
            writer = writing(node.uri, "append")
            writer.commit([run(writer, 7)])
            assert numbers(node.uri) == [7] * count


def test_an_abort_after_the_commit_takes_nothing_away(catalog: str, run: Run) -> None:
    writer = writing(catalog)
    writer.commit([run(writer, 1, 2)])
    writer.abort([])
    assert numbers(catalog) == [1, 2]


def test_a_commit_after_the_abort_is_refused(catalog: str, run: Run) -> None:
    writer = writing(catalog)
    message = run(writer)
    writer.abort([])
    with pytest.raises(CatalogError, match=r"the commit of 'x' was aborted: write its segments again"):
        writer.commit([message])
    with dis.connect(catalog) as client:
        assert client.list() == []


def test_a_catalog_that_is_not_there_is_told_before_any_task() -> None:
    with pytest.raises(CatalogUnreachable, match="no catalog answers at"):
        writing(f"grpc://127.0.0.1:{free_port()}")


# Nodes


@pytest.fixture
def outer(tmp_path: Path, start: Start) -> str:
    """Return the URI of a catalog that has no node yet."""
    return start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0").uri


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch, memory: Path, forked_nodes: None) -> Iterator[Callable[[str], Path]]:
    """Yield a function that moves to the host of that name, and returns the store of the node that is started there."""
    stores = []

    def be(host: str) -> Path:
        stores.append(memory / host)
        monkeypatch.setenv("DISSOCIATED_HOST", host)
        monkeypatch.setenv("DISSOCIATED_NODE", f"--store {memory / host} --heartbeat 0.5")
        return memory / host

    yield be
    for store in {*stores}:
        address = running(store)
        if address is not None:
            os.kill(address.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(address.pid, 0)


OnHost = Callable[[str], Path]


def kill_node(store: Path) -> None:
    address = running(store)
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)


def test_a_task_writes_into_the_node_of_its_own_host_and_starts_it(outer: str, run: Run, on_host: OnHost) -> None:
    writer = writing(outer)
    here = on_host("one")
    messages = [run(writer, 1, 2, partition=0), run(writer, 3, partition=1)]
    there = on_host("two")
    messages.append(run(writer, 4, partition=2))
    assert [len(staged(store / "staging")) for store in (here, there)] == [2, 1]
    assert len({message.node for message in messages}) == 2
    writer.commit(messages)
    with dis.connect(outer) as client:
        near, far = (client.describe("x").endpoints[part].locations[0] for part in (1, 0))
        assert (near.partition(":")[0], far.partition(":")[0]) == ("shm", "tcp")
    assert numbers(outer) == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_no_rows_at_all_are_on_the_node_of_the_driver(outer: str, run: Run, on_host: OnHost, mode: str) -> None:
    on_host("one")
    for _ in range(2):
        writer = writing(outer, mode)
        writer.commit([run(writer)])
    assert numbers(outer) == []
    more = writing(outer, "append")
    more.commit([run(more, 1)])
    assert numbers(outer) == [1]


def test_losers_on_every_host_go_when_their_job_is_over(outer: str, run: Run, on_host: OnHost) -> None:
    done, failed = writing(outer), writing(outer)
    stores = [on_host("one")]
    lost = [run(writer, 1, attempt=1) for writer in (done, failed)]
    stores.append(on_host("two"))
    won = run(done, 1, attempt=2)
    assert [len(staged(store / "staging")) for store in stores] == [2, 1]
    done.commit([won])
    failed.abort(lost)
    run(failed, 5, attempt=3)  # this writer does not know of the abort
    wait_until(lambda: not any(staged(store / "staging") for store in stores), "the nodes have heard")
    assert numbers(outer) == [1]


def test_a_node_that_runs_already_is_taken(outer: str, run: Run, on_host: OnHost, memory: Path, start: Start) -> None:
    unused = on_host("one")
    start("node", "--store", memory / "service", "--catalog", outer)
    message = run(writing(outer), 1)
    assert staged(memory / "service" / "staging") == [message.segment]
    assert not unused.exists()


def test_a_node_that_was_killed_is_started_again_with_what_it_had(outer: str, run: Run, on_host: OnHost) -> None:
    store = on_host("one")
    writer = writing(outer)
    writer.commit([run(writer, 1, 2)])
    kill_node(store)
    more = writing(outer, "append")
    more.commit([run(more, 3)])
    assert numbers(outer, "shm") == [1, 2, 3]
    request = DatasetRequest.parse({"catalog": outer, "path": "x"})
    reader = DatasetReader(request, request.schema())
    kill_node(store)
    batches = [batch for partition in reader.partitions() for batch in reader.read(partition)]
    assert pa.Table.from_batches(batches)["id"].to_pylist() == [1, 2, 3]


def test_a_node_that_cannot_be_started_is_told_by_the_task(
    outer: str, run: Run, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {memory / 'store'} --policy spill")
    with pytest.raises(StoreError, match=r"no node could be started for .*spill and policy disagree"):
        run(writing(outer), 1)


def test_what_is_prepared_for_a_commit_that_is_aborted_is_released(outer: str, run: Run, on_host: OnHost) -> None:
    writer = writing(outer)
    store = on_host("one")
    messages = [run(writer, 1)]
    with pytest.raises(CatalogError, match="no node 'no such node'"):
        writer.commit([*messages, Written(1, "no such node", "nothing", 1, 1)])
    assert not [*store.glob("segments/*/*.arrows")]  # no node has prepared anything
    on_host("two")
    lost = dataclasses.replace(run(writer, 2, partition=1), segment="nothing")
    with pytest.raises(CatalogError, match="nothing"):
        writer.commit([*messages, lost])
    assert len([*store.glob("segments/*/*.arrows")]) == 1
    writer.abort([*messages, lost])
    wait_until(lambda: not any(store.glob("segments/*")), "the node has released its part")


def test_a_catalog_that_is_killed_is_waited_for_by_tasks_the_abort_and_the_commit(
    memory: Path, run: Run, on_host: OnHost, start: Start
) -> None:
    arguments = ("catalog", "--db", memory / "db", "--listen", f"grpc://127.0.0.1:{free_port()}")
    catalog = start(*arguments)
    start("node", "--store", on_host("one"), "--catalog", catalog.uri, "--heartbeat", HEARTBEAT)
    writer, failed = writing(catalog.uri), writing(catalog.uri)
    message = run(writer, 1, 2)
    for doing in (
        lambda: run(failed, 3),
        lambda: failed.abort([]),
        lambda: writer.commit([message]),
    ):
        catalog.kill()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(doing)
            catalog = start(*arguments)
            waiting.result(PATIENCE)
    with dis.connect(catalog.uri) as client:
        wait_until(lambda: client.describe("x").endpoints[0].locations, "the node is heard again")
    assert numbers(catalog.uri) == [1, 2]


def test_segments_of_a_driver_that_died_are_forgotten(
    outer: str, run: Run, on_host: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = on_host("one")
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {store} --heartbeat 0.1 --forget 0.5")
    writer = writing(outer)
    message = run(writer, 1)
    wait_until(lambda: staged(store / "staging") == [], "it is forgotten")
    with pytest.raises(CatalogError, match=r"is not committed within 0\.5 seconds .*--forget"):
        writer.commit([message])
    with dis.connect(outer) as client:
        assert client.list() == []


def test_a_guarded_catalog_has_guarded_nodes_which_tasks_start(
    tmp_path: Path,
    memory: Path,
    run: Run,
    on_host: OnHost,
    start: Start,
    certified: Certificates,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret, token, tokens = tmp_path / "secret", tmp_path / "token", tmp_path / "tokens"
    secret.write_text(secrets.token_hex(32))
    token.write_text("sesame\n")
    tokens.write_text("ali sesame write\n")
    for file in (secret, token, tokens):
        file.chmod(0o600)
    protection = [
        *("--tls-cert", certified.options["tls_cert"], "--tls-key", certified.options["tls_key"]),
        *("--tls-roots", certified.roots, "--token-file", str(tokens), "--secret-file", str(secret)),
        *("--ticket-lifetime", "3600"),
    ]
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc+tls://127.0.0.1:0", *protection)
    place = on_host("one")
    guarded = CatalogConfig(catalog.uri, str(token), certified.roots)
    writer = DatasetWriter(WriteTarget(guarded, Commit("x")), SCHEMA)
    with pytest.raises(StoreError, match=r"no node could be started for .* is not trusted"):
        run(writer, 1)
    where = ["--listen", "shm:", "--listen", "tls://127.0.0.1:0", "--flight", "grpc+tls://127.0.0.1:0"]
    monkeypatch.setenv("DISSOCIATED_NODE", shlex.join(["--store", str(place), *where, *protection]))
    writer.commit([run(writer, 1, 2)])
    with dis.connect(catalog.uri, token="sesame", tls_roots=certified.roots) as client:
        assert client.read("x", transport="tls").read_all()["id"].to_pylist() == [1, 2]

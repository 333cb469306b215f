"""Commits on a node, while at any of their steps another writer makes room, or a time to live ends.

The other thread's work runs in the committing thread at exactly that step: each step locks the store for itself.
"""

from __future__ import annotations

import errno
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.store_backend import StoreBackend
from dissociated.control.commit import StagedSegment
from dissociated.control.version import Version
from dissociated.errors import CatalogError, DatasetNotFound, StoreFull
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support.helpers import PATIENCE
from support.injection import Fault, child_environment, clock_step
from support.nodes import MIB, SCHEMA, put, read, table
from support.processes import Fork

LARGE = table(*range(3 * MIB // 8))
LIMIT = 4 * MIB  # room for one dataset of this size


def refuse() -> None:
    raise CatalogError("refused")


def before(patch: pytest.MonkeyPatch, owner: type, name: str, act: Callable[[], object]) -> None:
    """Call `act` before the next call of a method."""
    method = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        patch.setattr(owner, name, method)
        act()
        return method(*arguments, **options)

    patch.setattr(owner, name, call)


def test_nothing_is_appended_to_a_version_that_is_evicted_during_the_commit(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node(Store(memory, LIMIT, Policy.EVICT), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("d", LARGE)
        before(monkeypatch, Store, "commit", lambda: node.store.ensure_room("other", 3 * MIB))
        with pytest.raises(CatalogError, match="'d' cannot be appended to: its last version was evicted"):
            client.put("d", table(1), mode="append")
        with pytest.raises(DatasetNotFound):
            client.read("d")
        with pytest.raises(CatalogError, match="version 1 was evicted, or lost"):
            client.put("d", table(1), mode="append")
        client.put("d", table(2))
        assert read(node.uri, "d") == [2]


def test_nothing_is_appended_to_a_version_whose_time_to_live_ends_during_the_commit(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = partial(Database, clock=lambda: time.time())  # reads the time that `clock_step` steps
    monkeypatch.setattr("dissociated.node.node.Database", stepped)
    with Node(Store(memory), ["shm:"], retain=0.0) as node, dis.connect(node.uri) as client:
        put(node.uri, "d", table(1), ttl=60.0)

        def expire() -> None:
            with clock_step(61.0):
                node.service.catalog.reconcile()

        before(monkeypatch, Store, "commit", expire)
        with pytest.raises(CatalogError, match="'d' cannot be appended to: its last version was"):
            client.put("d", table(2), mode="append")
        with pytest.raises(DatasetNotFound):
            client.read("d")


def test_the_current_version_is_not_evicted_in_favour_of_one_whose_publication_fails(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Node(Store(memory, LIMIT), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("d", LARGE)

        def make_room_and_refuse() -> None:
            with pytest.raises(StoreFull):
                node.store.ensure_room("other", 3 * MIB)
            refuse()

        before(monkeypatch, Database, "publish", make_room_and_refuse)
        with pytest.raises(CatalogError, match="refused"):
            client.put("d", table(1))
        assert client.read("d").read_all() == LARGE
        client.put("d", table(2))
        assert client.read("d").read_all() == table(2)
    with Node(Store(memory), ["shm:"]) as node:
        assert read(node.uri, "d") == [2]


def test_a_version_is_not_evicted_before_its_publication(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Node(Store(memory, LIMIT, Policy.EVICT), ["shm:"]) as node, dis.connect(node.uri) as client:
        versions: list[Version] = []

        def make_room() -> None:
            versions.extend(node.store.versions())
            with pytest.raises(StoreFull, match="is not committed yet"):
                node.store.ensure_room("other", 3 * MIB)

        before(monkeypatch, Store, "version", make_room)
        client.put("d", LARGE)
        assert [version.name for version in versions] == ["d"]
        assert client.read("d").read_all() == LARGE


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_a_commit_that_comes_again_overwrites_nothing_that_was_committed_since(
    memory: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Neither its publication nor the removal of its version succeeded at the first attempt."""
    with Node(Store(memory, LIMIT), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("d", table(1))

        def write() -> StagedSegment:
            with node.store.writer("w", SCHEMA) as writer:
                writer.write(table(2).to_batches()[0])
            return StagedSegment("w", node.store.id)

        commit = dis.Commit("d", [write()], SCHEMA, key="k", mode=mode)
        before(monkeypatch, Database, "publish", refuse)
        failing_removal = Fault(str(memory / "segments"), at=1, operations=("rename",), times=1000)
        with failing_removal, pytest.raises(CatalogError, match="refused"):
            client.commit(commit)
        client.put("d", table(3))
        with pytest.raises(CatalogError, match="segment 'w' is not in"):
            client.commit(commit)
        assert client.read("d").read_all() == table(3)
        write()
        client.commit(commit)
        rows = [3, 2] if mode == "append" else [2]
        assert client.read("d").read_all() == table(*rows)
        client.put("d", table(4), mode="append")
        assert client.read("d").read_all() == table(*rows, 4)
        node.store.ensure_room("other", 3 * MIB)
        assert read(node.uri, "d") == [*rows, 4]
    with Node(Store(memory), ["shm:"]) as node:
        assert read(node.uri, "d") == [*rows, 4]


CHILD = """
import os, signal, sys
import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.store_backend import StoreBackend
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.injection import Fault
from support.nodes import table
refuse = StoreBackend.refuse
def refuse_and_end(backend, id):
    refuse(backend, id)
    os.kill(os.getpid(), signal.SIGKILL)
def fail(*arguments):
    raise dis.errors.CatalogError("refused")
with Node(Store(sys.argv[1]), ["shm:"]) as node, dis.connect(node.uri) as client:
    client.put("d", table(1))
    Database.publish, StoreBackend.refuse = fail, refuse_and_end
    Fault(f"{sys.argv[1]}/segments", at=1, operations=("rename",)).arm()  # the first one commits the version
    client.put("d", table(2))
"""


def test_a_version_that_was_refused_is_not_published_by_a_restart(memory: Path, forks: None) -> None:
    """The node is killed when its removal has failed, before it is tried again."""
    with Fork("-c", CHILD, memory, env=child_environment()) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        assert client.read("d").read_all() == table(1)
        client.put("d", table(3))
        assert client.describe("d").version == 3


@pytest.mark.parametrize("policy", [Policy.REFUSE, Policy.SPILL])
def test_a_version_that_was_refused_on_a_full_disk_is_not_published_by_a_restart(
    memory: Path, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    disk = memory / "disk" if policy is Policy.SPILL else None
    full = Fault(str(memory / "store"), error=errno.ENOSPC, operations=("write",), times=1000)

    def fill_and_refuse() -> None:
        faults.enter_context(full)
        refuse()

    with (
        ExitStack() as faults,  # until the node has ended
        Node(Store(memory / "store", None, policy, disk), ["shm:"]) as node,
        dis.connect(node.uri) as client,
    ):
        client.put("d", table(1))
        before(monkeypatch, Database, "publish", fill_and_refuse)
        with pytest.raises(CatalogError, match="refused"):
            client.put("d", table(2))
    with Node(Store(memory / "store", None, policy, disk), ["shm:"]) as node, dis.connect(node.uri) as client:
        assert client.read("d").read_all() == table(1)
        client.put("d", table(3))
        assert client.describe("d").version == 3


def test_a_confirmation_that_is_late_makes_no_part_a_whole_version(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalog reconciles while a version is published, and is slow; rows of another node are appended meanwhile."""
    asked, appended = threading.Event(), threading.Event()
    confirm = StoreBackend.confirm

    def confirm_late(backend: StoreBackend, published: Mapping[str, bool]) -> None:
        if threading.current_thread().name == "late":
            asked.set()
            appended.wait(1)  # in vain if the append waits for this confirmation
        confirm(backend, published)

    with (
        Node(Store(memory / "a"), ["shm:"]) as a,
        Node(Store(memory / "b"), ["shm:"], catalog=a.uri, heartbeat_interval=600.0) as b,
    ):
        late = threading.Thread(target=a.service.catalog.reconcile, name="late")

        def reconcile() -> None:
            late.start()
            assert asked.wait(PATIENCE)

        monkeypatch.setattr(StoreBackend, "confirm", confirm_late)
        before(monkeypatch, Store, "record_published", reconcile)
        put(a.uri, "d", table(1))
        put(b.uri, "d", table(2), mode="append")
        appended.set()
        late.join(PATIENCE)
        assert sorted(read(a.uri, "d")) == [1, 2]
        assert [version.whole for version in a.store.versions()] == [False]

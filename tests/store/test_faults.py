"""Faults of a store's file system, at every call: exactly the acknowledged changes are served, also after a restart.

Nothing half-written is visible, nothing that was dropped comes back, and nothing stays in the staging directory.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import CatalogError, DatasetNotFound, StoreError
from dissociated.store.eviction import Policy
from dissociated.store.store import STAGING_TIMEOUT, Store
from support.helpers import PATIENCE, case, commit_of, files_below, wait_until
from support.injection import Fault, calls, clock_step
from support.processes import Fork

from .steps import SCHEMA, STEPS, State, after, node, served, staged, take, take_all, take_in_store

FOR_GOOD = 1 << 30  # calls: until the process ends
ROWS, LIMIT = 1 << 14, 5 << 16  # rows of 128 kB; bytes with room for two such datasets


def restarted(directory: Path, **options: Any) -> State:
    """Return the datasets that the next node serves.

    Nothing else may remain, except segments that can still be committed, until the node deletes them. No process may
    have anything open any more.
    """
    with node(directory, staging_timeout=-1.0, **options) as again, dis.connect(again.uri) as client:
        found = served(client)
        assert os.listdir(directory / "staging") == []
        for name in found:
            client.drop(name)
        assert os.listdir(directory / "segments") == []
        assert again.store.usage().committed == 0
    wait_until(lambda: not files_below(directory), "all is closed")
    return found


@pytest.mark.parametrize(("error", "times"), [(errno.EIO, 1), (errno.ENOSPC, FOR_GOOD)], ids=["once", "for good"])
def test_a_call_that_fails_changes_nothing_or_is_not_noticed(memory: Path, error: int, times: int) -> None:
    for at in calls(12 if times == 1 else 20):
        directory = memory / str(at)
        with node(directory) as first, dis.connect(first.uri) as client:
            with Fault(str(directory), at, error, times=times) as fault:
                state = take_all(client, fault)
            with case(f"{fault.calls[at : at + 1]}, call {at}"):
                assert served(client) == state
        with case(f"{fault.calls[at : at + 1]}, call {at}, after a restart"):
            assert restarted(directory) == state
        if not fault.came:
            assert at > 80
            return


CHILD = """
import sys
from dissociated.store.store import Store
from store.steps import STEPS, take_in_store
with Store(sys.argv[1]) as store:
    for number, step in enumerate(STEPS):
        take_in_store(store, step)
        print(number, flush=True)
"""


def test_a_process_killed_at_any_call_has_done_what_it_said_and_at_most_one_step_more(
    memory: Path, forks: None
) -> None:
    for at in calls(20):
        directory = memory / str(at)
        fault = Fault(str(directory), at, None)
        environment = fault.environment()
        with Fork("-c", CHILD, directory, stdout=subprocess.PIPE, env=environment) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        if process.returncode == 0:
            assert at > 80
            return
        assert process.returncode == -signal.SIGKILL
        states: list[State] = [{}]
        for step in STEPS:
            states.append(after(states[-1], step))
        done = len(said.split())
        with case(f"call {at}, in {STEPS[done]}"):
            assert restarted(directory) in states[done : done + 2]


@pytest.mark.parametrize("commit_fails", [True, False], ids=["commit", "publication"])
def test_a_rollback_that_is_interrupted_hides_no_earlier_version(memory: Path, commit_fails: bool) -> None:
    """From one call on, all fail, so the files stay as a kill would leave them. The new rows may then be there, too."""
    for at in calls(3):
        directory = memory / str(at)
        with Store(directory) as store:
            take_in_store(store, ("a", "overwrite", [1]))
            append = staged(store, "a", [2], mode="append")
            sync = Fault(str(directory), 5 if commit_fails else FOR_GOOD, operations=("fsync",))
            with sync, Fault(str(directory), at, times=FOR_GOOD) as fault:
                with suppress(StoreError):
                    store.remove(replace(store.commit(append, pending=True), prepared=True))
                store.close()
        assert not sync.came or sync.calls[5] == "fsync segments"
        with (
            case(f"{fault.calls[at : at + 1]}, call {at}"),
            node(directory) as again,
            dis.connect(again.uri) as client,
        ):
            assert served(client) in ({"a": [1]}, {"a": [1, 2]})
        if not fault.came:
            assert at > 20
            return


FULL = [(errno.ENOSPC, ("write",)), (errno.ENOSPC, ("write", "create", "mkdir")), (errno.EIO, ("fsync",))]


@pytest.mark.parametrize("spills", [False, True], ids=["no spill", "spill"])
@pytest.mark.parametrize(("error", "operations"), FULL, ids=["writes", "writes and files", "syncs"])
def test_a_rollback_on_a_full_disk_hides_no_earlier_version(
    memory: Path, error: int, operations: tuple[str, ...], spills: bool
) -> None:
    options: dict[str, Any] = {"policy": Policy.SPILL, "spill": memory / "disk"} if spills else {}
    with Store(memory / "store", **options) as store:
        take_in_store(store, ("a", "overwrite", [1]))
        version = store.commit(staged(store, "a", [2]), pending=True)
        with Fault(str(memory), error=error, operations=operations, times=FOR_GOOD):
            with nullcontext() if error == errno.ENOSPC else pytest.raises(StoreError):
                store.remove(replace(version, prepared=True))
            store.sweep()
            store.close()
    with node(memory / "store", **options) as again, dis.connect(again.uri) as client:
        assert served(client) == {"a": [1]}
        assert len(again.store.versions()) == 1 or error != errno.ENOSPC


def test_a_call_that_fails_on_the_stage_of_a_server_changes_nothing_or_is_not_noticed() -> None:
    for at in calls(4):
        with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
            directory = Path(client.stage().directory)
            with Fault(str(directory), at) as fault, case(f"call {at}"):
                state = take_all(client, fault)
            with case(f"{fault.calls[at : at + 1]}, call {at}"):
                assert served(client) == state
                wait_until(partial(is_empty, directory), "nothing is left in the stage")
        assert not directory.exists()
        if not fault.came:
            assert at > 15
            return


def is_empty(directory: Path) -> bool:
    return not os.listdir(directory)


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_a_call_that_fails_while_room_is_made_loses_nothing_and_brings_nothing_back(
    memory: Path, policy: Policy
) -> None:
    """Each put except the first two has to make room. Then one dataset is dropped."""

    def store(directory: Path, staging_timeout: float = STAGING_TIMEOUT) -> Store:
        disk = directory / "disk" if policy is Policy.SPILL else None
        return Store(directory / "store", LIMIT, policy, disk, staging_timeout)

    def rows(store: Store) -> dict[str, int]:
        return {one.name: sum(segment.rows for segment in store.segments(one)) for one in store.versions()}

    for at in calls(13):
        directory = memory / str(at)
        directory.mkdir()
        with store(directory) as first:
            acknowledged: dict[str, int] = {}
            with Fault(str(directory), at) as fault:
                for number, name in enumerate("abcd"):
                    try:
                        with first.writer(name, SCHEMA) as writer:
                            writer.write(pa.record_batch([pa.array(range(ROWS + number))], SCHEMA))
                        first.commit(commit_of(name, [name], key=name))
                    except StoreError:
                        assert fault.came
                    else:
                        acknowledged[name] = ROWS + number
            with case(f"{fault.calls[at : at + 1]}, call {at}"):
                found = rows(first)
                assert found.items() <= acknowledged.items()
                assert policy is Policy.EVICT or found == acknowledged
                dropped = next(iter(found))
                first.remove(*first.named(dropped))
                del found[dropped]
        with store(directory, -1.0) as again, case(f"{fault.calls[at : at + 1]}, call {at}, after a restart"):
            assert rows(again) == found
            for place in directory.iterdir():
                assert os.listdir(place / "staging") == []
            assert again.usage().total <= LIMIT
        if not fault.came:
            assert at > 70
            return


def test_a_drop_that_cannot_be_made_to_last_is_refused_and_can_be_repeated(memory: Path) -> None:
    for count, operations in ((1, ("rename",)), (2, ("rename",)), (1, ("fsync",))):
        with case((count, operations)):
            with node(memory / "store") as first, dis.connect(first.uri) as client:
                take(client, ("a", "overwrite", [1]))
                with Fault(str(memory), operations=operations, times=count):
                    for _ in range(count):
                        with pytest.raises(CatalogError, match=r"removing 'a' from .*: Input/output error"):
                            client.drop("a")
                        assert served(client) == {"a": [1]}
                    client.drop("a")
                with pytest.raises(DatasetNotFound):
                    client.drop("a")
            assert restarted(memory / "store") == {}


def test_a_removal_that_failed_and_could_not_be_undone_frees_its_bytes_in_the_end(memory: Path) -> None:
    with Store(memory / "store") as store:
        take_in_store(store, ("a", "overwrite", [1]))
        with Fault(str(memory), 1, operations=("rename", "fsync"), times=2) as fault, pytest.raises(StoreError):
            store.remove(*store.versions())
        assert [call.split("/")[0] for call in fault.calls] == ["rename store", "fsync store", "rename store"]
        assert store.usage().committed > 0
        store.remove(*store.versions())
        assert store.usage().committed == 0


@pytest.mark.parametrize("change", ["confirm", "withhold"])
def test_a_changed_manifest_survives_a_loss_of_power(memory: Path, change: str) -> None:
    """Its file and its directory are synced, so the renamed file is there in any case."""
    with Store(memory / "store") as store:
        version = store.commit(staged(store, "a", [1]), prepared=change == "confirm")
        manifest = f"store/segments/{version.id}/manifest.json"
        with Fault(str(memory), FOR_GOOD, operations=("rename", "fsync")) as fault:
            if change == "confirm":
                store.confirm(version, whole=True)
            else:
                store.withhold(version)
        written = [f"fsync {manifest}.draft", f"rename {manifest}.draft", f"fsync {os.path.dirname(manifest)}"]
        assert fault.calls[:3] == written


def test_a_clock_that_steps_back_brings_nothing_old_back(memory: Path) -> None:
    with node(memory / "store") as first, dis.connect(first.uri) as client:
        take(client, ("a", "overwrite", [1]))
        with clock_step(-3600.0):
            take(client, ("a", "overwrite", [2]))
            take(client, ("b", "overwrite", [3]))
            take(client, ("b", "drop", []))
    with clock_step(-7200.0):
        assert restarted(memory / "store") == {"a": [2]}

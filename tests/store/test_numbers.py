"""Version numbers of removed versions: they survive any end of the process or its disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dissociated.control.version import Version
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support.helpers import PATIENCE, commit_of
from support.injection import Fault
from support.nodes import MIB, SCHEMA, staged, table
from support.processes import Fork


def commit(store: Store, name: str, number: int, rows: Sequence[int] = (1,), prepared: bool = False) -> Version:
    with store.writer(f"{name} {number}", SCHEMA) as writer:
        for batch in table(*rows).to_batches():
            writer.write_batch(batch)
    return store.commit(commit_of(name, [f"{name} {number}"], key=f"{name} {number}", number=number), prepared=prepared)


def removed(directory: Path) -> dict[str, tuple[int, bool]]:
    """Return the removed versions that a reopened store reports."""
    with Store(directory) as store:
        return {name: (one.version, one.lost) for name, one in store.removals().items()}


def test_a_number_stays_when_its_version_goes(memory: Path) -> None:
    with Store(memory) as store:
        versions = [commit(store, "d", number) for number in (1, 2)]
        other = commit(store, "other", 5)
        store.remove(versions[0])
        assert store.removals() == {}  # a later version exists
        store.remove(versions[1], other)
    assert removed(memory) == {"d": (2, False), "other": (5, False)}
    with Store(memory) as store:
        commit(store, "d", 3)
    assert removed(memory) == {"other": (5, False)}


def test_what_was_never_published_uses_a_number_and_changes_nothing_else(memory: Path) -> None:
    with Store(memory, limit=3 * MIB, policy=Policy.EVICT) as store:
        commit(store, "d", 1, range(100_000))
        store.ensure_room("new", int(2.5 * MIB))
        assert store.versions() == []
        store.remove(commit(store, "d", 2, prepared=True))
        assert store.removals() == {"d": (1, True, 2)}
    assert removed(memory) == {"d": (1, True)}


def test_a_commit_that_was_refused_uses_a_number_and_hides_no_version(memory: Path, tmp_path: Path) -> None:
    with Store(memory, limit=2 * MIB, policy=Policy.SPILL, spill=tmp_path / "spill") as store:
        kept, spilled = commit(store, "kept", 1), commit(store, "spilled", 1, range(100_000))
        for version in (kept, spilled):
            store.record_published(version)
        store.ensure_room("new", int(1.9 * MIB))
        assert (tmp_path / "spill" / "segments" / spilled.id).exists()
        for name in ("kept", "spilled"):
            store.remove(replace(commit(store, name, 2), prepared=True))
        assert store.removals() == {"kept": (0, False, 2), "spilled": (0, False, 2)}


def test_a_version_that_is_damaged_on_disk_is_lost(memory: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit": 2 * MIB, "policy": Policy.SPILL, "spill": tmp_path / "spill"}
    with Store(memory, **options) as store:
        version = commit(store, "d", 1, range(100_000))
        store.record_published(version)
        store.ensure_room("new", int(1.9 * MIB))
        assert (tmp_path / "spill" / "segments" / version.id).exists()
    (tmp_path / "spill" / "segments" / version.id / "manifest.json").write_bytes(b"")
    with Store(memory, **options) as store:
        assert store.removals()["d"] == (1, True, 1)


def test_a_number_survives_a_kill_during_the_removal(memory: Path) -> None:
    with Store(memory) as store:
        version = commit(store, "d", 2)
    (memory / "segments" / version.id).rename(memory / "staging" / f"{version.id}.gone")
    for _ in range(2):
        assert removed(memory) == {"d": (2, True)}  # the reason of the removal is lost
        assert staged(memory) == []


REMOVING = """
import sys
from dissociated.store.store import Store
with Store(sys.argv[1]) as store:
    store.remove(*store.versions())
"""


def test_a_version_that_was_dropped_is_not_lost_wherever_its_removal_was_killed(memory: Path, forks: None) -> None:
    killed_after = 0
    for at in range(20):
        directory = memory / str(at)
        with Store(directory) as store:
            commit(store, "d", 2)
        environment = Fault(str(directory), at, None, ("unlink",)).environment()
        with Fork("-c", REMOVING, directory, env=environment) as process:
            process.communicate(timeout=PATIENCE)
        if process.returncode == 0:
            break
        with Store(directory) as store:
            if not store.versions():
                killed_after += 1
                assert store.removals() == {"d": (2, False, 2)}, at
    assert killed_after > 2


@pytest.mark.parametrize("lost", [False, True])
def test_a_version_stays_if_its_number_cannot_be_recorded(
    memory: Path, caplog: pytest.LogCaptureFixture, lost: bool
) -> None:
    with Store(memory, limit=MIB, policy=Policy.EVICT) as store:
        version = commit(store, "d", 2, range(100_000))
        (memory / "numbers").mkdir()
        if lost:
            store.ensure_room("new", int(0.9 * MIB))
        else:
            store.remove(version)
        assert store.versions() == []
        assert staged(memory) == [f"{version.id}.gone"]
        (memory / "numbers").rmdir()
        store.sweep()
        assert staged(memory) == []
    assert "removal failed" in caplog.text
    assert removed(memory)["d"] == (2, lost)


def test_a_record_that_was_cut_short_is_left_out_and_written_over(memory: Path) -> None:
    with Store(memory) as store:
        store.remove(commit(store, "d", 2), commit(store, "e", 3))
    content = (memory / "numbers").read_bytes()
    for length in range(len(content) - 1, content.index(b"\n") + 1, -7):
        (memory / "numbers").write_bytes(content[:length])
        with Store(memory) as store:
            assert {name: one.version for name, one in store.removals().items()} in ({"d": 2}, {"d": 2, "e": 3})
            store.remove(commit(store, "f", 4))
        assert {"d": (2, False), "f": (4, False)}.items() <= removed(memory).items()
        for line in (memory / "numbers").read_text().splitlines():
            json.loads(line)


def test_what_is_evicted_is_lost_and_what_is_dropped_or_replaced_is_not(memory: Path) -> None:
    rows = range(100_000)
    with Store(memory, limit=3 * MIB, policy=Policy.EVICT) as store:
        commit(store, "evicted", 1, rows)
        for number in (1, 2):
            commit(store, "replaced", number, rows)
        store.remove(commit(store, "dropped", 1, rows))
        store.ensure_room("new", 2 * MIB)
        assert [version.name for version in store.versions()] == ["replaced"]
    assert removed(memory) == {"evicted": (1, True), "dropped": (1, False)}


def test_versions_that_were_spilled_leave_their_numbers_too(memory: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    with Store(memory, limit=2 * MIB, policy=Policy.SPILL, spill=spill) as store:
        version = commit(store, "d", 4, range(100_000))
        store.ensure_room("new", int(1.9 * MIB))
        assert [path.name for path in (spill / "segments").iterdir()] == [version.id]
        assert store.removals() == {}
        store.remove(version)
        assert {name: one.version for name, one in store.removals().items()} == {"d": 4}
    assert removed(memory) == removed(spill) == {"d": (4, False)}


def test_a_spill_directory_that_outlives_the_memory_knows_all_numbers(memory: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"limit": 2 * MIB, "policy": Policy.SPILL, "spill": tmp_path / "spill"}
    with Store(memory / "before", **options) as store:
        version = commit(store, "spilled", 1, range(100_000))
        store.ensure_room("new", int(1.9 * MIB))
        assert not store.usage().committed
        store.record_published(commit(store, "spilled", 2))
        store.record_published(commit(store, "dropped", 3))
        store.remove(*(held for held in store.versions() if held.name == "dropped"))
    with Store(memory / "after", **options) as store:
        assert [held.id for held in store.versions()] == [version.id]
        assert store.removals() == {"spilled": (2, True, 2), "dropped": (3, False, 3)}


def test_numbers_from_before_a_store_had_a_spill_directory_are_in_both(memory: Path, tmp_path: Path) -> None:
    with Store(memory) as store:
        store.record_published(commit(store, "d", 4))
    with Store(memory, policy=Policy.SPILL, spill=tmp_path / "spill"):
        pass
    assert removed(tmp_path / "spill") == {"d": (4, True)}


def test_the_file_grows_with_the_names_and_not_with_the_versions(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.store.numbers.SPARE_LINES", 10)
    monkeypatch.setattr("dissociated.store.numbers.MAX_NAMES", 6)
    with Store(memory) as store:
        for number in range(1, 30):
            store.remove(commit(store, "d", number))
        assert len((memory / "numbers").read_text().splitlines()) < 15
        for number in range(10):
            store.remove(commit(store, f"name {number}", 1))
    found = removed(memory)
    assert len(found) <= 7
    assert found["name 9"] == (1, False)
    with Store(memory) as store:
        assert store.removals()[""].used == 29  # datasets whose names were forgotten must not reuse lower numbers


def test_serials_grow_though_the_clock_was_set_back_and_nothing_is_left(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(memory) as store:
        last = store.next_serial()
        version = commit(store, "d", 1)
        store.remove(version)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    with Store(memory) as store:
        assert last < version.serial < store.next_serial()

"""Keys of commits: they survive any end of the process or its disk, and do not grow without limit."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from dissociated.errors import StoreError
from dissociated.store.eviction import Policy
from dissociated.store.keys import KEY_TTL, CommitKey
from dissociated.store.store import Store
from support.helpers import case
from support.injection import Fault, clock_step
from support.nodes import MIB

NOW = time.time()


def keys(names: Iterable[str]) -> list[CommitKey]:
    return [CommitKey(name, NOW, "d") for name in names]


def recorded(directory: Path) -> list[str]:
    """Return the keys that a reopened store has."""
    with Store(directory) as store:
        return [record.key for record in store.commit_keys()]


def test_a_key_stays_with_its_dataset_and_time(memory: Path) -> None:
    records = [CommitKey("made", NOW, "d"), CommitKey("abörted\n", NOW + 0.5)]
    with Store(memory) as store:
        store.record_keys(records)
        store.record_keys([CommitKey("made", NOW, "another")])
    with Store(memory) as store:
        assert list(store.commit_keys()) == records
    assert stat.S_IMODE((memory / "keys").stat().st_mode) == 0o600
    assert len((memory / "keys").read_text().splitlines()) == 2


def test_keys_are_forgotten_after_a_time(memory: Path) -> None:
    with Store(memory) as store:
        store.record_keys([CommitKey("too old", NOW - KEY_TTL - 1, "d"), *keys("ab")])
        assert [record.key for record in store.commit_keys()] == ["a", "b"]
        with clock_step(KEY_TTL + 60):
            assert store.commit_keys() == []
            later = CommitKey("a", time.time(), "e")
            for _ in range(2):
                store.record_keys([later])
            assert store.commit_keys() == [later]
    with clock_step(KEY_TTL + 60), Store(memory) as store:
        assert store.commit_keys() == [later]
    assert len((memory / "keys").read_text().splitlines()) == 3


def test_the_last_keys_are_kept_when_there_are_too_many(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.store.keys.MAX_KEYS", 6)
    with Store(memory) as store:
        for name in "abcdefghij":
            store.record_keys(keys(name))
            assert store.commit_keys()[-1].key == name
    found = recorded(memory)
    assert 3 <= len(found) <= 6
    assert found == list("abcdefghij")[-len(found) :]
    assert len((memory / "keys").read_text().splitlines()) == len(found)


def test_earlier_keys_displace_none(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dissociated.store.keys.MAX_KEYS", 6)
    with Store(memory) as store:
        store.record_keys(keys("fgh"))
        for _ in range(2):
            store.record_keys(keys("abcdeh"), earlier=True)
            assert [record.key for record in store.commit_keys()] == list("cdefgh")
    assert recorded(memory) == list("cdefgh")
    with Store(memory) as store:
        store.record_keys(keys("i"))
    assert recorded(memory) == list("ghi")


def test_a_record_that_was_cut_short_is_left_out_and_written_over(memory: Path) -> None:
    with Store(memory) as store:
        store.record_keys(keys("ab"))
    content = (memory / "keys").read_bytes()
    for length in range(len(content) - 1, content.index(b"\n") + 1, -7):
        (memory / "keys").write_bytes(content[:length])
        with Store(memory) as store:
            store.record_keys(keys("c"))
        assert recorded(memory) in (["a", "c"], ["a", "b", "c"])
        assert not (memory / "keys.damaged").exists()
        for line in (memory / "keys").read_text().splitlines():
            json.loads(line)


def test_a_damaged_file_is_set_aside_and_its_other_keys_are_kept(memory: Path) -> None:
    with Store(memory) as store:
        store.record_keys(keys("abc"))
    lines = (memory / "keys").read_bytes().splitlines(keepends=True)
    for damage in (
        b"\xff\n",
        b"[" * 100_000 + b"\n",
        b"7\n",
        b'{"key": 7, "at": 1.0, "name": ""}\n',
        b'{"key": "\\ud800", "at": 1.0, "name": ""}\n',
        b'{"key": "b", "at": NaN, "name": ""}\n',
        b'{"key": "b", "name": ""}\n',
    ):
        with case(repr(damage[:40])):
            content = lines[0] + damage + lines[2]
            (memory / "keys").write_bytes(content)
            assert recorded(memory) == ["a", "c"]
            with Store(memory) as store:
                store.record_keys(keys("d"))
            assert recorded(memory) == ["a", "c", "d"]
            assert (memory / "keys.damaged").read_bytes() == content
            assert stat.S_IMODE((memory / "keys.damaged").stat().st_mode) == 0o600
            (memory / "keys.damaged").unlink()


def test_a_key_that_could_not_be_recorded_is_recorded_with_the_next_one(memory: Path) -> None:
    with Store(memory) as store:
        store.record_keys(keys("a"))
        with Fault(str(memory), operations=("write",)), pytest.raises(StoreError):
            store.record_keys(keys("b"))
        store.record_keys(keys("c"))
    assert recorded(memory) == ["a", "b", "c"]


def test_a_spill_directory_that_outlives_the_memory_knows_all_keys(memory: Path, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    with Store(memory / "before", limit=MIB, policy=Policy.SPILL, spill=spill) as store:
        store.record_keys(keys("ab"))
    with Store(memory / "after", limit=MIB, policy=Policy.SPILL, spill=spill) as store:
        store.record_keys(keys("c"))
        assert sorted(record.key for record in store.commit_keys()) == ["a", "b", "c"]

"""A store across kills: committed versions stay, uncommitted files are removed, and sizes are limited."""

from __future__ import annotations

import json
import os
import resource
import shutil
import stat
import textwrap
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.cli import main
from dissociated.control.version import Version
from dissociated.errors import CatalogError, StoreError
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.files import NewFile, StagedFile, claim_unused
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store
from support.helpers import case, commit_of, descriptors, leaving_nothing
from support.nodes import file_system, kill, small_file_system, spawn
from support.processes import run_script

pytestmark = pytest.mark.usefixtures("forks")

SCHEMA = pa.schema([("n", pa.int64())])
MIB = 1 << 20


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


def write(store: Store, name: str, *numbers: int) -> str:
    with store.writer(name, SCHEMA) as writer:
        writer.write(batch(*numbers))
    return name


def write_large(store: Store, name: str, mib: int) -> str:
    with store.writer(name, SCHEMA) as writer:
        for _ in range(mib):
            writer.write(batch(*[7] * (MIB // 8)))
    return name


def put(store: Store, name: str, *numbers: int, append: bool = False) -> Version:
    key = os.urandom(8).hex()
    return store.commit(
        commit_of(name, [write(store, key, *numbers)], mode="append" if append else "overwrite", key=key)
    )


def numbers(store: Store, version: Version | None) -> list[int]:
    """Return the numbers of a version, as libarrow reads them from the files."""
    assert version is not None
    found: list[int] = []
    for place in (store.directory, Path(f"{store.directory}-disk")):
        for path in sorted((place / "segments" / version.id).glob("*.arrows")):
            found += pa.ipc.open_stream(path.read_bytes()).read_all()["n"].to_pylist()
    return found


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


# Committed versions


def test_commits_survive_the_reopening_of_a_store(memory: Path) -> None:
    with leaving_nothing():
        with Store(memory) as store:
            names = [write(store, "a", 1, 2), write(store, "b", 3)]
            version = store.commit(commit_of("some", names, key="k", tags={"of": "x"}, ttl=7.0))
            assert os.listdir(store.staging) == []
            identity = store.id
        with Store(memory) as store:
            assert store.id == identity
            assert store.versions() == [version]
            assert (version.name, version.rows, version.tags, version.ttl) == ("some", 3, {"of": "x"}, 7.0)
            assert len(version.ticket) == 16
            assert numbers(store, version) == [1, 2, 3]
            assert [segment.rows for segment in store.segments(version)] == [2, 1]


def test_a_closed_store_does_nothing_to_the_next_owner(memory: Path) -> None:
    """Threads of its process may be late."""
    with Store(memory) as first:
        version = put(first, "a", 1)
        commit = commit_of("b", [write(first, "staged", 2)], key="b")
    with Store(memory) as second:
        draft = second.staging / "00000000000001-abcdef.new"  # as if it was committing
        draft.mkdir()
        before = files(memory)
        acts: list[Callable[[], object]] = [
            first.sweep,
            first.clear,
            lambda: first.remove(version),
            lambda: first.discard(["staged"]),
            lambda: first.commit(commit),
            lambda: first.confirm(version, whole=False),
            lambda: first.use_number("c", 7),
            lambda: first.segments(version),
            lambda: write(first, "new", 1),
        ]
        for number, act in enumerate(acts):
            with case(number), pytest.raises(StoreError, match="is closed in this process"):
                act()
        assert files(memory) == before
        assert draft.exists()


def test_everything_is_closed_to_others_and_segments_are_read_only(memory: Path) -> None:
    with Store(memory) as store:
        version = put(store, "some", 1)
        for parent, directories, names in os.walk(memory):
            for name in directories:
                assert stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) == 0o700
            for name in names:
                assert stat.S_IMODE(os.stat(os.path.join(parent, name)).st_mode) in (0o600, 0o400)
        segment = memory / "segments" / version.id / "0000.arrows"
        assert stat.S_IMODE(segment.stat().st_mode) == 0o400


def test_a_directory_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(StoreError, match="open to other users"), Store(tmp_path):
        pass


def test_a_store_has_one_owner(memory: Path) -> None:
    with Store(memory), pytest.raises(StoreError, match="belongs to another process"):
        Store(memory)
    Store(memory).close()


def test_a_repeated_commit_does_nothing(memory: Path) -> None:
    with Store(memory) as store:
        name = write(store, "a", 1)
        first = store.commit(commit_of("some", [name], key="k"))
        assert store.commit(commit_of("some", [name], key="k")) == first
        assert store.versions() == [first]
    with Store(memory) as store:
        assert store.commit(commit_of("some", [name], key="k")) == first


def test_what_was_prepared_gives_way_to_another_attempt_with_the_same_key(memory: Path) -> None:
    with Store(memory) as store:
        gone: list[Version] = []
        store.eviction.on_evicted = gone.append
        first = store.commit(commit_of("some", [write(store, "a", 1)], key="k"), prepared=True)
        assert store.commit(commit_of("some", ["a"], key="k"), prepared=True) == first  # repeats the attempt
        second = store.commit(commit_of("some", [write(store, "b", 2)], key="k"), prepared=True)
        assert (store.versions(), gone) == ([second], [first])
        assert numbers(store, second) == [2]
        again = store.commit(commit_of("some", [write(store, "b", 4)], key="k"), prepared=True)  # under the same name
        assert (store.versions(), gone) == ([again], [first, second])
        assert numbers(store, again) == [4]
        assert os.listdir(store.staging) == []


def test_what_was_published_with_a_key_stays_and_stands_for_no_other_segments(memory: Path) -> None:
    with Store(memory) as store:
        published = store.commit(commit_of("some", [write(store, "a", 1)], key="k", number=1), prepared=True)
        store.confirm(published, whole=True)
        repeated = store.commit(commit_of("some", ["a"], key="k", number=2), prepared=True)
        assert (repeated.id, repeated.number, repeated.created) == (published.id, 2, published.created)
        for name, segment, expected in (
            ("some", "b", "the store has published a version with the key 'k', which the catalog does not know; write"),
            ("some", "a", "the store has published a version with the key 'k', which the catalog does not know; write"),
            ("other", "b", "its key 'k' is that of a commit of 'some'; use another key"),
        ):
            write(store, segment, 2)
            for pending in (True, False):
                again = commit_of(name, [segment], key="k", number=3)
                with pytest.raises(StoreError, match=f"nothing was committed to '{name}': {expected}"):
                    store.commit(again, prepared=not pending, pending=pending)
            assert os.listdir(store.staging) == [segment]
            store.discard([segment])
        assert [(version.id, numbers(store, version)) for version in store.versions()] == [(published.id, [1])]


@pytest.mark.parametrize("is_prepared", [True, False])
def test_the_key_of_another_dataset_is_not_taken_over(memory: Path, is_prepared: bool) -> None:
    """A delayed call of the other commit would remove what was prepared for this one."""
    with Store(memory) as store:
        first = store.commit(commit_of("some", [write(store, "a", 1)], key="k", number=7), prepared=is_prepared)
        with pytest.raises(StoreError, match="its key 'k' is that of a commit of 'some'"):
            store.commit(commit_of("other", [write(store, "b", 2)], key="k", number=3), prepared=True)
        assert (store.versions(), os.listdir(store.staging)) == ([first], ["b"])


def test_a_part_of_a_lost_version_stays_beside_a_new_one_with_its_key(memory: Path) -> None:
    """Only its catalog knows whether the version is lost. The last version with the key is that of the commit."""
    with Store(memory) as store:
        lost = store.commit(commit_of("some", [write(store, "a", 1)], key="k", number=1), prepared=True)
        store.confirm(lost, whole=False)
        commit = commit_of("some", [write(store, "b", 2)], key="k", number=2)
        part = store.commit(commit, prepared=True)
        store.confirm(lost, whole=False)
        assert store.commit(replace(commit, number=3), prepared=True).id == part.id
    with Store(memory) as store:
        assert store.commit(replace(commit, number=4), prepared=True).id == part.id
        assert [numbers(store, version) for version in store.versions()] == [[1], [2]]


def test_an_attempt_that_comes_too_late_leaves_the_later_one_alone(memory: Path) -> None:
    """The catalog gave up waiting for the first call, and prepared the commit again with the next number."""
    with Store(memory) as store:
        segments = [write(store, "a", 1)], [write(store, "b", 2)]
        later = store.commit(commit_of("some", segments[1], key="k", number=8), prepared=True)
        for names in segments:
            with pytest.raises(StoreError, match="this attempt to commit 'some' came too late"):
                store.commit(commit_of("some", names, key="k", number=7), prepared=True)
        store.confirm(later, whole=True)
        assert [(version.number, numbers(store, version)) for version in store.versions()] == [(8, [2])]


def test_a_commit_that_is_repeated_after_others_is_the_last(memory: Path) -> None:
    """The catalog did not get the answer to the first call. The order of versions is that of their numbers."""
    with Store(memory, limit=14 * MIB) as store:
        first = commit_of("some", [write_large(store, "a", 5)], key="a", number=1)
        store.commit(first, prepared=True)
        other = store.commit(commit_of("some", [write_large(store, "b", 5)], key="b", number=2), prepared=True)
        store.confirm(other, whole=True)
        repeated = store.commit(replace(first, number=3), prepared=True)
        store.confirm(repeated, whole=True)
        assert [version.number for version in store.named("some")] == [2, 3]
        store.ensure_room("room for it", 6 * MIB)
        assert [version.key for version in store.versions()] == ["a"]
        assert store.current("some") == store.version(repeated.id)


def test_versions_that_were_appended_to_share_what_is_open(memory: Path) -> None:
    with leaving_nothing(), Store(memory) as store:
        put(store, "some", 0)
        opened = store.segments(store.versions()[0])
        for number in range(1, 20):
            opened = store.segments(put(store, "some", number, append=True))
        files = [target for target in descriptors().values() if target.startswith(f"{memory}/segments/")]
        assert len(files) == 2 * 20  # two for each segment, of any version
        assert [segment.rows for segment in opened] == [1] * 20
        del opened


def test_append_keeps_what_was_there_in_one_more_version(memory: Path) -> None:
    with Store(memory) as store:
        first = put(store, "some", 1)
        second = put(store, "some", 2, append=True)
        assert (numbers(store, first), numbers(store, second)) == ([1], [1, 2])
        assert store.current("some") == second
        assert second.before == (first.key,)
        once = store.usage().committed
        store.remove(first)  # its segment is in both versions
        assert store.usage().committed == pytest.approx(once, abs=8192)
        assert numbers(store, second) == [1, 2]
        assert store.usage().trash == 0


def test_nothing_is_appended_to_a_version_that_lacks_a_segment(memory: Path) -> None:
    with Store(memory) as store:
        for number in (1, 2):
            last = put(store, "some", number, append=True)
        (memory / "segments" / last.id / "0000.arrows").unlink()
    with Store(memory) as store:
        with pytest.raises(StoreError, match="'some' cannot be appended to: segments of version 0 are missing"):
            put(store, "some", 3, append=True)
        assert store.current("some") == last
        assert numbers(store, put(store, "some", 4)) == [4]


def test_no_segments_still_make_a_dataset(memory: Path) -> None:
    with Store(memory) as store:
        version = store.commit(commit_of("none", [], SCHEMA, key="k"))
        (segment,) = store.segments(version)
        assert (segment.rows, segment.schema) == (0, SCHEMA)


def test_a_commit_that_cannot_be_leaves_what_was_staged(memory: Path) -> None:
    with Store(memory) as store:
        name = write(store, "a", 1)
        with store.writer("b", pa.schema([("s", pa.string())])):
            pass
        for names, why in (
            ([name, "missing"], "'missing' is not in .* any more"),
            ([name, "b"], "must have one schema"),
        ):
            with pytest.raises(StoreError, match=why):
                store.commit(commit_of("some", names, key="k"))
        assert sorted(os.listdir(store.staging)) == ["a", "b"]
        assert store.versions() == []


def test_a_segment_is_committed_after_its_writer_has_ended_it(memory: Path) -> None:
    """Other tools may write to a file under the name that is committed."""
    with Store(memory) as store:
        place = store.staging / "mine"
        with place.open("wb", buffering=0) as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            writer.write_batch(batch(1, 2))
            with pytest.raises(StoreError, match="mine has no end-of-stream marker") as refusal:
                store.commit(commit_of("d", ["mine"], key="k"))
            writer.write_batch(batch(3, 4))
        assert refusal.traceback  # which has the segment as it was
        version = store.commit(commit_of("d", ["mine"], key="k"))
        assert numbers(store, version) == [1, 2, 3, 4]
        place.write_bytes((store.directory / "segments" / version.id / "0000.arrows").read_bytes() * 2)
        with pytest.raises(StoreError, match="mine has data after its end"):
            store.commit(commit_of("d", ["mine"], mode="append", key="l"))
        assert store.versions() == [version]


def test_an_append_checks_only_its_own_segments(memory: Path) -> None:
    """Development versions took segments with data after their end."""
    with Store(memory) as store:
        version = store.commit(commit_of("d", [write(store, "a", 1)], key="k"))
    with (memory / "segments" / version.id / "0000.arrows").open("ab") as file:
        file.write(b"more")
    with Store(memory) as store:
        both = store.commit(commit_of("d", [write(store, "b", 2)], mode="append", key="l"))
        assert numbers(store, both) == [1, 2]


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".", ""])
def test_only_what_lies_in_the_staging_directory_can_be_named(memory: Path, name: str) -> None:
    with Store(memory) as store:
        for act in (
            lambda: store.discard([name]),
            lambda: store.commit(commit_of("some", [name], key="k")),
            lambda: store.reserve(name, 1),
            lambda: store.writer(name, SCHEMA),
        ):
            with pytest.raises(StoreError, match="is not the name of a file"):
                act()


def test_an_entry_that_is_damaged_or_foreign_is_set_aside_and_the_rest_is_served(memory: Path) -> None:
    with Store(memory) as store:
        good, other = put(store, "good", 1), put(store, "other", 2)
    entry = memory / "segments" / other.id
    manifest = entry / "manifest.json"
    written = manifest.read_bytes()
    plain = json.loads(written)
    wrong: tuple[object, ...] = (None, [1], "\ud800", 10**30, -1, {"a": {}})
    damage: tuple[Any, ...] = (
        *(b"", b"{}", b"[]", b"null", b"\xff", b"[" * 100_000, written[:-40], written[:200] + b"\0" + written[201:]),
        *({**plain, name: value} for name in plain for value in wrong),
        *({key: value for key, value in plain.items() if key != name} for name in ("id", "name", "ticket", "format")),
        {**plain, "schema": "AAAA"},
        {**plain, "unknown": 1},
    )
    for content in damage:
        if content == plain:
            continue  # the unchanged manifest
        manifest.chmod(0o600)
        manifest.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        before = files(memory)
        with case(content if isinstance(content, bytes) else json.dumps(content)):
            with Store(memory) as store:
                assert store.versions() == [good]
                assert numbers(store, good) == [1]
                (aside,) = store.set_aside
                assert str(aside).startswith(f"{str(entry)!r} is set aside: manifest.json is damaged")
                assert aside.serial == other.serial
                assert store.usage().aside > 0
                late = put(store, "late", 3)
                assert late.serial > other.serial
                store.remove(late)
            assert files(memory) == before
    manifest.write_bytes(written)
    with Store(memory) as store:
        assert (store.versions(), store.set_aside) == ([good, other], ())


def test_an_invalid_version_is_set_aside_with_the_reason(memory: Path) -> None:
    with Store(memory) as store:
        good = put(store, "good", 1)
    written = memory / "segments" / good.id
    later = f"{1 << 50:014}-{'0' * 12}"
    os.mkdir(memory / "segments" / later)
    manifest = json.loads((written / "manifest.json").read_bytes())
    (memory / "segments" / later / "manifest.json").write_text(json.dumps({**manifest, "format": 2, "new": [1]}))
    (memory / "segments" / "empty").mkdir()
    (memory / "segments" / "file\x1b\udcff").write_text("notes")
    os.mkfifo(memory / "segments" / "pipe")
    (memory / "segments" / "link").symlink_to(written)
    (memory / "segments" / "pipe inside").mkdir()
    os.mkfifo(memory / "segments" / "pipe inside" / "manifest.json")
    shutil.copytree(written, memory / "segments" / "copy")
    reasons = {
        later: "the version was written by a later release (format 2): read it with that release",
        "empty": "the entry has no manifest.json",
        "file\x1b\udcff": "the entry is not a directory",
        "pipe": "the entry is not a directory",
        "link": "the entry is not a directory",
        "pipe inside": "manifest.json is not a regular file",
        "copy": f"manifest.json is that of {good.id!r}",
    }
    before = sorted(os.listdir(memory / "segments"))
    with leaving_nothing(), Store(memory) as store:
        assert store.versions() == [good]
        assert {one.path.name: one.reason for one in store.set_aside} == reasons
        assert all(str(one).isprintable() and "remove" not in str(one) for one in store.set_aside)
        store.sweep()
        assert put(store, "next", 2).serial > 1 << 50
        assert {*before} < {*os.listdir(memory / "segments")}


def test_a_version_that_was_replaced_is_not_served_in_place_of_one_that_is_set_aside(memory: Path) -> None:
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        for name in ("a", "b", "a"):
            client.put(name, pa.table({"n": [1]}))
        latest = node.store.versions()[-1]
    manifest = memory / "segments" / latest.id / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_text(json.dumps({**json.loads(content), "format": 2}))
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        assert [info.name for info in client.list()] == ["b"]
    manifest.write_bytes(content[:300])  # Its first lines still tell which version it was.
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        assert [info.name for info in client.list()] == ["b"]
        with pytest.raises(CatalogError, match="'a' cannot be appended to: version 2 was evicted, or lost"):
            client.put("a", pa.table({"n": [2]}), mode="append")
        client.put("a", pa.table({"n": [2]}))
        assert client.read("a").read_all()["n"].to_pylist() == [2]
        assert client.describe("a").version > 2
        (latest,) = node.store.named("a")[-1:]
    manifest = memory / "segments" / latest.id / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"version": ', b'"version; '))  # Only the name remains.
    with Node(Store(memory), ["shm:"]) as node, dis.connect(node.uri) as client:
        with pytest.raises(CatalogError, match="'a' cannot be appended to: version"):
            client.put("a", pa.table({"n": [2]}), mode="append")
        client.put("a", pa.table({"n": [3]}))
        assert client.describe("a").version > latest.number


def test_the_status_the_metrics_and_the_log_tell_what_is_set_aside(
    memory: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(memory):
        (memory / "segments" / "letters").mkdir()
    sentence = f"'{memory}/segments/letters' is set aside: the entry has no manifest.json"
    with Node(Store(memory), ["shm:"], metrics="127.0.0.1:0") as node, dis.connect(node.uri) as client:
        status = client.status()
        assert status.store is not None
        assert status.store.set_aside == (sentence,)
        main(["status", node.uri, "--once"])
        assert sentence in capsys.readouterr().out.splitlines()
        assert f"path='{memory}/segments/letters' reason=the entry has no manifest.json" in caplog.text
        with urllib.request.urlopen(node.server.metrics_uri) as answer:
            assert b"\ndissociated_store_set_aside 1.0\n" in answer.read()


def test_a_manifest_that_there_is_no_room_for_is_not_written_in_part(memory: Path) -> None:
    tags = {"of": "x" * 8000}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextmanager
    def full() -> Iterator[None]:
        """Limit files to one page, so that longer writes are short, like on a file system with one page left."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(StoreError, match="no space is left for"):
                yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with Store(memory) as store:
        with full():
            store.commit(commit_of("some", [], SCHEMA, key="k", tags=tags))
        assert store.versions() == []
        prepared = store.commit(commit_of("some", [], SCHEMA, key="k", tags=tags), prepared=True)
        before = files(memory)
        with full():
            store.confirm(prepared, whole=True)
        assert files(memory) == before
    with Store(memory) as store:
        assert store.versions() == [prepared]
        store.confirm(prepared, whole=True)
    with Store(memory) as store:
        assert [version.prepared for version in store.versions()] == [False]


# Removals while there are readers


def test_what_is_removed_stays_readable_and_counts_for_as_long_as_it_is_read(memory: Path) -> None:
    with Store(memory) as store:
        version = store.commit(commit_of("some", [write_large(store, "a", 3)], key="k"))
        segments = list(store.segments(version))
        mapped = segments[0].region.memory
        store.remove(version)
        assert store.versions() == []
        del segments
        assert store.usage().trash >= 3 * MIB  # our mapping
        assert pa.ipc.open_stream(mapped).read_all()["n"].to_pylist()[-1] == 7
        del mapped
        store.sweep()
        assert claim_unused(next(store.directory.glob("trash/*"))) is not None  # kept for a while for recycling


def test_what_was_written_long_ago_is_written_over_too(memory: Path) -> None:
    with Store(memory, limit=64 * MIB) as store:
        version = store.commit(commit_of("some", [write_large(store, "a", 3)], key="1"))
        (path,) = store.directory.glob("segments/*/*.arrows")
        os.utime(path, (0, 0))
        inode = path.stat().st_ino
        store.remove(version)
        store.sweep()
        store.commit(commit_of("some", [write_large(store, "b", 3)], key="2"))
        (path,) = store.directory.glob("segments/*/*.arrows")
        assert path.stat().st_ino == inode


def test_the_pages_of_what_was_removed_are_written_over_only_when_nobody_reads_them(memory: Path) -> None:
    with Store(memory) as store:
        version = store.commit(commit_of("some", [write(store, "a", 1, 2, 3)], key="1"))
        (path,) = store.directory.glob("segments/*/*.arrows")
        inode = path.stat().st_ino
        reader = pa.memory_map(str(path))  # any tool can read it
        store.remove(version)
        again = store.commit(commit_of("some", [write(store, "a", 9)], key="2"))
        (path,) = store.directory.glob(f"segments/{again.id}/*.arrows")
        assert path.stat().st_ino != inode
        assert pa.ipc.open_stream(reader).read_all()["n"].to_pylist() == [1, 2, 3]
        reader.close()
        del reader
        third = store.commit(commit_of("some", [write(store, "a", 10)], key="3"))
        (path,) = store.directory.glob(f"segments/{third.id}/*.arrows")
        assert path.stat().st_ino == inode
        assert numbers(store, third) == [10]


# Processes that are killed


#: A writer that writes a segment into the stage, reports that, and waits to be killed.
WRITER = """
import sys, pyarrow as pa
from pathlib import Path
from dissociated.store.store import Store
from dissociated.store.segment import SegmentWriter
store, stage = sys.argv[1:]
path = Path(store) / "staging" / "w"
writer = SegmentWriter(path, pa.schema([("n", pa.int64())]), reserve=lambda name, size, wish: wish)
writer.write(pa.record_batch({"n": pa.array([5], pa.int64())}))
if stage == "after":
    writer.close()
print("reached", flush=True)
sys.stdin.read()
"""

#: A process that owns the store, commits without end, and reports each commit after it has returned.
COMMITTER = """
import itertools, os, sys, pyarrow as pa
from dissociated.control.commit import Commit, StagedSegment
from dissociated.store.store import Store
schema = pa.schema([("n", pa.int64())])
with Store(sys.argv[1]) as store:
    start = len(store.versions())
    print("reached", flush=True)
    for n in itertools.count(start):
        staged = f"{n}-{os.getpid()}"
        with store.writer(staged, schema) as writer:
            writer.write(pa.record_batch({"n": pa.array([n], pa.int64())}))
        before = store.current("log")
        store.commit(Commit("log", [StagedSegment(staged)], key=str(n), mode="append"))
        if before is not None and n % 3 == 0:
            store.remove(before)
        print(n, flush=True)
"""


def test_a_writer_killed_before_its_segment_is_whole_leaves_nothing(memory: Path) -> None:
    with Store(memory) as store:
        writer = spawn(WRITER, memory, "before")
        assert os.listdir(store.staging) == ["w.part"]
        store.sweep()
        assert os.listdir(store.staging) == ["w.part"]  # its writer still runs
        kill(writer)
        store.sweep()
        assert os.listdir(store.staging) == []


def test_a_file_is_closed_once_also_by_who_was_interrupted_while_closing_it(memory: Path) -> None:
    with Store(memory) as store:
        for file in (NewFile(store.staging / "new"), StagedFile(store.staging / "staged", store.reserve)):
            number = file.descriptor
            file.commit(0)
            other = os.open("/dev/null", os.O_RDONLY)  # a file that has that descriptor number now, or gets it
            if other != number:
                os.dup2(other, number)
                os.close(other)
            file.abort()
            os.close(number)


def test_the_segment_of_a_writer_killed_after_it_was_whole_can_be_committed(memory: Path) -> None:
    with Store(memory):
        pass
    kill(spawn(WRITER, memory, "after"))
    with Store(memory) as store:
        assert os.listdir(store.staging) == ["w"]
        assert numbers(store, store.commit(commit_of("some", ["w"], key="k"))) == [5]
        assert os.listdir(store.staging) == []


def test_segments_that_nobody_commits_are_forgotten_in_the_end(memory: Path) -> None:
    with Store(memory) as store:
        write(store, "a", 1)
        store.sweep()
        assert os.listdir(store.staging) == ["a"]
    with Store(memory, staging_timeout=-1) as store:
        assert os.listdir(store.staging) == []


def test_an_owner_killed_at_any_moment_leaves_exactly_what_was_committed(memory: Path) -> None:
    said: list[int] = []
    for round_ in range(4):
        process = spawn(COMMITTER, memory)
        assert process.stdout is not None
        said += [int(process.stdout.readline()) for _ in range(5 + round_)]
        said += [int(line) for line in kill(process).splitlines(keepends=True) if line.endswith("\n")]
        with Store(memory) as store:
            found = numbers(store, store.current("log"))
            assert found == list(range(len(found)))  # every commit is there once, and none in part
            assert len(found) - len(said) in (0, 1)  # the last commit may not have been reported before the kill
            said = found
            for directory in (store.staging, store.directory / "trash"):
                assert not [path for path in directory.iterdir() if path.suffix in (".new", ".gone", ".part")]
            # COMMITTER begins by counting the versions, so the next round continues from here.
            for version in store.versions()[:-1]:
                store.remove(version)
            assert len(files(memory / "segments")) == len(found) + 1
            keep = store.current("log")
            assert keep is not None
        _pad(memory, len(found))


def _pad(memory: Path, count: int) -> None:
    """Add versions until there are `count`: COMMITTER begins by counting them."""
    with Store(memory) as store:
        while len(store.versions()) < count:
            key = os.urandom(8).hex()
            store.commit(commit_of(f"pad{key}", [], SCHEMA, key=key))


# Room


def test_a_full_store_refuses_with_numbers_and_says_what_to_do(memory: Path) -> None:
    with Store(memory, limit=8 * MIB) as store:
        store.commit(commit_of("a", [write_large(store, "a", 3)], key="a"))
        with pytest.raises(StoreError, match=r"is full: it holds [\d,]+ bytes of at most 8,388,608.*drop datasets"):
            write_large(store, "b", 6)
        with pytest.raises(StoreError, match="can never fit"), store.writer("c", SCHEMA) as writer:
            writer.write(batch(*[7] * (2 * MIB)))
        store.sweep()
        assert store.usage().total <= 8 * MIB
        store.commit(commit_of("b", [write_large(store, "b", 3)], key="b"))
        assert [version.name for version in store.versions()] == ["a", "b"]


def test_a_segment_that_fits_without_its_statistics_is_written_without_them(memory: Path) -> None:
    def write_rows(store: Store, count: int) -> int:
        with store.writer(f"rows-{count}", SCHEMA) as writer:
            writer.write(batch(*range(count)))
            return writer.nbytes + 8  # with the end of the stream

    page, count = resource.getpagesize(), 12_000
    with Store(memory / "measured") as store:
        count += -write_rows(store, count) % page // 64 * 8  # in bodies of multiples of 64 bytes
        size = write_rows(store, count)
    assert -size % page < 64
    with Store(memory / "store", size + -size % page) as store:
        assert write_rows(store, count) == size
        with pa.ipc.open_stream(store.staging / f"rows-{count}") as reader:
            assert reader.read_all()["n"].to_pylist() == [*range(count)]


def test_the_limit_holds_for_writers_in_other_processes_and_for_what_is_staged(memory: Path) -> None:
    with Store(memory, limit=12 * MIB) as store:
        first = SegmentWriter(store.staging / "x", SCHEMA, reserve=store.reserve)
        second = SegmentWriter(store.staging / "y", SCHEMA, reserve=store.reserve)
        first.write(batch(*[1] * (5 * MIB // 8)))
        with pytest.raises(StoreError, match="is full"):
            second.write(batch(*[1] * (8 * MIB // 8)))
        second.abort()
        first.close()
        assert store.usage().staged <= 6 * MIB  # reserved bytes that were not written are given back


def test_what_was_written_without_reserving_is_not_committed(memory: Path) -> None:
    with Store(memory, 4 * MIB) as store:
        with SegmentWriter(store.staging / "large", SCHEMA) as writer:
            for _ in range(6):
                writer.write(batch(*[7] * (MIB // 8)))
        with pytest.raises(StoreError, match="its limit is 4,194,304"):
            store.commit(commit_of("d", ["large"], key="k"))
        assert store.versions() == []
        store.discard(["large"])
        assert numbers(store, put(store, "d", 1, 2)) == [1, 2]


def test_what_was_replaced_goes_first_under_every_policy(memory: Path) -> None:
    with Store(memory, limit=14 * MIB) as store:
        gone: list[Version] = []
        store.eviction.on_evicted = gone.append
        old = store.commit(commit_of("a", [write_large(store, "1", 5)], key="1"))
        new = store.commit(commit_of("a", [write_large(store, "2", 5)], key="2"))
        store.commit(commit_of("b", [write_large(store, "3", 5)], key="3"))
        assert gone == [old]
        assert [version.name for version in store.versions()] == ["a", "b"]
        assert store.current("a") == new


def test_evict_removes_the_oldest_that_nobody_reads(memory: Path) -> None:
    with Store(memory, limit=14 * MIB, policy=Policy.EVICT) as store:
        gone: list[str] = []
        store.eviction.on_evicted = lambda version: gone.append(version.name)
        store.eviction.in_use = lambda version: version.name == "a"
        for name in "abc":
            store.commit(commit_of(name, [write_large(store, name, 5)], key=name))
        assert gone == ["b"]
        store.eviction.in_use = lambda version: True
        with pytest.raises(StoreError, match="the rest is being read"):
            write_large(store, "d", 10)
        assert [version.name for version in store.versions()] == ["a", "c"]
        assert store.usage().total <= 14 * MIB


def test_spill_moves_the_oldest_to_disk_where_it_is_served_from(memory: Path) -> None:
    home, disk = memory / "store", memory / "store-disk"
    with Store(home, limit=14 * MIB, policy=Policy.SPILL, spill=disk) as store:
        moved: list[str] = []
        store.eviction.on_spilled = lambda version: moved.append(version.name)
        a = store.commit(commit_of("a", [write_large(store, "a", 5)], key="a"))
        before = store.segments(a)[0].region.memory
        reader = pa.ipc.open_stream(before)
        for name in "bc":
            store.commit(commit_of(name, [write_large(store, name, 5)], key=name))
        assert moved == ["b"]  # moving the other, which is mapped, would free nothing
        assert reader.read_all().num_rows == 5 * MIB // 8
        del before, reader
        store.commit(commit_of("d", [write_large(store, "d", 5)], key="d"))
        assert moved == ["b", "a"]
        assert [version.name for version in store.versions()] == ["a", "b", "c", "d"]
        assert str(disk) in store.segments(a)[0].name
        assert pa.ipc.open_stream(store.segments(a)[0].region.memory).read_all().num_rows == 5 * MIB // 8
        assert store.usage().spilled >= 10 * MIB
        assert store.usage().total <= 14 * MIB
        grown = store.commit(
            commit_of("a", [write(store, "more", 1)], mode="append", key="more")
        )  # from disk, by a copy
        assert grown.rows == 5 * MIB // 8 + 1
    with Store(home, limit=14 * MIB, policy=Policy.SPILL, spill=disk) as store:
        assert [version.name for version in store.versions()] == ["a", "b", "c", "d", "a"]
        assert numbers(store, a) == [7] * (5 * MIB // 8)


def test_a_version_whose_mover_was_killed_is_there_once(memory: Path) -> None:
    home, disk = memory / "store", memory / "store-disk"
    with Store(home) as store:
        version = put(store, "a", 1, 2)
    with Store(disk):
        pass
    # The state before the removal of the original.
    shutil.copytree(home / "segments" / version.id, disk / "segments" / version.id)
    with Store(home) as store:
        store.confirm(version, whole=False)  # the move was given up, and the version has become a part of another
    with Store(home, policy=Policy.SPILL, spill=disk) as store:
        (held,) = store.versions()
        assert (held.id, held.whole) == (version.id, False)
        assert numbers(store, held) == [1, 2]
        assert not (disk / "segments" / version.id).exists()


def test_a_store_does_not_start_without_the_disk_that_has_its_versions(memory: Path) -> None:
    home, disk, other = memory / "store", memory / "disk", memory / "other"
    with Store(home, limit=14 * MIB, policy=Policy.SPILL, spill=disk):
        pass
    with Store(home, limit=14 * MIB, policy=Policy.SPILL, spill=other) as store:  # nothing was spilled
        for name in "abc":
            store.commit(commit_of(name, [write_large(store, name, 5)], key=name))
        assert store.usage().spilled
        lost = store.versions()
    for policy, spill, reason in (
        (Policy.REFUSE, None, "no spill directory was given: start"),
        (Policy.SPILL, disk, f"'{disk}' is another: start"),
    ):
        with case(reason), pytest.raises(StoreError, match=f"lie in the spill directory '{other}', and {reason}"):
            Store(home, policy=policy, spill=spill)
    with Store(home, policy=Policy.SPILL, spill=other) as store:
        assert store.versions() == lost
        store.remove(*lost)
    with Store(home) as store:  # nothing lies on disk any more
        assert store.versions() == []


SMALL = """
import os, sys
import pyarrow as pa
from dissociated.errors import StoreError, StoreFull
from dissociated.control.commit import Commit, StagedSegment
from dissociated.store.eviction import Policy
from dissociated.store.segment import Segment
from dissociated.store.store import Store

schema = pa.schema([("n", pa.int64())])
batch = pa.record_batch({"n": pa.array([7] * (1 << 17), pa.int64())})
root = sys.argv[1]

def write(store, name, mib):
    with store.writer(name, schema) as writer:
        for _ in range(mib):
            writer.write(batch)
    return name

with Store(root + "/store") as store:
    store.commit(Commit("a", [StagedSegment(write(store, "a", 3))], key="a"))
    try:
        write(store, "b", 30)
    except StoreError as error:
        print(error)
    print(os.listdir(store.staging))
    (segment,) = store.segments(store.current("a"))
    print(pa.ipc.open_stream(segment.region.memory).read_all().num_rows)
    del segment
with Store(root + "/store", policy=Policy.EVICT) as store:
    store.commit(Commit("b", [StagedSegment(write(store, "b", 5))], key="b"))
    print([version.name for version in store.versions()])
    segment = Segment.in_memory("m", pa.Table.from_batches([batch] * 3).to_reader())
    store.commit(Commit("m", [StagedSegment(store.hand_over(segment.descriptor))], key="m"))
    try:
        store.ensure_room("c", 9 << 20)  # for which memory that lies elsewhere is of no use
    except StoreFull:
        print([version.name for version in store.versions()])
with Store(root + "/store", limit=9 << 20, policy=Policy.EVICT) as store:
    store.commit(Commit("c", [StagedSegment(write(store, "c", 2))], key="c"))
    held = store.segments(store.current("b"))
    store.eviction.in_use = lambda version: version.name == "b"
    try:
        store.ensure_room("d", 4 << 20)  # the limit asks for less than the file system does
    except StoreFull:
        print([version.name for version in store.versions()])
"""


@pytest.mark.needs("tmpfs")
def test_a_full_file_system_is_told_in_a_sentence_and_can_be_evicted_from(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    with small_file_system(root) as mounts:
        done = run_script(textwrap.dedent(SMALL), root, mounts=mounts)
    assert not done.returncode, done.stderr
    sentence, staged, rows, left, *refused = done.stdout.splitlines()
    assert f"the file system of '{root}/store' is full" in sentence
    assert "in Docker, --shm-size" in sentence
    assert (staged, rows, left) == ("[]", str(3 << 17), "['b']")
    assert refused == ["['b', 'm']", "['b', 'c']"]


WITHOUT_FALLOCATE = """
import sys
import pyarrow as pa
from dissociated.control.commit import Commit, StagedSegment
from dissociated.store.store import Store

batch = pa.record_batch({"n": pa.array(range(1 << 14), pa.int64())})
with Store(sys.argv[1] + "/store") as store:
    with store.writer("a", batch.schema) as writer:
        for _ in range(4):  # more than is reserved at once
            writer.write(batch)
    version = store.commit(Commit("a", [StagedSegment("a")], key="k"))
    (segment,) = store.segments(version)
    print(pa.ipc.open_stream(segment.region.memory).read_all() == pa.Table.from_batches([batch] * 4))
    del segment
"""


@pytest.mark.needs("tmpfs")
def test_a_file_system_that_cannot_allocate_takes_segments(tmp_path: Path) -> None:
    with file_system(tmp_path, "ramfs", "mode=700") as mounts:
        done = run_script(WITHOUT_FALLOCATE, tmp_path, mounts=mounts)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


FULL_DISK = """
import os, sys
from pathlib import Path
import pyarrow as pa
from dissociated.control.commit import Commit, StagedSegment
from dissociated.store.eviction import Policy
from dissociated.store.store import Store

root, full = Path(sys.argv[1]), sys.argv[2]
SCHEMA = pa.schema({"n": pa.int64()})
places = {"store": Path(sys.argv[3]) / "store", "disk": Path(sys.argv[3]) / "disk", full: root / full}

def put(store, name, number, **options):
    with store.writer(name, SCHEMA) as writer:
        writer.write(pa.record_batch({"n": pa.array(range(1 << 16), pa.int64())}))
    commit = Commit(name, [StagedSegment(name)], SCHEMA, key=f"{name} {number}", number=number)
    version = store.commit(commit, **options)
    if not options:
        store.record_published(version)
    return version

LIMIT = 1 << 21 if full == "disk" else None

def fill(directory):
    with open(directory / "filler", "wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                pass

def names(store):
    return sorted({version.name for version in store.versions()})

with Store(places["store"], policy=Policy.SPILL, spill=places["disk"], limit=LIMIT) as store:
    for name in "abc":
        put(store, name, 1)
    if full == "disk":
        store.ensure_room("new", (1 << 21) - (1 << 20))
        (places["disk"] / "numbers").unlink()
        fill(places["disk"])
        for number in (2, 3):
            put(store, "c", number)
        store.confirm(put(store, "e", 1, prepared=True), True)
        store.record_dropped(*(version for version in store.versions() if version.name == "b"))
        store.remove(*(version for version in store.versions() if version.name in "ac" and version.number < 3))
    else:
        fill(places["store"] / "staging")
        store.ensure_room("new", 1 << 13)
        assert store.usage().spilled
    print(names(store))
with Store(places["store"], policy=Policy.SPILL, spill=places["disk"], limit=LIMIT) as store:
    print(names(store))
"""


@pytest.mark.needs("tmpfs")
@pytest.mark.parametrize(
    ("full", "result"),
    [("disk", "['c', 'e']"), ("store", "['a', 'b', 'c']")],
)
def test_a_store_with_a_full_disk_or_memory_frees_and_spills(tmp_path: Path, full: str, result: str) -> None:
    root, other = tmp_path / "small", tmp_path / "other"
    root.mkdir()
    other.mkdir()
    with small_file_system(root) as mounts:
        done = run_script(FULL_DISK, root, full, other, mounts=mounts)
    assert not done.returncode, done.stderr
    assert done.stdout.splitlines() == [result, result]


def test_a_pending_append_is_no_part_of_a_distributed_commit(memory: Path) -> None:
    """It has the rows of the earlier commits, too."""
    with Store(memory) as store:
        first = put(store, "d", 1, 2, 3)
        commit = commit_of("d", [write(store, "s", 4, 5)], key="k", mode="append")
        store.commit(commit, pending=True, base=first.id)
        with pytest.raises(StoreError, match="segment 's' is not in"):
            store.commit(replace(commit, mode="overwrite"), prepared=True)
        write(store, "s", 4, 5)
        assert store.commit(replace(commit, mode="overwrite"), prepared=True).rows == 2

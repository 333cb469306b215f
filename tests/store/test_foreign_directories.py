"""Directories that are not stores, and foreign files in a store: nothing of them is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from dissociated.errors import NotPrivate, StoreError
from dissociated.node.launch import ensure, running
from dissociated.store.eviction import Policy
from dissociated.store.segment import SegmentWriter
from dissociated.store.store import Store
from support.helpers import case, commit_of, leaving_nothing

SCHEMA = pa.schema([("n", pa.int64())])
ROWS = pa.record_batch({"n": pa.array(range(1 << 15), pa.int64())})


def files(directory: Path) -> dict[str, str]:
    """Return the files below a directory with their contents, and its directories."""
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else ""
        for path in sorted(directory.rglob("*"))
    }


@pytest.fixture
def folder(memory: Path) -> Path:
    """Create a user's folder that has some of the names in a store."""
    folder = memory / "folder"
    for name in ("trash", "staging/website", "segments"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "trash" / "letter.txt").write_text("Dear Sir")
    (folder / "staging" / "website" / "index.html").write_text("<html>")
    (folder / "staging" / "poem.part").write_text("Roses are red")
    os.utime(folder / "staging" / "poem.part", (0, 0))
    return folder


def put(store: Store, name: str, batch: pa.RecordBatch = ROWS) -> None:
    with store.writer("w", SCHEMA) as writer:
        writer.write(batch)
    store.commit(commit_of(name, ["w"], key=name))


def test_a_folder_that_is_no_store_is_refused_and_stays_as_it_is(folder: Path, memory: Path) -> None:
    before = files(folder)
    refused = f"{folder}' is not a store, and is not empty: it has 'segments': choose an empty directory"
    with leaving_nothing():
        with pytest.raises(StoreError, match=refused):
            Store(folder)
        with pytest.raises(StoreError, match=refused):
            Store(memory / "store", policy=Policy.SPILL, spill=folder)
        with pytest.raises(StoreError, match=refused):
            ensure(folder)
    assert files(folder) == before


def test_a_folder_with_an_id_that_no_store_has_written_is_refused(folder: Path, memory: Path) -> None:
    known = memory / "store"
    with Store(known):
        pass
    (folder / "id").write_text("passport 123\n")
    before = files(folder)
    for use in (Store, ensure):
        with case(use), pytest.raises(StoreError, match=f"{folder}' is not a store: its file 'id'"):
            use(folder)
    assert files(folder) == before
    (folder / "id").unlink()
    (folder / "id").symlink_to(known / "id")
    before = files(folder)
    for use in (Store, ensure):
        with case(use), pytest.raises(NotPrivate, match="id' is a symbolic link"):
            use(folder)
    assert files(folder) == before


def test_a_store_removes_and_writes_over_nothing_that_it_did_not_make(memory: Path) -> None:
    home, disk = memory / "store", memory / "disk"
    with Store(home, limit=1 << 19, policy=Policy.SPILL, spill=disk) as store:
        put(store, "a")
        put(store, "b")  # this put moves `a` to disk
        assert [path.name for path in (disk / "segments").iterdir()] == [store.versions()[0].id]
    for place in (home, disk):
        (place / "trash" / "letter.txt").write_text("Dear Sir")
        (place / "trash" / "probe.arrows").write_text("Dear Madam")
        (place / "staging" / "website").mkdir()
        (place / "staging" / "website" / "index.html").write_text("<html>")
        (place / "staging" / "letters.new").symlink_to(place / "trash")
    (home / "trash" / "large.txt").write_bytes(b"x" * (1 << 18))  # large enough to be recycled
    for number, directory in enumerate((*home.glob("segments/*"), *disk.glob("segments/*"), home)):
        (memory / f"{number}.txt").write_text("Dear All")
        name = "numbers.draft" if directory == home else "manifest.json.draft"
        (directory / name).symlink_to(memory / f"{number}.txt")
    (home / "numbers").write_text("cut short")  # so that it is written anew
    with Store(home, policy=Policy.SPILL, spill=disk, staging_timeout=1e6) as store:
        store.sweep()
        for version in store.versions():
            store.confirm(version, whole=False)
        store.remove(*store.versions())
        put(store, "c")
        store.sweep()
    for place in (home, disk):
        assert (place / "trash" / "letter.txt").read_text() == "Dear Sir"
        assert (place / "trash" / "probe.arrows").read_text() == "Dear Madam"
        assert (place / "staging" / "website" / "index.html").read_text() == "<html>"
        assert (place / "staging" / "letters.new").is_symlink()
    assert (home / "trash" / "large.txt").read_bytes() == b"x" * (1 << 18)
    assert [path.read_text() for path in memory.glob("?.txt")] == ["Dear All"] * 3


def test_a_writer_recycles_nothing_beside_a_directory_that_is_no_store(folder: Path) -> None:
    """The writer may have been given the directory by mistake or by a lying catalog."""
    removed = folder / "trash" / "00000000000001-0123456789ab-0000.arrows"  # such a name can occur in a copy of a store
    removed.write_text("Dear Sir")
    before = files(folder)
    with SegmentWriter(folder / "staging" / "w", SCHEMA, reserve=lambda name, size, wish: wish) as writer:
        writer.write(ROWS)
    (folder / "staging" / "w").unlink()
    assert files(folder) == before


def test_a_store_that_others_could_have_made_is_not_used(memory: Path) -> None:
    store, link = memory / "store", memory / "link"
    with Store(store):
        pass
    link.symlink_to(store)
    for use in (Store, ensure, running):
        with case(use), pytest.raises(NotPrivate, match=f"{link}' is a symbolic link"):
            use(link)
        store.chmod(0o750)
        with case(use), pytest.raises(NotPrivate, match=f"{store}' is open to other users"):
            use(store)
        store.chmod(0o700)
    (store / "trash").rmdir()
    (store / "trash").symlink_to(memory)
    with pytest.raises(NotPrivate, match="trash' is a symbolic link"):
        Store(store)


def test_starting_a_node_truncates_nothing_through_a_link(memory: Path) -> None:
    store, letter = memory / "store", memory / "letter"
    with Store(store):
        pass
    letter.write_text("Dear Sir")
    (store / "starting").symlink_to(letter)
    with pytest.raises(NotPrivate, match="starting' is a symbolic link"):
        ensure(store)
    (store / "starting").unlink()
    (store / "node.log").symlink_to(letter)
    with pytest.raises(NotPrivate, match=r"node\.log' is a symbolic link"):
        ensure(store)
    assert letter.read_text() == "Dear Sir"

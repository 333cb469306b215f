"""The stage: segments stay there until they are committed, and abandoned ones are removed."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from dissociated.errors import NotPrivate, StoreError
from dissociated.store.segment import SegmentWriter
from dissociated.store.stage import Stage

SCHEMA = pa.schema([("n", pa.int64())])


def write(stage: Stage, name: str, *numbers: int) -> None:
    with SegmentWriter(stage.directory / name, SCHEMA) as writer:
        writer.write(pa.record_batch({"n": pa.array(numbers, pa.int64())}))


def test_a_stage_is_private_and_goes_with_what_is_in_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert list(tmp_path.iterdir()) == []  # created on first use
    write(stage, "a", 1)
    directory = stage.directory
    for path in (directory, directory.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    stage.close()
    assert not directory.exists()


def test_what_is_taken_is_held_by_whoever_took_it_alone(tmp_path: Path) -> None:
    with closing(Stage(tmp_path)) as stage:
        write(stage, "a", 1, 2)
        write(stage, "b", 3)
        a, b = stage.take(["a", "b"])
        assert list(stage.directory.iterdir()) == []
        assert (a.rows, b.rows) == (2, 1)


def test_a_segment_that_its_writer_has_not_ended_is_not_taken(tmp_path: Path) -> None:
    with closing(Stage(tmp_path)) as stage:
        path = stage.directory / "mine"
        with path.open("wb", buffering=0) as file, pa.ipc.new_stream(file, SCHEMA) as writer:
            writer.write_batch(pa.record_batch({"n": pa.array([1], pa.int64())}))
            with pytest.raises(StoreError, match="mine has no end-of-stream marker"):
                stage.take(["mine"])
            assert path.exists()
        (segment,) = stage.take(["mine"])
        assert segment.rows == 1


def test_nothing_is_taken_where_one_cannot_be(tmp_path: Path) -> None:
    with closing(Stage(tmp_path)) as stage:
        write(stage, "a", 1)
        with pytest.raises(StoreError, match="No such file"):
            stage.take(["a", "b"])
        assert [path.name for path in stage.directory.iterdir()] == ["a"]
        stage.discard(["a", "b"])
        assert list(stage.directory.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", ".", ""])
def test_only_what_lies_in_the_stage_can_be_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_text("precious")
    with closing(Stage(tmp_path)) as stage:
        for act in (stage.take, stage.discard):
            with pytest.raises(StoreError, match="is not the name of a file"):
                act([name])
    assert (tmp_path / "a").read_text() == "precious"


def test_what_a_dead_server_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    home = tmp_path / f"dissociated-{os.geteuid()}"
    abandoned, other_directory, link = home / "1-0123abcd", home / "website", home / "2-0123abcd"
    home.mkdir(mode=0o700)
    for directory in (abandoned, other_directory):
        directory.mkdir(mode=0o700)
        (directory / "segment").write_text("x")
    link.symlink_to(other_directory)
    with closing(Stage(tmp_path)) as living:
        write(living, "a", 1)
        assert not abandoned.exists()
        assert (other_directory / "segment").exists()  # no stage has created this directory
        assert link.is_symlink()
        with closing(Stage(tmp_path)) as other:
            assert other.directory != living.directory
            assert (living.directory / "a").exists()


def test_a_directory_that_is_not_this_users_alone_is_not_used(tmp_path: Path) -> None:
    home, other = tmp_path / f"dissociated-{os.geteuid()}", tmp_path / "other"
    other.mkdir(mode=0o700)
    home.symlink_to(other)
    with pytest.raises(NotPrivate, match=f"{home}' is a symbolic link"):
        _ = Stage(tmp_path).directory
    home.unlink()
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(NotPrivate, match=f"{home}' is open to other users"):
        _ = Stage(tmp_path).directory
    assert [*home.iterdir()] == [*other.iterdir()] == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="staging directory below"):
        _ = Stage(tmp_path / "file").directory


def test_writers_that_ask_at_once_get_one_directory(tmp_path: Path) -> None:
    for attempt in range(10):
        with closing(Stage(tmp_path / str(attempt))) as stage, ThreadPoolExecutor(8) as writers:
            assert len(set(writers.map(lambda _: stage.directory, range(8)))) == 1

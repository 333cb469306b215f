"""Private directories and files: directories of other users are rejected, and nothing is touched before the check."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dissociated.base.private import (
    claim_private_file,
    open_private_directory,
    open_private_file,
    read_private_file,
    write_private_file,
)
from dissociated.errors import NotPrivate
from support.helpers import case, leaving_nothing

NOBODY = 65534


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    """Set a umask that removes no permissions, like some services do."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_what_is_made_is_closed_to_others(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b" / "c"
    with leaving_nothing():
        opened = open_private_directory(directory, create=True)
        write_private_file("id", b"1", within=opened)
        os.close(open_private_file("log", os.O_WRONLY | os.O_CREAT, within=opened))
        os.close(open_private_directory("run", within=opened, create=True))
        os.close(opened)
    for path in (tmp_path / "a", tmp_path / "a" / "b", directory, directory / "run"):
        assert mode(path) == 0o700
    assert sorted(entry.name for entry in directory.iterdir()) == ["id", "log", "run"]
    assert mode(directory / "id") == mode(directory / "log") == 0o600
    assert (directory / "id").read_bytes() == b"1"


def test_a_directory_that_is_not_this_users_alone_is_refused(tmp_path: Path) -> None:
    mine, link, file = tmp_path / "mine", tmp_path / "link", tmp_path / "file"
    mine.mkdir(mode=0o700)
    link.symlink_to(mine)
    file.touch()
    with leaving_nothing():
        os.close(open_private_directory(mine))
        for path in (str(link), f"{link}/"):
            with case(path), pytest.raises(NotPrivate, match=f"{link}' is a symbolic link.*name the directory"):
                open_private_directory(path, create=True)
        with pytest.raises(NotPrivate, match=f"{file}' is not a directory"):
            open_private_directory(file, create=True)
        for open_to in (0o701, 0o710, 0o704, 0o770, 0o777, 0o1777):
            mine.chmod(open_to)
            with case(oct(open_to)), pytest.raises(NotPrivate, match=rf"{mine}' is open to other users .*chmod 700"):
                open_private_directory(mine, create=True)
        with pytest.raises(FileNotFoundError):
            open_private_directory(tmp_path / "missing")
        mine.chmod(0o755)
        os.close(open_private_directory(mine, readable=True))
        mine.chmod(0o775)
        with pytest.raises(NotPrivate, match="is open to other users"):
            open_private_directory(mine, readable=True)


def test_a_file_is_claimed_without_being_opened(tmp_path: Path) -> None:
    """A process that opens and closes a database which SQLite has open loses SQLite's locks."""
    database = tmp_path / "db"
    claim_private_file(database, create=True)
    assert mode(database) == 0o600
    database.write_text("rows")
    database.chmod(0o644)
    database_lock = database.open("r+")
    with database_lock:
        fcntl.lockf(database_lock, fcntl.LOCK_EX)
        claim_private_file(database, create=True)
        other = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        blocked = subprocess.run([sys.executable, "-c", other, database], capture_output=True, text=True)
    assert "BlockingIOError" in blocked.stderr
    assert mode(database) == 0o600
    assert database.read_text() == "rows"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "missing")
    with pytest.raises(NotPrivate, match=f"{link}' is a symbolic link"):
        claim_private_file(link, create=True)
    with pytest.raises(FileNotFoundError):
        claim_private_file(tmp_path / "missing")


@pytest.mark.needs("root")
def test_what_another_user_owns_is_refused_unless_that_user_is_trusted(tmp_path: Path) -> None:
    directory, file = tmp_path / "theirs", tmp_path / "file"
    directory.mkdir(mode=0o700)
    file.write_text("theirs")
    os.chown(directory, NOBODY, NOBODY)
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(NotPrivate, match=f"{directory}' belongs to user .*choose another directory"):
        open_private_directory(directory, create=True)
    with pytest.raises(NotPrivate, match=f"{file}' belongs to user"):
        read_private_file(file)
    with pytest.raises(NotPrivate, match=f"{file}' belongs to user"):
        open_private_file(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert file.read_text() == "theirs"
    os.close(open_private_directory(directory, owners=[NOBODY]))


def test_a_file_that_is_not_this_users_alone_is_neither_read_nor_written(tmp_path: Path) -> None:
    letter, link, fifo = tmp_path / "letter", tmp_path / "link", tmp_path / "fifo"
    letter.write_text("keep")
    letter.chmod(0o600)
    link.symlink_to(letter)
    os.mkfifo(fifo)
    truncating = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with leaving_nothing():
        for flags in (os.O_RDONLY, truncating):
            with pytest.raises(NotPrivate, match=f"{link}' is a symbolic link.*name the regular file"):
                open_private_file(link, flags)
            with pytest.raises(NotPrivate, match=f"{fifo}' is not a regular file"):
                open_private_file(fifo, flags)
        letter.chmod(0o622)
        with pytest.raises(NotPrivate, match=rf"{letter}' can be written by other users .*chmod 600"):
            open_private_file(letter, truncating)
        assert letter.read_text() == "keep"
        letter.chmod(0o644)
        assert read_private_file(letter) == b"keep"
        assert mode(letter) == 0o644
        os.close(open_private_file(letter, os.O_WRONLY))
        assert mode(letter) == 0o600
        os.close(open_private_file(letter, truncating))
    assert letter.read_text() == ""


def test_a_file_is_replaced_as_a_whole_also_where_a_link_has_its_name(tmp_path: Path) -> None:
    letter, link = tmp_path / "letter", tmp_path / "link"
    letter.write_text("keep")
    link.symlink_to(letter)
    write_private_file(link, b"new")
    assert letter.read_text() == "keep"
    assert link.read_bytes() == b"new"
    assert not link.is_symlink()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["letter", "link"]
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        write_private_file(tmp_path / "directory", b"new")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "letter", "link"]  # and no draft

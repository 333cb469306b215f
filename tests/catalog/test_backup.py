"""The commands of the documentation that back up and restore the database of a catalog."""

from __future__ import annotations

import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from dissociated.catalog.database import Database
from dissociated.errors import CatalogError
from support.nodes import kill, spawn
from support.pages import ROOT, blocks

BACK_UP, RESTORE = (
    block.code for block in blocks(ROOT / "docs" / "running.md") if "catalog.db" in block.code and "cp " in block.code
)
#: A catalog that appends to 40 datasets in turn.
CATALOG = """
import sys
from dissociated.catalog.database import Database
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import Commit
from dissociated.control.version import NodeRecord, Part
database = Database(sys.argv[1])
database.register(NodeRecord("a", "h", "b", "f", ()), [], "", FOREVER, serial=-1)
for n in range(int(sys.argv[2]), int(sys.argv[3])):
    database.publish(Commit(f"d{n % 40}", key=str(n), mode="append"), b"s", [Part(str(n), "a", b"%d" % n, 1, 1)])
print("reached", flush=True)
sys.stdin.readline()
database.close()
"""
#: A catalog whose first start stops before a statement of SQLite.
FIRST_START = """
import sqlite3, sys
class Connection(sqlite3.Connection):
    def execute(self, sql, *values):
        if sys.argv[2] in sql:
            print("reached", flush=True)
            sys.stdin.readline()
        return super().execute(sql, *values)
connect = sqlite3.connect
sqlite3.connect = lambda path, **options: connect(path, factory=Connection, **options)
from dissociated.catalog.database import Database
Database(sys.argv[1])
"""


def shell(code: str, directory: Path) -> int:
    return subprocess.run(["sh", "-c", code], cwd=directory).returncode


def commit(path: Path, first: int, last: int, *, killed: bool) -> None:
    process = spawn(CATALOG, path, str(first), str(last))
    if killed:
        kill(process)
    else:
        process.communicate("\n")


def versions(path: Path) -> list[tuple[int, int | None]]:
    with closing(Database(str(path))) as database:
        return [(version.number, version.rows) for version in database.datasets()]


def test_a_backup_is_restored_beside_the_log_of_a_killed_catalog(memory: Path, forks: None) -> None:
    path = memory / "catalog.db"
    commit(path, 0, 80, killed=False)
    assert shell(BACK_UP, memory) == 0
    commit(path, 80, 200, killed=True)
    assert shell(BACK_UP, memory) != 0  # The copy would lack the commits in the log.
    assert shell(RESTORE, memory) == 0
    assert versions(path) == [(2, 2)] * 40
    assert sorted(entry.name for entry in memory.iterdir()) == ["catalog.db", "copy.db"]


def test_a_catalog_that_was_killed_is_backed_up_after_a_restart(memory: Path, forks: None) -> None:
    path = memory / "catalog.db"
    commit(path, 0, 40, killed=True)
    assert shell(BACK_UP, memory) != 0
    commit(path, 40, 40, killed=False)
    assert shell(BACK_UP, memory) == 0
    assert versions(memory / "copy.db") == [(1, 1)] * 40


def test_an_empty_file_is_not_restored(memory: Path) -> None:
    """SQLite leaves such a file if it copies a database that is locked."""
    path = memory / "catalog.db"
    path.touch()
    for _ in range(2):
        with pytest.raises(CatalogError, match=r"catalog\.db' is empty, as a failed copy is: restore another copy"):
            Database(str(path))
    path.unlink()
    assert versions(path) == []


def test_a_catalog_that_was_killed_while_it_created_its_database_starts(memory: Path, forks: None) -> None:
    path = memory / "catalog.db"
    for statement in ("journal_mode", "CREATE TABLE versions"):
        process = spawn(FIRST_START, path, statement)
        kill(process)
        assert path.exists()
        assert versions(path) == []
        assert [entry.name for entry in memory.iterdir()] == ["catalog.db"]
        path.unlink()

"""The tables of a catalog: one SQLite database, in a file or in memory.

nodes          who serves parts, and until when it is believed to live
versions       what a dataset was at one commit; the one that was not replaced is the dataset
parts          what one node holds under one ticket; one that no version has is to be released by its node
version_parts  a version is its parts, in the order of their numbers; those with one number are copies
commits        the key of every commit, so that one that is sent twice is done once
aborts         the key of every commit that shall never come
unused         the parts that no version has any more
unsettled      the parts that were all of a version and are not any more, until their nodes say that they know
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dissociated.errors import CatalogError
from dissociated.fork import ProcessBound, leak

_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS nodes (
    id TEXT PRIMARY KEY, host TEXT NOT NULL, boot_id TEXT NOT NULL, flight TEXT NOT NULL, locations TEXT NOT NULL,
    seen REAL NOT NULL, lives_until REAL NOT NULL, digest TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS versions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, schema BLOB NOT NULL, rows INTEGER, nbytes INTEGER,
    tags TEXT NOT NULL, created REAL NOT NULL, expires REAL, replaced REAL, promised REAL NOT NULL DEFAULT 0,
    began TEXT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS the_dataset ON versions (name) WHERE replaced IS NULL;
CREATE TABLE IF NOT EXISTS parts (
    id TEXT PRIMARY KEY, node TEXT NOT NULL REFERENCES nodes, ticket BLOB NOT NULL, rows INTEGER, nbytes INTEGER,
    serial INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS by_ticket ON parts (ticket);
CREATE TABLE IF NOT EXISTS version_parts (
    version INTEGER NOT NULL REFERENCES versions ON DELETE CASCADE, number INTEGER NOT NULL,
    part TEXT NOT NULL REFERENCES parts ON DELETE CASCADE, PRIMARY KEY (version, number, part)
);
CREATE INDEX IF NOT EXISTS by_part ON version_parts (part);
CREATE INDEX IF NOT EXISTS by_name ON versions (name);
CREATE INDEX IF NOT EXISTS by_expiry ON versions (expires) WHERE replaced IS NULL AND expires IS NOT NULL;
CREATE INDEX IF NOT EXISTS by_promise ON versions (promised) WHERE replaced IS NOT NULL;
CREATE TABLE IF NOT EXISTS unused (part TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS unsettled (part TEXT PRIMARY KEY);
CREATE TRIGGER IF NOT EXISTS out_of_use AFTER DELETE ON version_parts
WHEN NOT EXISTS (SELECT 1 FROM version_parts WHERE part = OLD.part)
BEGIN INSERT OR IGNORE INTO unused VALUES (OLD.part); END;
CREATE TRIGGER IF NOT EXISTS in_use AFTER INSERT ON version_parts BEGIN DELETE FROM unused WHERE part = NEW.part; END;
CREATE TRIGGER IF NOT EXISTS lost AFTER DELETE ON parts BEGIN DELETE FROM unused WHERE part = OLD.id; END;
CREATE TRIGGER IF NOT EXISTS lost_unsettled AFTER DELETE ON parts
BEGIN DELETE FROM unsettled WHERE part = OLD.id; END;
CREATE TABLE IF NOT EXISTS commits (key TEXT PRIMARY KEY, version INTEGER NOT NULL, at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS aborts (key TEXT PRIMARY KEY, at REAL NOT NULL);
CREATE INDEX IF NOT EXISTS commits_by_age ON commits (at);
CREATE INDEX IF NOT EXISTS aborts_by_age ON aborts (at);
INSERT OR IGNORE INTO unused SELECT id FROM parts WHERE id NOT IN (SELECT part FROM version_parts);
"""


class Tables(ProcessBound):
    """The tables in the file `path`, which is locked until `close`. Whatever is run is within a `transaction`.

    Raises CatalogError where the file cannot be used, or another catalog uses it.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.RLock()
        self._path = path
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=1.0)
            self._connection.row_factory = sqlite3.Row
            self._prepare()
        except sqlite3.Error as error:
            if hasattr(self, "_connection"):
                self._connection.close()
            raise CatalogError(f"the catalog's database {path}: {error}; is another catalog using it?") from None
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        leak(self._connection)  # SQLite takes its parent's locks for its own, and would remove the log that is in use

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute("PRAGMA foreign_keys = ON")
        (schema_version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if schema_version not in (0, _SCHEMA_VERSION):
            raise CatalogError(f"the catalog's database {self._path} was written by another version of this library")
        self._connection.executescript(_SCHEMA)
        self._connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def run(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """Run one statement."""
        return self._connection.execute(sql, values)

    def all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """All rows of a query."""
        return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        if self.is_inherited:
            return
        with self._lock:
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, by one thread at a time. Raises CatalogError for what SQLite raises."""
        self.check_process()
        with self._lock:
            try:
                self._connection.rollback()  # what Ctrl-C has left, which may come between any two lines of this
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._connection.rollback()  # SQLite itself has done so where the disk is full
                    raise
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise CatalogError(f"the catalog's database {self._path}: {error}") from None

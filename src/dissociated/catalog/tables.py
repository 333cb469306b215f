"""The tables of a catalog: an SQLite database, in a file or in memory.

nodes          The processes that serve parts, each with the time until which it is considered alive.
versions       The versions of datasets. The current version of a dataset has no time in `replaced`; a hidden one has
               the time at which it expires. `number` counts the versions of a name and is never reused. `id` has a
               meaning only within the database. `origin` is an `Origin`.
numbers        For each name, the last number assigned and the last number published, also if that version is gone.
               `lost` is a `Loss`: whether that version is gone without having been dropped or replaced.
parts          The data that one node holds under one ticket. The node deletes parts that no version has. `set_aside`
               tells whether the node could not read the part at its start.
version_parts  The parts of each version, in the order of their numbers. Parts with the same number are copies.
commits        The key of every commit and the name of its dataset, so that a repeated commit has no effect. `version`
               is 0 if the store of this process has the key, and the database has never known the version.
aborts         The key of every commit that must not be made any more.
abandoned      The parts that waited too long for their commit. Their nodes delete them, so no version may get them.
unused         The parts that no version has.
unsettled      The parts that were the whole of a version and no longer are, until their nodes acknowledge that.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from dissociated.base.fork import ProcessBound, leak
from dissociated.base.once import once
from dissociated.base.private import claim_private_file, open_private_directory
from dissociated.control.change_counter import ChangeCounter
from dissociated.errors import CatalogDamaged, CatalogError, NotPrivate

_log = logging.getLogger(__name__)

_SCHEMA_VERSION = 5
_MEMORY = ":memory:"
_RECOGNIZED = 1 << 20  # the number of bytes of a damaged file that are searched for the name of a table
_TABLES = """
CREATE TABLE nodes (
    id TEXT PRIMARY KEY, host TEXT NOT NULL, boot_id TEXT NOT NULL, flight TEXT NOT NULL, locations TEXT NOT NULL,
    seen REAL NOT NULL, lives_until REAL NOT NULL, digest TEXT NOT NULL DEFAULT '', crc INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE versions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, number INTEGER NOT NULL, schema BLOB NOT NULL,
    rows INTEGER, nbytes INTEGER, tags TEXT NOT NULL, created REAL NOT NULL, expires REAL, replaced REAL,
    promised REAL NOT NULL DEFAULT 0, began TEXT NOT NULL, origin INTEGER NOT NULL, crc INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX the_dataset ON versions (name) WHERE replaced IS NULL;
CREATE UNIQUE INDEX by_number ON versions (name, number);
CREATE TABLE numbers (
    name TEXT PRIMARY KEY, last INTEGER NOT NULL, published INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0, crc INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE parts (
    id TEXT PRIMARY KEY, node TEXT NOT NULL REFERENCES nodes, ticket BLOB NOT NULL, rows INTEGER, nbytes INTEGER,
    serial INTEGER NOT NULL, set_aside INTEGER NOT NULL DEFAULT 0, crc INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_ticket ON parts (ticket);
CREATE TABLE version_parts (
    version INTEGER NOT NULL REFERENCES versions ON DELETE CASCADE, number INTEGER NOT NULL,
    part TEXT NOT NULL REFERENCES parts ON DELETE CASCADE, PRIMARY KEY (version, number, part)
);
CREATE INDEX by_part ON version_parts (part);
CREATE INDEX by_expiry ON versions (expires) WHERE replaced IS NULL AND expires IS NOT NULL;
CREATE INDEX by_promise ON versions (max(replaced, promised)) WHERE replaced IS NOT NULL;
CREATE TABLE unused (part TEXT PRIMARY KEY);
CREATE TABLE unsettled (part TEXT PRIMARY KEY);
CREATE TRIGGER out_of_use AFTER DELETE ON version_parts
WHEN NOT EXISTS (SELECT 1 FROM version_parts WHERE part = OLD.part)
BEGIN INSERT OR IGNORE INTO unused VALUES (OLD.part); END;
CREATE TRIGGER in_use AFTER INSERT ON version_parts BEGIN DELETE FROM unused WHERE part = NEW.part; END;
CREATE TRIGGER lost AFTER DELETE ON parts BEGIN DELETE FROM unused WHERE part = OLD.id; END;
CREATE TRIGGER lost_unsettled AFTER DELETE ON parts
BEGIN DELETE FROM unsettled WHERE part = OLD.id; END;
CREATE TABLE commits (
    key TEXT PRIMARY KEY, name TEXT NOT NULL, version INTEGER NOT NULL, at REAL NOT NULL,
    crc INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE aborts (key TEXT PRIMARY KEY, at REAL NOT NULL, crc INTEGER NOT NULL DEFAULT 0);
CREATE TABLE abandoned (part TEXT PRIMARY KEY, at REAL NOT NULL, crc INTEGER NOT NULL DEFAULT 0);
CREATE INDEX commits_by_age ON commits (at);
CREATE INDEX aborts_by_age ON aborts (at);
CREATE INDEX abandoned_by_age ON abandoned (at);
"""
#: The columns of each table whose checksum is in its column `crc`. The other tables consist of indexed columns only, so
#: the integrity check of SQLite covers them.
_SEALED = {
    "nodes": ("id", "host", "boot_id", "flight", "locations", "seen", "lives_until", "digest"),
    "versions": (
        "id",
        "name",
        "number",
        "schema",
        "rows",
        "nbytes",
        "tags",
        "created",
        "expires",
        "replaced",
        "promised",
        "began",
        "origin",
    ),
    "numbers": ("name", "last", "published", "lost"),
    "parts": ("id", "node", "ticket", "rows", "nbytes", "serial", "set_aside"),
    "commits": ("key", "name", "version", "at"),
    "aborts": ("key", "at"),
    "abandoned": ("part", "at"),
}


def _seals() -> Iterator[str]:
    for table, columns in _SEALED.items():
        new = ", ".join(f"NEW.{column}" for column in columns)
        for name, event in (("insert", "INSERT"), ("update", f"UPDATE OF {', '.join(columns)}")):
            yield (
                f"CREATE TRIGGER seal_{table}_{name} AFTER {event} ON {table} BEGIN UPDATE {table}"
                f" SET crc = checksum({new}) WHERE rowid = NEW.rowid; END;"
            )


_SCHEMA = _TABLES + "\n".join(_seals())


class Tables(ProcessBound):
    """The tables in the file `path`, which is locked until `close`. Statements run within a `transaction`.

    Only this user may read the file, since the tickets in it give access to the data. Others may read its directory. A
    damaged file is renamed, which is logged as an error, and replaced by empty tables. The nodes then register again
    with all their parts.

    Raises:
        CatalogError: The file cannot be used, or another catalog uses it.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.RLock()
        self._path = path
        #: The number of changes of all transactions that are committed, or about to be. SQLite's own number may be read
        #: under `_lock` alone: it is read with the GIL, and SQLite's mutex may belong to a thread in `_checksum`, which
        #: waits for the GIL.
        self.changes = 0
        #: Whether a damaged file was replaced by these tables when this process opened it.
        self.replaces_damaged = False
        try:
            self._open()
        except CatalogDamaged as error:
            self.replaces_damaged = True
            aside = _set_aside(Path(path))
            _log.error(
                "the catalog's database is damaged and was set aside: path=%s aside=%s error=%s", *(path, aside), error
            )
            self._open()
        #: The counter by which readers on this host know that nothing has changed.
        self.counter = ChangeCounter()
        self.bind_to_process()

    def _open(self) -> None:
        is_new = self._path == _MEMORY or _claim(Path(self._path))
        with self._errors(at_start=True):
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=1.0)
            try:
                self._connection.row_factory = sqlite3.Row
                self._connection.create_function("checksum", -1, _checksum)
                self._prepare(is_new)
            except BaseException:
                self._connection.close()
                raise
        if self._path != _MEMORY:
            with suppress(OSError):
                _unfinished(Path(self._path)).unlink()

    def after_fork_in_child(self) -> None:
        # In the child, SQLite would consider the locks of its parent its own, and remove the log that the parent uses.
        leak(self._connection)

    def _prepare(self, is_new: bool) -> None:
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        (schema_version,) = self._connection.execute("PRAGMA user_version").fetchone()
        schema = _schema_of(self._connection)
        names = {name for name, _ in schema}
        if not names and not schema_version:
            if not is_new:
                raise CatalogError(
                    f"the catalog's database {self._path!r} is empty, as a failed copy is: restore another copy, or "
                    "remove the file to begin with an empty catalog"
                )
            self._create()
        elif not names >= {"nodes", "parts"} and not names >= {"versions", "commits"}:
            raise CatalogError(f"the catalog's database {self._path} has the tables of another program")
        elif schema_version != _SCHEMA_VERSION:
            raise CatalogError(f"the catalog's database {self._path} was written by another version of this library")
        elif schema != _expected_schema():
            raise self._damaged("it has other tables")
        else:
            self._check_structure()
            self._check_rows()
        self._connection.execute("PRAGMA foreign_keys = ON")
        #: The id of these tables and of copies of the file. Other databases have other ids.
        self.id: int = self._connection.execute("PRAGMA application_id").fetchone()[0]

    def _create(self) -> None:
        """Create the tables in one transaction."""
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            for statement in _statements(_SCHEMA):
                run(statement)
            run(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            run(f"PRAGMA application_id = {1 + secrets.randbelow((1 << 31) - 1)}")
            run("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise

    def _check_structure(self) -> None:
        """Raise CatalogDamaged if pages or indexes are not as SQLite wrote them."""
        if self._path != _MEMORY:
            (answer,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise self._damaged(answer)

    def _check_rows(self) -> None:
        """Raise CatalogDamaged if the checksum of a row is wrong."""
        for table, columns in _SEALED.items():
            sql = f"SELECT 1 FROM {table} WHERE crc IS NOT checksum({', '.join(columns)}) LIMIT 1"
            try:
                rows = self._connection.execute(sql).fetchall()
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                    raise
                raise self._damaged(f"a text of {table} is no UTF-8") from None
            if rows:
                raise self._damaged(f"a row of {table} has another checksum")

    def check(self, table: str, row: sqlite3.Row) -> None:
        """Raise CatalogDamaged if the checksum of `row`, which has all columns of the table, is wrong."""
        if row["crc"] != _checksum(*(row[column] for column in _SEALED[table])):
            raise self._damaged(f"a row of {table} has another checksum")

    def _damaged(self, why: object) -> CatalogDamaged:
        return CatalogDamaged(
            f"the catalog's database {str(self._path)!r} is damaged ({why}): restart the catalog, which sets the "
            "database aside and asks its nodes for their datasets"
        )

    @contextmanager
    def _errors(self, at_start: bool = False) -> Iterator[None]:
        """Convert the errors of SQLite to CatalogError."""
        try:
            yield
        except UnicodeDecodeError as error:  # The invalid text is a name in the file, or part of a message of SQLite.
            raise self._damaged(error) from None
        except sqlite3.Error as error:
            code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
            is_damaged = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            # An open database was recognized when it was opened. To open and close its file would release its lock.
            if is_damaged and (not at_start or _is_ours(Path(self._path))):
                raise self._damaged(error) from None
            hint = ""
            if at_start and is_damaged:
                hint = "; if it was the database of this catalog, move it away, and the nodes report their datasets"
            elif at_start:
                hint = "; is another catalog using it?"
            raise CatalogError(f"the catalog's database {self._path}: {error}{hint}") from None

    def run(self, sql: str, values: Sequence[Any] | Mapping[str, Any] = ()) -> sqlite3.Cursor:
        """Run one statement, and return its cursor."""
        return self._connection.execute(sql, values)

    def all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Run a query, and return all its rows."""
        return self._connection.execute(sql, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        if self.is_inherited:
            return
        with self._lock:
            self.counter.close()
            self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run a transaction, in one thread at a time. Errors of SQLite are raised as CatalogError."""
        self.check_process()
        with self._lock, self._errors():
            # End a transaction that Ctrl-C interrupted, which can happen between any two lines here.
            self._connection.rollback()
            self._connection.execute("BEGIN")  # The first statement that writes takes the lock for writing.
            try:
                yield
            except BaseException:
                self._connection.rollback()  # If the disk is full, SQLite has rolled back already.
                raise
            number = self._connection.total_changes & 0xFFFF_FFFF  # SQLite's number wraps around
            if number != self.counter.number:
                self.counter.number = 0  # The 0 remains if Ctrl-C or an error comes before the last line.
            self.changes = number
            self._connection.execute("COMMIT")
            self.counter.number = number


def _unfinished(path: Path) -> Path:
    """Return the path of a file that exists while the tables of a new database are not complete."""
    return path.with_name(f"{path.name}.unfinished")


def _claim(path: Path) -> bool:
    """Make sure that a database file is accessible to this user alone; create the file if it is missing.

    Returns:
        Whether the file is new, so that it may lack tables. Otherwise, a file without tables is a failed copy.

    Raises:
        CatalogError: Other users can access the file, or the file cannot be created.
    """
    try:
        # A user who can create a log file next to the database could make SQLite read anything from it.
        os.close(open_private_directory(path.absolute().parent.resolve(), owners=[0], readable=True))
        if not os.path.lexists(path):
            # This process may end before the new file has tables. The next start then creates them.
            claim_private_file(_unfinished(path), create=True)
        claim_private_file(path, create=True)  # SQLite gives its logs the same mode.
        for log in ("-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                claim_private_file(f"{path}{log}")
        return os.path.lexists(_unfinished(path))
    except NotPrivate as error:
        raise CatalogError(f"the catalog's database {str(path)!r}: {error}") from None
    except OSError as error:
        raise CatalogError(f"the catalog's database {str(path)!r}: {error.strerror}") from None


def _checksum(*values: object) -> int:
    crc = 0
    for value in values:
        encoded = value if isinstance(value, bytes) else ascii(value).encode()
        crc = zlib.crc32(encoded, zlib.crc32(b"%d " % len(encoded), crc))
    return crc


def _statements(script: str) -> Iterator[str]:
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement.strip()
            statement = ""


def _schema_of(connection: sqlite3.Connection) -> set[tuple[str, str | None]]:
    """Return the names of tables, indexes and triggers, with the statements that created them."""
    return {(row[0], row[1]) for row in connection.execute("SELECT name, sql FROM sqlite_master")}


@once
def _expected_schema() -> set[tuple[str, str | None]]:
    with closing(sqlite3.connect(_MEMORY)) as connection:
        connection.create_function("checksum", -1, _checksum)
        connection.executescript(_SCHEMA)
        return _schema_of(connection)


def _is_ours(path: Path) -> bool:
    """Return whether a damaged file was the database of a catalog. No other file may be renamed."""
    try:
        with path.open("rb") as file:
            return b"version_parts" in file.read(_RECOGNIZED)
    except OSError:
        return False


def _set_aside(path: Path) -> Path:
    """Rename a database and its log, and return the new path. Raise CatalogError if that fails."""
    new_path = path.with_name(f"{path.name}.damaged")
    number = 1
    while new_path.exists():
        number += 1
        new_path = path.with_name(f"{path.name}.damaged-{number}")
    try:
        for suffix in ("-wal", "-shm", ""):
            source = Path(f"{path}{suffix}")
            if source.exists():
                source.rename(f"{new_path}{suffix}")
    except OSError as error:
        raise CatalogError(
            f"the catalog's database {str(path)!r} is damaged, and could not be renamed to {new_path}: {error.strerror}"
        ) from None
    return new_path

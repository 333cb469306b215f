"""The tables of a catalog: one SQLite database, in a file or in memory.

nodes          who serves parts, and until when it is believed to live
versions       what a dataset was at one commit; the one that was not replaced is the dataset. `number` is counted for
               each name, and never given twice; `id` is known within the database alone. `origin` is an `Origin`
numbers        the last number that was given for each name, and the last that was published, also of one that is gone;
               `lost` if that was neither dropped nor replaced
parts          what one node holds under one ticket; one that no version has is to be released by its node
version_parts  a version is its parts, in the order of their numbers; those with one number are copies
commits        the key of every commit, so that one that is sent twice is done once
aborts         the key of every commit that shall never come
unused         the parts that no version has any more
unsettled      the parts that were all of a version and are not any more, until their nodes say that they know
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
from dissociated.errors import CatalogDamaged, CatalogError, NotPrivate

_log = logging.getLogger(__name__)

_SCHEMA_VERSION = 3
_MEMORY = ":memory:"
_RECOGNIZED = 1 << 20  # bytes of a damaged file that are searched for the name of a table
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
    serial INTEGER NOT NULL, crc INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_ticket ON parts (ticket);
CREATE TABLE version_parts (
    version INTEGER NOT NULL REFERENCES versions ON DELETE CASCADE, number INTEGER NOT NULL,
    part TEXT NOT NULL REFERENCES parts ON DELETE CASCADE, PRIMARY KEY (version, number, part)
);
CREATE INDEX by_part ON version_parts (part);
CREATE INDEX by_expiry ON versions (expires) WHERE replaced IS NULL AND expires IS NOT NULL;
CREATE INDEX by_promise ON versions (promised) WHERE replaced IS NOT NULL;
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
    key TEXT PRIMARY KEY, version INTEGER NOT NULL, at REAL NOT NULL, crc INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE aborts (key TEXT PRIMARY KEY, at REAL NOT NULL, crc INTEGER NOT NULL DEFAULT 0);
CREATE INDEX commits_by_age ON commits (at);
CREATE INDEX aborts_by_age ON aborts (at);
"""
#: The columns of each table whose checksum is in its `crc`. The columns of other tables are in their indexes, too.
_SEALED = {
    "nodes": ("id", "host", "boot_id", "flight", "locations", "seen", "lives_until", "digest"),
    "versions": (
        *("id", "name", "number", "schema", "rows", "nbytes", "tags", "created", "expires", "replaced", "promised"),
        *("began", "origin"),
    ),
    "numbers": ("name", "last", "published", "lost"),
    "parts": ("id", "node", "ticket", "rows", "nbytes", "serial"),
    "commits": ("key", "version", "at"),
    "aborts": ("key", "at"),
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
#: From tables of the schema before: numbers were the ids of all versions together, and stay as they are.
_UPGRADES = {
    "nodes": "SELECT id, host, boot_id, flight, locations, seen, lives_until, digest, 0 FROM nodes",
    "versions": "SELECT id, name, id, schema, rows, nbytes, tags, created, expires, replaced, promised, began, 0, 0"
    " FROM versions",
    "numbers": "SELECT name, max(id), max(id), 0, 0 FROM versions GROUP BY name",
    "parts": "SELECT id, node, ticket, rows, nbytes, serial, 0 FROM parts",
    "version_parts": "SELECT * FROM version_parts",
    "commits": "SELECT *, 0 FROM commits",
    "aborts": "SELECT *, 0 FROM aborts",
    "unused": "SELECT * FROM unused",
    "unsettled": "SELECT * FROM unsettled",
}


class Tables(ProcessBound):
    """The tables in the file `path`, which is locked until `close`. Whatever is run is within a `transaction`.

    The file is this user's alone, since the tickets in it are as good as the data. Others may read its directory. A
    file that is damaged is set aside, with an event in the log, and new tables take its place: nodes tell again what
    they have.

    Raises CatalogError if the file cannot be used, or if another catalog uses it.
    """

    def __init__(self, path: str) -> None:
        self._lock = threading.RLock()
        self._path = path
        try:
            self._open()
        except CatalogDamaged as error:
            aside = _set_aside(Path(path))
            _log.error(
                "the catalog's database is damaged and was set aside: path=%s aside=%s error=%s", *(path, aside), error
            )
            self._open()
        self.bind_to_process()

    def _open(self) -> None:
        if self._path != _MEMORY:
            _close_to_others(Path(self._path))
        with self._errors(at_start=True):
            self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=1.0)
            try:
                self._connection.row_factory = sqlite3.Row
                self._connection.create_function("checksum", -1, _checksum)
                self._prepare()
            except BaseException:
                self._connection.close()
                raise

    def after_fork_in_child(self) -> None:
        leak(self._connection)  # SQLite takes its parent's locks for its own, and would remove the log that is in use

    def _prepare(self) -> None:
        self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        (schema_version,) = self._connection.execute("PRAGMA user_version").fetchone()
        found = _schema_of(self._connection)
        names = {name for name, _ in found}
        if not names and not schema_version:
            self._create()
        elif not names >= {"nodes", "parts"} and not names >= {"versions", "commits"}:
            raise CatalogError(f"the catalog's database {self._path} has the tables of something else")
        elif schema_version == _SCHEMA_VERSION - 1 and "numbers" not in names:
            self._check_structure()
            self._create(upgraded=True)
        elif schema_version not in (_SCHEMA_VERSION - 1, _SCHEMA_VERSION):
            raise CatalogError(f"the catalog's database {self._path} was written by another version of this library")
        elif found != _expected_schema() or schema_version != _SCHEMA_VERSION:
            raise self._damaged("it has other tables")
        else:
            self._check_structure()
            self._check_rows()
        self._connection.execute("PRAGMA foreign_keys = ON")
        #: Tells these tables, and copies of the file, from all others.
        self.id: int = self._connection.execute("PRAGMA application_id").fetchone()[0]

    def _create(self, upgraded: bool = False) -> None:
        """Make the tables, with what is in those of the schema before where they are `upgraded`, at once or not."""
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            queries = _UPGRADES if upgraded else {}
            rows = {table: run(query).fetchall() for table, query in queries.items()}
            for table in reversed(rows):
                run(f"DROP TABLE IF EXISTS {table}")
            for statement in _statements(_SCHEMA):
                run(statement)
            for table, content in rows.items():
                for row in content:
                    run(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", tuple(row))
            run(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            run(f"PRAGMA application_id = {1 + secrets.randbelow((1 << 31) - 1)}")
            run("COMMIT")
        except BaseException:
            self._connection.rollback()
            raise

    def _check_structure(self) -> None:
        """Raise CatalogDamaged where pages or indexes are not as SQLite has written them."""
        if self._path != _MEMORY:
            (answer,) = self._connection.execute("PRAGMA integrity_check(1)").fetchone()
            if answer != "ok":
                raise self._damaged(answer)

    def _check_rows(self) -> None:
        """Raise CatalogDamaged where a row is not as it was written."""
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
        """Raise CatalogDamaged where this row of a table, read whole, is not as it was written."""
        if row["crc"] != _checksum(*(row[column] for column in _SEALED[table])):
            raise self._damaged(f"a row of {table} has another checksum")

    def _damaged(self, why: object) -> CatalogDamaged:
        return CatalogDamaged(
            f"the catalog's database {self._path} is damaged ({why}). A catalog that starts sets it aside, and learns "
            "from its nodes what they have"
        )

    @contextmanager
    def _errors(self, at_start: bool = False) -> Iterator[None]:
        """Raise CatalogError for what SQLite raises."""
        try:
            yield
        except UnicodeDecodeError as error:  # of a name in the file, or in what SQLite says of it
            raise self._damaged(error) from None
        except sqlite3.Error as error:
            code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and _is_ours(Path(self._path)):
                raise self._damaged(error) from None
            hint = "; is another catalog using it?" if at_start else ""
            raise CatalogError(f"the catalog's database {self._path}: {error}{hint}") from None

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
        with self._lock, self._errors():
            self._connection.rollback()  # what Ctrl-C has left, which may come between any two lines of this
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._connection.rollback()  # SQLite itself has done so where the disk is full
                raise
            self._connection.execute("COMMIT")


def _close_to_others(path: Path) -> None:
    """Make sure that a database, which is created if it is missing, is this user's alone. Raises CatalogError."""
    try:
        # Whoever can create a log beside the database can have SQLite read anything from it.
        os.close(open_private_directory(path.absolute().parent.resolve(), owners=[0], readable=True))
        claim_private_file(path, create=True)  # SQLite gives its logs the same mode
        for log in ("-wal", "-shm", "-journal"):
            with suppress(FileNotFoundError):
                claim_private_file(f"{path}{log}")
    except NotPrivate as error:
        raise CatalogError(f"the catalog's database {path}: {error}") from None
    except OSError as error:
        raise CatalogError(f"the catalog's database {path}: {error.strerror}") from None


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
    """The names of tables, indexes and triggers, and the statements that have made them."""
    return {(row[0], row[1]) for row in connection.execute("SELECT name, sql FROM sqlite_master")}


@once
def _expected_schema() -> set[tuple[str, str | None]]:
    with closing(sqlite3.connect(_MEMORY)) as connection:
        connection.create_function("checksum", -1, _checksum)
        connection.executescript(_SCHEMA)
        return _schema_of(connection)


def _is_ours(path: Path) -> bool:
    """Whether a file that is damaged was the database of a catalog: nothing else may be set aside."""
    try:
        with path.open("rb") as file:
            return b"version_parts" in file.read(_RECOGNIZED)
    except OSError:
        return False


def _set_aside(path: Path) -> Path:
    """Rename a database with its log. Returns what it is called then. Raises CatalogError."""
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    try:
        for suffix in ("-wal", "-shm", ""):
            source = Path(f"{path}{suffix}")
            if source.exists():
                source.rename(f"{aside}{suffix}")
    except OSError as error:
        raise CatalogError(
            f"the catalog's database {path} is damaged, and could not be renamed to {aside}: {error.strerror}"
        ) from None
    return aside

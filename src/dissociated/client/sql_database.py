"""The things that a client keeps between its queries of SQL: a database of DuckDB, and versions in shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound, leak
from dissociated.client.idle import MAX_AGE
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.messages import MAX_CURRENT
from dissociated.errors import TransportError

if TYPE_CHECKING:
    import duckdb

    from dissociated.client.mapped import MappedVersion

_MAX_VERSIONS = MAX_CURRENT  # so that one call identifies all
_MAX_QUERIES = 32


def open_database() -> duckdb.DuckDBPyConnection:
    """Return a connection to a new, empty database, in which names do not refer to variables of Python.

    It keeps no files in memory that queries have read. This takes 20 ms: DuckDB registers its functions, and starts
    threads.
    """
    import duckdb  # on first use: slow to import, and optional

    return duckdb.connect(config={"python_enable_replacements": False, "enable_external_file_cache": False})


class SqlDatabase(ProcessBound):
    """An empty database that is opened by the first query, and kept for the next ones. It is thread-safe.

    Each query has a connection of its own, in which the objects that it registers are temporary views: no other
    connection sees them. The same query may get it again. Queries should not change the database itself, which some
    functions of DuckDB do.
    """

    def __init__(self) -> None:
        #: The mapped datasets of the last queries.
        self.kept_versions = KeptVersions()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._lock = threading.Lock()
        self.bind_to_process()

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Return a new connection, which the caller closes."""
        with self._lock:
            if self._connection is None:
                self.bind_to_process()  # a child that opens a database may fork, too
                self._connection = open_database()
            return self._connection.cursor()

    def close(self) -> None:
        """Close the database as soon as its last connection is closed. A later query opens another one."""
        self.kept_versions.close()
        with self._lock:
            self._connection = None  # its own `close` would close the connections of other threads, or fail

    def after_fork_in_child(self) -> None:
        """Leak the database: its threads are those of the parent. The child opens another one."""
        leak(self._connection)
        self._connection = None
        self._lock = threading.Lock()  # a thread of the parent may hold the other


@dataclass
class KeptQuery:
    """A query that has run: its statement, and a connection in which the Tables that it reads are registered."""

    statement: duckdb.Statement
    connection: duckdb.DuckDBPyConnection
    tables: dict[str, Any]


@dataclass
class _Entry:
    info: DatasetInfo
    mapped: MappedVersion
    last_use: float  # by time.monotonic


class KeptVersions(ProcessBound):
    """The mapped versions of the last queries, which the next ones read again, and these queries. It is thread-safe.

    A query over memory that is mapped anew has a page fault for each few pages, which can take longer than the rest of
    the query. A version is kept until no query has used it for MAX_AGE seconds. Then a thread gives it back, because a
    node cannot make room of mapped memory. For the same reason, a client that needs room closes this object.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}  # by name; the version that was used last is the last one
        self._queries: dict[str, KeptQuery] = {}  # by text; the query that was put last is the last one
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._is_stopped = False
        self._thread: StreamThread | None = None
        self.bind_to_process()

    def get(self, info: DatasetInfo) -> MappedVersion | None:
        """Return the version that the catalog has described, if it is kept."""
        with self._lock:
            entry = self._entries.get(info.name)
            if entry is None or _identity(entry.info) != _identity(info):
                return None
            self._entries[info.name] = self._entries.pop(info.name)
            entry.last_use = time.monotonic()
            return entry.mapped

    def find(self, names: Iterable[str]) -> list[DatasetInfo]:
        """Return the descriptions of the versions of these names that are kept and have not expired."""
        now = time.time()
        with self._lock:
            infos = [self._entries[name].info for name in names if name in self._entries]
        return [info for info in infos if info.expires is None or info.expires > now]

    def put(self, info: DatasetInfo, mapped: MappedVersion) -> None:
        """Keep a version in place of the others of its name."""
        removed = []  # which is freed without the lock
        with self._lock:
            if self._thread is None:
                self._start()
            if self._thread is None:
                return
            if info.name in self._entries:
                removed += self._remove({info.name})
            self._entries[info.name] = _Entry(info, mapped, time.monotonic())
            if len(self._entries) > _MAX_VERSIONS:
                removed += self._remove({next(iter(self._entries))})

    def _remove(self, names: Set[str]) -> list[object]:
        """Remove versions, and the queries that read them. Return them: to unmap them may take long.

        The caller holds the lock.
        """
        texts = [text for text, query in self._queries.items() if not names.isdisjoint(query.tables)]
        return [*(self._queries.pop(text) for text in texts), *(self._entries.pop(name) for name in names)]

    def take_query(self, text: str) -> KeptQuery | None:
        """Return a query with this text if it is kept. It is not kept any more."""
        with self._lock:
            return self._queries.pop(text, None)

    def put_query(self, text: str, query: KeptQuery) -> bool:
        """Keep a query in place of another one with this text. Return whether it is kept.

        It is not if it reads no version that is kept, or anything else.
        """
        removed = []  # which is freed without the lock
        with self._lock:
            entries = [(self._entries.get(name), table) for name, table in query.tables.items()]
            if not entries or any(entry is None or entry.mapped.whole is not table for entry, table in entries):
                return False
            removed.append(self._queries.pop(text, None))
            self._queries[text] = query
            if len(self._queries) > _MAX_QUERIES:
                removed.append(self._queries.pop(next(iter(self._queries))))
        return True

    def _start(self) -> None:
        self.bind_to_process()  # a child that keeps versions may fork, too
        thread = StreamThread(self, self._expire, (), "expire")
        with suppress(TransportError):  # the system has no more threads, so nothing is kept
            thread.start()
            self._thread = thread

    def _expire(self) -> None:
        while (pause := self._remove_old()) is not None:
            self._changed.wait(pause)

    def _remove_old(self) -> float | None:
        """Remove versions that are old. Return the seconds until the next one is; None if there is none."""
        with self._lock:
            self._changed.clear()
            oldest = time.monotonic() - MAX_AGE
            old = {name for name, entry in self._entries.items() if entry.last_use <= oldest or self._is_stopped}
            removed = self._remove(old)
            pause = min((entry.last_use for entry in self._entries.values()), default=None)
            if pause is None:
                self._thread = None
            else:
                pause -= oldest
        del removed  # without the lock
        return pause

    def stop(self) -> None:
        """Make the thread return. Called at the exit of the interpreter."""
        self._is_stopped = True
        self._changed.set()

    def close(self) -> None:
        """Keep nothing. Memory is given back when the last query that reads it ends."""
        with self._lock:
            removed = self._remove({*self._entries})
            self._changed.set()
        del removed  # without the lock

    def after_fork_in_child(self) -> None:
        """Discard the versions, which the parent keeps, leak its connections, and discard the thread."""
        self._entries = {}
        leak(self._queries)
        self._queries = {}
        self._lock = threading.Lock()  # a thread of the parent may hold the other
        self._changed = threading.Event()
        self._thread = None


def _identity(info: DatasetInfo) -> tuple[int, str, float]:
    """Return an identity of a version among all versions of its name, also of those in an earlier catalog."""
    return info.version, info.lineage_id, info.created

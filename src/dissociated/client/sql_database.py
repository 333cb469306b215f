"""The database of DuckDB in which a client runs its queries of SQL, and the versions in shared memory that it keeps."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound, leak
from dissociated.client.idle import MAX_AGE
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import TransportError

if TYPE_CHECKING:
    import duckdb

    from dissociated.client.mapped import MappedVersion

_MAX_VERSIONS = 64


def open_database() -> duckdb.DuckDBPyConnection:
    """Return a connection to a new, empty database, in which names do not refer to variables of Python.

    This takes 20 ms: DuckDB registers its functions, and starts threads.
    """
    import duckdb  # on first use: slow to import, and optional

    return duckdb.connect(config={"python_enable_replacements": False})


class SqlDatabase(ProcessBound):
    """An empty database that is opened by the first query, and kept for the next ones. It is thread-safe.

    Each query has a connection of its own, in which the objects that it registers are temporary views: no other
    connection sees them. Queries must not change the database itself.
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
class _Entry:
    info: DatasetInfo
    mapped: MappedVersion
    last_use: float  # by time.monotonic


class KeptVersions(ProcessBound):
    """The mapped versions of the last queries, which the next ones read again. It is thread-safe.

    A query over memory that is mapped anew has a page fault for each few pages, which can take longer than the rest of
    the query. A version is kept until no query has used it for MAX_AGE seconds. Then a thread gives it back, because a
    node cannot make room of mapped memory.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}  # by name; the version that was used last is the last one
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: StreamThread | None = None
        self.bind_to_process()

    def get(self, info: DatasetInfo) -> MappedVersion | None:
        """Return the version that the catalog has described, if it is kept."""
        with self._lock:
            entry = self._entries.get(info.name)
            if entry is None or _identity(entry.info) != _identity(info):
                return None
            self._keep(entry)
            return entry.mapped

    def put(self, info: DatasetInfo, mapped: MappedVersion) -> None:
        """Keep a version in place of the others of its name."""
        with self._lock:
            self._keep(_Entry(info, mapped, 0.0))
            if self._thread is None:
                self.bind_to_process()  # a child that keeps versions may fork, too
                self._closing.clear()
                self._thread = StreamThread(self, self._expire, (), "give back")
                try:
                    self._thread.start()
                except TransportError:  # the system has no more threads, and this version is not kept
                    self._thread = None
                    self._entries.clear()

    def _keep(self, entry: _Entry) -> None:
        entry.last_use = time.monotonic()
        self._entries.pop(entry.info.name, None)
        self._entries[entry.info.name] = entry
        if len(self._entries) > _MAX_VERSIONS:
            del self._entries[next(iter(self._entries))]

    def _expire(self) -> None:
        """Remove versions when they are old, until there are none."""
        while True:
            with self._lock:
                now = time.monotonic()
                self._entries = {name: entry for name, entry in self._entries.items() if entry.last_use + MAX_AGE > now}
                if self._closing.is_set() or not self._entries:
                    self._entries.clear()
                    self._thread = None
                    return
                pause = min(entry.last_use for entry in self._entries.values()) + MAX_AGE - now
            self._closing.wait(pause)

    def stop(self) -> None:
        """Make the thread return. Called at the exit of the interpreter."""
        self._closing.set()

    def close(self) -> None:
        """Keep nothing. Memory is given back when the last query that reads it ends."""
        with self._lock:
            self._entries.clear()
            self._closing.set()

    def after_fork_in_child(self) -> None:
        """Forget the versions, which the parent keeps, and the thread, which the child lacks."""
        self._entries = {}
        self._lock = threading.Lock()  # a thread of the parent may hold the other
        self._closing = threading.Event()
        self._thread = None


def _identity(info: DatasetInfo) -> tuple[int, str, float]:
    """Return an identity of a version among all versions of its name, also of those in an earlier catalog."""
    return info.version, info.lineage_id, info.created

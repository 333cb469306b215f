"""The database of DuckDB in which a client runs its queries of SQL."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dissociated.base.fork import ProcessBound, leak
from dissociated.client.kept_versions import KeptVersions

if TYPE_CHECKING:
    import duckdb


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
    connection sees them. Queries should not change the database itself, which some functions of DuckDB do.
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

"""Statements of SQL over the datasets of a catalog, which DuckDB runs in this process.

Importing this module imports duckdb and pyarrow.dataset.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self

import pyarrow as pa

from dissociated.client.calls import CatalogClient
from dissociated.client.dataset import DatasetHandle
from dissociated.client.mapped import MappedVersion
from dissociated.client.scanner import Scanner
from dissociated.control.locations import DatasetInfo
from dissociated.errors import DatasetNotFound, DissociatedError, OptionError, WrongKind

try:
    import duckdb
except ImportError:
    raise OptionError("sql needs DuckDB: pip install duckdb") from None

#: DuckDB has one class for everything that its catalog lacks, and names the missing table in the text alone.
_MISSING = re.compile("Table with name (.+) does not exist!")
#: Kinds of statements that change tables, and kinds after which there are tables that they can change.
_CHANGING = {"INSERT", "UPDATE", "DELETE", "DROP", "ALTER", "MERGE_INTO"}
_PREPARING = {"CREATE", "ATTACH"}
_MAX_SHARE = 4  # a scan is selective if statistics leave at most one batch of so many


class SqlSession:
    """A private database of DuckDB, in which names stand for the datasets of a client. It is a context manager.

    A name stands for the version that was current when a statement first used it. DuckDB resolves all names that it
    knows itself.

    Args:
        client: The client.
        advice: The end of the message that a statement would change a dataset.
    """

    def __init__(self, client: CatalogClient, advice: str) -> None:
        self._client = client
        self._advice = advice
        self._has_tables = False  # whether there may be tables that are no datasets
        self._handles: dict[str, _Handle] = {}
        self._connection = duckdb.connect()
        self._connection.execute("SET python_enable_replacements = false")  # names must not refer to Python variables

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def parse(self, query: str, *, returns_rows: bool = False) -> Sequence[duckdb.Statement]:
        """Return the statements of `query`, which `run` takes in this order.

        Args:
            query: One or more statements.
            returns_rows: Require a query as the last statement.

        Raises:
            OptionError: A statement is invalid, would change a dataset, or makes a table that would be gone when the
                session ends.
        """
        with _errors():
            statements = self._connection.extract_statements(query)
        kinds = [statement.type.name for statement in statements]
        for kind in kinds:
            if kind == "TRANSACTION":  # an error ends a transaction, and `run` repeats statements after errors
                raise OptionError("each statement is a transaction of its own: leave out BEGIN and COMMIT")
            if kind in _CHANGING and not self._has_tables:
                raise OptionError(f"sql changes no dataset ({kind.replace('_', ' ')}): {self._advice}")
            self._has_tables = self._has_tables or kind in _PREPARING
        if kinds and kinds[-1] == "CREATE":
            raise OptionError(f"the result of the last statement is deleted when the query ends: {self._advice}")
        if returns_rows and (not kinds or kinds[-1] != "SELECT"):
            raise OptionError("a query is needed as the last statement")
        return statements

    def run(self, statement: duckdb.Statement) -> pa.RecordBatchReader | None:
        """Run a statement.

        If DuckDB does not find a table, the dataset of this name is registered, and the statement is run again. If
        DuckDB scans most of a mapped version, it gets Tables, and the statement is run again.

        Returns:
            The result, which must be read before the next statement; None if the statement is no query.

        Raises:
            OptionError: The statement fails.
            DatasetNotFound: There is neither a table nor a dataset of a name.
            WrongKind: The dataset of a name holds tensors.
        """
        is_query = statement.type.name not in _CHANGING | _PREPARING
        if not self._has_tables:
            self._register_named(statement.query)
        while True:
            try:
                relation = self._connection.sql(statement.query)
                if relation is None or not is_query:
                    return None
                if (reader := _started(relation, self._handles)) is not None:
                    return reader
                self._register_tables()
            except (duckdb.Error, DissociatedError) as error:
                missing = _MISSING.search(str(error)) if isinstance(error, duckdb.CatalogException) else None
                if missing is not None and missing[1] not in self._handles:
                    self._register(missing[1])
                elif any(handle.is_refused for handle in self._handles.values()):
                    self._register_tables()
                elif isinstance(error, DissociatedError):  # of a handle
                    raise
                else:
                    raise OptionError(str(error).strip()) from None

    def _register_named(self, statement: str) -> None:
        """Register the datasets that a statement names, as far as DuckDB can list its names."""
        with suppress(duckdb.Error):  # `run` raises the error, or learns the names one by one
            for name in self._connection.get_table_names(statement) - self._handles.keys():
                with suppress(DatasetNotFound):
                    self._register(name)

    def _register(self, name: str) -> None:
        try:
            info = self._client.describe(name)
        except DatasetNotFound as unknown:
            raise DatasetNotFound(f"{unknown}, and DuckDB has no table of that name") from None
        if info.tensors is not None:
            raise WrongKind(
                f"{name!r} holds tensors, which have no rows: client.read_tensors({name!r}) reads them in Python"
            )
        handle = self._handles[name] = _Handle(self._client, info)
        self._connection.register(name, handle)

    def _register_tables(self) -> None:
        for name, handle in self._handles.items():
            handle.is_refused = False
            if handle.is_mapped:
                self._connection.register(name, handle.table())


class _Handle(DatasetHandle):
    """A handle that refuses scans of many batches of a mapped version.

    DuckDB knows the number of rows of a Table, but not of a dataset, and plans joins by it. And DuckDB filters faster
    than libarrow. Batches that statistics leave out weigh more than both.
    """

    def __init__(self, client: CatalogClient, info: DatasetInfo, transport: str | None = None) -> None:
        super().__init__(client, info, transport)
        self.is_strict = True
        self.is_refused = False
        self._lock = threading.Lock()  # DuckDB scans in its own threads

    @property
    def is_mapped(self) -> bool:
        """Whether the version is mapped, so that a Table of it copies nothing."""
        return self._reader.map(self._client.defaults) is not None

    def table(self) -> pa.Table:
        """Return all rows."""
        return super().scanner().to_table()

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Scanner:
        """Return a selection, which is small if the version is mapped. See `DatasetHandle.scanner`.

        Raises:
            OptionError: The selection is not small.
        """
        mapped = self._reader.map(self._client.defaults)
        with self._lock:
            if self.is_strict and mapped is not None and not _is_selective(mapped, filter):
                self.is_refused = True
                raise OptionError("the scan is not selective")
        return super().scanner(columns, filter, **options)

    def accept_all(self) -> bool:
        """Refuse no more scans. Return whether a scan was refused."""
        with self._lock:
            self.is_strict = False
            return self.is_refused


def _is_selective(mapped: MappedVersion, filter_: Any) -> bool:
    """Return whether the statistics leave out most batches."""
    return filter_ is not None and len(mapped.passing_numbers(filter_)) * _MAX_SHARE <= len(mapped.batches)


def _started(relation: Any, handles: Mapping[str, _Handle]) -> pa.RecordBatchReader | None:
    """Return the result of a relation, of which the first batch has been read; None if a scan was refused.

    Later scans are not refused.
    """
    for handle in handles.values():
        handle.is_strict = True
    reader = relation.to_arrow_reader()
    first = next(reader, None)
    refused = [handle.accept_all() for handle in handles.values()]
    if any(refused):
        reader.close()
        return None

    def batches() -> Iterator[pa.RecordBatch]:
        if first is not None:
            yield first
        with _errors():
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


@contextmanager
def _errors() -> Iterator[None]:
    """Turn errors of DuckDB into OptionError."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        raise OptionError(str(error).strip()) from None

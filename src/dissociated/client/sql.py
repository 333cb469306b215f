"""Statements of SQL over the datasets of a catalog, which DuckDB runs in this process.

Importing this module imports duckdb and pyarrow.dataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import pyarrow as pa

from dissociated.client.calls import CatalogClient
from dissociated.client.dataset import DatasetHandle
from dissociated.client.request import ReadRequest
from dissociated.client.version_reader import VersionReader
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import DatasetNotFound, DissociatedError, Failure, OptionError, WrongKind

try:
    import duckdb
except ImportError:
    raise OptionError("sql needs DuckDB: pip install duckdb") from None

#: DuckDB has one class for everything that its catalog lacks, and names the missing table in the text alone: with
#: `errors_as_json`, queries fail with the same text, and `get_table_names` refuses PIVOT, UPDATE and CREATE VIEW.
_MISSING = re.compile("Table with name (.+) does not exist!")
#: Kinds of statements that change tables, and kinds after which there are tables that they can change.
_CHANGING = {"INSERT", "UPDATE", "DELETE", "DROP", "ALTER", "MERGE_INTO"}
_PREPARING = {"CREATE", "ATTACH"}
#: Kinds of statements that return rows. MULTI is a PIVOT, which DuckDB runs in several steps.
_QUERIES = {"SELECT", "EXPLAIN", "MULTI"}


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
        self._names: set[str] = set()  # of the datasets that are registered
        self._failures: list[Failure] = []  # of the datasets that the current statement reads
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
        with self._errors():
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
        if returns_rows and (not kinds or kinds[-1] not in _QUERIES):
            raise OptionError("a query is needed as the last statement")
        return statements

    def run(self, statement: duckdb.Statement) -> pa.RecordBatchReader | None:
        """Run a statement. If DuckDB lacks a table, it gets the dataset of this name, and the statement is run again.

        Returns:
            The result, which must be read before the next statement; None if the statement is no query.

        Raises:
            OptionError: The statement fails, or names two datasets whose names differ only in case. If a dataset cannot
                be read, the error of its server is raised, here or by the result.
            DatasetNotFound: There is neither a table nor a dataset of a name.
            WrongKind: The dataset of a name holds tensors.
        """
        self._check_names(statement.query)
        while True:
            self._failures.clear()
            with self._errors():
                try:
                    relation = self._connection.sql(statement.query)
                    if relation is None or statement.type.name in _CHANGING | _PREPARING:
                        return None
                    return self._read(relation)
                except duckdb.CatalogException as error:
                    missing = _MISSING.search(str(error))
                    if missing is None or missing[1] in self._names:
                        raise
            self._register(missing[1])

    def _read(self, relation: Any) -> pa.RecordBatchReader:
        """Return the result of a relation. Its reader raises the errors of `run` if the rest of the query fails."""
        reader = relation.to_arrow_reader()

        def batches() -> Iterator[pa.RecordBatch]:
            with self._errors():
                yield from reader

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of DuckDB into OptionError, or into the error of the dataset that could not be read."""
        try:
            yield
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if isinstance(error, DissociatedError):
                raise
            if self._failures:
                raise self._failures[0].error() from None
            raise OptionError(str(error).strip()) from None

    def _check_names(self, statement: str) -> None:
        """Raise OptionError for two names that DuckDB takes for one, although datasets may have both."""
        try:
            table_names = self._connection.get_table_names(statement)
        except duckdb.Error:  # no query, which names no two datasets; or the statement fails
            return
        spellings: dict[str, str] = {}
        for name in sorted(self._names | table_names):
            if (first_spelling := spellings.setdefault(name.casefold(), name)) != name:
                raise OptionError(
                    f"DuckDB does not distinguish {first_spelling!r} and {name!r}: query one dataset at a time, and "
                    "write its name as the catalog does"
                )

    def _register(self, name: str) -> None:
        try:
            info = self._client.describe(name)
        except DatasetNotFound as unknown:
            raise DatasetNotFound(f"DuckDB has no table {name!r}, and {unknown}") from None
        if info.tensors is not None:
            raise WrongKind(
                f"{name!r} holds tensors, which have no rows: client.read_tensors({name!r}) reads them in Python"
            )
        self._names.add(name)
        handle = DatasetHandle(self._client, info, reader=_RecordingReader(self._client, info, self._failures))
        # DuckDB plans joins by the number of rows, which it knows of a Table, and not of a dataset.
        table = handle.map_table()
        self._connection.register(name, handle if table is None else table)


class _RecordingReader(VersionReader):
    """A VersionReader that records its errors in `failures`: DuckDB, which calls it, passes on their text alone."""

    def __init__(self, client: CatalogClient, info: DatasetInfo, failures: list[Failure]) -> None:
        super().__init__(client, info, None)
        self._failures = failures

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        with self._recorded():
            reader = super().read(request)

        def pairs() -> Iterator[BatchAndMetadata]:
            with self._recorded():
                yield from batches(reader)

        return BatchReader(reader.schema, pairs())

    @contextmanager
    def _recorded(self) -> Iterator[None]:
        try:
            yield
        except DissociatedError as error:
            self._failures.append(Failure.of(error))
            raise

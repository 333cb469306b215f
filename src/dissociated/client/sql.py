"""Statements of SQL over the datasets of a catalog, which DuckDB runs in this process.

Importing this module imports duckdb and pyarrow.dataset.
"""

from __future__ import annotations

import hashlib
import re
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, Self

import pyarrow as pa

from dissociated.client.calls import CatalogClient
from dissociated.client.dataset import DatasetHandle
from dissociated.client.endpoints import MAX_RETRIES
from dissociated.client.mapped import MappedVersion
from dissociated.client.request import ReadRequest
from dissociated.client.scanner import Scanner
from dissociated.client.sql_database import KeptQuery, open_database
from dissociated.client.version_reader import VersionReader
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.messages import MAX_CURRENT
from dissociated.errors import CatalogError, DatasetNotFound, DissociatedError, Failure, OptionError, WrongKind

try:
    import duckdb
except ImportError:
    raise OptionError("sql needs DuckDB: pip install duckdb") from None
if not hasattr(duckdb.DuckDBPyRelation, "to_arrow_reader"):
    raise OptionError(f"sql needs DuckDB 1.5 or later, not {duckdb.__version__}: pip install --upgrade duckdb")

#: DuckDB has one class for everything that its catalog lacks, and names the missing table in the text alone: with
#: `errors_as_json`, queries fail with the same text, and `get_table_names` refuses PIVOT, UPDATE and CREATE VIEW. In
#: `WITH a AS (FROM a)`, the second name is an error only if there is no table `a`.
_MISSING = re.compile('Table with name (.+) does not exist!|Circular reference to CTE "(.+)", use WITH RECURSIVE')
#: Functions that can compute the name of a table, and statements that read views from a file.
_COMPUTING = re.compile(
    r'\bquery(_table)?"?\s*(\(|/\*|--)|json_execute_serialized_sql|substrait|\battach\b|\bimport[_\s]+database\b',
    re.IGNORECASE,
)
_QUOTED = re.compile(r"""(['"])((?:(?!\1).)+)\1""")
#: Names that are paths or URLs. Presigned URLs are secrets, which the catalog must not see.
_PATH = re.compile(r"\.{0,2}/|~/|[^/]*://")
_TABLES = "SELECT table_name FROM duckdb_tables() UNION SELECT view_name FROM duckdb_views() WHERE NOT internal"
#: Kinds of statements that change tables, and kinds after which there are tables that they can change.
_CHANGING = {"INSERT", "UPDATE", "DELETE", "DROP", "ALTER", "MERGE_INTO"}
_PREPARING = {"CREATE", "ATTACH"}
#: Kinds of statements that return rows of datasets. MULTI is a PIVOT, which DuckDB runs in several steps.
_QUERIES = {"SELECT", "EXPLAIN", "MULTI"}
_LONG = 1 << 20  # least number of rows of a dataset for which a query is tried with its handle
_MAX_READ = 0.25  # largest fraction of the batches that a scan of a handle may need
_MAX_REFUSED = 1_000  # most statements that are remembered for a version
_MAX_KEPT_LENGTH = 1 << 14  # characters of a query that is kept
#: The digests of the statements that were refused, as long as a version is kept. The statements may be long.
_refused_statements: weakref.WeakKeyDictionary[MappedVersion, set[bytes]] = weakref.WeakKeyDictionary()


def is_query(statement: duckdb.Statement) -> bool:
    """Return whether a statement returns rows: others answer with the word Success or a number of rows."""
    results = [result.name for result in statement.expected_result_type]
    return statement.type.name == "MULTI" or results == ["QUERY_RESULT"]


class SqlSession:
    """Statements of DuckDB, in which names stand for the datasets of a client. It is a context manager.

    A name stands for the version that was current when a statement first used it. DuckDB resolves all names that it
    knows itself. Queries run in the database that the client keeps, other statements in a database of their own.

    DuckDB takes names that differ only in the case of ASCII letters for one, and a dataset that is registered hides a
    table of its name. So each statement begins without the datasets of the others. If the statements contain the name
    of a dataset in another spelling, which another dataset has, they are refused: a view, a macro or a string may use
    either.

    DuckDB plans joins by the number of rows, which it knows of a Table, and not of a handle. And it filters faster than
    libarrow. But only a handle gets the filters of a query, and can skip batches. So a query over many rows begins with
    handles. A scan that statistics do not make short is refused, and the query begins anew with Tables. The next time,
    it begins with Tables.

    A query over Tables is kept with its connection. When it comes again, and its datasets have not changed, it is not
    parsed, and its Tables are registered already. No other query gets this connection, which functions such as
    `setseed` change.

    Args:
        client: The client.
        advice: The end of the message that a statement would change a dataset.
    """

    def __init__(self, client: CatalogClient, advice: str) -> None:
        self._client = client
        self._advice = advice
        self._is_shared = True  # whether the database is that of the client, which statements do not change
        self._has_tables = False  # whether there may be tables that are no datasets
        self._datasets: dict[str, _SqlDataset] = {}
        self._registered: dict[str, Any] = {}  # the handle or Table by which DuckDB knows each dataset
        self._failures: list[Failure] = []  # of the datasets that the current statement reads
        self._connection = client.sql_database.connect()
        self._script = ""  # the text of all statements
        self._text: str | None = None  # of a query that can be kept
        self._finished: duckdb.Statement | None = None  # the last query, if its result has been read to its end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._text is not None and self._finished is not None:
            query = KeptQuery(self._finished, self._connection, self._registered)
            if self._client.sql_database.kept_versions.put_query(self._text, query):
                return
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
        self._script = query
        kept_query = self._client.sql_database.kept_versions.take_query(query)
        if kept_query is not None:
            self._connection.close()
            self._text, self._connection, self._registered = query, kept_query.connection, kept_query.tables
            return [kept_query.statement]
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
        if {*kinds} != {"SELECT"}:
            self._connection.close()
            self._connection, self._is_shared = open_database(), False
        elif len(statements) == 1 and len(query) <= _MAX_KEPT_LENGTH and "setseed" not in query.lower():
            self._text = query  # setseed would change the connection for the next call
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
        earlier_names, retries = {*self._datasets}, 0
        if self._text is not None and self._registered:  # by the session that kept the query
            named = {*self._registered}
            self._find_kept(named)
            if self._datasets.keys() != self._registered.keys():  # some have changed
                self._connection.close()
                self._connection, self._registered = self._client.sql_database.connect(), {}
            names = {*self._datasets}
        else:
            self._unregister()
            named = {name for name in self._names(statement.query) if not _PATH.match(name)}
            names = {*named} if self._is_shared else set()  # earlier statements may have made tables of these names
            self._find_kept(names)
            names &= self._datasets.keys()
            for name in names:
                self._check_spelling(name)
        names |= self._find_like_files(named)
        kind = statement.type.name
        is_tried = self._is_shared  # other statements might take effect twice
        while True:
            for name in names:
                dataset = self._datasets[name]
                self._register(name, dataset.begin(statement.query) if is_tried else dataset.whole)
            self._failures.clear()
            try:
                with self._errors():
                    try:
                        relation = self._connection.sql(statement)
                        if relation is None or kind in _CHANGING | _PREPARING:
                            return None
                        if (reader := self._begin(relation, statement)) is not None:
                            return reader
                        is_tried = False
                    except (duckdb.CatalogException, duckdb.BinderException) as error:
                        names.add(self._find_missing(error, names))
            except DatasetNotFound:
                replaced = names - earlier_names if self._failures and self._is_shared else set()
                if not replaced or retries == MAX_RETRIES:
                    raise
                retries += 1
                for name in replaced:  # look up again all that this statement was the first to use
                    self._connection.unregister(name)
                    del self._registered[name], self._datasets[name]
                names = names - replaced | self._find_like_files(replaced)

    def _begin(self, relation: Any, statement: duckdb.Statement) -> pa.RecordBatchReader | None:
        """Return the result of a statement, of which the first batch was read; None if a handle has refused a scan.

        No scan is refused afterwards. The reader raises the errors of `run` if the rest of the query fails.
        """
        reader = first = None
        try:
            reader = relation.to_arrow_reader()
            first = next(reader, None)
        except (duckdb.Error, pa.ArrowException, OSError):
            if not self._has_refused():
                raise
            return None
        if self._has_refused():
            reader.close()
            return None

        def batches() -> Iterator[pa.RecordBatch]:
            if first is not None:
                yield first
            with self._errors():
                yield from reader
            self._finished = statement

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def _has_refused(self) -> bool:
        refusals = [dataset.handle.accept_all() for dataset in self._datasets.values() if dataset.is_tried]
        return any(refusals)

    def _register(self, name: str, form: Any) -> None:
        """Register a dataset in this form: a handle or a Table."""
        if self._registered.get(name) is not form:
            self._connection.register(name, form)
            self._registered[name] = form

    def _find_missing(self, error: duckdb.Error, names: set[str]) -> str:
        """Find the dataset that a statement lacks, and return its name.

        Args:
            error: The error of DuckDB.
            names: The names of the datasets that DuckDB has.

        Raises:
            duckdb.Error: It is `error`, which has another reason.
        """
        match = _MISSING.search(str(error))
        name: str | None = match and (match[1] or match[2])
        if match is None or name is None or name in names:
            raise error
        if name not in self._datasets:
            try:
                self._datasets[name] = self._find(name)
            except DatasetNotFound:
                if match[2]:
                    raise error from None
                raise
        self._check_spelling(name)
        return name

    def _find_like_files(self, names: set[str]) -> set[str]:
        """Find the datasets among these names that DuckDB would not lack, because it may take the names for files."""
        like_files = {name for name in names if "." in name}
        if like_files and not self._is_shared:
            tables = self._connection.execute(_TABLES).fetchall()
            like_files = {name for name in like_files if not any(_fold(table) == _fold(name) for (table,) in tables)}
        unknown = like_files - self._datasets.keys()
        if not unknown:
            return like_files
        candidates = [*unknown]
        with suppress(CatalogError):  # the server is not of this library
            questions = [candidates[at : at + MAX_CURRENT] for at in range(0, len(candidates), MAX_CURRENT)]
            current = set().union(*map(self._client.current, questions))
            candidates = [name for name in candidates if name in current]
        for name in candidates:
            with suppress(DatasetNotFound):
                self._datasets[name] = self._find(name)
                self._check_spelling(name)
        if not unknown <= self._datasets.keys():
            self._text = None  # a file that the query reads may be a dataset when it comes again
        return like_files & self._datasets.keys()

    def _unregister(self) -> None:
        """Make DuckDB forget the datasets of the last statement."""
        for name in self._registered:
            self._connection.unregister(name)
        self._registered = {}

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

    def _names(self, statement: str) -> set[str]:
        """Return the names of tables in a statement, or all quoted names if DuckDB does not tell these.

        Raises:
            OptionError: DuckDB takes two names for one, although datasets may have both.
        """
        try:
            table_names: set[str] = self._connection.get_table_names(statement)
        except duckdb.Error:
            return {name for _, name in _QUOTED.findall(statement)}
        spellings: dict[bytes, str] = {}
        for name in sorted(table_names):
            if (first_spelling := spellings.setdefault(_fold(name), name)) != name:
                raise _confused(first_spelling, name)
        return table_names

    def _check_spelling(self, name: str) -> None:
        """Check that the statements name no other dataset that DuckDB takes for this one.

        Raises:
            OptionError: They contain the name of another dataset, or may name it without containing the name.
        """
        if _COMPUTING.search(self._script) or '"' in name or "'" in name:  # SQL doubles quotes
            other_names = {info.name for info in self._client.list() if _fold(info.name) == _fold(name)}
            self._text = None
        else:
            pattern = rf"(?<!\w){re.escape(name)}(?!\w)"
            other_names = {*re.findall(pattern, self._script, re.IGNORECASE | re.ASCII)}
        for other in sorted(other_names - {name}):
            self._text = None  # a query that is kept is not checked again, and there may be such a dataset then
            with suppress(DatasetNotFound):
                self._client.describe_current(other)
                raise _confused(*sorted((name, other)))

    def _find_kept(self, names: set[str]) -> None:
        """Find all datasets of these names whose kept version is still the current one, by one call of the catalog."""
        infos = self._client.sql_database.kept_versions.find(names - self._datasets.keys())
        current = self._client.current([info.name for info in infos]) if infos else {}
        for info in infos:
            identity = {"version": info.version, "created": info.created, "began": info.lineage_id}
            if current.get(info.name) == identity:
                with suppress(DatasetNotFound):  # it was replaced meanwhile, and is looked up when DuckDB lacks it
                    self._datasets[info.name] = _SqlDataset(self._client, info, self._failures)

    def _find(self, name: str) -> _SqlDataset:
        retries = 0
        while True:
            try:
                info = self._client.describe_current(name)
            except DatasetNotFound as unknown:
                raise DatasetNotFound(f"DuckDB has no table {name!r}, and {unknown}") from None
            if info.tensors is not None:
                raise WrongKind(
                    f"{name!r} holds tensors, which have no rows: client.read_tensors({name!r}) reads them in Python"
                )
            try:
                return _SqlDataset(self._client, info, self._failures)
            except DatasetNotFound:  # it was replaced after the look-up
                if retries == MAX_RETRIES:
                    raise
                retries += 1


def _fold(name: str) -> bytes:
    """Return a text that is equal for names that DuckDB does not distinguish."""
    return name.encode().lower()  # as bytes, only ASCII letters have a case


def _confused(name: str, other: str) -> OptionError:
    return OptionError(
        f"DuckDB does not distinguish {name!r} and {other!r}: query one dataset at a time, and write its name as the "
        "catalog does"
    )


class _SqlDataset:
    """A dataset that statements read.

    Args:
        client: The client.
        info: The description, which the catalog has just returned.
        failures: Gets the errors of reading.
    """

    def __init__(self, client: CatalogClient, info: DatasetInfo, failures: list[Failure]) -> None:
        kept_versions = client.sql_database.kept_versions
        kept_version = kept_versions.get(info)
        self._client = client
        self._info = info
        self._reader = _RecordingReader(client, info, failures, kept_version)
        self._mapped = self._reader.map(client.defaults, described_now=True)
        if self._mapped is not None and kept_version is None:
            kept_versions.put(info, self._mapped)
        #: Whether a statement began with the handle, and its scans may be refused.
        self.is_tried = False

    @property
    def whole(self) -> Any:
        """The form in which DuckDB reads the dataset best if it needs most rows: a Table if the rows are mapped."""
        return self.handle if self._mapped is None else self._mapped.whole

    @cached_property
    def handle(self) -> _SqlHandle:
        """The handle. To make it takes longer than to find a kept version, and most statements need none."""
        return _SqlHandle(self._client, self._info, self._reader, self._mapped)

    def begin(self, statement: str) -> Any:
        """Return the form with which a statement begins. If it is the handle of mapped rows, it refuses long scans."""
        mapped = self._mapped
        if mapped is None or not mapped.has_statistics or (self._info.rows or 0) < _LONG:
            return self.whole
        digest = hashlib.blake2b(statement.encode(), digest_size=16).digest()
        if digest in _refused_statements.get(mapped, ()):
            return self.whole
        self.is_tried = True
        self.handle.refuse_long(digest)
        return self.handle


class _SqlHandle(DatasetHandle):
    """A handle that can refuse scans of most batches. `mapped` has its rows if they are mapped."""

    def __init__(
        self, client: CatalogClient, info: DatasetInfo, reader: VersionReader, mapped: MappedVersion | None
    ) -> None:
        super().__init__(client, info, reader=reader)
        self._lock = threading.Lock()  # DuckDB scans in its own threads
        self._mapped = mapped
        self._statement: bytes | None = None  # the digest of the statement that begins; its scans may be refused
        self._has_refused = False

    def refuse_long(self, statement: bytes) -> None:
        """Refuse long scans of the statement with this digest."""
        self._statement = statement

    def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Scanner:
        """Return a selection. See `DatasetHandle.scanner`.

        Raises:
            OptionError: The scan is refused.
        """
        with self._lock:
            if self._statement is not None and self._is_long(filter):
                self._has_refused = True
                raise OptionError("this scan needs most batches")
        return super().scanner(columns, filter, **options)

    def _is_long(self, filter_: Any) -> bool:
        mapped = self._mapped
        assert mapped is not None
        return filter_ is None or len(mapped.passing_numbers(filter_)) > _MAX_READ * len(mapped.batches)

    def accept_all(self) -> bool:
        """Refuse no more scans. Return whether a scan was refused since `refuse_long`, which is remembered."""
        with self._lock:
            statement, self._statement = self._statement, None
            has_refused, self._has_refused = self._has_refused, False
        if has_refused and statement is not None and self._mapped is not None:
            statements = _refused_statements.setdefault(self._mapped, set())
            if len(statements) >= _MAX_REFUSED:
                statements.clear()
            statements.add(statement)
        return has_refused


class _RecordingReader(VersionReader):
    """A VersionReader that records its errors in `failures`: DuckDB, which calls it, passes on their text alone."""

    computes_statistics = False  # for a single query, this takes longer than it saves

    def __init__(
        self, client: CatalogClient, info: DatasetInfo, failures: list[Failure], mapped: MappedVersion | None
    ) -> None:
        super().__init__(client, info, None, mapped=mapped)
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

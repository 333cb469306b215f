"""The command sql: runs queries of DuckDB over datasets, and prints or publishes the result."""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import TYPE_CHECKING

from dissociated.cli import access, target, text
from dissociated.cli.formats import FILE_FORMATS
from dissociated.cli.reading import add_format_argument, require_rows, write_stdout
from dissociated.errors import CatalogError, DatasetNotFound, OptionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import duckdb

    from dissociated.client.client import Client

#: DuckDB has one class for everything that its catalog lacks, and names the missing table in the text alone.
_MISSING = re.compile("Table with name (.+) does not exist!")
_SQL = """\
Run an SQL query with DuckDB (pip install duckdb). The tables are the datasets of the catalog. Write a name in double
quotes if it has other characters than letters, digits and underscores. Only the columns and rows that the query needs
are read. DuckDB resolves all other names, so 'other.parquet' is a file.

    dissociated sql "SELECT dest, count(*) FROM flights GROUP BY dest"
    dissociated sql "SELECT * FROM flights JOIN planes USING (tailnum)" --into joined
    dissociated sql -f csv < question.sql > answer.csv"""
#: Kinds of statements that change tables, and kinds after which there are tables that they can change.
_CHANGING = {"INSERT", "UPDATE", "DELETE", "DROP", "ALTER", "MERGE_INTO"}
_PREPARING = {"CREATE", "ATTACH"}
_INTO_ADVICE = 'publish a result instead: dissociated sql "SELECT ..." --into NAME'


def add_sql(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `sql` to its parser."""
    parser.description = _SQL
    parser.add_argument(
        "query", nargs="?", default="-", metavar="QUERY", help="the query (default, or -: read from standard input)"
    )
    add_format_argument(parser, FILE_FORMATS, "table")
    parser.add_argument("--into", metavar="[URI/]NAME", help="publish the result as this dataset")
    target.add_options(parser)
    parser.set_defaults(uri="", run=_run_sql)


def _run_sql(arguments: argparse.Namespace) -> None:
    """Run the query, and print its result."""
    try:
        import duckdb
    except ImportError:
        raise OptionError("sql needs DuckDB: pip install duckdb") from None
    if arguments.query == "-" and sys.stdin.isatty():
        raise OptionError('no query is given: dissociated sql "SELECT ...", or a query on the standard input')
    query = sys.stdin.read() if arguments.query == "-" else arguments.query
    catalog = target.find(arguments).catalog
    with access.client(catalog, arguments) as client, duckdb.connect() as connection:
        connection.execute("SET python_enable_replacements = false")  # names must not refer to Python variables
        try:
            statements = connection.extract_statements(query)
            _check_kinds([statement.type.name for statement in statements], arguments.into)
            for statement in statements:
                answer = _run_statement(connection, client, statement.query)
                if answer is None or statement.type.name in _CHANGING | _PREPARING:
                    continue
                if arguments.into and statement is statements[-1]:
                    _publish(answer, arguments)
                else:
                    file_format = FILE_FORMATS[arguments.format or "table"]
                    write_stdout(answer.to_arrow_reader(), file_format._replace(choose="SELECT A,B"))
        except duckdb.Error as error:
            raise OptionError(str(error).strip()) from None


def _check_kinds(kinds: Sequence[str], into: str | None) -> None:
    """Check the kinds of all statements before any is run.

    Raises:
        OptionError: A statement would change a dataset, or make a table that is gone when the command ends; or there is
            no result to publish.
    """
    private = False  # whether there may be tables that are no datasets
    for kind in kinds:
        if kind in _CHANGING and not private:
            raise OptionError(
                f"sql changes no dataset ({kind.replace('_', ' ')}): {_INTO_ADVICE}. dissociated drop NAME drops a "
                "dataset"
            )
        private = private or kind in _PREPARING
    if kinds and kinds[-1] == "CREATE":
        raise OptionError(f"the result of the last statement is deleted when the command ends: {_INTO_ADVICE}")
    if into and (not kinds or kinds[-1] != "SELECT"):
        raise OptionError("--into needs a query as the last statement")


def _publish(answer: duckdb.DuckDBPyRelation, arguments: argparse.Namespace) -> None:
    """Publish the result of a query as the dataset of the option --into, and print a summary to stderr."""
    dataset = target.find_dataset(argparse.Namespace(**{**vars(arguments), "uri": arguments.into}))
    started = time.perf_counter()
    with access.client(dataset.catalog, arguments) as client:
        rows = client.put(dataset.name, answer.to_arrow_reader())
    print(
        f"{dataset.name}: {text.plural(rows, 'row')} in {time.perf_counter() - started:.2f} s, "
        f"at {dataset.catalog}/{dataset.name}",
        file=sys.stderr,
    )


def _run_statement(
    connection: duckdb.DuckDBPyConnection, client: Client, statement: str
) -> duckdb.DuckDBPyRelation | None:
    """Run a statement, and return its result, or None if it is no query.

    If DuckDB does not find a table, the dataset of this name is registered, and the statement is run again.
    """
    import duckdb

    registered_names: set[str] = set()
    while True:
        try:
            return connection.sql(statement)
        except duckdb.CatalogException as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in registered_names:
                raise
            registered_names.add(missing[1])
            try:
                dataset = client.dataset(missing[1])
            except DatasetNotFound as unknown:
                raise CatalogError(f"{unknown}, and DuckDB has no table of that name") from None
            require_rows(dataset.info)
            connection.register(missing[1], dataset)

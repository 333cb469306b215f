"""dissociated sql: ask a question of datasets, by DuckDB."""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING

from dissociated.cli import access, reading, target
from dissociated.cli.formats import FILE_FORMATS
from dissociated.errors import CatalogError, DatasetNotFound, OptionError

if TYPE_CHECKING:
    import duckdb

    from dissociated.client.client import Client

#: DuckDB has one class for everything that its catalog lacks, and names what it is in the text alone.
_MISSING = re.compile("Table with name (.+) does not exist!")

DESCRIPTION = """\
Ask a question in SQL, which DuckDB answers (pip install duckdb). Tables are the datasets of the catalog, by their
names; a name that is not of letters and digits is written in double quotes. Only the columns and rows that the question
needs are read. What is no dataset is looked up by DuckDB, so 'other.parquet' is a file.

    dissociated sql "SELECT dest, count(*) FROM flights GROUP BY dest"
    dissociated sql -f csv < question.sql > answer.csv"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `sql`."""
    parser.add_argument("query", nargs="?", default="-", metavar="QUERY", help="left out or -: from standard input")
    reading.add_format_argument(parser, FILE_FORMATS, "table")
    target.add_options(parser)
    parser.set_defaults(uri="")


def run(arguments: argparse.Namespace) -> None:
    """Answer it."""
    try:
        import duckdb
    except ImportError:
        raise OptionError("sql needs DuckDB: pip install duckdb") from None
    if arguments.query == "-" and sys.stdin.isatty():
        raise OptionError('there is no question: dissociated sql "SELECT ...", or one on standard input')
    query = sys.stdin.read() if arguments.query == "-" else arguments.query
    with access.client(target.find(arguments).catalog, arguments) as client, duckdb.connect() as connection:
        connection.execute("SET python_enable_replacements = false")  # a name is no variable of this program
        try:
            for statement in connection.extract_statements(query):
                answer = _answer(connection, client, statement.query)
                if answer is not None:
                    reading.to_stdout(answer.to_arrow_reader(), FILE_FORMATS[arguments.format or "table"])
        except duckdb.Error as error:
            raise OptionError(str(error).strip()) from None


def _answer(connection: duckdb.DuckDBPyConnection, client: Client, statement: str) -> duckdb.DuckDBPyRelation | None:
    """What DuckDB says; None of a statement that is no question. It is told of each dataset that it does not find."""
    import duckdb

    known: set[str] = set()
    while True:
        try:
            return connection.sql(statement)
        except duckdb.CatalogException as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in known:
                raise
            known.add(missing[1])
            try:
                found = client.dataset(missing[1])
            except DatasetNotFound as unknown:
                raise CatalogError(f"{unknown}, and DuckDB has no table of that name") from None
            reading.check_rows(found.info)
            connection.register(missing[1], found)

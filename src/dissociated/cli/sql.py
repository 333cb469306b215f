"""The command sql: runs queries of DuckDB over datasets, and prints or publishes the result."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

from dissociated.cli import access, target, text
from dissociated.cli.formats import FILE_FORMATS
from dissociated.cli.reading import add_format_argument, write_stdout
from dissociated.errors import OptionError

if TYPE_CHECKING:
    import pyarrow as pa

_SQL = """\
Run an SQL query with DuckDB (pip install duckdb). The tables are the datasets of the catalog. Write a name in double
quotes if it has other characters than letters, digits and underscores. Only the columns and rows that the query needs
are read. DuckDB resolves all other names, so 'other.parquet' is a file.

    dissociated sql "SELECT dest, count(*) FROM flights GROUP BY dest"
    dissociated sql "FROM flights JOIN planes USING (tailnum)" --into joined
    dissociated sql -f csv < question.sql > answer.csv"""
_ADVICE = 'publish a result instead: dissociated sql "SELECT ..." --into NAME. dissociated drop NAME drops a dataset'


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
    from dissociated.client.sql import SqlSession  # on first use: duckdb is slow to import

    if arguments.query == "-" and sys.stdin.isatty():
        raise OptionError('no query is given: dissociated sql "SELECT ...", or a query on the standard input')
    query = sys.stdin.read() if arguments.query == "-" else arguments.query
    catalog = target.find(arguments).catalog
    with access.client(catalog, arguments) as client, SqlSession(client, _ADVICE) as session:
        statements = session.parse(query, returns_rows=arguments.into is not None)
        for statement in statements:
            answer = session.run(statement)
            if answer is None:
                continue
            if arguments.into and statement is statements[-1]:
                _publish(answer, arguments)
            else:
                file_format = FILE_FORMATS[arguments.format or "table"]
                write_stdout(answer, file_format._replace(choose="SELECT A,B"))


def _publish(answer: pa.RecordBatchReader, arguments: argparse.Namespace) -> None:
    """Publish the result of a query as the dataset of the option --into, and print a summary to stderr."""
    dataset = target.find_dataset(argparse.Namespace(**{**vars(arguments), "uri": arguments.into}))
    started = time.perf_counter()
    with access.client(dataset.catalog, arguments) as client:
        rows = client.put(dataset.name, answer)
    print(
        f"{dataset.name}: {text.plural(rows, 'row')} in {time.perf_counter() - started:.2f} s, "
        f"at {dataset.catalog}/{dataset.name}",
        file=sys.stderr,
    )

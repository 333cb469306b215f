"""The commands that read a dataset: head, cat, get and sql, with their options for rows, columns and formats."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dissociated.cli import access, formats, streams, target, text
from dissociated.cli.condition import parse_condition
from dissociated.cli.formats import FILE_FORMATS
from dissociated.cli.output import atomic_file, is_irreplaceable, stream_batches, write_batches, write_stdout
from dissociated.cli.terminal import progress
from dissociated.client.client import Client
from dissociated.client.endpoints import MAX_RETRIES
from dissociated.client.request import ReadRequest
from dissociated.client.version_reader import VersionReader
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import DatasetNotFound, OptionError, WrongKind

_HEAD = """\
Show the first rows of a dataset, as a table or in the format of --format. Only these rows are read.
In a terminal, the table has the columns that fit: choose others with --columns."""


def add_head(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `head` to its parser."""
    parser.description = _HEAD
    add_arguments(parser)
    parser.add_argument(
        "-n", "--rows", type=_row_count, default=10, metavar="N", help="number of rows (default: %(default)s)"
    )
    add_format_argument(parser, FILE_FORMATS, "table")
    parser.set_defaults(run=_run_head)


def _row_count(written: str) -> int:
    if not written.isdecimal():
        raise argparse.ArgumentTypeError(f"{written!r} is not a number of rows")
    return int(written)


def _run_head(arguments: argparse.Namespace) -> None:
    """Show the rows."""
    with open_dataset(arguments, limit=arguments.rows) as reading:
        write_stdout(reading.reader, FILE_FORMATS[arguments.format or "table"])


_CAT = """\
Write the rows of a dataset to the standard output, as a table or in the format of --format.
In a terminal, the table has the columns that fit; elsewhere, all columns."""


def add_cat(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `cat` to its parser."""
    parser.description = _CAT
    add_arguments(parser)
    add_rows_argument(parser)
    add_format_argument(parser, FILE_FORMATS, "table")
    parser.set_defaults(run=_run_cat)


def _run_cat(arguments: argparse.Namespace) -> None:
    """Write the rows."""
    with open_dataset(arguments, arguments.rows) as reading:
        write_stdout(reading.reader, FILE_FORMATS[arguments.format or "table"])


_GET = """\
Copy a dataset into a file, in the format of --format or of the file's ending:

  arrow    .arrow .feather  Arrow IPC file
  arrows   .arrows          Arrow IPC stream
  parquet  .parquet         Parquet
  csv      .csv             CSV
  jsonl    .jsonl .ndjson   JSON, an object a line

The file appears when it is complete; devices and FIFOs are written directly. "-" writes to the standard output, as an
Arrow IPC stream unless --format is given."""


def add_get(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `get` to its parser."""
    parser.description = _GET
    add_arguments(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help='file to write, "-" for standard output')
    add_rows_argument(parser)
    add_format_argument(parser, [name for name in FILE_FORMATS if name != "table"], "what the ending of FILE says")
    parser.set_defaults(run=_run_get)


def _run_get(arguments: argparse.Namespace) -> None:
    """Copy the rows, and print a summary with the rate to stderr."""
    path = None if arguments.output == "-" else Path(arguments.output)
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"the directory {str(path.parent)!r} does not exist")
    if path is not None and path.is_dir():
        raise OptionError(f"{str(path)!r} is a directory: give a file in it")
    if arguments.format:
        file_format = FILE_FORMATS[arguments.format]
    else:
        file_format = FILE_FORMATS["arrows"] if path is None else formats.of_file(path)
    started = time.perf_counter()
    with open_dataset(arguments, arguments.rows) as reading, progress(reading.info.name, reading.rows) as advance:
        if path is None:
            rows, nbytes = write_stdout(reading.reader, file_format, advance)
        elif is_irreplaceable(path):
            with path.open("ab") as sink:
                rows, nbytes = stream_batches(reading.reader, sink, file_format, advance)
        else:
            with atomic_file(Path(os.path.realpath(path))) as sink:
                rows, nbytes = write_batches(reading.reader, sink, file_format, advance)
    seconds = time.perf_counter() - started
    rate = text.size(nbytes / seconds)
    summary = f"{reading.info.name}: {text.plural(rows, 'row')}, {text.size(nbytes)} in {seconds:.2f} s, {rate}/s"
    print(text.printable(summary), file=sys.stderr)


_SQL = """\
Run an SQL query with DuckDB (pip install duckdb). The tables are the datasets of the catalog. Write a name in double
quotes if it has other characters than letters, digits and underscores. Only the columns and rows that the query needs
are read. DuckDB resolves all other names, so 'other.parquet' is a file unless a dataset has this name. Names
that begin with /, ./, ../ or ~/, and URLs, are always files.

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
    from dissociated.client.sql import SqlSession, is_query  # on first use: duckdb is slow to import

    if arguments.query == "-" and not streams.has_input():
        raise OptionError('no query is given: dissociated sql "SELECT ...", or a query on the standard input')
    query = arguments.query
    if query == "-":
        query = io.TextIOWrapper(streams.open_stdin(), sys.stdin.encoding).read()
    if not query.strip():
        raise OptionError('the query is empty: dissociated sql "SELECT ..."')
    catalog = target.find(arguments).catalog
    into = None
    if arguments.into is not None:
        target.new_name(arguments.into)
        into = target.find_dataset(argparse.Namespace(**{**vars(arguments), "uri": arguments.into}))
        access.check_second_catalog(catalog, into.catalog, arguments)
    with access.client(catalog, arguments) as client, SqlSession(client, _ADVICE) as session:
        statements = session.parse(query, returns_rows=into is not None)
        file_format = FILE_FORMATS[arguments.format or "table"]
        queries = [statement for statement in statements if is_query(statement)]
        if len(queries) > 1 and not file_format.holds_several:
            raise OptionError(
                f"the format {arguments.format} holds one result, and {len(queries)} statements return rows: use "
                "another format, table or jsonl"
            )
        for statement in statements:
            answer = session.run(statement)
            if answer is None:
                continue
            is_last = statement is statements[-1]
            if not (statement in queries or file_format.holds_several):
                for _ in answer:  # the word Success, or a number of rows
                    pass
                continue
            if into is not None and is_last:
                _publish(answer, into, arguments)
            else:
                write_stdout(answer, file_format._replace(choose="SELECT A,B"))


def _publish(answer: pa.RecordBatchReader, dataset: target.Target, arguments: argparse.Namespace) -> None:
    """Publish the result of a query as the dataset of the option --into, and print a summary to stderr."""
    started = time.perf_counter()
    with access.client(dataset.catalog, arguments) as client:
        rows = client.put(dataset.name, answer)
    took = f"{text.plural(rows, 'row')} in {time.perf_counter() - started:.2f} s"
    print(text.printable(f"{dataset.name}: {took}, at {dataset.catalog}/{dataset.name}"), file=sys.stderr)


_ROWS = re.compile(r"(\d*):(\d*)")
_NO_END = 2**62  # more rows than there are


class OpenDataset(NamedTuple):
    """An open reader of a dataset, with the number of rows if the catalog knows it."""

    info: DatasetInfo
    reader: pa.RecordBatchReader
    rows: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument and the options that `open_dataset` reads."""
    group = parser.add_argument_group("rows and columns")  # before the groups of access and of the log in the help
    target.add_arguments(parser)
    group.add_argument("--columns", metavar="A,B,…", help="only these columns, in the order of the schema")
    group.add_argument("--filter", metavar="CONDITION", help="only rows that pass: \"dep_delay > 60 and dest = 'IAH'\"")
    group.add_argument("--version", type=int, metavar="N", help="read a replaced version that is still kept")
    group.add_argument(
        "--transport", metavar="SCHEME", help="shm, tcp, tls, ucx, fabric or grpc (default: the nearest that works)"
    )


def add_rows_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option for a range of rows."""
    parser.add_argument(
        "--rows",
        type=parse_rows,
        metavar="A:B",
        help="rows from A up to, but not including, B; the first is 0: 0:100, or 500:",
    )


def add_format_argument(parser: argparse.ArgumentParser, choices: Iterable[str], default: str) -> None:
    """Add the option for the output format."""
    names = [*choices]
    parser.add_argument(
        "-f",
        "--format",
        choices=names,
        metavar="FORMAT",
        help=f"format of the output: {', '.join(names)} (default: {default})",
    )


def parse_rows(written: str) -> range:
    """Parse a range of rows: 10:20, :20, or 10:."""
    match = _ROWS.fullmatch(written)
    if match is None or not any(match.groups()):
        raise argparse.ArgumentTypeError(
            f"{written!r} is not a range of rows: give 0:100, or 500: for all rows from 500 on"
        )
    first, end = match.groups()
    return range(int(first or 0), int(end or _NO_END))


@contextmanager
def open_dataset(
    arguments: argparse.Namespace, rows: range | None = None, limit: int | None = None
) -> Iterator[OpenDataset]:
    """Open the dataset of the command line for the `with` block.

    Args:
        arguments: The options, with columns, filter, version and transport.
        rows: The range of rows; by default all.
        limit: The largest number of rows that pass the filter; by default all.

    Yields:
        The reader, with the description of the dataset.
    """
    catalog, name = target.find_dataset(arguments)
    with access.client(catalog, arguments) as client:
        info = client.describe(name, arguments.version)
        request = replace(client.defaults, transport=arguments.transport, rows=rows, limit=limit)
        for retries in count():
            try:
                reader = _open_version(client, info, arguments, request)
                break
            except DatasetNotFound:
                if retries == MAX_RETRIES or (current := client.describe(name, arguments.version)) == info:
                    raise
                info = current  # it was replaced after the look-up
        yield OpenDataset(info, reader, None if arguments.filter is not None else _rows_in(info.rows, rows))


def _open_version(
    client: Client, info: DatasetInfo, arguments: argparse.Namespace, request: ReadRequest
) -> pa.RecordBatchReader:
    """Open the version of `info`, because the options for columns and filter mean something else in another schema.

    Raises DatasetNotFound if the version was replaced.
    """
    require_rows(info)
    columns = None if arguments.columns is None else _split_columns(arguments.columns, info.schema)
    condition = None if arguments.filter is None else parse_condition(arguments.filter, info.schema)
    version = VersionReader(client, info, arguments.transport)
    return client.endpoints.read(version.describe, replace(request, columns=columns, filter=condition))


def _split_columns(written: str, schema: pa.Schema) -> list[str]:
    """Split the names of columns at commas. Spaces around a name are left out unless the schema has them."""
    return [name if name in schema.names else name.strip() for name in written.split(",")]


def require_rows(info: DatasetInfo) -> None:
    """Raise WrongKind if a dataset holds tensors."""
    if info.tensors is not None:
        raise WrongKind(
            f"{info.name!r} holds tensors, which have no rows: dissociated describe shows them, and "
            f"client.read_tensors({info.name!r}) reads them in Python"
        )


def _rows_in(total: int | None, rows: range | None) -> int | None:
    return total if total is None or rows is None else len(range(min(rows.start, total), min(rows.stop, total)))

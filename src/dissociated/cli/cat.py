"""dissociated cat: write a dataset to the standard output."""

from __future__ import annotations

import argparse

from dissociated.cli import reading
from dissociated.cli.formats import FILE_FORMATS

DESCRIPTION = """\
Write the rows of a dataset to the standard output: as a table for people, or as --format says for programs.
In a terminal the table has the columns that fit; elsewhere it has them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cat`."""
    reading.add_arguments(parser)
    reading.add_rows_argument(parser)
    reading.add_format_argument(parser, FILE_FORMATS, "table")


def run(arguments: argparse.Namespace) -> None:
    """Write it."""
    with reading.opened(arguments, arguments.rows) as found:
        reading.to_stdout(found.reader, FILE_FORMATS[arguments.format or "table"])

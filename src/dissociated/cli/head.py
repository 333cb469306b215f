"""dissociated head: show the first rows of a dataset."""

from __future__ import annotations

import argparse

from dissociated.cli import reading
from dissociated.cli.formats import FILE_FORMATS

DESCRIPTION = """\
Show the first rows of a dataset, as a table or as --format says. No more is read than that takes.
In a terminal the table has the columns that fit: --columns chooses others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `head`."""
    reading.add_arguments(parser)
    parser.add_argument("-n", "--rows", type=_count, default=10, metavar="N", help="how many (default: %(default)s)")
    reading.add_format_argument(parser, FILE_FORMATS, "table")


def _count(written: str) -> int:
    if not written.isdecimal():
        raise argparse.ArgumentTypeError(f"{written!r} is no number of rows")
    return int(written)


def run(arguments: argparse.Namespace) -> None:
    """Show them."""
    with reading.opened(arguments, limit=arguments.rows) as found:
        reading.to_stdout(found.reader, FILE_FORMATS[arguments.format or "table"])

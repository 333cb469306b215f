"""What the commands that read a dataset have in common: of which rows and columns, and how these are written."""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.cli import access, target
from dissociated.cli.condition import parse_condition
from dissociated.cli.ending import EndingSignals
from dissociated.cli.formats import FileFormat
from dissociated.cli.progress import Advance
from dissociated.codec.columns import values_size
from dissociated.codec.split import Validator, batches
from dissociated.control.locations import DatasetInfo
from dissociated.errors import OptionError, WrongKind

_ROWS = re.compile(r"(\d*):(\d*)")
_NO_END = 2**62  # more rows than there are


class Reading(NamedTuple):
    """A dataset that is read, and how many rows there will be, as far as the catalog knows."""

    info: DatasetInfo
    reader: pa.RecordBatchReader
    rows: int | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The argument and the options that `opened` takes."""
    target.add_arguments(parser)
    group = parser.add_argument_group("what is read")
    group.add_argument("--columns", metavar="A,B,…", help="only these columns, in the order of the schema")
    group.add_argument("--filter", metavar="CONDITION", help="only rows that pass: \"dep_delay > 60 and dest = 'IAH'\"")
    group.add_argument("--version", type=int, metavar="N", help="a version that was replaced and is still kept")
    group.add_argument(
        "--transport", metavar="SCHEME", help="shm, tcp, tls, ucx, fabric or grpc (default: the nearest that works)"
    )


def add_rows_argument(parser: argparse.ArgumentParser) -> None:
    """The option that says which rows."""
    parser.add_argument(
        "--rows", type=parse_rows, metavar="A:B", help="from row A, the first is 0, up to and without B: 0:100, or 500:"
    )


def add_format_argument(parser: argparse.ArgumentParser, choices: Iterable[str], default: str) -> None:
    """The option that says how they are written."""
    parser.add_argument("-f", "--format", choices=[*choices], help=f"how they are written (default: {default})")


def parse_rows(written: str) -> range:
    """What 10:20, :20, or 10: means."""
    found = _ROWS.fullmatch(written)
    if found is None or not any(found.groups()):
        raise argparse.ArgumentTypeError(f"{written!r} are no rows: 0:100, or 500: for all from there on")
    first, end = found.groups()
    return range(int(first or 0), int(end or _NO_END))


@contextmanager
def opened(arguments: argparse.Namespace, rows: range | None = None, limit: int | None = None) -> Iterator[Reading]:
    """The dataset that is meant, for the time of the block: of these rows, those that pass, and at most so many."""
    catalog, name = target.find_dataset(arguments)
    columns = None if arguments.columns is None else arguments.columns.split(",")
    with access.client(catalog, arguments) as client:
        info = client.describe(name, arguments.version)
        check_rows(info)
        condition = None if arguments.filter is None else parse_condition(arguments.filter, info.schema)
        reader = client.read(
            name,
            transport=arguments.transport,
            columns=columns,
            version=arguments.version,
            rows=rows,
            filter=condition,
            limit=limit,
        )
        yield Reading(info, reader, None if condition is not None else _count(info.rows, rows))


def check_rows(info: DatasetInfo) -> None:
    """Raise WrongKind for tensors."""
    if info.tensors is not None:
        raise WrongKind(
            f"{info.name!r} holds tensors, which have no rows: dissociated describe shows them, and in Python "
            f"client.read_tensors({info.name!r}) reads them"
        )


def _count(total: int | None, rows: range | None) -> int | None:
    return total if total is None or rows is None else len(range(min(rows.start, total), min(rows.stop, total)))


def write_batches(
    reader: pa.RecordBatchReader, sink: Any, written: FileFormat, advance: Advance = lambda more, nbytes: None
) -> tuple[int, int]:
    """Write all of it, and tell `advance` how much that was. Returns how many rows and bytes that were.

    What breaks off cannot be taken for all of it, but for text.
    """
    rows = nbytes = 0
    validator = Validator(reader.schema)
    with written.open(sink, reader.schema) as writer:
        for batch, metadata in batches(reader):
            if written.is_ipc:
                writer.write_batch(validator.check(batch), custom_metadata=metadata)
            else:
                validator.check_values(batch)
                writer.write_batch(batch)
            size = values_size(batch)
            advance(batch.num_rows, size)
            rows, nbytes = rows + batch.num_rows, nbytes + size
    return rows, nbytes


def write_away(
    reader: pa.RecordBatchReader, sink: Any, written: FileFormat, advance: Advance = lambda more, nbytes: None
) -> tuple[int, int]:
    """The same to what somebody may read meanwhile: a signal that ends this process breaks it off, too."""
    if written.is_text:
        return write_batches(reader, sink, written, advance)
    with EndingSignals() as signals:

        def told(more: int, nbytes: int) -> None:
            advance(more, nbytes)
            signals.check()

        return write_batches(reader, sink, written, told)


def to_stdout(
    reader: pa.RecordBatchReader, written: FileFormat, advance: Advance = lambda more, nbytes: None
) -> tuple[int, int]:
    """The same to the standard output. Raises OptionError for what is no text, where that is a terminal."""
    if not written.is_text and sys.stdout.isatty():
        raise OptionError("this format is no text, and the standard output is a terminal: give a file, -o FILE")
    if isinstance(sys.stdout.buffer, io.RawIOBase):  # PYTHONUNBUFFERED: it may take less than it is given
        with open(sys.stdout.fileno(), "wb", closefd=False) as sink:
            return write_away(reader, sink, written, advance)
    return write_away(reader, sys.stdout.buffer, written, advance)

"""The command put: publishes files in a catalog."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dissociated.cli import access, quantities, target, text
from dissociated.cli.datasets import parse_tags
from dissociated.cli.formats import FILE_FORMATS
from dissociated.cli.inputs import open_input
from dissociated.cli.terminal import progress
from dissociated.codec.batches import BatchReader
from dissociated.codec.columns import values_size
from dissociated.codec.schemas import schema_difference
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.datasets.base import Dataset
from dissociated.datasets.text import TEXT_FORMATS
from dissociated.errors import OptionError, SourceError

_PUT = """\
Publish files with the same schema as one dataset, all at once. The node keeps a copy, so the dataset stays available
after this command has ended and the files are deleted.

  Arrow IPC, Parquet  detected from the content
  a directory         must have Parquet files only
  .csv                types inferred from the first 16 MB
  .jsonl .ndjson      types inferred from the first 16 MB

"-" is the standard input: an Arrow IPC stream or file, Parquet, or the text format that --format names.

A name without a URI is a dataset of your node on this host. The node is started if it does not run."""


def add_put(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `put` to its parser."""
    parser.description = _PUT
    parser.add_argument(
        "file", nargs="+", type=Path, metavar="FILE", help='a file or a directory, "-" for standard input'
    )
    parser.add_argument("uri", metavar="[URI/]NAME", help="name of the dataset: grpc://HOST:PORT/NAME, or NAME alone")
    parser.add_argument(
        "-f", "--format", choices=("csv", "jsonl"), help="format of text (default: by the ending of the file)"
    )
    parser.add_argument("--append", action="store_true", help="append to the dataset instead of replacing it")
    parser.add_argument(
        "--tag", action="append", default=[], metavar="KEY=VALUE", help="tag of the version; may be repeated"
    )
    quantities.add_duration(parser, "--ttl", "remove the dataset after this time: 90s, 15m, 1h, 2d")
    target.add_options(parser)
    parser.set_defaults(run=_run_put)


def _run_put(arguments: argparse.Namespace) -> None:
    """Publish the files, and print a summary to stderr."""
    from dissociated.control.commit import Commit

    name = target.new_name(arguments.uri)
    _check_order(arguments)
    mode = "append" if arguments.append else "overwrite"
    commit = Commit(name, mode=mode, tags=parse_tags(arguments.tag), ttl=arguments.ttl)
    started = time.perf_counter()
    with ExitStack() as owned:
        sources = [open_input(file, arguments.format, owned) for file in arguments.file]
        schema = sources[0].schema
        for file, source in zip(arguments.file, sources, strict=True):
            if source.schema != schema:
                difference = schema_difference(schema, source.schema)
                raise SourceError(f"{str(file)!r} and {str(arguments.file[0])!r} have different schemas: {difference}")
        catalog = owned.enter_context(_catalog(arguments))
        client = owned.enter_context(access.client(catalog, arguments))
        advance = owned.enter_context(progress(name, _row_count(sources)))

        def pairs() -> Iterator[BatchAndMetadata]:
            for source in sources:
                for batch, metadata in batches(source.open_reader()):
                    yield batch, metadata
                    advance(batch.num_rows, values_size(batch))

        rows = client.put(name, BatchReader(schema, pairs()), mode=mode, tags=commit.tags, ttl=commit.ttl)
    took = f"{text.plural(rows, 'row')} in {time.perf_counter() - started:.2f} s"
    print(text.printable(f"{name}: {took}, at {catalog}/{name}"), file=sys.stderr)


def _check_order(arguments: argparse.Namespace) -> None:
    """Raise OptionError if the last argument is not a name, but a file to publish: `put *.csv`, or a wrong order."""
    last = Path(arguments.uri)
    is_data = last.suffix in TEXT_FORMATS or any(
        last.suffix in file_format.endings for file_format in FILE_FORMATS.values()
    )
    if is_data and last.is_file():
        raise OptionError(
            f"the last argument is the name of the dataset, and {arguments.uri!r} is a file: give the name after the "
            "files, dissociated put FILE NAME"
        )


def _row_count(sources: Sequence[Dataset]) -> int | None:
    """Return the number of rows of all sources, or None if it is not known before they are read."""
    row_counts = [source.rows for source in sources if source.rows is not None]
    return sum(row_counts) if len(row_counts) == len(sources) else None


@contextmanager
def _catalog(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the URI of the catalog. If none is named and no node runs, start a node.

    The node ends with this process if nothing was committed.
    """
    catalog = target.catalog(arguments)
    if catalog is not None:
        yield catalog
        return
    from dissociated.node.launch import ensure

    read, write = os.pipe()
    try:
        yield ensure(arguments.store, starter=read).uri
    finally:
        os.close(read)
        os.close(write)

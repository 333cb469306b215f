"""dissociated put: publish files in a catalog."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dissociated.cli import access, target
from dissociated.cli.describe import tags
from dissociated.errors import SourceError

DESCRIPTION = """\
Publish Arrow IPC or Parquet files, all of one schema, as one dataset, whole and at once. The node keeps a copy: the
dataset stays when this command has ended, and when the files are gone.

A name without a URI is one at this user's node on this host, which is started where there is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `put`."""
    parser.add_argument("file", nargs="+", type=Path, metavar="FILE", help="an Arrow IPC or Parquet file")
    parser.add_argument("uri", metavar="[URI/]NAME", help="grpc://HOST:PORT/NAME, or NAME alone")
    parser.add_argument("--append", action="store_true", help="add to the dataset instead of replacing it")
    parser.add_argument("--tag", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    parser.add_argument("--ttl", type=float, metavar="SECONDS", help="after which the dataset is gone")
    target.add_options(parser)


def run(arguments: argparse.Namespace) -> None:
    """Publish, and say on stderr what was."""
    from dissociated.catalog.publication import Publication
    from dissociated.codec.batches import BatchReader
    from dissociated.codec.split import batches
    from dissociated.datasets.sources import make_dataset

    name = target.name(arguments.uri)
    mode = "append" if arguments.append else "overwrite"
    asked = Publication(name, mode, tags(arguments.tag), arguments.ttl)
    started = time.perf_counter()
    sources = [make_dataset(file.name, file) for file in arguments.file]
    schema = sources[0].schema
    for file, source in zip(arguments.file, sources, strict=True):
        if source.schema != schema:
            raise SourceError(f"{file} has another schema than {arguments.file[0]}, so they are not one dataset")
    pairs = (pair for source in sources for pair in batches(source.open_reader()))
    with _catalog(arguments) as catalog, access.client(catalog, arguments) as client:
        rows = client.put(name, BatchReader(schema, pairs), mode=mode, tags=asked.tags, ttl=asked.ttl)
    print(f"{name}: {rows:,} rows in {time.perf_counter() - started:.2f} s, at {catalog}/{name}", file=sys.stderr)


@contextmanager
def _catalog(arguments: argparse.Namespace) -> Iterator[str]:
    """Where it goes. Where no catalog is named, a node is started, which ends with us if it was started for nothing."""
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

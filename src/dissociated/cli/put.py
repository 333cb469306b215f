"""dissociated put: publish files in a catalog."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pyarrow as pa

from dissociated.cli import access, text
from dissociated.errors import SourceError, UriError

SUMMARY = "publish files as a dataset of a node"
DESCRIPTION = """\
Publish Arrow IPC or Parquet files, all of one schema, as one dataset, whole and at once. The node keeps a copy: the
dataset stays when this command has ended, and when the files are gone."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `put`."""
    parser.add_argument("file", nargs="+", type=Path, metavar="FILE", help="an Arrow IPC or Parquet file")
    parser.add_argument("uri", metavar="URI/NAME", help="grpc://HOST:PORT/NAME")
    parser.add_argument("--append", action="store_true", help="add to the dataset instead of replacing it")
    parser.add_argument("--tag", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    parser.add_argument("--ttl", type=float, metavar="SECONDS", help="after which the dataset is gone")
    access.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Publish, and say on stderr what was."""
    from dissociated.dataset import dataset

    catalog, name = text.split_name(arguments.uri)
    if not name:
        raise UriError(f"{arguments.uri} names no dataset: grpc://HOST:PORT/NAME")
    tags = dict(one.partition("=")[::2] for one in arguments.tag)
    started = time.perf_counter()
    sources = [dataset(file.name, file) for file in arguments.file]
    schema = sources[0].schema
    for file, source in zip(arguments.file, sources, strict=True):
        if source.schema != schema:
            raise SourceError(f"{file} has another schema than {arguments.file[0]}, so they are not one dataset")
    batches = (batch for source in sources for batch in source.open_reader())
    with access.client(catalog, arguments) as client:
        mode = "append" if arguments.append else "overwrite"
        reader = pa.RecordBatchReader.from_batches(schema, batches)
        rows = client.put(name, reader, mode=mode, tags=tags, ttl=arguments.ttl)
    print(f"{name}: {rows:,} rows in {time.perf_counter() - started:.2f} s", file=sys.stderr)

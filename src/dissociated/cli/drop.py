"""dissociated drop: make a dataset unavailable."""

from __future__ import annotations

import argparse

from dissociated.cli import access, text
from dissociated.errors import UriError

SUMMARY = "make a dataset unavailable"
DESCRIPTION = "Make a dataset unavailable. Whoever reads it goes on; a node then removes its segments."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `drop`."""
    parser.add_argument("uri", metavar="URI/NAME", help="grpc://HOST:PORT/NAME")
    access.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Drop it."""
    catalog, name = text.split_name(arguments.uri)
    if not name:
        raise UriError(f"{arguments.uri} names no dataset: grpc://HOST:PORT/NAME")
    with access.client(catalog, arguments) as client:
        client.drop(name)

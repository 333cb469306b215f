"""dissociated drop: make a dataset unavailable."""

from __future__ import annotations

import argparse

from dissociated.cli import access, target

DESCRIPTION = "Make a dataset unavailable. Readers that have begun go on; then a node removes the segments."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `drop`."""
    target.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Drop it."""
    catalog, name = target.find_dataset(arguments)
    with access.client(catalog, arguments) as client:
        client.drop(name)

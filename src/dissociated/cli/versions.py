"""dissociated versions: what of a dataset can still be read."""

from __future__ import annotations

import argparse
import json

from dissociated.cli import access, target, terminal, text
from dissociated.errors import DatasetNotFound

DESCRIPTION = """\
List the versions of a dataset that can be read, the oldest first: the current one, and those that were replaced and
are kept for a while. dissociated cat --version N reads one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `versions`."""
    target.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def run(arguments: argparse.Namespace) -> None:
    """Print them."""
    catalog, name = target.find_dataset(arguments)
    with access.client(catalog, arguments) as client:
        found = client.versions(name)
    if not found:
        raise DatasetNotFound(f"no dataset {name!r} is published at {catalog}")
    if arguments.json:
        print(json.dumps([{**one, "created": text.utc(one["created"])} for one in found], indent=2))
        return
    rows = [
        (
            str(one["version"]),
            text.count(one["rows"]),
            text.local_time(one["created"]),
            "current" if one["current"] else "replaced",
        )
        for one in found
    ]
    terminal.print_table(("VERSION", "ROWS", "CREATED", "STATE"), rows, right=(0, 1))

"""dissociated ls: what a catalog holds."""

from __future__ import annotations

import argparse
import json

from dissociated.cli import access, target, terminal, text
from dissociated.cli.describe import column_count, plain_info, tags, transports
from dissociated.control.locations import DatasetInfo

DESCRIPTION = """\
List the datasets of a catalog: all, one, or those whose names begin alike, as in "team/*"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ls`."""
    target.add_arguments(parser, "[URI/][NAME]", optional=True)
    parser.add_argument("-l", "--long", action="store_true", help="show when they were made and where they are, too")
    parser.add_argument("--tag", action="append", default=[], metavar="KEY=VALUE", help="only those that have this tag")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    catalog, name = target.find(arguments)
    wanted_tags = tags(arguments.tag)
    with access.client(catalog, arguments) as client:
        if name and not name.endswith("*"):
            found = [one for one in [client.describe(name)] if wanted_tags.items() <= one.tags.items()]
        else:
            found = list(client.list(name.removesuffix("*"), wanted_tags))
    if arguments.json:
        print(json.dumps([plain_info(info) for info in found], indent=2))
    elif found:
        _print(found, arguments.long)
    else:
        print("no datasets")


def _print(found: list[DatasetInfo], long: bool) -> None:
    """A column for what any of them has."""
    columns = [
        ("NAME", [info.name for info in found]),
        ("ROWS", [text.count(info.rows) for info in found]),
        ("SIZE", [text.size(info.nbytes) for info in found]),
        ("COLUMNS", [column_count(info) for info in found]),
        ("VERSION", [str(info.version) if info.version else "-" for info in found]),
    ]
    if long:
        columns.append(("CREATED", [text.local_time(info.created) if info.created else "-" for info in found]))
    if long or any(info.expires for info in found):
        columns.append(("EXPIRES", [text.until(info.expires) for info in found]))
    if long:
        columns.append(("HOSTS", [" ".join(sorted({h for e in info.endpoints for h in e.hosts})) for info in found]))
        columns.append(("TRANSPORTS", [transports(info.endpoints) for info in found]))
    if long or any(info.tags for info in found):
        columns.append(("TAGS", [" ".join(f"{key}={value}" for key, value in info.tags.items()) for info in found]))
    heads = [head for head, _ in columns]
    terminal.print_table(heads, zip(*(cells for _, cells in columns), strict=True), right=(1, 2, 3, 4))

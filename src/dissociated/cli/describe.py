"""dissociated describe: the columns of a dataset, and where it is."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from dissociated.cli import access, target, terminal, text
from dissociated.control.locations import DatasetInfo, Endpoint
from dissociated.errors import OptionError

DESCRIPTION = "Show the columns of a dataset, its version and tags, and where its parts are."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `describe`."""
    target.add_arguments(parser)
    parser.add_argument("--version", type=int, metavar="N", help="a version that was replaced and is still kept")
    parser.add_argument("-l", "--long", action="store_true", help="show the URIs that it can be read at, too")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")


def run(arguments: argparse.Namespace) -> None:
    """Print what the catalog knows of it."""
    catalog, name = target.find_dataset(arguments)
    with access.client(catalog, arguments) as client:
        info = client.describe(name, arguments.version)
    if arguments.json:
        print(json.dumps(plain_info(info), indent=2))
        return
    _print_facts(info)
    _print_schema(info)
    parts = [
        (str(number), text.count(one.rows), " ".join(one.hosts) or "-", transports([one]) or "none: is its node alive?")
        for number, one in enumerate(info.endpoints)
    ]
    print()
    terminal.print_table(("PART", "ROWS", "HOSTS", "TRANSPORTS"), parts, right=(0, 1))
    if arguments.long:
        for endpoint in info.endpoints:
            print("\n" + "\n".join(endpoint.locations))


def _print_facts(info: DatasetInfo) -> None:
    of = text.plural(info.rows, "row") if info.tensors is None else text.plural(info.tensors.number, "tensor")
    print(f"{text.printable(info.name)}: {of}, {text.size(info.nbytes)}")
    facts = []
    if info.version:
        facts.append(f"version {info.version} of {text.local_time(info.created)}")
    if info.expires is not None:
        facts.append(f"expires {text.until(info.expires)}")
    facts += [f"{key}={value}" for key, value in info.tags.items()]
    if facts:
        print(text.printable(", ".join(facts)))


def _print_schema(info: DatasetInfo) -> None:
    tensors = info.tensors
    print()
    if tensors is None:
        fields = [(field.name, str(field.type), "" if field.nullable else "not null") for field in info.schema]
        terminal.print_table(("COLUMN", "TYPE", ""), fields)
        return
    rows = [(one.format, one.type, " x ".join(map(str, one.shape)), ", ".join(one.names)) for one in tensors.first]
    terminal.print_table(("TENSOR", "TYPE", "SHAPE", ""), rows)
    if len(rows) < tensors.number:
        print(f"and {text.count(tensors.number - len(rows))} more")


def column_count(info: DatasetInfo) -> str:
    """How many columns it has, or tensors."""
    tensors = info.tensors
    return text.count(len(info.schema)) if tensors is None else text.plural(tensors.number, "tensor")


def transports(endpoints: Sequence[Endpoint]) -> str:
    """The schemes by which these can be read."""
    return " ".join(sorted({scheme for endpoint in endpoints for scheme in endpoint.schemes}))


def tags(written: Sequence[str]) -> dict[str, str]:
    """What KEY=VALUE, again and again, says. Raises OptionError where a value is missing."""
    for one in written:
        if "=" not in one:
            raise OptionError(f"--tag {one} gives it no value: KEY=VALUE")
    return dict(one.partition("=")[::2] for one in written)


def plain_info(info: DatasetInfo) -> dict[str, Any]:
    """The same for other programs."""
    return {
        "name": info.name,
        "rows": info.rows,
        "bytes": info.nbytes,
        "version": info.version or None,
        "created": text.utc(info.created) if info.created else None,
        "expires": None if info.expires is None else text.utc(info.expires),
        "tags": dict(info.tags),
        "schema": [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in info.schema],
        "tensors": None if info.tensors is None else [one._asdict() for one in info.tensors.first],
        "hosts": sorted({host for endpoint in info.endpoints for host in endpoint.hosts}),
        "locations": [one for endpoint in info.endpoints for one in endpoint.locations],
    }

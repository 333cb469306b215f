"""dissociated ls: what a catalog holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dissociated.catalog.locations import DatasetInfo
from dissociated.cli import access, text
from dissociated.uri import Uri

SUMMARY = "list datasets, or describe one"
DESCRIPTION = "List what a catalog holds. With the name of a dataset, show its columns and where it can be had."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ls`."""
    parser.add_argument("uri", metavar="URI", help="grpc://HOST:PORT, or grpc://HOST:PORT/NAME")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    access.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the list, or the one."""
    catalog, name = text.split_name(arguments.uri)
    with access.client(catalog, arguments) as client:
        found = [client.describe(name)] if name else list(client.list())
    if arguments.json:
        print(json.dumps([_plain(info) for info in found], indent=2))
    elif name:
        _describe(found[0])
    elif found:
        rows = [
            (info.name, text.count(info.rows), text.size(info.nbytes), _columns(info), _transports(info))
            for info in found
        ]
        print(text.table(("NAME", "ROWS", "SIZE", "COLUMNS", "TRANSPORTS"), rows, right=(1, 2, 3)))
    else:
        print("no datasets")


def _columns(info: DatasetInfo) -> str:
    tensors = info.tensors
    return text.count(len(info.schema)) if tensors is None else _tensors(tensors.number)


def _tensors(count: int) -> str:
    return f"{text.count(count)} tensor{'' if count == 1 else 's'}"


def _describe(info: DatasetInfo) -> None:
    tensors = info.tensors
    if tensors is None:
        print(f"{info.name}: {text.count(info.rows)} rows, {text.size(info.nbytes)}\n")
        fields = [(field.name, str(field.type), "" if field.nullable else "not null") for field in info.schema]
        print(text.table(("COLUMN", "TYPE", ""), fields))
    else:
        print(f"{info.name}: {_tensors(tensors.number)}, {text.size(info.nbytes)}\n")
        rows = [(one.format, one.type, " x ".join(map(str, one.shape)), ", ".join(one.names)) for one in tensors.first]
        print(text.table(("TENSOR", "TYPE", "SHAPE", ""), rows))
        if len(rows) < tensors.number:
            print(f"and {text.count(tensors.number - len(rows))} more")
    print()
    for endpoint in info.endpoints:
        print("\n".join(endpoint.locations))


def _transports(info: DatasetInfo) -> str:
    schemes = {Uri.parse(one).scheme for endpoint in info.endpoints for one in endpoint.locations}
    return " ".join(sorted(scheme for scheme in schemes if not scheme.startswith("arrow-flight")))


def _plain(info: DatasetInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "rows": info.rows,
        "bytes": info.nbytes,
        "schema": [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in info.schema],
        "tensors": None if info.tensors is None else [one._asdict() for one in info.tensors.first],
        "locations": [one for endpoint in info.endpoints for one in endpoint.locations],
    }

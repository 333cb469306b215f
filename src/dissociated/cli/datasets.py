"""The commands that list, describe and drop datasets and nodes of a catalog: ls, describe, versions, drop, forget."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from dissociated.cli import access, target, terminal, text
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint, unavailable
from dissociated.errors import CatalogError, DatasetNotFound, OptionError

if TYPE_CHECKING:
    from dissociated.client.client import Client

_LS = """\
List the datasets of a catalog: all, one, or all whose names match a pattern in quotes, as in "team/*".

In a terminal, long names lose their middle, and columns that do not fit are left out. In a pipe the list is whole."""


def add_ls(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `ls` to its parser."""
    parser.description = _LS
    target.add_arguments(parser, "[URI/][NAME]", optional=True)
    parser.add_argument("-l", "--long", action="store_true", help="also show creation times and locations")
    parser.add_argument("--tag", action="append", default=[], metavar="KEY=VALUE", help="only datasets with this tag")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    parser.set_defaults(run=_run_ls)


def _run_ls(arguments: argparse.Namespace) -> None:
    """Print the list of datasets."""
    catalog, name = target.find(arguments)
    wanted_tags = parse_tags(arguments.tag)
    with access.client(catalog, arguments) as client:
        if name and "*" not in name:
            datasets = [info for info in [client.describe(name)] if wanted_tags.items() <= info.tags.items()]
        else:
            datasets = _matching_datasets(client, name or "*", wanted_tags)
        problems = [] if arguments.json else _problems(client)
    if arguments.json:
        print(json.dumps([_plain_info(info) for info in datasets], indent=2))
    elif datasets:
        _print_list(datasets, arguments.long)
    else:
        print("no datasets")
    for problem in problems:
        print(text.printable(problem), file=sys.stderr)


def _problems(client: Client) -> list[str]:
    """Return a sentence about each node that is away, that the catalog refused, or that has another problem."""
    try:
        nodes = client.nodes()
    except CatalogError:
        return []  # a server that is not of this library
    away = [
        f"the node on {node['host']} has been away since {text.local_time(node['seen'])}: start it again, or remove it "
        f"with its datasets: dissociated forget {node['host']}"
        for node in nodes
        if not node["alive"] and not node.get("problem")
    ]
    return [*away, *(f"node on {node['host']}: {node['problem']}" for node in nodes if node.get("problem"))]


#: The columns of numbers and times, which are not cut: a part of them would mislead.
_WHOLE = {"ROWS", "SIZE", "COLUMNS", "VERSION", "CREATED", "EXPIRES"}


def _print_list(datasets: list[DatasetInfo], long: bool) -> None:
    """Print a table of datasets. A column is left out if no dataset has a value for it."""
    columns = [("NAME", [info.name for info in datasets])]
    if any(endpoint.is_away for info in datasets for endpoint in info.endpoints):
        columns.append(("STATE", [_state(info) for info in datasets]))  # next to the name: narrow terminals show it
    columns += [
        ("ROWS", [text.count(info.rows) for info in datasets]),
        ("SIZE", [text.size(info.nbytes) for info in datasets]),
        ("COLUMNS", [_column_count(info) for info in datasets]),
        ("VERSION", [str(info.version) if info.version else "-" for info in datasets]),
    ]
    if long:
        columns.append(("CREATED", [text.local_time(info.created) if info.created else "-" for info in datasets]))
    if long or any(info.expires for info in datasets):
        columns.append(("EXPIRES", [text.time_until(info.expires) for info in datasets]))
    if long:
        columns.append(("HOSTS", [" ".join(sorted({h for e in info.endpoints for h in e.hosts})) for info in datasets]))
        columns.append(("TRANSPORTS", [_transports(info.endpoints) for info in datasets]))
    if long or any(info.tags for info in datasets):
        columns.append(("TAGS", [" ".join(f"{key}={value}" for key, value in info.tags.items()) for info in datasets]))
    heads = [head for head, _ in columns]
    right = [index for index, head in enumerate(heads) if head in _WHOLE]
    terminal.print_table(heads, zip(*(cells for _, cells in columns), strict=True), right)


def _state(info: DatasetInfo) -> str:
    """Return whether a dataset can be read, as text. Its beginning is enough in a narrow terminal."""
    away = [endpoint for endpoint in info.endpoints if endpoint.is_away]
    if not away:
        return "readable"
    hosts = {f"{host} {'has set a part aside' if end.set_aside else 'is away'}" for end in away for host in end.hosts}
    return f"cannot be read: {', '.join(sorted(hosts))}"


_DESCRIBE = "Show the columns, version, tags and locations of a dataset."


def add_describe(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `describe` to its parser."""
    parser.description = _DESCRIBE
    target.add_arguments(parser)
    parser.add_argument("--version", type=int, metavar="N", help="show a replaced version that is still kept")
    parser.add_argument("-l", "--long", action="store_true", help="also show the URIs of the parts")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    parser.set_defaults(run=_run_describe)


def _run_describe(arguments: argparse.Namespace) -> None:
    """Print the catalog's description of a dataset."""
    catalog, name = target.find_dataset(arguments)
    with access.client(catalog, arguments) as client:
        info = client.describe(name, arguments.version)
    if arguments.json:
        print(json.dumps(_plain_info(info), indent=2))
        return
    _print_facts(info)
    _print_schema(info)
    parts = [
        (
            str(number),
            text.count(endpoint.rows),
            " ".join(endpoint.hosts) or "-",
            _transports([endpoint]) or ("none: it is set aside" if endpoint.set_aside else "none: its node is away"),
        )
        for number, endpoint in enumerate(info.endpoints)
    ]
    print()
    terminal.print_table(("PART", "ROWS", "HOSTS", "TRANSPORTS"), parts, right=(0, 1))
    away = next((endpoint for endpoint in info.endpoints if endpoint.is_away), None)
    if away is not None:
        error = unavailable(info.name, away.hosts, away.seen, away.set_aside)
        print(text.printable(str(error)), file=sys.stderr)
    if arguments.long:
        for endpoint in info.endpoints:
            print("\n" + "\n".join(map(text.printable, endpoint.locations)))


def _print_facts(info: DatasetInfo) -> None:
    of = text.plural(info.rows, "row") if info.tensors is None else text.plural(info.tensors.number, "tensor")
    print(f"{text.printable(info.name)}: {of}, {text.size(info.nbytes)}")
    facts = []
    if info.version:
        facts.append(f"version {info.version} of {text.local_time(info.created)}")
    if info.expires is not None:
        facts.append(f"expires {text.time_until(info.expires)}")
    facts += [f"{key}={value}" for key, value in info.tags.items()]
    if facts:
        print(text.printable(", ".join(facts)))


def _print_schema(info: DatasetInfo) -> None:
    tensors = info.tensors
    print()
    if tensors is None:
        fields = [(field.name, str(field.type), "" if field.nullable else "not null") for field in info.schema]
        terminal.print_table(("COLUMN", "TYPE", ""), fields, whole=True)
        return
    rows = [
        (tensor.format, tensor.type, " x ".join(map(str, tensor.shape)), ", ".join(tensor.names))
        for tensor in tensors.first
    ]
    terminal.print_table(("TENSOR", "TYPE", "SHAPE", ""), rows)
    if len(rows) < tensors.number:
        print(f"and {text.count(tensors.number - len(rows))} more")


def _column_count(info: DatasetInfo) -> str:
    """Return the number of columns or of tensors, as text."""
    tensors = info.tensors
    return text.count(len(info.schema)) if tensors is None else text.plural(tensors.number, "tensor")


def _transports(endpoints: Sequence[Endpoint]) -> str:
    """Return the schemes of the transports by which endpoints can be read, as text."""
    return " ".join(sorted({scheme for endpoint in endpoints for scheme in endpoint.schemes}))


def parse_tags(written: Sequence[str]) -> dict[str, str]:
    """Parse tags in the form KEY=VALUE. Raises OptionError if a value is missing."""
    for tag in written:
        if "=" not in tag:
            raise OptionError(f"--tag {tag!r} has no value: give KEY=VALUE")
    return dict(tag.partition("=")[::2] for tag in written)


def _plain_info(info: DatasetInfo) -> dict[str, Any]:
    """Return the description of a dataset as plain values, for JSON."""
    return {
        "name": info.name,
        "rows": info.rows,
        "bytes": info.nbytes,
        "version": info.version or None,
        "created": text.utc(info.created) if info.created else None,
        "expires": None if info.expires is None else text.utc(info.expires),
        "tags": dict(info.tags),
        "schema": [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in info.schema],
        "tensors": None if info.tensors is None else [tensor._asdict() for tensor in info.tensors.first],
        "hosts": sorted({host for endpoint in info.endpoints for host in endpoint.hosts}),
        "readable": not any(endpoint.is_away for endpoint in info.endpoints),
        "locations": [location for endpoint in info.endpoints for location in endpoint.locations],
    }


_VERSIONS = """\
List the readable versions of a dataset, oldest first: the current version, and replaced versions that are still kept.
Read one with dissociated cat --version N."""


def add_versions(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `versions` to its parser."""
    parser.description = _VERSIONS
    target.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs")
    parser.set_defaults(run=_run_versions)


def _run_versions(arguments: argparse.Namespace) -> None:
    """Print the versions."""
    catalog, name = target.find_dataset(arguments)
    with access.client(catalog, arguments) as client:
        versions = client.versions(name)
        if not versions:
            client.describe(name)  # raises DatasetNotFound, with advice
    if arguments.json:
        print(json.dumps([{**version, "created": version["created"].isoformat()} for version in versions], indent=2))
        return
    rows = [
        (
            str(version["version"]),
            text.count(version["rows"]),
            text.local_time(version["created"].timestamp()),
            "current" if version["current"] else "replaced",
        )
        for version in versions
    ]
    terminal.print_table(("VERSION", "ROWS", "CREATED", "STATE"), rows, right=(0, 1))


_DROP = """\
Make datasets unavailable: the named ones, and those that match a pattern in quotes, as in "team/*". Several datasets
are dropped after asking. Readers that have begun can finish; the node then removes the segments."""


def add_drop(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `drop` to its parser."""
    parser.description = _DROP
    target.add_arguments(parser, several=True)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=_run_drop)


def _run_drop(arguments: argparse.Namespace) -> None:
    """Drop the datasets, after asking if they are several or a pattern has matched them."""
    with ExitStack() as owned:
        clients: dict[str, Client] = {}
        targets: dict[tuple[str, str], None] = {}  # in the order of the arguments, each once
        for item_arguments in target.for_each(arguments):
            catalog, name = target.find_dataset(item_arguments)
            if catalog not in clients:
                access.check_second_catalog(next(iter(clients), catalog), catalog, arguments)
                clients[catalog] = owned.enter_context(access.client(catalog, arguments))
            if "*" in name:
                matches = [info.name for info in _matching_datasets(clients[catalog], name, {})]
                if not matches:
                    raise DatasetNotFound(f"no dataset matches {name!r}: list the names with dissociated ls")
            else:
                matches = [name]
                if len(arguments.uri) > 1:
                    clients[catalog].describe(name)  # Raise before anything is dropped.
            targets.update(dict.fromkeys((catalog, match) for match in matches))
        asks = len(arguments.uri) > 1 or "*" in arguments.uri[0]
        if asks and not arguments.yes:
            names = text.first_names([name for _, name in targets])
            if not terminal.confirm(text.printable(f"Drop {text.plural(len(targets), 'dataset')}: {names}?")):
                return
        for catalog, name in targets:
            clients[catalog].drop(name)


def _matching_datasets(client: Client, pattern: str, wanted_tags: dict[str, str]) -> list[DatasetInfo]:
    """Return the datasets whose names match a pattern, in which `*` stands for any text."""
    names = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL)
    return [info for info in client.list(pattern.partition("*")[0], wanted_tags) if names.fullmatch(info.name)]


_FORGET = """\
Remove a node that will not come back from its catalog, with the datasets that only this node has.

The catalog refuses if the node is alive. A node that was forgotten may start again. It then removes those datasets from
its store, as if they had been dropped."""


def add_forget(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `forget` to its parser."""
    parser.description = _FORGET
    parser.add_argument("node", metavar="NODE", help="the node: its host, its URI, or its id, as the status shows them")
    target.add_arguments(parser, "URI", optional=True)
    parser.set_defaults(run=_run_forget)


def _run_forget(arguments: argparse.Namespace) -> None:
    """Forget the node."""
    catalog, _ = target.find(arguments)
    with access.client(catalog, arguments) as client:
        client.forget(arguments.node)

"""The target of a command: a catalog, and for most commands one of its datasets."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dissociated.cli import access, text
from dissociated.control.catalog_uri import CATALOG_VARIABLE
from dissociated.errors import CatalogError, DissociatedError, OptionError, StoreError, UriError
from dissociated.node.launch import ADDRESS_FILE, default_store, running, stopping
from dissociated.store.layout import SEGMENTS
from dissociated.store.manifest import DAMAGE, decode_manifest, read_manifest

_COMPLETION_TIMEOUT = 1.0  # seconds to wait for the names of datasets in a shell
_ADDRESS = re.compile(r"(localhost|[\w-]+(\.[\w-]+)+|\[[0-9a-fA-F:]+\]):\d+(/.*)?")  # a URI without its scheme


class Target(NamedTuple):
    """The URI of a catalog, and the name of a dataset, which is empty if the target is the catalog."""

    catalog: str
    name: str


def add_arguments(
    parser: argparse.ArgumentParser, metavar: str = "[URI/]NAME", optional: bool = False, several: bool = False
) -> None:
    """Add the argument and the options that `find` reads, and the options of access.

    With `several`, the argument `uri` is a list, whose items `for_each` replaces one by one.
    """
    described = "the URI of a catalog, the name of a dataset, or both: grpc://HOST:PORT/NAME"
    if metavar == "URI":
        described = "the URI of a catalog: grpc://HOST:PORT"
    uri = parser.add_argument(
        "uri", metavar=metavar, nargs="+" if several else "?" if optional else None, default="", help=described
    )
    uri.completer = complete_names  # type: ignore[attr-defined]  # read by argcomplete
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `find` reads, and the options of access, without the argument."""
    group = parser.add_argument_group("catalog")
    group.add_argument(
        "--catalog",
        metavar="URI",
        help=f"catalog to ask if no URI is given (or set {CATALOG_VARIABLE}; default: your node on this host)",
    )
    group.add_argument("--store", type=Path, metavar="DIR", help="ask the node on this host with this store")
    access.add_arguments(parser)


def find(arguments: argparse.Namespace) -> Target:
    """Return the target. Raises UriError, and CatalogError if no catalog is named and no node is running."""
    uri = catalog(arguments)
    if uri is None:
        store = arguments.store or default_store()
        if names := _stored_names(store):
            if (pid := stopping(store)) is not None:
                how = f"is stopping, and process {pid} waits for streams in progress"
            else:
                # A node touches the directory while it runs, and removes its address when it stops.
                last = "was last alive" if (store / ADDRESS_FILE).exists() else "was stopped"
                how = f"{last} at {text.local_time(store.stat().st_mtime)}"
            raise CatalogError(
                f"no node serves the store {str(store)!r}, which holds {text.plural(len(names), 'dataset')}: "
                f"{text.first_names(names)}. Its node {how}: "
                f"dissociated start{'' if arguments.store is None else f' --store {store}'} serves them again"
            )
        raise CatalogError(
            f"no catalog is given, and no node with the store {str(store)!r} runs on "
            f"this host: give grpc://HOST:PORT/NAME, set {CATALOG_VARIABLE}, or start a node: dissociated start, or "
            "dissociated put FILE NAME"
        )
    return Target(uri, _split(arguments.uri)[1])


def _stored_names(store: Path) -> list[str]:
    """Return the names of the datasets in a store, or nothing if it cannot be read."""
    names = set()
    for entry in store.glob(f"{SEGMENTS}/*"):
        with suppress(OSError, StoreError, *DAMAGE):
            names.add(decode_manifest(read_manifest(entry)).name)
    return sorted(names)


def find_dataset(arguments: argparse.Namespace) -> Target:
    """Return the target, which must have a dataset. Raises the errors of `find`, and UriError without a dataset."""
    return Target(find(arguments).catalog, name(arguments.uri))


def for_each(arguments: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Yield the arguments once for each item of `uri`."""
    for uri in arguments.uri:
        yield argparse.Namespace(**{**vars(arguments), "uri": uri})


def complete_names(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the completions of an argument for a shell: datasets, if the catalog answers within a second."""
    try:
        named, begin = _split(prefix)
        arguments = argparse.Namespace(**{**vars(parsed_args), "uri": f"{named}/" if named else ""})
        uri = catalog(arguments, _COMPLETION_TIMEOUT)
        if uri is None:
            return []
        with access.client(uri, arguments, _COMPLETION_TIMEOUT) as client:
            return [f"{named}/{info.name}" if named else info.name for info in client.list(begin)]
    except (DissociatedError, AttributeError):  # the command line may be incomplete
        return []


def name(written: str) -> str:
    """Return the name of the dataset in an argument. Raises UriError if it has none."""
    dataset = _split(written)[1]
    if not dataset:
        form = f"{written.rstrip('/')}/NAME" if written else "NAME"
        raise UriError(f"{written!r} has no dataset name: give {form}; dissociated ls lists the names")
    return dataset


def new_name(written: str) -> str:
    """Return the name of the dataset to publish in an argument.

    Raises:
        UriError: The argument has no name.
        OptionError: Other commands would take the name for a pattern.
    """
    dataset = name(written)
    if "*" in dataset:
        raise OptionError(f"{dataset!r} is not a name for a dataset: '*' stands for any text in ls and drop")
    return dataset


def catalog(arguments: argparse.Namespace, timeout: float = 5.0) -> str | None:
    """Return the URI of the catalog, or None if none is named and no node answers within `timeout` seconds.

    Raises UriError, and OptionError if two options name a catalog.
    """
    named, _ = _split(arguments.uri)
    if arguments.store is not None and (named or arguments.catalog):
        raise OptionError("--store and a catalog are both given: give one of them")
    default = arguments.catalog or (None if arguments.store else os.environ.get(CATALOG_VARIABLE))
    if named:
        return named
    if default:
        return _split(default)[0] or str(default)
    node = running(arguments.store or default_store(), timeout)
    return None if node is None else node.uri


def _split(written: str) -> tuple[str, str]:
    """Return the catalog and the name in an argument. Either may be empty."""
    if _ADDRESS.fullmatch(written):
        raise UriError(f"{written!r} has no scheme: give grpc://{written}, or grpc+tls://{written}")
    return text.split_name(written) if "://" in written else ("", written)

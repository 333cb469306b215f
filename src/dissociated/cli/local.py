"""The commands for this user's node on this host: start, stop and clean."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dissociated.cli import quantities, terminal, text
from dissociated.cli.serving import add_node
from dissociated.errors import OptionError, StoreError
from dissociated.node.launch import NodeAddress, NodeProcess, default_store, ensure, log_file, running
from dissociated.node.local import STORE_SUFFIX

if TYPE_CHECKING:
    from dissociated.store.store import Store

_START = """\
Start your node on this host in the background, unless it is running. dis.connect() in Python, this command line and
Spark find it without an address. It serves its store until dissociated stop, and serves it again when it is started
again. dissociated node has the same options, and serves in the foreground."""
#: The options of `node` that are paths. A node that is started has another working directory.
_PATHS = {"spill", "tls_cert", "tls_key", "token_file", "secret_file", "tls_roots"}


def add_start(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `start` to its parser."""
    add_node(parser)
    parser.description = _START
    parser.set_defaults(run=_run_start)


def _run_start(arguments: argparse.Namespace) -> None:
    """Start the node, and print where it is."""
    address = running(arguments.store)
    if address is not None:
        print("the node is running already, with the options that it was started with")
    else:
        address = ensure(arguments.store, options=_node_options(arguments))
    _print_node(arguments.store, address)


def _node_options(arguments: argparse.Namespace) -> list[str]:
    """Return the options of `node` that were given, for another process."""
    options: list[str] = []
    for name, values in vars(arguments).items():
        if name in ("run", "store", "ready_fd", "starter_fd") or values is None:
            continue
        for value in values if isinstance(values, list) else [values]:
            option = f"--{name.replace('_', '-')}"
            options.append(f"{option}={os.path.abspath(value) if name in _PATHS else value}")
    return options


def _print_node(store: Path, address: NodeAddress) -> None:
    print(f"process  {address.pid}")
    print(f"store    {store.absolute()}")
    if (log := log_file(store)) is not None:
        print(f"log      {log}")
    print(f"catalog  {address.uri}")


_STOP = """\
Stop your node on this host: it ends when the streams in progress have ended, and cuts them off after its --drain, 30
seconds by default. The datasets stay in its store. dissociated start serves them again, and dissociated clean frees
their memory."""
_QUIET_TIME = 1.0  # seconds after which stop says what it waits for


def add_stop(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `stop` to its parser."""
    parser.description = _STOP
    _add_store(parser)
    quantities.add_duration(parser, "--timeout", "how long to wait (default: 60s)", 60.0)
    parser.set_defaults(run=_run_stop)


def _add_store(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--store", type=Path, default=None, metavar="DIR", help=f"the store of the node (default: {default_store()})"
    )


def _run_stop(arguments: argparse.Namespace) -> None:
    """Stop the node, and wait until it has ended."""
    store = (arguments.store or default_store()).absolute()
    try:
        process = NodeProcess(store)
    except (ProcessLookupError, FileNotFoundError):
        print(f"no node with the store {store} runs on this host")
        return
    with process:
        pid = process.address.pid
        has_ended = process.stop(min(_QUIET_TIME, arguments.timeout))
        if not has_ended:
            print(f"process {pid} of the store {store} waits for streams in progress", flush=True)
            has_ended = process.wait(arguments.timeout)
    log = log_file(store)
    its_log = "" if log is None else f". Its log is {log}"
    if not has_ended:
        raise StoreError(
            f"process {pid} of the store {store} has not ended within {arguments.timeout:g} seconds{its_log}"
        )
    print(f"stopped process {pid}. Its datasets stay in {store}: dissociated clean frees them{its_log}")


_CLEAN = """\
Free the memory of your stores on this host whose nodes are stopped: all their datasets are removed. It asks first.

These are the default store and the stores of nodes that Spark has started, or the store that --store names. A store
keeps its identity and the last version number of each dataset, so that no number is used twice."""


def add_clean(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `clean` to its parser."""
    parser.description = _CLEAN
    _add_store(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")
    parser.set_defaults(run=_run_clean)


def _run_clean(arguments: argparse.Namespace) -> None:
    """Ask for each stopped store, and free it."""
    stores = [arguments.store.absolute()] if arguments.store is not None else [*_stores()]
    freed = False
    for path in stores:
        if not path.is_dir():
            raise OptionError(f"the store '{path}' does not exist")
        node = running(path)
        if node is not None:
            log = log_file(path)
            served = f"process {node.pid}" + ("" if log is None else f" (log {log})")
            print(f"{path} is served by {served}, and stays: dissociated stop --store {path}")
            continue
        try:
            store = _open(path)  # Nobody else can own the store until this process has answered.
        except StoreError as error:
            if arguments.store is not None:
                raise
            print(text.printable(str(error)))
            continue
        with store:
            freed = _clean(store, arguments.yes) or freed
    if not freed:
        print("nothing was freed")


def _open(path: Path) -> Store:
    """Open a store, with its spill directory if versions of it lie there."""
    from dissociated.store.eviction import Policy
    from dissociated.store.places import spill_of
    from dissociated.store.store import Store

    spilled = spill_of(path)
    if spilled is not None and spilled.path.is_dir():
        return Store(path, policy=Policy.SPILL, spill=spilled.path)
    return Store(path)


def _stores() -> Iterator[Path]:
    """Yield the default store and the stores of nodes that Spark has started, if they exist."""
    first = default_store()
    for path in sorted(first.parent.glob(f"{first.name}*")):
        is_ours = path == first or STORE_SUFFIX.fullmatch(path.name.removeprefix(first.name))
        if is_ours and path.is_dir() and not path.is_symlink():
            yield path


def _clean(store: Store, yes: bool) -> bool:
    """Ask, and remove all data of a store. Return whether anything was removed."""
    versions = store.versions()
    before = store.usage().total
    if not versions and not before:
        return False
    names = sorted({version.name for version in versions})
    print(f"{store.directory}: {text.plural(len(names), 'dataset')}, {text.size(before)}")
    if names:
        print(text.printable(f"  {text.first_names(names)}"))
    if not yes and not terminal.confirm("Remove these datasets?"):
        return False
    store.clear()
    usage = store.usage()
    print(f"freed {text.size(before - usage.total)}")
    if in_use := usage.staged + usage.trash:
        print(f"{text.size(in_use)} are in use by other processes: the next node or clean frees them after their end")
    for entry in store.set_aside:
        print(text.printable(f"{entry}. Remove it yourself"))
    return True

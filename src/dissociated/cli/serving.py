"""The commands that serve until a signal arrives: serve, node and catalog."""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dissociated.cli import access, quantities, text
from dissociated.cli.signals import StopSignal
from dissociated.errors import SourceError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dissociated.control.version import Version
    from dissociated.monitoring.status import ConsumerStatus
    from dissociated.node.node import Node


_SERVE = """\
Publish files under their names without the ending, until Ctrl-C or SIGTERM.

Arrow IPC streams and files are mapped and served in place. Parquet files are read again for each client.
A directory stands for its files that end in .arrow, .arrows, .feather or .parquet."""
_ENDINGS = {".arrow", ".arrows", ".feather", ".parquet"}


def add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `serve` to its parser."""
    parser.description = _SERVE
    parser.add_argument("path", nargs="+", type=Path, metavar="PATH", help="a file, or a directory of files")
    parser.add_argument(
        "--listen",
        action="append",
        metavar="URI",
        help="URI to serve at, may be repeated (default: shm: and tcp://127.0.0.1:0, or tls: with a certificate); "
        "shm:///PATH?allow=USER,... serves other users of this host, too",
    )
    parser.add_argument(
        "--catalog",
        metavar="URI",
        help="URI of the catalog, which speaks Arrow Flight: grpc+unix: is for this user alone (default: "
        "grpc://127.0.0.1:0, or grpc+tls: with a certificate; port 0 takes a free port)",
    )
    _add_retain(parser, 0.0)
    access.add_serving_arguments(parser)
    parser.set_defaults(run=_run_serve)


def _add_retain(parser: argparse.ArgumentParser, default: float) -> None:
    quantities.add_duration(
        parser,
        "--retain",
        "time for which tickets of a replaced version stay valid: 90s, 15m, 1h, 2d (default: %(default)gs)",
        default,
    )


def _run_serve(arguments: argparse.Namespace) -> None:
    """Serve files until a signal arrives."""
    from dissociated.server.server import Server

    _raise_descriptor_limit()
    sources = _sources(arguments.path)
    stop = StopSignal()
    listen, catalog = access.serving_uris(arguments)
    with Server(
        arguments.listen or listen,
        catalog=arguments.catalog or f"{catalog}:0",
        retain=arguments.retain,
        metrics=arguments.metrics,
        http=arguments.http,
        **access.serving(arguments),
    ) as server:
        for name, path in sources.items():
            server.publish(name, path)
        rows = [
            (name, text.count(dataset.rows), text.size(dataset.nbytes), text.count(len(dataset.schema)), str(path))
            for name, path in sources.items()
            for dataset in (server.dataset(name),)
        ]
        print(text.table(("NAME", "ROWS", "SIZE", "COLUMNS", "FILE"), rows, right=(1, 2, 3)))
        print(f"\nmetrics  {server.metrics_uri}" if arguments.metrics else "")
        if arguments.http:
            print(f"page     {server.http_uri}")
        access.print_catalog(server.catalog_uri, server.security)
        stop.wait()


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors to its maximum: each file and each client needs some."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _sources(paths: list[Path]) -> dict[str, Path]:
    from dissociated.cli.inputs import check_arrow

    sources: dict[str, Path] = {}
    for path in paths:
        files = sorted(f for f in path.iterdir() if f.suffix in _ENDINGS) if path.is_dir() else [path]
        if not files:
            raise SourceError(
                f"{str(path)!r} has no files to serve: their names must end in {', '.join(sorted(_ENDINGS))}"
            )
        for file in files:
            check_arrow(file, "dissociated put takes CSV and JSON lines, and keeps a copy")
            if file.stem in sources:
                raise SourceError(
                    f"{str(file)!r} and {str(sources[file.stem])!r} would have the same name, {file.stem!r}"
                )
            sources[file.stem] = file
    return sources


_NODE = """\
Serve all committed versions of a store, which is a directory in memory or on disk, until Ctrl-C or SIGTERM. The data
outlives its writers and the node: after a restart, the node serves the same datasets under the same tickets.

The policy applies when the store reaches its limit: a write fails (refuse), the oldest datasets that are not being read
are removed (evict), or the oldest datasets move to a directory on disk and are served from there (spill)."""
_IDLE_CHECK_INTERVAL = 0.5  # seconds between checks whether the node is idle
_IDLE_CHECKS = 3  # idle checks in a row after which an unused node ends


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `node` to its parser."""
    from dissociated.catalog.upstream import HEARTBEAT_INTERVAL
    from dissociated.node.launch import default_store
    from dissociated.node.node import RETAIN
    from dissociated.store.eviction import Policy
    from dissociated.store.store import STAGING_TIMEOUT

    parser.description = _NODE
    parser.add_argument(
        "--store",
        type=Path,
        default=default_store(),
        metavar="DIR",
        help="directory of the store (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=quantities.size,
        metavar="SIZE",
        help="maximum size of the store, as in 8GiB or 500MB (default: no limit)",
    )
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in Policy],
        default=Policy.REFUSE.value,
        help="action at the limit (default: %(default)s)",
    )
    parser.add_argument("--spill", type=Path, metavar="DIR", help="the directory on disk for --policy spill")
    parser.add_argument(
        "--listen",
        action="append",
        metavar="URI",
        help="URI to serve at, may be repeated (default: shm: and tcp://127.0.0.1:0, or tls: with a certificate); "
        "tcp://0.0.0.0:8816?advertise=HOST:PORT gives the address for clients, if it differs",
    )
    parser.add_argument(
        "--flight",
        metavar="URI",
        help="URI of the node's own catalog, which speaks Arrow Flight: grpc+unix: is for this user alone, "
        "grpc://HOST:PORT for everybody who reaches it (default: grpc+unix:; with a certificate "
        "grpc+tls://127.0.0.1:0; with a --catalog at grpc://, grpc://127.0.0.1:0; port 0 takes a free port)",
    )
    parser.add_argument("--catalog", metavar="URI", help="catalog of several nodes to register with (default: none)")
    parser.add_argument(
        "--advertise", metavar="HOST", help="name of this host for other hosts, if a listener is on all interfaces"
    )
    _add_retain(parser, RETAIN)
    quantities.add_duration(
        parser,
        "--forget",
        f"time after which an uncommitted segment is removed (default: {STAGING_TIMEOUT / 3600:g}h)",
        STAGING_TIMEOUT,
    )
    quantities.add_duration(
        parser, "--drain", "time that streams in progress have after SIGTERM (default: %(default)gs)", 30.0
    )
    quantities.add_duration(parser, "--idle-exit", "end after this time without readers and writers")
    quantities.add_duration(
        parser, "--empty-exit", "end after this time with an empty store, without readers and writers"
    )
    access.add_serving_arguments(parser, peers=True)
    quantities.add_duration(parser, "--heartbeat", argparse.SUPPRESS, HEARTBEAT_INTERVAL)
    parser.add_argument("--ready-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--starter-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.set_defaults(run=_run_node)


def _run_node(arguments: argparse.Namespace) -> None:
    """Serve a store until a signal arrives."""
    from dissociated.node.launch import log_file, running
    from dissociated.node.node import Node
    from dissociated.store.eviction import Policy
    from dissociated.store.layout import NODE_LOG
    from dissociated.store.store import Store

    _raise_descriptor_limit()
    stop = StopSignal()
    listen, flight = access.serving_uris(arguments)
    guarded = access.peer_security(arguments)
    try:
        store = Store(arguments.store, arguments.limit, Policy(arguments.policy), arguments.spill, arguments.forget)
    except StoreError as error:
        if (address := running(arguments.store)) is None:
            raise
        log = log_file(arguments.store)
        raise StoreError(f"{error}: process {address.pid}" + ("" if log is None else f", with the log {log}")) from None
    if arguments.ready_fd is None:
        (store.directory / NODE_LOG).unlink(missing_ok=True)  # by which tasks of Spark know a node that they may start
    before = store.versions()  # before any client knows this node
    with Node(
        store,
        arguments.listen or listen,
        flight=arguments.flight or (f"{flight}:0" if arguments.tls_cert else None),
        catalog=arguments.catalog,
        retain=arguments.retain,
        heartbeat_interval=arguments.heartbeat,
        advertise=arguments.advertise,
        security=guarded,
        metrics=arguments.metrics,
        http=arguments.http,
    ) as node:
        usage = store.usage()
        print(f"store    {store.directory}, {len(store.versions())} versions, {text.size(usage.total)}")
        for uri in node.server.endpoints.base_locations():
            print(f"listens  {uri.partition('?')[0]}")
        if arguments.metrics:
            print(f"metrics  {node.server.metrics_uri}")
        if arguments.http:
            print(f"page     {node.server.http_uri}")
        access.print_catalog(node.uri, node.service.catalog.security)
        if arguments.ready_fd is not None:
            with suppress(BrokenPipeError):  # the starter may be dead, but other processes wait, too
                os.write(arguments.ready_fd, f"{node.uri}\n".encode())
            os.close(arguments.ready_fd)
        if arguments.starter_fd is not None:
            follow = threading.Thread(
                target=stop_with_starter, args=(arguments.starter_fd, node, before, stop), daemon=True
            )
            follow.start()
        _wait_for_end(node, stop, arguments.idle_exit, arguments.empty_exit)
        waited = time.monotonic()
        if not node.drain(arguments.drain, lambda consumers: _print_waiting(consumers, arguments.drain)):
            print(
                f"stopping: streams in progress are cut off after {text.duration(time.monotonic() - waited)}",
                flush=True,
            )


def _wait_for_end(node: Node, stop: StopSignal, idle_exit: float | None, empty_exit: float | None) -> None:
    """Wait for a signal, or until the node has been idle, or idle and empty, for as many seconds."""
    if idle_exit is empty_exit is None:
        stop.wait()
        return
    last_busy = last_filled = time.monotonic()
    while not stop.wait(_IDLE_CHECK_INTERVAL):
        now = time.monotonic()
        if not node.idle:
            last_busy = last_filled = now
        elif not node.empty:
            last_filled = now
        if idle_exit is not None and now - last_busy > idle_exit and not node.is_awaited:
            break
        if empty_exit is not None and now - last_filled > empty_exit:
            node.retire()
            break


def _print_waiting(consumers: Sequence[ConsumerStatus], timeout: float) -> None:
    """Print the streams that a stopping node waits for."""
    names = [f"{consumer.peer} ({consumer.dataset or 'no request yet'})" for consumer in consumers]
    print(text.printable(f"stopping: waiting up to {timeout:g} s for {text.first_names(names)}"), flush=True)


def stop_with_starter(starter: int, node: Node, before: list[Version], stop: StopSignal) -> None:
    """Wait until the process that started a node has ended, and stop the node if it is unused.

    Args:
        starter: The read end of a pipe from that process. It is closed here.
        node: The node.
        before: The versions in the store when the node started. If these have changed, the node stays.
        stop: The event to set if the node is idle and unchanged, and no client is connected.
    """
    os.read(starter, 1)  # returns when the other end is closed
    os.close(starter)
    idle = 0
    while idle < _IDLE_CHECKS and not stop.wait(_IDLE_CHECK_INTERVAL):
        if node.store.versions() != before:
            return
        idle = idle + 1 if node.idle and not node.has_clients else 0
    stop.set()


_CATALOG = """\
Run a catalog, which speaks Arrow Flight and holds no data itself, until Ctrl-C or SIGTERM. Nodes register with it:
dissociated node --catalog URI. All its knowledge is in the database, and is available again after a restart."""


def add_catalog(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `catalog` to its parser."""
    parser.description = _CATALOG
    parser.add_argument(
        "--db", required=True, metavar="FILE", help="SQLite database of the catalog, created if it is missing"
    )
    parser.add_argument(
        "--listen",
        metavar="URI",
        help="URI of the catalog: grpc+unix:///PATH.sock is for this user alone (default: grpc://127.0.0.1:8815, or "
        "grpc+tls: with a certificate)",
    )
    parser.add_argument(
        "--advertise",
        metavar="HOST",
        help="name of this host for other hosts, if the catalog listens on all interfaces",
    )
    _add_retain(parser, 300.0)
    access.add_serving_arguments(parser, peers=True)
    parser.set_defaults(run=_run_catalog)


def _run_catalog(arguments: argparse.Namespace) -> None:
    """Run a catalog until a signal arrives."""
    from dissociated.catalog.database import Database
    from dissociated.catalog.service import CatalogService

    stop = StopSignal()
    guarded = access.peer_security(arguments)
    _, flight = access.serving_uris(arguments)
    service = CatalogService(
        arguments.listen or f"{flight}:8815",
        database=Database(arguments.db),
        retain=arguments.retain,
        advertise=arguments.advertise,
        security=guarded,
    )
    with ExitStack() as owned:
        owned.enter_context(closing(service))
        if arguments.metrics is not None:
            from dissociated.monitoring.metrics import PATH, metrics_service

            metrics = owned.enter_context(closing(metrics_service(arguments.metrics, service.catalog.status)))
            print(f"metrics  {metrics.uri}{PATH}")
        if arguments.http is not None:
            from dissociated.monitoring.dashboard import Dashboard

            page = Dashboard(arguments.http, service.catalog.status, service.catalog.holdings.activity, guarded)
            owned.enter_context(closing(page))
            print(f"page     {page.uri}")
        access.print_catalog(service.uri, guarded)
        stop.wait()

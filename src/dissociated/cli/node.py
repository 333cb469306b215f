"""dissociated node: serve what is committed in a store."""

from __future__ import annotations

import argparse
import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dissociated.cli import access, text
from dissociated.cli.stop import StopSignal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dissociated.monitoring.status import ConsumerStatus
    from dissociated.node.node import Node
    from dissociated.store.directory import Version

DESCRIPTION = """\
Serve whatever is committed in a store, a directory in memory or on disk, until SIGTERM or Ctrl-C. Data in it outlives
whoever wrote it, and the node: killed and started again, it serves the same datasets under the same tickets.

When the store reaches its limit, the policy says what happens: whoever writes is told (refuse), the oldest datasets
that nobody reads are removed (evict), or the oldest move to a directory on disk and are served from there (spill)."""

_IDLE_CHECK_INTERVAL = 0.5  # seconds between looks at whether anybody is there
_MAX_TOLD = 10  # streams in progress that are named
_IDLE_CHECKS = 3  # looks after which a node that was started for nothing ends


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `node`."""
    from dissociated.node.launch import default_store
    from dissociated.node.node import RETAIN
    from dissociated.store.eviction import Policy
    from dissociated.store.store import FORGOTTEN

    parser.add_argument(
        "--store", type=Path, default=default_store(), metavar="DIR", help="where segments lie (default: %(default)s)"
    )
    parser.add_argument(
        "--limit", type=_size, metavar="SIZE", help="how much they may take, as in 8GiB or 500MB (default: no limit)"
    )
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in Policy],
        default=Policy.REFUSE.value,
        help="what happens at the limit (default: %(default)s)",
    )
    parser.add_argument("--spill", type=Path, metavar="DIR", help="the directory on disk for --policy spill")
    parser.add_argument(
        "--listen",
        action="append",
        metavar="URI",
        help="where to serve, may be repeated (default: shm: and tcp://127.0.0.1:0, or tls: with a certificate)",
    )
    parser.add_argument(
        "--flight",
        metavar="URI",
        help="where its own catalog, Arrow Flight, answers: grpc+unix: is for this user alone, grpc://HOST:PORT for "
        "whoever reaches that (default: grpc+unix:; with a certificate grpc+tls://127.0.0.1:0; with a --catalog at "
        "grpc://, grpc://127.0.0.1:0; port 0 is one that is free)",
    )
    parser.add_argument("--catalog", metavar="URI", help="the catalog of several nodes to register at (default: none)")
    parser.add_argument(
        "--advertise", metavar="HOST", help="the name of this host for others, if a listener is on all interfaces"
    )
    parser.add_argument(
        "--retain",
        type=float,
        default=RETAIN,
        metavar="SECONDS",
        help="how long the tickets of a replaced version stay good (default: %(default)g)",
    )
    parser.add_argument(
        "--forget",
        type=float,
        default=FORGOTTEN,
        metavar="SECONDS",
        help="how long a segment that was written waits to be committed (default: %(default)g)",
    )
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long streams in progress may go on after SIGTERM (default: %(default)g)",
    )
    parser.add_argument(
        "--idle-exit", type=float, metavar="SECONDS", help="end when nobody has read or written for so long"
    )
    access.add_serving_arguments(parser, peers=True)
    parser.add_argument("--beat", type=float, default=5.0, metavar="SECONDS", help=argparse.SUPPRESS)
    parser.add_argument("--ready-fd", type=int, metavar="N", help=argparse.SUPPRESS)
    parser.add_argument("--starter-fd", type=int, metavar="N", help=argparse.SUPPRESS)


def _size(written: str) -> int:
    try:
        return text.parse_size(written)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    from dissociated.node.node import Node
    from dissociated.store.eviction import Policy
    from dissociated.store.store import Store

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    stop = StopSignal()
    listen, flight = access.serving_uris(arguments)
    options = access.serving(arguments, peers=True)
    store = Store(arguments.store, arguments.limit, Policy(arguments.policy), arguments.spill, arguments.forget)
    before = store.versions()  # when nobody knows of this node yet
    with Node(
        store,
        arguments.listen or listen,
        flight=arguments.flight or (f"{flight}:0" if arguments.tls_cert else None),
        catalog=arguments.catalog,
        retain=arguments.retain,
        heartbeat_interval=arguments.beat,
        advertise=arguments.advertise,
        metrics=arguments.metrics,
        http=arguments.http,
        **options,
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
            with suppress(BrokenPipeError):  # whoever started it may have been killed: others wait for it too
                os.write(arguments.ready_fd, f"{node.uri}\n".encode())
            os.close(arguments.ready_fd)
        if arguments.starter_fd is not None:
            follow = threading.Thread(
                target=stop_with_starter, args=(arguments.starter_fd, node, before, stop), daemon=True
            )
            follow.start()
        busy = time.monotonic()
        while not stop.wait(None if arguments.idle_exit is None else _IDLE_CHECK_INTERVAL):
            if not node.idle:
                busy = time.monotonic()
            elif time.monotonic() - busy > arguments.idle_exit:
                break
        waited = time.monotonic()
        if not node.drain(arguments.drain, lambda found: _print_waiting(found, arguments.drain)):
            print(f"stopping cuts off what is in progress after {text.duration(time.monotonic() - waited)}", flush=True)


def _print_waiting(found: Sequence[ConsumerStatus], timeout: float) -> None:
    """Say whom a node that is stopping waits for."""
    whom = [f"{one.peer} ({one.dataset or 'has asked for nothing yet'})" for one in found[:_MAX_TOLD]]
    if len(found) > _MAX_TOLD:
        whom.append(f"{len(found) - _MAX_TOLD:,} more")
    print(text.printable(f"stopping waits for {', '.join(whom)}, {timeout:g} s at most"), flush=True)


def stop_with_starter(starter: int, node: Node, before: list[Version], stop: StopSignal) -> None:
    """Set `stop` once the node's starter is gone, if nothing has been committed since `before` and nobody is there.

    `starter` is the end of a pipe, which is closed here. Returns as soon as it is decided.
    """
    os.read(starter, 1)  # which ends when the other end is closed
    os.close(starter)
    idle = 0
    while idle < _IDLE_CHECKS and not stop.wait(_IDLE_CHECK_INTERVAL):
        if node.store.versions() != before:
            return
        idle = idle + 1 if node.idle else 0
    stop.set()

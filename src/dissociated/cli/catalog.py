"""dissociated catalog: one catalog for the nodes of many hosts."""

from __future__ import annotations

import argparse
from contextlib import ExitStack, closing

from dissociated.cli import access
from dissociated.cli.stop import StopSignal

DESCRIPTION = """\
Run a catalog, Arrow Flight, that holds no data itself: nodes register at it, dissociated node --catalog URI. It runs
until SIGTERM or Ctrl-C; what it knows is in the database, and is there again when it starts again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `catalog`."""
    parser.add_argument("--db", required=True, metavar="FILE", help="its SQLite database, made where there is none")
    parser.add_argument(
        "--listen",
        metavar="URI",
        help="where it answers: grpc+unix:///PATH.sock is for this user alone (default: grpc://127.0.0.1:8815, or "
        "grpc+tls: with a certificate)",
    )
    parser.add_argument(
        "--advertise", metavar="HOST", help="the name of this host for others, if it listens on all interfaces"
    )
    parser.add_argument(
        "--retain",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long the tickets of a replaced version stay good (default: %(default)g)",
    )
    access.add_serving_arguments(parser, peers=True)


def run(arguments: argparse.Namespace) -> None:
    """Answer until a signal comes."""
    from dissociated.base.access import security
    from dissociated.catalog.database import Database
    from dissociated.catalog.service import CatalogService

    stop = StopSignal()
    guarded = security(**access.serving(arguments, peers=True), peers=True)
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

            metrics = owned.enter_context(closing(metrics_service(arguments.metrics, service.status)))
            print(f"metrics  {metrics.uri}{PATH}")
        if arguments.http is not None:
            from dissociated.monitoring.dashboard import Dashboard

            page = Dashboard(arguments.http, service.status, service.catalog.holdings.activity, guarded)
            owned.enter_context(closing(page))
            print(f"page     {page.uri}")
        access.print_catalog(service.uri, guarded)
        stop.wait()

"""dissociated serve: publish files until interrupted."""

from __future__ import annotations

import argparse
import resource
import signal
import threading
from pathlib import Path

from dissociated import log
from dissociated.access import Tokens
from dissociated.cli import text
from dissociated.errors import SourceError

SUMMARY = "publish Arrow IPC and Parquet files"
DESCRIPTION = """\
Publish files under their names without ending, until interrupted (Ctrl-C or SIGTERM).

Arrow IPC streams and files are mapped and served from where they lie; Parquet files are read anew by each client.
A directory stands for the files in it that end in .arrow, .arrows, .feather or .parquet."""

_ENDINGS = {".arrow", ".arrows", ".feather", ".parquet"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `serve`."""
    parser.add_argument("path", nargs="+", type=Path, metavar="PATH", help="a file, or a directory of files")
    parser.add_argument(
        "--listen",
        action="append",
        metavar="URI",
        help="where to serve, may be repeated (default: shm: and tcp://127.0.0.1:0, or tls: with a certificate); "
        "shm:///PATH?allow=USER,... serves other users of this host, too",
    )
    parser.add_argument(
        "--catalog",
        metavar="URI",
        help="where the catalog, Arrow Flight, answers (default: grpc://127.0.0.1:0, or grpc+tls: with a certificate; "
        "port 0 is one that is free)",
    )
    group = parser.add_argument_group("access")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM file of the certificate, with its chain, that proves us")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file of its key")
    group.add_argument(
        "--token-file", metavar="FILE", help="tokens that the catalog accepts, one a line, each alone or after a name"
    )
    group.add_argument(
        "--ticket-lifetime",
        type=float,
        metavar="S",
        help="sign tickets, and let them expire after so many seconds (default: good until a dataset is replaced)",
    )
    group = parser.add_argument_group("seeing it")
    group.add_argument("--metrics", metavar="HOST:PORT", help="answer Prometheus there, at /metrics")
    group.add_argument("--log-format", choices=log.FORMATS, default="text", help="of what is logged, on stderr")
    group.add_argument("--log-level", choices=log.LEVELS, default="warning", help="from which on it is logged")


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    from dissociated.server import Server

    log.configure(arguments.log_format, arguments.log_level)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file and each client needs some
    sources = _sources(arguments.path)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    tls = arguments.tls_cert is not None
    with Server(
        arguments.listen or ("shm:", "tls://127.0.0.1:0" if tls else "tcp://127.0.0.1:0"),
        catalog=arguments.catalog or ("grpc+tls://127.0.0.1:0" if tls else "grpc://127.0.0.1:0"),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        authorize=Tokens.read(arguments.token_file) if arguments.token_file else None,
        ticket_lifetime=arguments.ticket_lifetime,
        metrics=arguments.metrics,
    ) as server:
        for name, path in sources.items():
            server.publish(name, path)
        rows = [
            (name, text.count(found.rows), text.size(found.nbytes), text.count(len(found.schema)), str(path))
            for name, path in sources.items()
            for found in (server.dataset(name),)
        ]
        print(text.table(("NAME", "ROWS", "SIZE", "COLUMNS", "FILE"), rows, right=(1, 2, 3)))
        print(f"\nmetrics  {server.metrics_uri}" if arguments.metrics else "")
        print(f"catalog  {server.catalog_uri}", flush=True)
        stop.wait()


def _sources(paths: list[Path]) -> dict[str, Path]:
    sources: dict[str, Path] = {}
    for path in paths:
        files = sorted(f for f in path.iterdir() if f.suffix in _ENDINGS) if path.is_dir() else [path]
        if not files:
            raise SourceError(f"there are no files to serve in {path}: they end in {', '.join(sorted(_ENDINGS))}")
        for file in files:
            if file.stem in sources:
                raise SourceError(f"{file} and {sources[file.stem]} would have the same name, {file.stem}")
            sources[file.stem] = file
    return sources

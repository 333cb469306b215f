"""dissociated serve: publish files until interrupted."""

from __future__ import annotations

import argparse
import resource
from pathlib import Path

from dissociated.cli import access, text
from dissociated.cli.inputs import check_arrow
from dissociated.cli.stop import StopSignal
from dissociated.errors import SourceError

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
        help="where the catalog, Arrow Flight, answers: grpc+unix: is for this user alone (default: "
        "grpc://127.0.0.1:0, or grpc+tls: with a certificate; port 0 is one that is free)",
    )
    parser.add_argument(
        "--retain",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long the tickets of a replaced version stay good (default: %(default)g)",
    )
    access.add_serving_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Serve until a signal comes."""
    from dissociated.server.server import Server

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each file and each client needs some
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
            (name, text.count(found.rows), text.size(found.nbytes), text.count(len(found.schema)), str(path))
            for name, path in sources.items()
            for found in (server.dataset(name),)
        ]
        print(text.table(("NAME", "ROWS", "SIZE", "COLUMNS", "FILE"), rows, right=(1, 2, 3)))
        print(f"\nmetrics  {server.metrics_uri}" if arguments.metrics else "")
        if arguments.http:
            print(f"page     {server.http_uri}")
        access.print_catalog(server.catalog_uri, server.security)
        stop.wait()


def _sources(paths: list[Path]) -> dict[str, Path]:
    sources: dict[str, Path] = {}
    for path in paths:
        files = sorted(f for f in path.iterdir() if f.suffix in _ENDINGS) if path.is_dir() else [path]
        if not files:
            raise SourceError(f"there are no files to serve in {path}: they end in {', '.join(sorted(_ENDINGS))}")
        for file in files:
            check_arrow(file, "dissociated put takes CSV and JSON lines, and keeps a copy")
            if file.stem in sources:
                raise SourceError(f"{file} and {sources[file.stem]} would have the same name, {file.stem}")
            sources[file.stem] = file
    return sources

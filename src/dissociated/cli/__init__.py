"""The command `dissociated`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dissociated.cli import catalog, drop, get, inspect, ls, node, put, serve, status


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line, with the options of those commands alone that `arguments` name: theirs load what they need."""
    from dissociated._version import __version__

    top = argparse.ArgumentParser(
        prog="dissociated",
        description="Move Apache Arrow data between processes and hosts, by shared memory where it can be shared.",
        epilog="To begin: dissociated serve FILE, and elsewhere: dissociated ls URI",
    )
    top.add_argument("--version", action="version", version=f"dissociated {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, node, catalog, ls, get, put, drop, status, inspect):
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in arguments:
            command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 with a sentence on stderr, 2 for a wrong command line."""
    import pyarrow as pa

    from dissociated.errors import DissociatedError
    from dissociated.monitoring import log

    given = sys.argv[1:] if arguments is None else arguments
    parsed = parser(given).parse_args(given)
    if getattr(parsed, "log_level", None):
        log.configure(parsed.log_format, parsed.log_level)
    try:
        parsed.run(parsed)
    except BrokenPipeError:
        # Whoever read our output has had enough; do not complain about it again while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (DissociatedError, OSError, pa.ArrowException) as error:
        print(f"dissociated: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0

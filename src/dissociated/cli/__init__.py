"""The command `dissociated`."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module

from dissociated.cli import terminal

#: The module of each command, and what the command is for. The module is loaded for that command alone; its function
#: `add_NAME` gives the command's parser a description, options, and the function `run`.
COMMANDS = {
    "ls": ("datasets", "list datasets"),
    "describe": ("datasets", "show the columns of a dataset, and where it is"),
    "versions": ("datasets", "list the versions of a dataset that can be read"),
    "head": ("reading", "show the first rows of a dataset"),
    "cat": ("reading", "write a dataset to the standard output"),
    "sql": ("reading", "ask a question of datasets, by DuckDB"),
    "get": ("reading", "copy a dataset into a file"),
    "put": ("put", "publish files as a dataset of a node"),
    "drop": ("datasets", "make a dataset unavailable"),
    "serve": ("serving", "publish Arrow IPC and Parquet files"),
    "node": ("serving", "serve a store of segments, one for each host"),
    "catalog": ("serving", "run a catalog for the nodes of many hosts"),
    "status": ("status", "show what a server is doing"),
    "completion": ("integrations", "let a shell complete commands, options and names"),
    "inspect": ("inspect", "show what lies where in an Arrow IPC file"),
    "spark-jar": ("integrations", "print the path of the jar for Spark"),
}

#: What the library says of its own parameters, in the command line's words. Options are found by their names.
_WORDS = {
    "publish a reader of it, pyarrow.ipc.open_stream(path)": r"add it: printf '\377\377\377\377\0\0\0\0' >> FILE",
    "publish each stream by itself": "publish each stream by itself (dissociated put FILE NAME --append)",
    "is not certain: filter what was read": "says nothing that is certain: write a value of that type",
    "a directory to spill to": "a directory to spill to, --spill DIR",
    "connect(uri, token=...)": "--token-file FILE, or DISSOCIATED_TOKEN",
    "(tls_roots says which certificates are)": "(--tls-roots FILE says which certificates are)",
}


class _Help(argparse.HelpFormatter):
    """Fills the paragraphs of a description, but leaves those as they are that are indented.

    Commands are a list like any other: argparse would indent them below a line of their own, and break long names off.
    """

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            one if re.search("^ ", one, re.MULTILINE) else super(_Help, self)._fill_text(one, width, indent)
            for one in paragraphs
        )


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line, with the options of those commands alone that `arguments` name: theirs load what they need."""
    from dissociated._version import __version__

    top = argparse.ArgumentParser(
        prog="dissociated",
        formatter_class=_Help,
        description="Move Apache Arrow data between processes and hosts, by shared memory where it can be shared.",
        epilog="To begin: dissociated put FILE NAME, then dissociated ls, dissociated head NAME. "
        "A dataset is NAME, of the catalog in DISSOCIATED_CATALOG or of your node on this host, or URI/NAME.",
    )
    top.add_argument("--version", action="version", version=f"dissociated {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=_Help)
        if name in arguments:
            add = getattr(import_module(f"dissociated.cli.{module}"), f"add_{name.replace('-', '_')}")
            add(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, 1 with a sentence on stderr, 2 for a wrong command line."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could follow
        import argcomplete

        argcomplete.autocomplete(parser(os.environ["COMP_LINE"].split()))
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["help"]:
        given = [*given[1:2], "--help"]
    try:
        top = parser(given)
        parsed = top.parse_args(given)
        if hasattr(parsed, "run"):
            _run(parsed)
        else:
            top.print_help()
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has had enough; do not complain about it again while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _Failed as error:
        print(f"{terminal.red('dissociated:', sys.stderr)} {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _Failed(Exception):
    """A command has failed, for this reason."""


def _run(parsed: argparse.Namespace) -> None:
    """Run a command. Raises _Failed."""
    import pyarrow as pa

    from dissociated.errors import DissociatedError
    from dissociated.monitoring import log

    try:
        if getattr(parsed, "log_level", None):
            log.configure(parsed.log_format, parsed.log_level)
        parsed.run(parsed)
    except BrokenPipeError:
        raise
    except (DissociatedError, OSError, pa.ArrowException) as error:
        raise _Failed(_reworded(str(error), parsed)) from error


def _reworded(message: str, parsed: argparse.Namespace) -> str:
    """The message, with the options of this command in place of the parameters that they set."""
    for said, word in _WORDS.items():
        message = message.replace(said, word)
    for name in vars(parsed):
        if "_" in name:
            message = re.sub(rf"(?<![\w-]){name}(?!\w)", f"--{name.replace('_', '-')}", message)
    return message

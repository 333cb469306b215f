"""The command `dissociated`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from importlib import import_module

from dissociated.base.display import advise_name, printable
from dissociated.cli import streams, terminal

#: The module and the summary of each command. The module is loaded for its command only. Its function `add_NAME` adds
#: the description, the options and the function `run` to the command's parser.
COMMANDS = {
    "ls": ("datasets", "list datasets"),
    "describe": ("datasets", "show the columns of a dataset, and where it is"),
    "versions": ("datasets", "list the versions of a dataset that can be read"),
    "head": ("reading", "show the first rows of a dataset"),
    "cat": ("reading", "write a dataset to the standard output"),
    "sql": ("reading", "query datasets in SQL, with DuckDB"),
    "get": ("reading", "copy a dataset into a file"),
    "put": ("put", "publish files as a dataset of a node"),
    "drop": ("datasets", "make a dataset unavailable"),
    "forget": ("datasets", "remove a node that will not come back from a catalog"),
    "start": ("local", "start your node on this host in the background"),
    "stop": ("local", "stop your node on this host"),
    "clean": ("local", "free the memory of stopped nodes"),
    "serve": ("serving", "publish Arrow IPC and Parquet files"),
    "node": ("serving", "serve a store of segments in the foreground, one for each host"),
    "catalog": ("serving", "run a catalog for the nodes of many hosts"),
    "status": ("status", "show what a server is doing"),
    "completion": ("integrations", "print the completion script of a shell"),
    "inspect": ("inspect", "show the messages and buffers of an Arrow IPC file"),
    "conformance": ("conformance", "test an implementation of the protocol in another language"),
    "spark-jar": ("integrations", "print the path of the jar for Spark"),
}


class _Help(argparse.HelpFormatter):
    """A help formatter that fills the paragraphs of a description, except indented ones, and cuts no word.

    Commands are listed without the extra indentation of argparse, which would also wrap long names.
    """

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            paragraph if re.search("^ ", paragraph, re.MULTILINE) else "\n".join(self._split_lines(paragraph, width))
            for paragraph in paragraphs
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        # argparse would cut paths and URIs, after hyphens and at the width.
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


class _Version(argparse.Action):
    """An option that prints the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from dissociated.base.version import package_version

        print("dissociated", package_version())
        parser.exit()


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Only the commands that `arguments` name get their options, because adding them imports the command's module.
    """
    top = argparse.ArgumentParser(
        prog="dissociated",
        formatter_class=_Help,
        description="Move Apache Arrow data between processes and hosts, over shared memory if possible.",
        epilog="To begin: dissociated put FILE NAME, then dissociated ls, dissociated head NAME. A dataset is "
        "URI/NAME, or NAME in the catalog of DISSOCIATED_CATALOG (by default, your node on this host).",
    )
    top.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, formatter_class=_Help)
        if name in arguments:
            add = getattr(import_module(f"dissociated.cli.{module}"), f"add_{name.replace('-', '_')}")
            add(command)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The arguments; by default the ones of this process.

    Returns:
        The exit status: 0, 1 after an error message on stderr, 130 after an interrupt. argparse exits with 2 if the
        command line is invalid.
    """
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser(os.environ["COMP_LINE"].split()))
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if sys.stderr is None:  # closed; and no file that is opened later gets its descriptor
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        if sys.stdout is None:
            raise _CommandError("the standard output is closed: redirect it, for example to /dev/null")
        sys.stdout = streams.complete_stdout(sys.stdout)
        top = parser(words)
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            advice = advise_name(words[0], [*COMMANDS], "dissociated --help").replace("names", "commands")
            top.error(f"there is no command {words[0]!r}: {advice}")
        parsed = top.parse_args(words)
        if hasattr(parsed, "run"):
            _run(parsed)
        else:
            top.print_help()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has closed it. Without this, Python would report the error again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _CommandError as error:
        message = "\n".join(map(printable, str(error).split("\n")))  # may quote names that others have chosen
        print(f"{terminal.red('dissociated:', sys.stderr)} {message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class _CommandError(Exception):
    """A failure of a command, with its message."""


def _run(parsed: argparse.Namespace) -> None:
    """Run a command. Raises _CommandError."""
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
        raise _CommandError(str(error)) from error

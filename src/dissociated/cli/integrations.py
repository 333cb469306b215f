"""The commands that set up other programs: completion for a shell, spark-jar for Spark."""

from __future__ import annotations

import argparse

from dissociated.errors import OptionError

_COMPLETION = """\
Print the completion script of a shell, for commands, options and names of datasets. Use it in this shell or in its
startup file:

  bash  eval "$(dissociated completion bash)"     in ~/.bashrc
  zsh   eval "$(dissociated completion zsh)"      in ~/.zshrc, after compinit
  fish  dissociated completion fish | source      in ~/.config/fish/config.fish

The names come from the catalog that the command would use, if it answers within a second."""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `completion` to its parser."""
    parser.description = _COMPLETION
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    parser.set_defaults(run=_run_completion)


def _run_completion(arguments: argparse.Namespace) -> None:
    """Print the code that the shell evaluates."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise OptionError("completion needs argcomplete: pip install argcomplete") from None
    print(shellcode(["dissociated"], shell=arguments.shell))


_SPARK_JAR = """\
Print the path of the data source for Spark's JVM, for the setting spark.jars. If it is not compiled for this Spark yet,
it is compiled now, with Spark's own compiler.

dissociated.spark.session() does this by itself. Use this command for clusters, and for sessions that other programs
start."""


def add_spark_jar(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `spark-jar` to its parser."""
    parser.description = _SPARK_JAR
    parser.set_defaults(run=_run_spark_jar)


def _run_spark_jar(arguments: argparse.Namespace) -> None:
    """Print the path of the jar."""
    from dissociated.spark.jar import jar

    print(jar())

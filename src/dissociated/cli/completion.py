"""dissociated completion: let a shell complete commands, options, and the names of datasets."""

from __future__ import annotations

import argparse

from dissociated.errors import OptionError

DESCRIPTION = """\
Print what makes a shell complete commands, options, and the names of datasets. For this shell, or in its startup file:

  bash  eval "$(dissociated completion bash)"     in ~/.bashrc
  zsh   eval "$(dissociated completion zsh)"      in ~/.zshrc, after compinit
  fish  dissociated completion fish | source      in ~/.config/fish/config.fish

Names are those of the catalog that the command would ask, if that answers within a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> None:
    """Print it."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise OptionError("completion needs argcomplete: pip install argcomplete") from None
    print(shellcode(["dissociated"], shell=arguments.shell))

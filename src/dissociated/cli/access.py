"""What commands have in common that ask a catalog: how they prove who they are, and whom they trust."""

from __future__ import annotations

import argparse
import os

from dissociated.access import read_token
from dissociated.catalog.client import Client, connect

_TOKEN = "DISSOCIATED_TOKEN"
_ROOTS = "DISSOCIATED_TLS_ROOTS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `client` takes."""
    group = parser.add_argument_group("access")
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"holds the token that the catalog asks for (or: {_TOKEN}, a token)",
    )
    group.add_argument(
        "--tls-roots",
        metavar="FILE",
        help=f"PEM file of the certificates to trust, in place of the system's (or: {_ROOTS})",
    )


def client(catalog: str, arguments: argparse.Namespace) -> Client:
    """A client of `catalog`, by these options and the environment. No option is a token: all users could see that."""
    token = read_token(arguments.token_file) if arguments.token_file else os.environ.get(_TOKEN) or None
    return connect(catalog, token=token, tls_roots=arguments.tls_roots or os.environ.get(_ROOTS) or None)

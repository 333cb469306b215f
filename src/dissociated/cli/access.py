"""Options of access that commands share: credentials for clients of a catalog, and access control for servers."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from typing import Any

from dissociated.base.host import is_loopback
from dissociated.cli import quantities, text
from dissociated.client.client import Client
from dissociated.client.request import TIMEOUT
from dissociated.control.access import Security, Tokens, read_secret, read_token, security
from dissociated.control.catalog_uri import CATALOG_VARIABLE, ROOTS_VARIABLE, TOKEN_VARIABLE, describe_reach, is_unix
from dissociated.errors import OptionError, UriError
from dissociated.monitoring import log
from dissociated.uri import Uri


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `client` and `main` read."""
    group = parser.add_argument_group("access")
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"file with the token for the catalog (or set {TOKEN_VARIABLE} to the token for {CATALOG_VARIABLE})",
    )
    group.add_argument(
        "--tls-roots",
        metavar="FILE",
        help=f"PEM file of the certificates to trust instead of the system's (or set {ROOTS_VARIABLE})",
    )
    _add_log_arguments(parser.add_argument_group("log"), None)


def _add_log_arguments(group: argparse._ArgumentGroup, level: str | None) -> None:
    """Add the options of the log, which `main` reads. Without a level there is no log."""
    group.add_argument(
        "--log-format", choices=log.LOG_FORMATS, default="text", help="format of the log, which goes to stderr"
    )
    group.add_argument(
        "--log-level",
        choices=log.LOG_LEVELS,
        default=level,
        metavar="LEVEL",
        help=f"lowest level of the log: {', '.join(log.LOG_LEVELS)} (default: {level or 'no log'}); debug has a line "
        "for each message of the protocol, without its content",
    )


def client(catalog: str, arguments: argparse.Namespace, timeout: float = TIMEOUT) -> Client:
    """Return a client of `catalog`, with the credentials of the options and of the environment.

    There is no option for a token itself, because all users of a host can see command lines.
    """
    token = read_token(arguments.token_file) if arguments.token_file else _token_of_environment(catalog)
    return Client(catalog, timeout, token, arguments.tls_roots or os.environ.get(ROOTS_VARIABLE) or None)


def _token_of_environment(catalog: str) -> str | None:
    """Return the token in the environment if it is for `catalog`.

    It is for the catalog in the environment. If there is none, it is for any catalog to which it is not sent in plain
    text over a network.
    """
    own = os.environ.get(CATALOG_VARIABLE)
    if own:
        is_meant = catalog in (own, text.split_name(own)[0])
    else:
        is_meant = is_unix(catalog) or catalog.startswith("grpc+tls:")
        with suppress(UriError):  # which the client raises, too
            is_meant = is_meant or is_loopback(Uri.parse(catalog).host)
    return os.environ.get(TOKEN_VARIABLE) or None if is_meant else None


def check_second_catalog(first: str, second: str, arguments: argparse.Namespace) -> None:
    """Raise OptionError if a command uses two catalogs, and its option --token-file has the token for one of them."""
    if arguments.token_file and first != second:
        raise OptionError(
            f"the token in --token-file is for one catalog, and {first!r} and {second!r} are two: give each a command"
        )


def add_serving_arguments(parser: argparse.ArgumentParser, peers: bool = False) -> None:
    """Add the options that `serving` and `main` read, with `peers` also the ones of `peer_security`."""
    group = parser.add_argument_group("access")
    group.add_argument("--tls-cert", metavar="FILE", help="PEM file of this server's certificate, with its chain")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file of this server's key")
    group.add_argument(
        "--token-file",
        metavar="FILE",
        help="file of the tokens that the catalog accepts, one a line: TOKEN, NAME TOKEN or NAME TOKEN ROLE",
    )
    quantities.add_duration(
        group,
        "--ticket-lifetime",
        "sign tickets, and let them expire after this time: 90s, 15m, 1h, 2d (default: tickets are valid "
        "until the dataset is replaced)",
    )
    if peers:
        group.add_argument(
            "--secret-file",
            metavar="FILE",
            help="file of the secret that a catalog and its nodes share, and sign tickets with",
        )
        group.add_argument(
            "--tls-roots",
            metavar="FILE",
            help="PEM file of the certificates that a catalog and its nodes trust (default: the system's)",
        )
    group = parser.add_argument_group("monitoring and log")
    group.add_argument("--metrics", metavar="HOST:PORT", help="address for Prometheus, at /metrics")
    group.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="address of a web page that shows the state of the server; also /metrics and /healthz",
    )
    _add_log_arguments(group, "warning")


def serving(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options as keyword arguments of `Server`."""
    return {
        "tls_cert": arguments.tls_cert,
        "tls_key": arguments.tls_key,
        "authorize": Tokens.read(arguments.token_file) if arguments.token_file else None,
        "ticket_lifetime": arguments.ticket_lifetime,
    }


def peer_security(arguments: argparse.Namespace) -> Security:
    """Return the access rules of a catalog or a node."""
    secret = read_secret(arguments.secret_file) if arguments.secret_file else None
    return security(**serving(arguments), secret=secret, tls_roots=arguments.tls_roots, peers=True)


def serving_uris(arguments: argparse.Namespace) -> tuple[tuple[str, str], str]:
    """Return the default listeners, and the default URI of the catalog, without a port."""
    tls = arguments.tls_cert is not None
    return (
        ("shm:", "tls://127.0.0.1:0" if tls else "tcp://127.0.0.1:0"),
        "grpc+tls://127.0.0.1" if tls else "grpc://127.0.0.1",
    )


def print_catalog(uri: str, security: Security) -> None:
    """Print the URI of a catalog, and who can reach it if it requires no token."""
    if (reach := describe_reach(uri, security)) is not None:
        print(f"access   {reach}")
    print(f"catalog  {uri}", flush=True)

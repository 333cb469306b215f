"""Negotiation between a client and a server over UCX by means of the URI and the client id.

It needs no messages, so that any UCX peer can take part.
"""

from __future__ import annotations

from typing import NamedTuple

from dissociated.errors import UriError
from dissociated.transport.native.ucx import libucp as c
from dissociated.transport.native.ucx.libucp import LIBRARY, Ucp
from dissociated.uri import Uri

_NAME, _VERSION, _RUNS_VERSION = int.from_bytes(b"DISSOC"), 1, 2  # in the id of our clients, see client_id
SEGMENT_PARAMETER = "tcp_segment"

MODES = {"peer": c.ERR_MODE_PEER, "none": c.ERR_MODE_NONE}


class ClientAbilities(NamedTuple):
    """The abilities that a client declares by its id."""

    knows_abort: bool
    takes_runs: bool
    #: Size in bytes of the largest TCP segment that the client receives; 0 if it is not known.
    segment: int


def client_id(segment: int, takes_runs: bool) -> int:
    """Return the UCX client id of a client of this library, which implies that it understands aborts.

    The eight bytes of the id are "DISSOC", the binary logarithm of `segment` or 0, and a version: 2 for a client that
    takes runs, otherwise 1.

    Args:
        segment: The size in bytes of the largest TCP segment that the client receives; 0 if it is not known.
        takes_runs: Whether the client takes runs.
    """
    return _NAME << 16 | max(segment.bit_length() - 1, 0) << 8 | (_RUNS_VERSION if takes_runs else _VERSION)


def client_says(client_id: int) -> ClientAbilities:
    """Decode a client id. A client that does not use this library has no abilities."""
    version, exponent = client_id & 0xFF, client_id >> 8 & 0xFF
    if client_id >> 16 != _NAME or version not in (_VERSION, _RUNS_VERSION):
        return ClientAbilities(False, False, 0)
    return ClientAbilities(True, version == _RUNS_VERSION, 1 << exponent if exponent else 0)


def error_mode(uri: Uri) -> str:
    """Return the error mode that a URI asks for. Raises UriError if it is unknown."""
    mode = uri.parameters.get("err_mode", "peer")
    if mode not in MODES:
        raise UriError(f"err_mode={mode} in {uri}: there are {' and '.join(MODES)}")
    return mode


def segment_of(uri: Uri) -> int:
    """Return the size in bytes of the largest TCP segment that the server receives; 0 if `uri` does not tell.

    Raises:
        UriError: The parameter is not a number.
    """
    text = uri.parameters.get(SEGMENT_PARAMETER, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UriError(f"{SEGMENT_PARAMETER}={text!r} in {uri} is not a number of bytes")
    return int(text)


def check_version(u: Ucp, uri: Uri, where: str) -> None:
    """Raise TransportError if the server's version of UCX is incompatible: the two would fail, or even crash."""
    server_version = uri.parameters.get("ucx", u.version)
    if server_version.split(".")[:2] != u.version.split(".")[:2]:
        raise LIBRARY.mismatch(where, server_version, u.version)

"""What a client and a server over UCX know of each other before they talk: from the URI, and from a client's id.

None of it is a message, so that any UCX peer can take part.
"""

from __future__ import annotations

from typing import NamedTuple

from dissociated.errors import UriError
from dissociated.transport.native.ucx import _ucp as c
from dissociated.transport.native.ucx._ucp import LIBRARY, Ucp
from dissociated.uri import Uri

_NAME, _VERSION, _RUNS_VERSION = int.from_bytes(b"DISSOC"), 1, 2  # of our clients, see client_id
SEGMENT_PARAMETER = "tcp_segment"

MODES = {"peer": c.ERR_MODE_PEER, "none": c.ERR_MODE_NONE}


class ClientAbilities(NamedTuple):
    """What a client has said of itself."""

    knows_abort: bool
    takes_runs: bool
    #: Bytes of the largest TCP segment that it receives; 0 where it does not say.
    segment: int


def client_id(segment: int, takes_runs: bool) -> int:
    """What a client says before anything else: that it knows what an abort is, and which segments it receives.

    As eight bytes: DISSOC, the logarithm to base 2 of the segment in bytes, or 0 where that is not said, and 1, or 2
    where it takes runs, too.
    """
    return _NAME << 16 | max(segment.bit_length() - 1, 0) << 8 | (_RUNS_VERSION if takes_runs else _VERSION)


def client_says(client_id: int) -> ClientAbilities:
    """What the client with this id has said; nothing if it is none of ours."""
    version, exponent = client_id & 0xFF, client_id >> 8 & 0xFF
    if client_id >> 16 != _NAME or version not in (_VERSION, _RUNS_VERSION):
        return ClientAbilities(False, False, 0)
    return ClientAbilities(True, version == _RUNS_VERSION, 1 << exponent if exponent else 0)


def error_mode(uri: Uri) -> str:
    mode = uri.parameters.get("err_mode", "peer")
    if mode not in MODES:
        raise UriError(f"err_mode={mode} in {uri}: there are {' and '.join(MODES)}")
    return mode


def segment_of(uri: Uri) -> int:
    """The bytes of the largest TCP segment that the server says it receives; 0 where it does not say."""
    text = uri.parameters.get(SEGMENT_PARAMETER, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UriError(f"{SEGMENT_PARAMETER}={text} in {uri} is not a number of bytes")
    return int(text)


def check_version(u: Ucp, uri: Uri, where: str) -> None:
    """Raise TransportError where the server says that it has another UCX: the two would fail, or even crash."""
    theirs = uri.parameters.get("ucx", u.version)
    if theirs.split(".")[:2] != u.version.split(".")[:2]:
        raise LIBRARY.mismatch(where, theirs, u.version)

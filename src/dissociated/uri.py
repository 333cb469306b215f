"""Location URIs: the transport, its address, and the parameters of the protocol ("URI Specification").

tcp://HOST:PORT?want_data=N
shm:///run/user/1000/dissociated/x.sock?want_data=N&free_data=N
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from dissociated.errors import UriError

#: Hosts that mean every interface of this host. A server can listen on them, but clients need another name to connect.
ANY_INTERFACE = ("0.0.0.0", "::")

#: A parameter of this library: the want_data value that requests packed bodies, without addresses, of the same stream.
PACKED = "packed"
#: A parameter of a listener: HOST or HOST:PORT by which clients reach it, if these differ from where it listens.
ADVERTISE = "advertise"
#: A parameter of this library: the identity of the device, on this host, that the remote_handle belongs to.
DEVICE = "device"

_UINT64_MAX = 2**64 - 1
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*\Z")
_BASE64URL_TO_BASE64 = str.maketrans("-_", "+/")
_NO_PARAMETERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Uri:
    """A parsed location.

    Attributes:
        want_data: The tag of the request for a stream. Required to connect.
        free_data: The tag of the message with which a client gives addresses back.
        remote_handle: The handle with which the medium reaches the server's memory.
        parameters: All other query parameters by name. This library or a transport defines them.
    """

    scheme: str
    host: str = ""
    port: int | None = None
    path: str = ""
    want_data: int | None = None
    free_data: int | None = None
    remote_handle: bytes | None = None
    parameters: Mapping[str, str] = field(default_factory=lambda: _NO_PARAMETERS, hash=False)

    def __post_init__(self) -> None:
        if not _SCHEME.match(self.scheme):
            raise UriError(f"the URI scheme {self.scheme!r} is not valid: begin the URI with one such as tcp: or shm:")
        for name in ("want_data", "free_data"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= _UINT64_MAX:
                raise UriError(f"the URI parameter {name}={value!r} is not an unsigned 64-bit integer")
        if (self.host or self.port is not None) and self.path and not self.path.startswith("/"):
            raise UriError(f"the path {self.path!r} after a host does not start with a slash")

    @classmethod
    def parse(cls, text: str) -> Uri:
        """Parse `text`.

        Raises:
            UriError: `text` is not a URI, repeats a parameter, or has a parameter with an invalid value.
        """
        try:
            text.encode()  # raises for a lone surrogate, which `__str__` could not percent-encode
            pieces = urlsplit(text)
            port = pieces.port
            query = parse_qsl(pieces.query, keep_blank_values=True, strict_parsing=bool(pieces.query))
        except (ValueError, UnicodeError) as error:
            raise UriError(f"{text!r} is not a URI: {error}") from None
        parameters: dict[str, str] = {}
        for name, value in query:
            if name in parameters:
                raise UriError(f"{text!r} has the parameter {name} more than once")
            parameters[name] = value
        remote_handle = parameters.pop("remote_handle", None)
        return cls(
            scheme=pieces.scheme,
            host=pieces.hostname or "",
            port=port,
            path=unquote(pieces.path),
            want_data=_uint64(parameters.pop("want_data", None), "want_data", text),
            free_data=_uint64(parameters.pop("free_data", None), "free_data", text),
            remote_handle=None if remote_handle is None else _base64(remote_handle, text),
            parameters=MappingProxyType(parameters),
        )

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        # An absolute path follows "//", even if there is no host: shm:///path.
        authority = f"//{host}{port}" if host or port or self.path.startswith("/") else ""
        query: dict[str, str] = {}
        if self.want_data is not None:
            query["want_data"] = str(self.want_data)
        if self.free_data is not None:
            query["free_data"] = str(self.free_data)
        if self.remote_handle is not None:
            query["remote_handle"] = base64.b64encode(self.remote_handle).decode()
        query.update(self.parameters)
        tail = "?" + urlencode(query, quote_via=quote, safe="") if query else ""
        return f"{self.scheme}:{authority}{quote(self.path)}{tail}"

    def with_parameters(self, **changes: str) -> Uri:
        """Return a copy of this URI with `changes` added to its parameters, or replaced in them."""
        return replace(self, parameters=MappingProxyType({**self.parameters, **changes}))

    def split_advertised(self) -> tuple[Uri, Uri]:
        """Split the URI of a listener by its parameter `advertise`.

        Returns:
            The URI to listen at, and a URI with the host and port to announce. Both are missing there without the
            parameter; the port is missing if it is that of the listener.

        Raises:
            UriError: The parameter is no host, or the URI has no port.
        """
        parameters = dict(self.parameters)
        written = parameters.pop(ADVERTISE, None)
        if written is None:
            return self, Uri(self.scheme)
        advertised = Uri.parse(f"{self.scheme}://{written}")
        if not advertised.host or advertised.path or advertised.parameters or advertised.host in ANY_INTERFACE:
            raise UriError(
                f"the parameter {ADVERTISE}={written!r} of {str(self)!r} is not a HOST or HOST:PORT that clients "
                "could reach"
            )
        if not self.host and self.path:
            raise UriError(f"{self} has no port that could be advertised")
        return replace(self, parameters=MappingProxyType(parameters)), advertised

    def with_packed_bodies(self) -> Uri | None:
        """Return the URI that requests the same stream as packed bodies; None if the server does not offer that."""
        packed_tag = self.parameters.get(PACKED)
        if packed_tag is None:
            return None
        parameters = {name: value for name, value in self.parameters.items() if name != PACKED}
        return replace(
            self,
            want_data=_uint64(packed_tag, PACKED, str(self)),
            free_data=None,
            parameters=MappingProxyType(parameters),
        )

    def require_want_data(self) -> int:
        """Return the tag that requests a stream.

        Raises:
            UriError: The URI has no want_data parameter.
        """
        if self.want_data is None and self.scheme.startswith("grpc"):
            raise UriError(
                f"{str(self)!r} is the URI of a catalog, which sends no stream itself: open it with connect(...)"
            )
        if self.want_data is None:
            raise UriError(f"{str(self)!r} has no want_data parameter, which is required to request a stream")
        return self.want_data


def _uint64(text: str | None, name: str, uri: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= _UINT64_MAX):
        raise UriError(f"the parameter {name}={text!r} of {uri!r} is not an unsigned 64-bit integer")
    return int(text)


def _base64(text: str, uri: str) -> bytes:
    # A "+" that was not percent-encoded arrives as a space. Both base64 alphabets and missing padding are accepted.
    text = text.replace(" ", "+").translate(_BASE64URL_TO_BASE64).rstrip("=")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError as error:  # binascii.Error, or a character outside ASCII
        raise UriError(f"the parameter remote_handle of {uri!r} is not base64: {error}") from None

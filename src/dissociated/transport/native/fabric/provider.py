"""Providers of libfabric: the usable ones, their endpoints, and the URI parameters that concern them."""

from __future__ import annotations

from dissociated.errors import UriError
from dissociated.transport.native.fabric.control import held_up
from dissociated.transport.native.fabric.dual_endpoint import ConnectionEndpoint, DualEndpoint
from dissociated.transport.native.fabric.endpoint import FabricEndpoint
from dissociated.transport.native.fabric.libfabric import LIBRARY, ofi
from dissociated.transport.native.fabric.memory import Domain
from dissociated.uri import Uri

PROVIDER = "tcp;ofi_rxm"
_HEARTBEAT = 2.0  # seconds


def allows_rma(uri: Uri, provider: str) -> bool:
    """Return whether a listener lets clients fetch from memory.

    Only rxm supports that. Memory is registered with the listener's domain, which all its connections then share. With
    other providers, a peek of any endpoint of a domain, including the listener's, finds the messages of all of them.

    Raises:
        UriError: if the URI requests it with another provider. Clients would receive addresses that they cannot read.
    """
    if uri.parameters.get("rma") != "allow":
        return False
    if not provider.endswith("ofi_rxm"):
        raise UriError(
            f"allow_rma is not possible with provider={provider} in {uri}: use {PROVIDER}, or leave allow_rma out"
        )
    return True


def provider_of(uri: Uri) -> str:
    """Return the provider in `uri`, or the default. Raise UriError for a provider that is known to be unusable."""
    name = uri.parameters.get("provider", PROVIDER)
    version = tuple(map(int, ofi().version.split(".")))
    wrong = None
    if name == "tcp" and version < (2, 0):
        wrong = f"before libfabric 2.0, and this is {ofi().version}, it means tcp;ofi_rxm: say that"
    elif name == "shm":
        wrong = "it can only be waited for by spinning, and leaves memory in /dev/shm: use shm: or tcp;ofi_rxm"
    elif name == "net":
        wrong = "it keeps a processor busy while nothing happens: use tcp;ofi_rxm"
    elif name.startswith("udp"):
        wrong = "it cuts messages off without an error: use tcp;ofi_rxm"
    elif name == "sockets":
        wrong = "libfabric has given it up: use tcp;ofi_rxm"
    elif not name or not all(part.isascii() and part.isidentifier() for part in name.split(";")):
        wrong = "that is no name of a provider"
    if wrong:
        raise UriError(f"provider={name} in {uri} cannot be used: {wrong}")
    return name


def lanes(provider: str) -> int:
    """Return the number of endpoints of a connection."""
    return DualEndpoint.lanes if provider == "tcp" else FabricEndpoint.lanes


def open_endpoint(provider: str, host: str, rma: bool, domain: Domain | None = None) -> ConnectionEndpoint:
    """Open the endpoint, or the pair of endpoints, of one connection."""
    if lanes(provider) == DualEndpoint.lanes:
        return DualEndpoint(provider, host, held_up)
    return FabricEndpoint(provider, host, None, rma, domain)


def check_same(uri: Uri, endpoint: ConnectionEndpoint) -> None:
    """Raise TransportError if the server has an incompatible libfabric or protocol: no message would ever arrive."""
    version = endpoint.ofi.version
    server_version = uri.parameters.get("libfabric", version)
    protocol = uri.parameters.get("protocol", endpoint.protocol)
    if server_version.split(".")[0] != version.split(".")[0] or protocol != endpoint.protocol:
        where = f"the fabric server {uri.host}:{uri.port}"
        raise LIBRARY.mismatch(where, f"{server_version} (protocol {protocol})", f"{version} ({endpoint.protocol})")


def heartbeat_interval(uri: Uri) -> float:
    """Return the seconds between heartbeats that a URI asks for. Raises UriError if they are out of range."""
    text = uri.parameters.get("heartbeat", "")
    try:
        seconds = float(text or _HEARTBEAT)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 3600:
        raise UriError(f"heartbeat={text!r} in {uri} is not a number of seconds from 0.01 to 3600")
    return seconds

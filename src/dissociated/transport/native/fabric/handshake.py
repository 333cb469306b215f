"""How the two ends of a connection over libfabric learn each other's names: see docs/fabric-peers.md."""

from __future__ import annotations

import struct

from dissociated.errors import RemoteProtocolError, TransportError
from dissociated.transport.native.addresses import advertised_names
from dissociated.transport.native.fabric.control import JOINS, TAKES_RUNS, VERSION, Kind
from dissociated.transport.native.fabric.outbox import Outbox
from dissociated.transport.native.fabric.provider import ConnectionEndpoint

_VERSION = bytes([VERSION])


class Handshake:
    """What one end knows of the other; it tells the `outbox` whom to send to.

    On the server's side `client` is the name of the client that will join.
    """

    def __init__(self, endpoint: ConnectionEndpoint, outbox: Outbox, peer: str, client: bytes | None = None) -> None:
        self._endpoint = endpoint
        self._outbox = outbox
        self._peer = peer
        self._accepted = client is not None
        self._client = client
        self._welcome: bytes | None = None
        self._bodies_joined = False
        #: Whether the client that has joined takes runs.
        self.takes_runs = False

    @property
    def joining(self) -> bool:
        """Whether the client is still to come."""
        return self._client is not None

    @property
    def hello(self) -> bytes:
        """What a client says first."""
        return _VERSION + self._endpoint.name

    @property
    def welcomed(self) -> bool:
        """Whether the server has answered that."""
        return self._welcome is not None

    def receive(self, kind: int, data: bytes) -> bool:
        """Take what the peer says. False where that is no part of this, or has been said before."""
        if kind == Kind.WELCOME and not self._accepted and self._welcome is None:
            self._welcome = data
        elif kind == Kind.JOIN and self._client is not None:
            self._outbox.peer, self._client = self._endpoint.insert(self._client), None
        elif kind == Kind.BODIES_JOIN and self._accepted and not self._bodies_joined:
            self._bodies_joined = True  # it has done its work: there is a connection
        else:
            return False
        if kind == JOINS[self._endpoint.lanes - 1]:  # what is said where requests come, too, and so before them
            self.takes_runs = data == TAKES_RUNS
        return True

    def take_name(self, host: str) -> None:
        """Send to the endpoint that the server, on `host`, answered with. Raises TransportError for what is none."""
        welcome = self._welcome or b""
        if not welcome.startswith(_VERSION):
            raise TransportError(f"{self._peer} exchanges names in another way than version {VERSION}")
        try:
            if len(welcome) != len(self.hello):
                raise ValueError
            self._outbox.peer = self._endpoint.insert(advertised_names(welcome[1:], host))
        except (ValueError, OSError, struct.error):
            raise RemoteProtocolError(f"{self._peer} said what is no name of an endpoint") from None

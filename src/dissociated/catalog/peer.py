"""Another catalog, or a node of this one, as a catalog speaks with it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

import pyarrow.flight as flight

from dissociated.base.access import Security
from dissociated.client.calls import CatalogClient

T = TypeVar("T")

PEER_TIMEOUT = 60.0  # seconds, for it to answer


class Peer(CatalogClient):
    """Calls the catalog at `uri`, which answers within `timeout` seconds, proving itself as `security` says."""

    def __init__(self, uri: str, security: Security, timeout: float = PEER_TIMEOUT) -> None:
        unlimited = sys.maxsize  # what is relayed, whoever reads it limits
        super().__init__(uri, timeout, security.peer, security.roots, max_metadata=unlimited)

    def forward(self, call: Callable[[flight.FlightClient], T]) -> T:
        """What that one answers."""
        return self._calls.call(call)

    def forward_action(self, action: str, body: bytes) -> bytes:
        """The answer to an action whose body is not JSON."""
        (result,) = self.forward(lambda client: [*client.do_action(flight.Action(action, body))])
        return bytes(result.body.to_pybytes())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""The pair of endpoints of a connection, for providers with which one endpoint is not enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from dissociated.errors import TransportError
from dissociated.transport.native.fabric.endpoint import FabricEndpoint, PeekedMessage
from dissociated.transport.native.fabric.memory import Done
from dissociated.transport.native.threads import Waker


class DualEndpoint:
    """Two endpoints that are used as one, for providers with which an unclaimed message blocks all messages behind it.

    Messages whose tag satisfies `apart` are sent from the second endpoint to the peer's second endpoint, and only those
    are peeked at. Receives for all other messages are posted at the first endpoint, so nothing can block there.
    Messages of the two endpoints arrive in no particular order. The name consists of the names of both.
    """

    lanes = 2

    def __init__(self, provider: str, node: str, apart: Callable[[int], bool]) -> None:
        self._apart = apart
        self._first = first = FabricEndpoint(provider, node, None)
        try:
            # It has a domain of its own, because a peek also finds unclaimed messages of other endpoints of its domain.
            self._second = FabricEndpoint(provider, node, None)
        except BaseException:
            first.close()
            raise
        self.ofi, self.iov_limit, self.max_message = first.ofi, first.iov_limit, first.max_message
        self.protocol, self.eager_limit, self.max_untagged = first.protocol, first.eager_limit, first.max_untagged
        self.wakes = first.wakes + self._second.wakes
        self.find, self.read = first.find, first.read
        self.receive_untagged, self.receive_tagged = first.receive_untagged, first.receive_tagged
        self.peek, self.claim, self.discard = self._second.peek, self._second.claim, self._second.discard

    @property
    def name(self) -> bytes:
        """The name that peers insert to reach this endpoint."""
        return self._first.name + self._second.name

    def insert(self, name: bytes) -> int:
        """Add the pair of endpoints called `name` to the address vectors.

        Returns:
            The number of the pair, for sending to it.

        Raises:
            TransportError: if the name is invalid.
        """
        half = len(self._first.name)
        number = self._first.insert(name[:half])
        second_number = self._second.insert(
            name[half:] or name
        )  # a single name is added to both, to keep the numbers equal
        if number != second_number:
            raise TransportError(f"{name.hex()} names one endpoint twice")
        return number

    @property
    def ended_count(self) -> int:
        """The number of operations that have ended, except peeks."""
        return self._first.ended_count + self._second.ended_count

    @property
    def peeked(self) -> PeekedMessage | None:
        """The message that was found by a peek, and is neither claimed nor discarded yet."""
        return self._second.peeked

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], on_done: Done) -> bool:
        """Begin to send a message. See `FabricEndpoint.send`."""
        apart = tag is not None and self._apart(tag)
        return (self._second if apart else self._first).send(to, tag, pieces, on_done)

    def progress(self) -> bool:
        """Let libfabric work for both endpoints. Return whether any operation has ended."""
        first, second = self._first.progress(), self._second.progress()
        return first or second

    def arm(self) -> bool:
        """Prepare to sleep. Return False if there is work to do first."""
        return self._first.arm() and self._second.arm()

    def sleep(self, waker: Waker, seconds: float) -> bool:
        """Sleep until there is work to do. See `FabricEndpoint.sleep`."""
        return waker.sleep(self.wakes, seconds)

    def close(self) -> None:
        """Close both endpoints. Operations in progress are dropped."""
        try:
            self._second.close()
        finally:
            self._first.close()


#: The endpoint, or the pair of endpoints, of one connection.
ConnectionEndpoint: TypeAlias = FabricEndpoint | DualEndpoint

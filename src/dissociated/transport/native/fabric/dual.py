"""Two endpoints of libfabric that are used as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dissociated.errors import TransportError
from dissociated.transport.native.fabric.endpoint import FabricEndpoint, PeekedMessage
from dissociated.transport.native.fabric.operations import Done
from dissociated.transport.native.waker import Waker


class DualEndpoint:
    """Two endpoints that are used as one, for providers with which a message that nobody claims holds up all behind it.

    Messages whose tag is `apart` go from second to second, and are the only ones to be looked for; all others are
    waited for by the first, which nothing can hold up. Between the two there is no order. The name is that of both.
    """

    lanes = 2

    def __init__(self, provider: str, node: str, apart: Callable[[int], bool]) -> None:
        self._apart = apart
        self._first = first = FabricEndpoint(provider, node, None)
        try:
            # In a domain of its own: what waits to be claimed is found by whoever looks in the same.
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
        """What others insert to reach this one."""
        return self._first.name + self._second.name

    def insert(self, name: bytes) -> int:
        """Make another known. Its number, for sending to it. Raises TransportError for what is no name of two."""
        half = len(self._first.name)
        number = self._first.insert(name[:half])
        other = self._second.insert(name[half:] or name)  # one that is no pair takes a number in both, too
        if number != other:
            raise TransportError(f"{name.hex()} names one endpoint twice")
        return number

    @property
    def ended(self) -> int:
        """How many operations have ended, but for looking."""
        return self._first.ended + self._second.ended

    @property
    def peeked(self) -> PeekedMessage | None:
        """What was found and is neither claimed nor discarded."""
        return self._second.peeked

    def send(self, to: int, tag: int | None, pieces: Sequence[Any], done: Done) -> bool:
        """See `FabricEndpoint`."""
        apart = tag is not None and self._apart(tag)
        return (self._second if apart else self._first).send(to, tag, pieces, done)

    def progress(self) -> bool:
        """Let libfabric work, for both. Whether anything was done."""
        first, second = self._first.progress(), self._second.progress()
        return first or second

    def arm(self) -> bool:
        """Whether one may sleep now: otherwise there is something to do."""
        return self._first.arm() and self._second.arm()

    def sleep(self, waker: Waker, seconds: float) -> bool:
        """See `FabricEndpoint`. The only method that another thread may run beside others."""
        return waker.sleep(self.wakes, seconds)

    def close(self) -> None:
        """Close both. What was under way is dropped."""
        try:
            self._second.close()
        finally:
            self._first.close()

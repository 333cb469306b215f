"""Messages and runs of messages, which the protocol and a transport exchange."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dissociated.base.buffers import Buffer


class Message(NamedTuple):
    """A delimited message to send, tagged or untagged ("Requirements").

    `tag` is None for an untagged message. `parts` are sent one after the other and arrive as one buffer. The transport
    borrows them until the send returns, and never joins them.
    """

    tag: int | None
    parts: Sequence[Buffer]


class Incoming(NamedTuple):
    """A message that arrived. Its data is `bytes` if it is untagged, and otherwise a buffer that the receiver owns."""

    tag: int | None
    data: Buffer

    def expand(self) -> Iterable[Incoming]:
        """Return this message, as the counterpart of `Run.expand`."""
        return (self,)


class Run(NamedTuple):
    """Many small messages that arrived together: `length` untagged ones of equal size, and as many tagged ones.

    The tagged messages have equal sizes, too. A run is equivalent to its messages, one after the other; `expand` yields
    them. `tags` holds little-endian uint64. Sizes are in bytes.
    """

    length: int
    untagged: memoryview
    untagged_size: int
    tags: memoryview
    tagged: memoryview
    tagged_size: int

    def expand(self) -> Iterator[Incoming]:
        """Yield the messages of the run: each untagged message, followed by a tagged one."""
        untagged, tagged = self.untagged_size, self.tagged_size
        for index in range(self.length):
            yield Incoming(None, bytes(self.untagged[index * untagged : (index + 1) * untagged]))
            tag = int.from_bytes(self.tags[8 * index : 8 * index + 8], "little")
            yield Incoming(tag, self.tagged[index * tagged : (index + 1) * tagged])

"""What the protocol hands to a transport to move, and what comes out at the other end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dissociated.base.buffers import Buffer


class Message(NamedTuple):
    """A delimited message, tagged or not ("Requirements").

    `tag` is None for an untagged message. `parts` are sent one after the other and arrive as one; they are
    borrowed until the send returns and never joined on the way.
    """

    tag: int | None
    parts: Sequence[Buffer]


class Incoming(NamedTuple):
    """A message as it arrived. An untagged one is `bytes`; a tagged one is a buffer that the receiver owns."""

    tag: int | None
    data: Buffer

    def expand(self) -> Iterable[Incoming]:
        """The message: see `Run`."""
        return (self,)


class Run(NamedTuple):
    """Many small messages that arrived together: `length` untagged ones of one size, and as many tagged ones of one.

    It means what its messages mean, one after the other; `expand` gives them. `tags` holds little-endian uint64.
    """

    length: int
    untagged: memoryview
    untagged_size: int
    tags: memoryview
    tagged: memoryview
    tagged_size: int

    def expand(self) -> Iterator[Incoming]:
        """The messages of the run, each untagged one followed by a tagged one."""
        untagged, tagged = self.untagged_size, self.tagged_size
        for index in range(self.length):
            yield Incoming(None, bytes(self.untagged[index * untagged : (index + 1) * untagged]))
            tag = int.from_bytes(self.tags[8 * index : 8 * index + 8], "little")
            yield Incoming(tag, self.tagged[index * tagged : (index + 1) * tagged])

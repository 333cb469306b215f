"""Messages of a live stream, for its consumers: a single message, or several small alike messages in one object."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.codec.split import SplitMessage
from dissociated.format.message import Header, HeaderType, parse_header
from dissociated.format.missed import note_missed
from dissociated.memory.live import LiveRegion

#: Bodies of up to this many bytes travel inline. Sharing a small body costs more than a copy, and takes whole pages.
SMALL_BODY = 1 << 14
#: Memory of a waiting message, in bytes, apart from its header and body.
QUEUED_OVERHEAD = 256
#: Largest number of messages, and of bytes of several messages, that are sent in one call.
MAX_SEND_MESSAGES = 1 << 13
MAX_SEND_BYTES = 1 << 20
#: Messages with equal headers wait in one object if each has at most this many bytes, header included.
_MAX_ALIKE = 1 << 11


class LiveMessage(NamedTuple):
    """A message for consumers, or several small messages that differ in their bodies alone."""

    header: bytes
    parsed: Header
    #: The body, in parts; None for a message without a body.
    body: Sequence[Buffer] | None
    #: Bytes of each message outside of shared memory while it waits.
    queued: int = 0
    #: The region of shared memory that the body lies in; None for an inline body.
    region: LiveRegion | None = None
    #: Address and length of each buffer in `region`.
    extents: Sequence[tuple[int, int]] = ()
    #: The bodies of alike messages that follow this message; None if none may be appended.
    repeats: list[bytes] | None = None
    #: The addresses that a consumer holds once it was given this message.
    addresses: Collection[int] = frozenset()

    @classmethod
    def inline(cls, message: SplitMessage) -> LiveMessage:
        """Return the message with a copy of its body, outside of shared memory."""
        header, parsed, body = message
        size = len(header) + parsed.body_length
        parts = None if body is None else (b"".join(body),) if body else ()
        may_be_followed = parts and parsed.type is HeaderType.RECORD_BATCH and size <= _MAX_ALIKE
        return cls(header, parsed, parts, size + QUEUED_OVERHEAD, repeats=[] if may_be_followed else None)

    def append_alike(self, message: SplitMessage) -> bool:
        """Append the body of `message` to `repeats` if the headers are equal and there is room.

        Returns:
            Whether the body was appended.
        """
        more = self.repeats
        if more is None or message.header != self.header:
            return False
        if len(more) >= MAX_SEND_MESSAGES - 1 or (len(more) + 2) * self.queued > MAX_SEND_BYTES:
            return False
        more.append(b"".join(message.body or ()))
        return True

    def noting_missed(self, count: int) -> list[LiveMessage]:
        """Return this record batch with a note that its consumer missed `count` batches so far.

        Alike messages after it become an object of their own.
        """
        first, *more = self.each()
        header = note_missed(self.header, count)
        noted = first._replace(header=header, parsed=parse_header(header), repeats=None)
        bodies = [*(self.repeats or ())]
        return [noted, more[0]._replace(repeats=bodies[1:])] if more else [noted]

    @property
    def messages(self) -> int:
        """The number of messages in this object."""
        return 1 + len(self.repeats) if self.repeats else 1

    @property
    def droppable(self) -> bool:
        """Whether the stream stays valid without this message. Batches need the schema and dictionaries before them."""
        return self.parsed.type is HeaderType.RECORD_BATCH

    @property
    def nbytes(self) -> int:
        """The total bytes of all bodies."""
        return self.messages * self.parsed.body_length

    @property
    def bodies(self) -> list[Buffer]:
        """The bodies of all messages. If there are `repeats`, each body is one buffer."""
        return [*(self.body or ()), *(self.repeats or ())]

    def each(self) -> Iterable[LiveMessage]:
        """Return each message as an object of its own."""
        return [self._replace(body=(body,), repeats=None) for body in self.bodies] if self.repeats else (self,)


def all_addresses(items: Iterable[LiveMessage]) -> set[int]:
    """Return the addresses of all of these messages."""
    return set().union(*[item.addresses for item in items])

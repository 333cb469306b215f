"""What consumers of a live stream are given: a message, or small ones that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dissociated.base.buffers import Buffer
from dissociated.codec.split import SplitMessage
from dissociated.format.message import Header, HeaderType
from dissociated.memory.live import LiveRegion

#: Bodies of up to this many bytes travel inline: to share one costs more than to copy it, and takes whole pages.
SMALL_BODY = 1 << 14
#: Bytes that keeping a message takes beside its own.
QUEUED_OVERHEAD = 256
#: How many messages are sent together at most, and how many bytes where there is more than one.
MAX_SEND_MESSAGES = 1 << 13
MAX_SEND_BYTES = 1 << 20
#: Messages that are alike but for their bodies wait together if they have at most so many bytes.
_MAX_ALIKE = 1 << 11


class LiveMessage(NamedTuple):
    """A message for consumers, or several small ones that differ in their bodies alone."""

    header: bytes
    parsed: Header
    #: In parts; None for a message without one.
    body: Sequence[Buffer] | None
    #: Bytes that each message takes outside of shared memory while it waits.
    queued: int = 0
    #: The shared memory that the body lies in; None for one that is inline.
    region: LiveRegion | None = None
    #: Address and length of each buffer in `region`.
    extents: Sequence[tuple[int, int]] = ()
    #: The bodies of the messages that follow this one and are alike; None where none may.
    repeats: list[bytes] | None = None

    @classmethod
    def inline(cls, message: SplitMessage) -> LiveMessage:
        """The message with its body in memory of its own."""
        header, parsed, body = message
        size = len(header) + parsed.body_length
        parts = None if body is None else (b"".join(body),) if body else ()
        may_be_followed = parts and parsed.type is HeaderType.RECORD_BATCH and size <= _MAX_ALIKE
        return cls(header, parsed, parts, size + QUEUED_OVERHEAD, repeats=[] if may_be_followed else None)

    def append_alike(self, message: SplitMessage) -> bool:
        """Add `message` to the `repeats`, if it is alike and there is room. Returns whether it was added."""
        more = self.repeats
        if more is None or message.header != self.header:
            return False
        if len(more) >= MAX_SEND_MESSAGES - 1 or (len(more) + 2) * self.queued > MAX_SEND_BYTES:
            return False
        more.append(b"".join(message.body or ()))
        return True

    @property
    def messages(self) -> int:
        """How many messages these are."""
        return 1 + len(self.repeats) if self.repeats else 1

    @property
    def nbytes(self) -> int:
        """Bytes of all their bodies."""
        return self.messages * self.parsed.body_length

    @property
    def bodies(self) -> list[Buffer]:
        """The bodies of all these messages, each in one piece where there are `repeats`."""
        return [*(self.body or ()), *(self.repeats or ())]

    def each(self) -> Iterable[LiveMessage]:
        """The messages one by one."""
        return [self._replace(body=(body,), repeats=None) for body in self.bodies] if self.repeats else (self,)

    @property
    def addresses(self) -> set[int]:
        """The addresses that a consumer holds once it is given this."""
        return {address for address, length in self.extents if length} if self.extents else set()

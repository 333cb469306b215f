"""What consumers of a live stream are given: a message, or small ones that are alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dissociated.buffers import Buffer
from dissociated.codec.split import SplitMessage
from dissociated.format.message import Header, HeaderType
from dissociated.memory.live import LiveRegion

#: Bodies of up to this many bytes travel inline: to share one costs more than to copy it, and takes whole pages.
SMALL_BODY = 1 << 14
#: Bytes that keeping a message takes beside its own.
QUEUED_OVERHEAD = 256
#: So many messages go together at most, and so many bytes where there is more than one.
MAX_SEND_MESSAGES = 1 << 13
MAX_SEND_BYTES = 1 << 20
#: Messages that are alike but for their bodies wait together if they have at most so many bytes.
_MAX_ALIKE = 1 << 11


class LiveMessage(NamedTuple):
    """A message for consumers: its body in parts, and the extents of its buffers in `region`, if it lies there.

    Of a small one, `repeats` are the bodies of those that follow it and are alike but for that.
    """

    header: bytes
    parsed: Header
    body: Sequence[Buffer] | None
    queued: int = 0  # bytes that each takes, outside of shared memory, while it waits
    region: LiveRegion | None = None
    extents: Sequence[tuple[int, int]] = ()
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
        """Take `message` for the next, if it is alike."""
        more = self.repeats
        if more is None or message.header != self.header:
            return False
        if len(more) >= MAX_SEND_MESSAGES - 1 or (len(more) + 2) * self.queued > MAX_SEND_BYTES:
            return False
        more.append(b"".join(message.body or ()))
        return True

    @property
    def messages(self) -> int:
        """How many these are."""
        return 1 + len(self.repeats) if self.repeats else 1

    @property
    def nbytes(self) -> int:
        """Bytes of their bodies."""
        return self.messages * self.parsed.body_length

    @property
    def bodies(self) -> list[Buffer]:
        """Those of messages that are alike, each in one piece."""
        return [*(self.body or ()), *(self.repeats or ())]

    def each(self) -> Iterable[LiveMessage]:
        """The messages one by one."""
        return [self._replace(body=(body,), repeats=None) for body in self.bodies] if self.repeats else (self,)

    @property
    def addresses(self) -> set[int]:
        """What whoever is given this holds."""
        return {address for address, length in self.extents if length} if self.extents else set()

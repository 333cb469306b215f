"""Messages of datasets as they are sent, and the segments that their bodies lie in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dissociated.base.buffers import Buffer
from dissociated.format.message import Header
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing


class StaticMessage(NamedTuple):
    """A message that stays as it is."""

    #: The flatbuffer.
    header: bytes
    #: What was read of the flatbuffer.
    parsed: Header
    #: The packed body in parts; None for a message without one.
    packed: Sequence[Buffer] | None
    #: Address and length of each buffer in shared memory; None where it does not lie there.
    extents: Sequence[tuple[int, int]] | None = None
    #: The number of the segment that it lies in.
    segment: int = 0


class SharedSegment(Protocol):
    """Memory that peers can map. The descriptor is read-only."""

    descriptor: int
    region: Region

    @property
    def backing(self) -> Backing:
        """LIVE for as long as some of it is still to be written."""

    def wait(self, until: int) -> None:
        """Wait until everything is there that lies below this address. Raises StoreError."""


class MappedMessages(NamedTuple):
    """Messages whose bodies lie in one segment, to be sent as addresses into it."""

    segment: SharedSegment
    messages: Sequence[StaticMessage]

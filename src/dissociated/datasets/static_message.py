"""Messages of datasets in the form in which they are sent, and the segments that hold their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dissociated.base.buffers import Buffer
from dissociated.format.message import Header
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing


class StaticMessage(NamedTuple):
    """An encoded message of a static dataset."""

    #: The metadata, a flatbuffer.
    header: bytes
    #: The fields of the flatbuffer that are needed here.
    parsed: Header
    #: The packed body, in parts; None for a message without a body.
    packed: Sequence[Buffer] | None
    #: Address and length of each buffer in shared memory; None if the body does not lie there.
    extents: Sequence[tuple[int, int]] | None = None
    #: The number of the segment that the body lies in.
    segment: int = 0


class SharedSegment(Protocol):
    """A segment of memory that peers can map. The descriptor is read-only."""

    descriptor: int
    region: Region

    @property
    def backing(self) -> Backing:
        """The kind of memory: LIVE while a part of the segment is still to be written."""

    def wait(self, until: int) -> None:
        """Wait until all memory below the address `until` is written. Raise StoreError if writing fails."""


class MappedMessages(NamedTuple):
    """Messages whose bodies lie in one segment and can be sent as addresses in it."""

    segment: SharedSegment
    messages: Sequence[StaticMessage]

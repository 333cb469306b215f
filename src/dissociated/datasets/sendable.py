"""The ways in which datasets can be sent, and what whoever sends them is offered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from dissociated.buffers import Buffer
from dissociated.codec.split import SplitMessage
from dissociated.datasets.fanout import Consumer
from dissociated.datasets.live_message import LiveMessage
from dissociated.format.message import Header
from dissociated.memory.device.segment import DeviceSegment
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing

S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
T = TypeVar("T")


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


class Static(Protocol):
    """Messages that stay as they are, and the segments in shared memory that their bodies lie in."""

    name: str

    def packed(self) -> Sequence[StaticMessage]:
        """The messages, to be sent with their bodies inline."""

    def mapped(self) -> Iterable[MappedMessages]:
        """The messages by the segments that they lie in, in order. A segment may still be being written."""

    def encoded(self, key: Hashable, encode: Callable[[], T]) -> T:
        """What `encode` made for `key`, now or before. It stays as long as the dataset."""


class Streamed(Protocol):
    """Messages that are made for each client anew."""

    name: str

    def messages(self) -> Iterator[SplitMessage]:
        """The messages of one reading, bodies packed. Whatever the source raises comes out of it."""


class OnDevice(Streamed, Protocol):
    """Messages that stay, whose bodies lie on a device: to be sent as addresses there, or copied out for a client."""

    segment: DeviceSegment | None
    placed: Sequence[StaticMessage]


class Broadcasting(Protocol):
    """Messages that are read once, for all clients together."""

    name: str

    def join(self, wake: Callable[[], None], on_cut_off: Callable[[], None]) -> Consumer:
        """Become one of the consumers: see `Fanout.join`."""

    def project(self, item: LiveMessage) -> LiveMessage | None:
        """What this client gets of a message; None where that is nothing."""


class SendVisitor(Protocol[S_co]):
    """What knows all ways to send a dataset, of which each dataset chooses one: see `Dataset.accept`."""

    def static(self, dataset: Static) -> S_co:
        """Send messages that stay."""

    def streamed(self, dataset: Streamed) -> S_co:
        """Send messages that are made for this client."""

    def on_device(self, dataset: OnDevice) -> S_co:
        """Send messages that lie on a device."""

    def broadcast(self, dataset: Broadcasting) -> S_co:
        """Send messages that others read along."""

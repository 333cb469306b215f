"""One client of a server: a request, the stream that answers it, and the memory that comes back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dissociated.dataset import Dataset, LiveDataset, StaticDataset, only, source_blamed
from dissociated.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    RemoteProtocolError,
)
from dissociated.ipc.split import SplitMessage
from dissociated.memory.leases import Ledger
from dissociated.memory.live import LiveRegion
from dissociated.message import Buffer, Incoming, Run
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.events import AddressesFreed, StreamRequested, Streams
from dissociated.protocol.header import buffer_extents
from dissociated.protocol.sender import Body, Sender, Tags
from dissociated.protocol.states import State
from dissociated.protocol.tags import BodyKind
from dissociated.transport.base import Connection

if TYPE_CHECKING:
    from dissociated.server import Server
    from dissociated.status import Tally

# The values are ours to choose; these spell DISS. Bits 0 and 1 say which streams, bit 2 that bodies come packed.
_WANT = 0x4449_5353_0000_0000
_PACKED = 4
#: The tag of free_data.
FREE_DATA = _WANT | 0x100

_MAX_REQUEST = 1 << 16  # bytes of a message from a client
_PATIENCE = 1.0  # seconds for a client to free memory before bodies go inline


def want_tag(streams: Streams, packed: bool) -> int:
    """The tag of want_data that requests these streams, and bodies that are `packed` or come as they can."""
    return _WANT | streams.value | (_PACKED if packed else 0)


_TAGS = Tags(
    want={want_tag(one, packed): one for one in Streams.__members__.values() for packed in (False, True)},
    free_data=FREE_DATA,
)


class Session:
    """One connection: a request, the stream, and the frees that come back."""

    def __init__(self, server: Server, connection: Connection, tally: Tally) -> None:
        self._server = server
        self._connection = connection
        self._sender = Sender(_TAGS)
        self._ledger = Ledger()
        self._tally = tally
        tally.held = self._ledger
        self._wanted: Dataset | None = None  # what clients fetch from must stay until they have given it back
        self._regions: list[LiveRegion] = []  # of a live stream; bodies go to the last
        self._inline = False  # a live region was full, and no free has come since

    def run(self) -> None:
        """Serve the client to its end. Raises whatever ended it before."""
        try:
            request = self._request()
            if request is None:
                return
            identifier, streams, packed = request
            found, columns = self._server.granted(identifier)
            self._tally.dataset = found
            self._wanted = found if columns is None else only(found, columns)
            with found.reading():
                try:
                    self._send(self._wanted, streams, packed)
                except ConnectionClosed:
                    # The client may have stopped listening and still hold memory: then it goes on to give it back.
                    self._sender.fail()
                self._drain()
            if self._sender.state is State.ENDING:
                self._sender.drained()
                self._connection.finish(self._server.stall_timeout)
        except DissociatedError as error:
            self._connection.abort(str(error))
            raise
        except Exception:
            self._connection.abort("the server failed for a reason that its log tells")
            raise
        finally:
            self._ledger.release_all()
            for region in self._regions:
                region.close()

    def _request(self) -> tuple[bytes, Streams, bool] | None:
        incoming = self._receive(self._server.handshake_timeout)
        if incoming is None:
            return None
        event = self._sender.receive(incoming.tag, bytes(incoming.data))
        assert isinstance(event, StreamRequested)  # the table allows nothing else first
        return event.identifier, event.streams, bool((incoming.tag or 0) & _PACKED)

    def _send(self, wanted: Dataset, streams: Streams, packed: bool) -> None:
        connection = self._connection
        by_address = not packed and bool(streams & Streams.BODIES)
        if isinstance(wanted, StaticDataset):
            self._send_static(wanted, streams, by_address and (connection.shares_memory or connection.exposes_memory))
        elif isinstance(wanted, LiveDataset):
            self._send_live(wanted, streams, by_address and connection.shares_memory)
        self._connection.send(self._sender.end(), self._server.stall_timeout)
        self._tally.sent = True

    def _send_static(self, wanted: StaticDataset, streams: Streams, mapped: bool) -> None:
        if mapped and self._connection.shares_memory:
            for segment in wanted.mapped()[1]:
                region = segment.region
                self._connection.share(segment.descriptor, region.base, region.size, segment.backing)
        for group in wanted.groups(self._connection, streams, mapped, self._server.inline_limit):
            self._ledger.hold(group.leased)  # first: of a group that is cut off, some may have arrived
            self._connection.send(group.prepared, self._server.stall_timeout)
            self._sender.sent(group.messages)
            self._tally.messages += group.messages
            self._tally.bytes += group.nbytes
            self._take_frees()

    def _send_live(self, wanted: LiveDataset, streams: Streams, mapped: bool) -> None:
        for message in _blamed(wanted):
            body = None
            if message.body is not None and streams & Streams.BODIES:
                length = message.parsed.body_length
                if mapped and length > self._server.inline_limit and self._room(wanted.name, length):
                    body = self._place(message, message.body)
                else:
                    body = Body(BodyKind.PACKED, message.body)
            self._connection.send(self._sender.send(message.header, body), self._server.stall_timeout)
            self._tally.messages += 1
            if body is not None:
                self._tally.bytes += message.parsed.body_length
            self._take_frees()

    def _room(self, name: str, length: int) -> bool:
        """Whether the live region takes a body of this length, after waiting for frees if need be.

        A client that holds everything until the stream ends would wait for us, and we for it. So if no free comes
        for a second, bodies go inline, and the client's own memory is the limit, until one comes.
        """
        if not self._regions or not self._regions[-1].fits(length):
            self._open_region(name)
        region = self._regions[-1]
        if not region.fits(length):
            return False
        while not region.has_room(length, beside=sum(other.unfreed for other in self._regions[:-1])):
            if self._inline:
                return False
            try:
                incoming = self._receive(_PATIENCE)
            except DeadlineExceeded:
                self._inline = True
                return False
            if incoming is None:
                raise ConnectionClosed("the client closed the connection")
            self._freed(incoming)
        return True

    def _open_region(self, name: str) -> None:
        for used_up in [region for region in self._regions if not region.unfreed]:
            self._regions.remove(used_up)
            used_up.close()
        region = LiveRegion(name, self._server.live_limit)
        self._regions.append(region)
        self._connection.share(region.descriptor, region.base, region.size, region.backing)

    def _place(self, message: SplitMessage, parts: Sequence[Buffer]) -> Body:
        offsets, lengths = buffer_extents(message.header, message.parsed)
        placed = self._regions[-1].place(parts, message.parsed.body_length, zip(offsets, lengths, strict=True))
        self._ledger.hold(address for address, length in placed if length)
        return Body(BodyKind.ADDRESSES, (encode_addresses(placed),))

    def _take_frees(self) -> None:
        while self._connection.arrived():
            incoming = self._receive(self._server.stall_timeout)
            if incoming is None:
                raise ConnectionClosed("the client closed the connection")
            self._freed(incoming)

    def _freed(self, incoming: Incoming) -> None:
        event = self._sender.receive(incoming.tag, bytes(incoming.data))
        assert isinstance(event, AddressesFreed)  # the table allows nothing else now
        gone = self._ledger.release(event.addresses)
        for region in self._regions:
            region.free(gone)
        self._inline = False

    def _receive(self, timeout: float) -> Incoming | None:
        incoming = self._connection.receive(timeout, _allocate)
        if isinstance(incoming, Run):
            raise RemoteProtocolError("the client sent a run of messages, which only servers do")
        return incoming

    def _drain(self) -> None:
        """ "wait for tagged <free_data> messages", until nothing is outstanding or the client is gone."""
        while len(self._ledger):
            incoming = self._receive(self._server.lease_timeout)
            if incoming is None:
                return
            self._freed(incoming)


def _allocate(tag: int | None, length: int) -> Buffer:
    if length > _MAX_REQUEST:
        raise RemoteProtocolError(f"the client sent a message of {length} bytes; at most {_MAX_REQUEST} are taken")
    return bytearray(length)


def _blamed(wanted: LiveDataset) -> Iterator[SplitMessage]:
    with source_blamed(wanted.name):
        yield from wanted.messages()

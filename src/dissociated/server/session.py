"""One client of a server: a request, the stream that answers it, and the memory that comes back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby

from dissociated.buffers import Buffer, too_long
from dissociated.codec.split import SplitMessage, Splitter
from dissociated.datasets.base import Dataset
from dissociated.datasets.blame import source_blamed
from dissociated.datasets.broadcast import AT_ONCE, BYTES_AT_ONCE, SMALL, Broadcast, BroadcastColumns, Consumer, Part
from dissociated.datasets.registry import Registry
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.streamed import StreamedDataset
from dissociated.errors import (
    ColumnNotFound,
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    OptionError,
    RemoteProtocolError,
    SourceError,
    told,
)
from dissociated.format.message import buffer_extents
from dissociated.memory.leases import Ledger
from dissociated.memory.live import LiveMemory, LiveRegion
from dissociated.monitoring.activity import Tally
from dissociated.protocol.bodies import encode_addresses
from dissociated.protocol.events import AddressesFreed, StreamRequested, Streams
from dissociated.protocol.message import Incoming, Message, Run
from dissociated.protocol.request import MAX_IDENTIFIER, Selection, parse_identifier
from dissociated.protocol.sender import Body, Sender, Tags
from dissociated.protocol.states import State
from dissociated.protocol.tags import BodyKind
from dissociated.server.admission import Admission, Limits
from dissociated.server.gathering import PACE, Gathering
from dissociated.transport.base import Connection
from dissociated.transport.framed.framing import MIN_RUN

_log = logging.getLogger(__name__)

# The values are ours to choose; these spell DISS. Bits 0 and 1 say which streams, bit 2 that bodies come packed.
_WANT = 0x4449_5353_0000_0000
_PACKED = 4
#: The tag of free_data.
FREE_DATA = _WANT | 0x100

_MAX_REQUEST = MAX_IDENTIFIER  # bytes of a message from a client
_LOOK_AGAIN = 3600.0  # seconds; what is waited for tells when it comes
_FOREVER = 1e6  # seconds
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

    def __init__(
        self, registry: Registry, limits: Limits, admission: Admission, connection: Connection, tally: Tally
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._admission = admission
        self._connection = connection
        self._sender = Sender(_TAGS)
        self._ledger = Ledger()
        self._tally = tally
        tally.held = self._ledger
        self._wanted: Dataset | None = None  # what clients fetch from must stay until they have given it back
        self._memory: LiveMemory | None = None  # of a live stream
        self._shared: set[int] = set()  # the bases of its regions that the client knows
        self._consumer: Consumer | None = None  # of a broadcast
        self._inline = False  # a live region was full, and no free has come since
        self._silent = False  # the client has ended what it sends, so it can give nothing back any more
        self._lingers = False  # the client was sent away, and what it holds of a live stream stays until it is gone
        tally.kept = self._kept

    def run(self) -> None:
        """Serve the client to its end. Raises whatever ended it before."""
        try:
            request = self._request()
            if request is None:
                return
            identifier, streams, packed = request
            ticket, selection = parse_identifier(identifier)
            found, whole = self._registry.resolve_ticket(ticket)
            self._tally.dataset = found
            with found.reading():
                self._wanted = self._selected(whole.opened(), selection)  # counted first: so it is not evicted
                self._answer(self._wanted, streams, packed)
            if self._sender.state is State.ENDING:
                self._sender.drained()
                if not self._connection.finish(self._limits.stall_timeout):
                    raise ConnectionClosed("the client went before it had everything")
        except ConnectionClosed:
            raise  # there is nobody to tell
        except DissociatedError as error:
            self._send_away(told(error))
            raise
        except Exception:
            self._send_away("the server failed for a reason that its log tells")
            raise
        finally:
            self._end()

    def _end(self) -> None:
        """Nothing is held for this client any more. What it may still map of a live stream is not used again."""
        gone = not self._holds_live or self._connection.outlast()
        self._ledger.release_all()
        self._tally.kept = None  # which leads back here
        if self._consumer is not None:
            self._consumer.leave(gone)
        if self._memory is not None:
            self._memory.close()

    def _send_away(self, reason: str) -> None:
        """Tell the client why there is no more. What it holds of a live stream stays until it lets go."""
        if not self._holds_live:
            self._connection.abort(reason)
            return
        self._lingers = True
        _log.info("%s was sent away, and still holds memory: %s", self._connection.peer, reason)
        if self._consumer is not None:
            self._consumer.set_aside()
        self._connection.farewell(reason)
        with suppress(DissociatedError):  # of one that breaks the rules, only its end is waited for
            self._sender.fail()
            self._drain(_FOREVER)
            self._connection.last_words(self._limits.stall_timeout)

    @property
    def _holds_live(self) -> bool:
        """Whether the client holds memory that is used again once it has been given back."""
        return bool(len(self._ledger)) and (self._consumer is not None or self._memory is not None)

    def _kept(self) -> int | None:
        """How much memory is held for a client that was sent away, in bytes; None for one that was not."""
        if self._consumer is not None:
            return self._consumer.kept_bytes
        return self._memory.unfreed if self._lingers and self._memory is not None else None

    def _answer(self, wanted: Dataset, streams: Streams, packed: bool) -> None:
        """Send it, and wait until everything is given back."""
        try:
            self._send(wanted, streams, packed)
        except ConnectionClosed:
            # The client may have stopped listening and still hold memory: then it goes on to give it back.
            self._sender.fail()
            if self._consumer is not None:
                self._consumer.stop()
        except SourceError as error:
            if self._consumer is None:
                raise
            # What it has been sent is used again once it is freed: until then the client may take its time.
            self._connection.farewell(told(error))
            self._sender.fail()
        self._drain(self._limits.lease_timeout)
        self._connection.last_words(self._limits.stall_timeout)

    def _request(self) -> tuple[bytes, Streams, bool] | None:
        incoming = self._receive(self._limits.handshake_timeout)
        if incoming is None:
            return None
        self._admission.asked(self._connection)
        event = self._sender.receive(incoming.tag, bytes(incoming.data))
        assert isinstance(event, StreamRequested)  # the table allows nothing else first
        return event.identifier, event.streams, bool((incoming.tag or 0) & _PACKED)

    def _selected(self, wanted: Dataset, selection: Selection | None) -> Dataset:
        """What is wanted of it. Where that is not there, the client gets to know the whole schema, and then why."""
        if selection is None:
            return wanted
        try:
            return wanted.select(selection)
        except (ColumnNotFound, OptionError):
            schema = Splitter(wanted.schema).schema_message.header
            self._connection.send(self._sender.send(schema, None), self._limits.stall_timeout)
            raise

    def _send(self, wanted: Dataset, streams: Streams, packed: bool) -> None:
        connection = self._connection
        by_address = not packed and bool(streams & Streams.BODIES)
        if isinstance(wanted, StaticDataset):
            self._send_static(wanted, streams, by_address and (connection.shares_memory or connection.exposes_memory))
        elif isinstance(wanted, StreamedDataset):
            self._send_live(wanted, streams, by_address and connection.shares_memory)
        elif isinstance(wanted, Broadcast | BroadcastColumns):
            self._send_broadcast(wanted, streams, by_address and connection.shares_memory)
        self._connection.send(self._sender.end(), self._limits.stall_timeout)
        self._tally.sent = True

    def _send_static(self, wanted: StaticDataset, streams: Streams, mapped: bool) -> None:
        if mapped and self._connection.shares_memory:
            for segment in wanted.mapped()[1]:
                region = segment.region
                self._connection.share(segment.descriptor, region.base, region.size, segment.backing)
        for group in wanted.groups(self._connection, streams, mapped, self._limits.inline_limit or 0):
            self._ledger.hold(group.leased)  # first: of a group that is cut off, some may have arrived
            with self._tally.sending(self._connection, group.nbytes):
                self._connection.send(group.prepared, self._limits.stall_timeout)
            self._sender.sent(group.messages)
            self._tally.messages += group.messages
            self._take_frees()

    def _send_live(self, wanted: StreamedDataset, streams: Streams, mapped: bool) -> None:
        if mapped:
            self._admission.admit_live(wanted.name)
        self._memory = LiveMemory(wanted.name, self._limits.live_limit)
        inline_limit = SMALL if self._limits.inline_limit is None else self._limits.inline_limit
        gathers = streams is Streams.BOTH and self._connection.takes_runs
        with Gathering(lambda parts: self._send_gathered(wanted, parts)) as gathering:
            for message in _blamed(wanted):
                length = message.parsed.body_length
                by_address = mapped and not self._silent and length > inline_limit
                if gathers and message.body is not None and length <= SMALL and not by_address:
                    gathering.add(message)
                    continue
                gathering.flush()
                body = None
                if message.body is not None and streams & Streams.BODIES:
                    region = self._room(length) if by_address else None
                    body = (
                        Body(BodyKind.PACKED, message.body)
                        if region is None
                        else self._place(region, message, message.body)
                    )
                with self._tally.sending(self._connection, 0 if body is None else length):
                    self._connection.send(self._numbered(wanted, message.header, body), self._limits.stall_timeout)
                self._tally.messages += 1
                self._take_frees()

    def _send_gathered(self, wanted: StreamedDataset, parts: Sequence[Part]) -> None:
        self._send_together(wanted, parts, mapped=False, unsent=set())
        self._tally.messages += sum([part.messages for part in parts])
        self._take_frees()

    def _send_broadcast(self, wanted: Broadcast | BroadcastColumns, streams: Streams, mapped: bool) -> None:
        if streams is not Streams.BOTH:
            raise SourceError(
                f"each connection has its own place in the live stream {wanted.name!r}: request all of it over one"
            )
        if mapped:
            self._admission.admit_live(wanted.name)
        # One that maps nothing holds up others only by not taking what is being sent.
        cut = self._connection.wake if mapped else self._connection.interrupt
        self._consumer = consumer = wanted.join(self._connection.wake, cut)
        paced = 0.0  # until when small messages wait for more
        while not consumer.over:
            self._take_frees()
            if (pause := paced - time.monotonic()) > 0:
                time.sleep(pause)
            parts = consumer.take(AT_ONCE, BYTES_AT_ONCE)
            if parts:
                count, nbytes = self._send_parts(consumer, wanted, parts, mapped and not self._silent)
                paced = time.monotonic() + PACE if count < AT_ONCE and nbytes <= SMALL else 0.0
            else:
                self._connection.wait(_LOOK_AGAIN)

    def _send_parts(
        self, consumer: Consumer, wanted: Broadcast | BroadcastColumns, parts: Sequence[Part], mapped: bool
    ) -> tuple[int, int]:
        """Send these all at once. Returns how many messages they are, and how many bytes their bodies have."""
        given = {address for part in parts for address in part.addresses}
        unsent, written = {*given}, self._connection.written
        try:
            count = sum([part.messages for part in parts])
            chosen = [part for part in map(wanted.choose, parts) if part is not None]
            nbytes = self._send_together(wanted, chosen, mapped, unsent)
            self._tally.messages += count
            return count, nbytes
        except ConnectionClosed:
            if self._connection.written == written:  # nothing of it has left: the client will never give it back
                self._ledger.release([*given - unsent])
                unsent = given
            raise
        finally:
            consumer.free(unsent)

    def _send_together(self, wanted: Dataset, parts: Sequence[Part], mapped: bool, unsent: set[int]) -> int:
        """Send these all at once, alike ones in runs; see `_body`. Returns how many bytes their bodies have."""
        messages: list[Message | Run] = []
        for header, group in groupby(parts, _alike):
            some = [*group]
            bodies = [body for part in some for body in part.bodies] if header is not None else []
            if header is not None and len(bodies) >= MIN_RUN and self._connection.takes_runs:
                self._check(wanted, header)
                messages.append(self._sender.send_alike(header, bodies))
                continue
            for part in [one for several in some for one in several.each()]:
                messages += self._numbered(wanted, part.header, self._body(part, mapped, unsent))
        nbytes = sum([part.nbytes for part in parts])
        with self._tally.sending(self._connection, nbytes):
            self._connection.send(self._connection.prepare(messages), self._limits.stall_timeout)
        return nbytes

    def _numbered(self, wanted: Dataset, header: bytes, body: Body | None) -> list[Message]:
        """The next message of a stream whose metadata nobody could look at before."""
        self._check(wanted, header)
        return self._sender.send(header, body)

    def _check(self, wanted: Dataset, header: bytes) -> None:
        why = too_long(repr(wanted.name), len(header), self._limits.max_metadata)
        if why is not None:
            raise SourceError(why)

    def _body(self, part: Part, mapped: bool, unsent: set[int]) -> Body | None:
        """The body of a message of a broadcast. What the client holds with it is taken out of `unsent`."""
        if part.body is None:
            return None
        if mapped and part.region is not None and part.parsed.body_length > (self._limits.inline_limit or 0):
            self._share(part.region)
            unsent -= part.addresses
            return self._leased(part.extents)
        # Once it is freed, its memory is used again; but what a client that maps it has not taken may wait for longer.
        if part.region is None or (self._connection.copies and not mapped):
            return Body(BodyKind.PACKED, part.body)
        return Body(BodyKind.PACKED, [*map(bytes, part.body)])

    def _room(self, length: int) -> LiveRegion | None:
        """The live region that takes a body of this length, after waiting for frees if need be; None for inline.

        A client that holds everything until the stream ends would wait for us, and we for it. So if no free comes
        for a second, bodies go inline, and the client's own memory is the limit, until one comes.
        """
        assert self._memory is not None
        region = self._memory.region(length)
        if region is None:
            return None
        while not self._memory.has_room(length):
            if self._inline:
                return None
            try:
                incoming = self._receive(_PATIENCE)
            except DeadlineExceeded:
                self._inline = True
                return None
            if incoming is None:
                self._client_ended()
                return None
            self._freed(incoming)
        self._share(region)
        return region

    def _share(self, region: LiveRegion) -> None:
        """Let the client map `region`, once."""
        if region.base not in self._shared:
            self._shared.add(region.base)
            self._connection.share(region.descriptor, region.base, region.size, region.backing)

    def _place(self, region: LiveRegion, message: SplitMessage, parts: Sequence[Buffer]) -> Body:
        offsets, lengths = buffer_extents(message.header, message.parsed)
        placed = region.place(parts, message.parsed.body_length, zip(offsets, lengths, strict=True))
        return self._leased(placed)

    def _leased(self, extents: Sequence[tuple[int, int]]) -> Body:
        """A body by address, which the client holds from now on."""
        self._ledger.hold(address for address, length in extents if length)
        return Body(BodyKind.ADDRESSES, (encode_addresses(extents),))

    def _take_frees(self) -> None:
        while self._connection.arrived():
            incoming = self._receive(self._limits.stall_timeout)
            if incoming is None:
                self._client_ended()
                return
            self._freed(incoming)

    def _client_ended(self) -> None:
        """The client sends no more. If it still listens it gets the whole stream, and what it leases until it hangs up.

        Raises ConnectionClosed where it is gone. Where that shows only by sending, as over TCP, who shares a live
        stream is taken to be gone: what is read next is for those who are there.
        """
        gone = self._connection.hung_up()
        if gone or (gone is None and self._consumer is not None):
            raise ConnectionClosed("the client closed the connection")
        self._silent = True

    def _freed(self, incoming: Incoming) -> None:
        event = self._sender.receive(incoming.tag, bytes(incoming.data))
        assert isinstance(event, AddressesFreed)  # the table allows nothing else now
        gone = self._ledger.release(event.addresses)
        if self._memory is not None:
            self._memory.free(gone)
        if self._consumer is not None:
            self._consumer.free(gone)
        self._inline = False

    def _receive(self, timeout: float) -> Incoming | None:
        incoming = self._connection.receive(timeout, _allocate)
        if isinstance(incoming, Run):
            raise RemoteProtocolError("the client sent a run of messages, which only servers do")
        return incoming

    def _drain(self, timeout: float) -> None:
        """ "wait for tagged <free_data> messages", until nothing is outstanding or the client is gone."""
        while len(self._ledger):
            incoming = self._receive(timeout)
            if incoming is None:
                if not self._holds_live:  # which `_end` waits for, without a limit
                    self._outlast(timeout)
                return
            self._freed(incoming)

    def _outlast(self, timeout: float) -> None:
        """Wait until the client, which gives nothing back any more, has hung up."""
        end = time.monotonic() + timeout
        while self._connection.hung_up() is False:
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"the client held memory for {timeout:g} s without a word")
            self._connection.wait(left)


def _alike(part: Part) -> bytes | None:
    """What messages have in common that may travel in one run; None for others."""
    return None if part.more is None else part.header


def _allocate(tag: int | None, length: int) -> Buffer:
    if length > _MAX_REQUEST:
        raise RemoteProtocolError(f"the client sent a message of {length} bytes; at most {_MAX_REQUEST} are taken")
    return bytearray(length)


def _blamed(wanted: StreamedDataset) -> Iterator[SplitMessage]:
    with source_blamed(wanted.name):
        yield from wanted.messages()

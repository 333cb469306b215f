"""Sending of a dataset to one client, and the account of the memory that the client leases until it frees it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dissociated.datasets.static import StaticDataset
from dissociated.datasets.static_message import SharedSegment, StaticMessage
from dissociated.errors import ConnectionClosed, DeadlineExceeded, SourceError
from dissociated.memory.device.segment import DeviceSegment
from dissociated.memory.leases import AddressLedger, Ledger, MessageLedger
from dissociated.memory.shared import Backing
from dissociated.monitoring.activity import ConnectionStats
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.sender import Body, MemoryFreed, Sender
from dissociated.protocol.wire import BodyKind, Streams, encode_addresses, leased_addresses
from dissociated.server.admission import Admission, Limits
from dissociated.server.encoding import encode_groups
from dissociated.server.requests import max_message, receive
from dissociated.transport.base import Connection

if TYPE_CHECKING:
    from dissociated.datasets.device import DeviceDataset

#: Segments that clients may still have mapped when this side stopped waiting for them. They are never freed, since the
#: driver would give the same memory to another allocation while a client still reads it.
_abandoned: list[DeviceSegment] = []


@dataclass(frozen=True)
class ClientRequest:
    """A client's request for a stream, and the objects that answering it needs."""

    connection: Connection
    sender: Sender
    limits: Limits
    admission: Admission
    stats: ConnectionStats
    #: The streams that travel over this connection.
    streams: Streams
    #: Whether bodies must be sent inline, even if they could be shared.
    packed: bool
    #: Whether the client accepts addresses on a device.
    on_device: bool
    #: Whether the client frees messages by number, and not their addresses.
    frees_messages: bool


class Sending(ABC):
    """The sending of one stream to one client, with the account of the memory that the client leases.

    The caller keeps this object until the client holds nothing more, since it keeps that memory alive.
    """

    def __init__(self, client: ClientRequest) -> None:
        self._connection = client.connection
        self._sender = client.sender
        self._limits = client.limits
        self._admission = client.admission
        self._stats = client.stats
        self._streams = client.streams
        self._by_address = not client.packed and bool(client.streams & Streams.BODIES)
        self._ledger: Ledger = MessageLedger() if client.frees_messages else AddressLedger()
        self._half_closed = False  # whether the client has ended its side, and so can free nothing
        client.stats.leases = self._ledger

    @abstractmethod
    def send(self) -> None:
        """Send all messages, except the end of the stream."""

    def drain(self, timeout: float) -> None:
        """Receive `free_data` messages until the client holds nothing or has disconnected.

        Args:
            timeout: Seconds that the client may be silent.

        Raises:
            DeadlineExceeded: The client is silent for longer.
            ConnectionClosed: The client disconnects without ending its side, while it holds memory.
            RemoteProtocolError: The client sends an invalid message.
        """
        while len(self._ledger):
            incoming = self._receive(timeout)
            if incoming is None:
                if self._connection.shares_memory and not self._half_closed and self._connection.arrived():
                    raise ConnectionClosed(f"the client disconnected while it held {len(self._ledger)} leases")
                if self._connection.shares_memory and not self.holds_live_memory:  # for live memory, the caller waits
                    self._wait_disconnected(timeout)
                return
            self._receive_free(incoming)

    @property
    def joined(self) -> bool:
        """Whether the client has joined a stream that other clients share, which wait for it."""
        return False

    @property
    def holds_live_memory(self) -> bool:
        """Whether the client holds memory that is reused once it was freed."""
        return False

    @property
    def mapped(self) -> Sequence[SharedSegment]:
        """The segments that the client has mapped and still holds leases of."""
        return ()

    @property
    def kept_bytes(self) -> int | None:
        """The bytes that the client still holds after it was cut off. None if it was not cut off."""
        return None

    @property
    def missed(self) -> int:
        """The number of batches of a live stream that were dropped because the client did not keep up."""
        return 0

    def cut_off(self) -> None:
        """Cut the client off. Memory that it holds stays until it is freed, and delays no other client."""

    def close(self, disconnected: bool) -> None:
        """Release everything that is held for this client.

        Args:
            disconnected: Whether the client is known to be gone. Otherwise memory that it may still map is not reused.
        """
        self._ledger.clear()

    def _on_freed(self, addresses: Collection[int]) -> None:
        """Handle addresses that the client has freed."""

    def _hold(self, leased: Mapping[int, Sequence[int]], pairs: int) -> None:
        """Record the lease of messages that are about to be sent.

        `leased` has their addresses, by number, which are sent in `pairs` pairs of an address and a length.

        The client may free everything that it holds in one message, even while this side sends. So the limit on the
        length of its messages is raised first.
        """
        self._ledger.hold(leased, pairs - sum(map(len, leased.values())))
        self._connection.limit_tagged(max_message(self._ledger.max_freed))

    def _receive(self, timeout: float) -> Incoming | Run | None:
        return receive(self._connection, timeout, self._ledger.max_freed)

    def _take_frees(self) -> None:
        """Receive all `free_data` messages that have arrived."""
        if not self._connection.arrived():
            return
        freed: list[int] = []
        try:
            while True:
                incoming = self._receive(self._limits.stall_timeout)
                if incoming is None:
                    self._client_ended()
                    return
                freed += self._freed_by(incoming)
                if not self._connection.arrived():
                    return
        finally:
            self._on_freed(freed)

    def _receive_free(self, incoming: Incoming | Run) -> None:
        self._on_freed(self._freed_by(incoming))

    def _freed_by(self, incoming: Incoming | Run) -> list[int]:
        """Return the addresses that the client no longer holds, according to this message."""
        event = self._sender.receive(incoming)
        assert isinstance(event, MemoryFreed)  # the protocol's state table allows no other event now
        return self._ledger.release(event.freed)

    def is_client_gone(self) -> bool:
        """Return whether the client is gone, while the source waits for other consumers of a shared live stream.

        As in `_client_ended`, a client that may be gone is assumed to be.
        """
        try:
            self._take_frees()
        except ConnectionClosed:
            return True
        return self._half_closed and not self._connection.shares_memory

    def _client_ended(self) -> None:
        """Handle the end of the client's side of the connection.

        A client that still receives gets the whole stream, and keeps its leases until it disconnects. Over TCP and
        similar transports, only sending shows whether the client still receives. A consumer of a shared live stream is
        then assumed to be gone, so that the stream goes on for the other consumers.

        Raises:
            ConnectionClosed: The client is gone, or is assumed to be gone.
        """
        is_certain = self._connection.shares_memory  # these media tell a client that still receives from a lost one
        if self._connection.arrived() or (self.joined and not is_certain):
            raise ConnectionClosed("the client closed the connection")
        self._half_closed = True

    def _wait_disconnected(self, timeout: float) -> None:
        """Wait until the client has disconnected, since it can free nothing any more.

        Raises:
            DeadlineExceeded: The client is still connected after `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while not self._connection.arrived():
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(f"the client held memory and was silent for {timeout:g} s")
            self._connection.wait(remaining)


class StaticSending(Sending):
    """The sending of a static dataset. Its messages are encoded once for all clients, and its memory never changes."""

    def __init__(self, client: ClientRequest, dataset: StaticDataset) -> None:
        super().__init__(client)
        self._dataset = dataset
        self._shared: list[SharedSegment] = []  # the segments that the client can map

    @property
    def mapped(self) -> Sequence[SharedSegment]:
        return self._shared if len(self._ledger) else ()

    def send(self) -> None:
        connection = self._connection
        if not (self._by_address and (connection.shares_memory or connection.exposes_memory)):
            self._send_messages(self._dataset.packed())
            return
        if connection.shares_memory:
            self._admission.admit_static(self._dataset.name)
        for number, (segment, messages) in enumerate(self._dataset.mapped()):
            region = segment.region
            if connection.shares_memory:
                self._shared.append(segment)
                timeout = self._limits.stall_timeout
                connection.memory.share(segment.descriptor, region.base, region.size, segment.backing, timeout)
            else:
                connection.memory.retain(region)
            self._send_messages(messages, number, segment if segment.backing is Backing.LIVE else None)

    def _send_messages(
        self,
        messages: Sequence[StaticMessage],
        segment_number: int | None = None,
        growing_segment: SharedSegment | None = None,
    ) -> None:
        """Send messages, each only after its body was written.

        Args:
            messages: The messages to send.
            segment_number: The number of the segment that the bodies lie in; None to send the bodies inline.
            growing_segment: That segment if it is still being written; otherwise None.
        """
        connection, inline_limit = self._connection, self._limits.inline_limit or 0
        groups = encode_groups(
            self._dataset,
            messages,
            self._sender.sequence,
            connection,
            self._streams,
            segment_number,
            is_growing=growing_segment is not None,
            inline_limit=inline_limit,
        )
        is_modifiable = self._dataset.is_modifiable
        for group in groups:
            if growing_segment is not None:
                growing_segment.wait(group.end)
            self._hold(group.leased, group.pairs)  # before sending, since part of an aborted group may have arrived
            if is_modifiable:
                self._dataset.check_unchanged()
            try:
                with self._stats.sending(connection, group.nbytes):
                    connection.send(group.encoded, self._limits.stall_timeout)
            except SourceError:
                if group.unsent is not None:  # the client does not use the body, because its metadata is missing
                    connection.send_zeros(self._limits.stall_timeout)  # within a message, no reason could be told
                self._dataset.check_unchanged()
                raise
            self._sender.record_sent(group.first, group.message_count)
            self._stats.messages += group.message_count
            self._take_frees()
            self._admission.check_open()


class DeviceSending(Sending):
    """The sending of a dataset as addresses in a device segment, which is freed only after the client closed it."""

    def __init__(self, client: ClientRequest, dataset: DeviceDataset) -> None:
        super().__init__(client)
        self._dataset = dataset

    def send(self) -> None:
        for message in self._dataset.placed:
            extents = message.extents
            body = Body(BodyKind.PACKED, ()) if message.parsed.has_body else None
            if extents is not None:
                body = Body(BodyKind.ADDRESSES, (encode_addresses(extents),))
                self._hold({self._sender.sequence: leased_addresses(extents)}, len(extents))
            with self._stats.sending(self._connection, message.parsed.body_length):
                self._connection.send(self._sender.send(message.header, body), self._limits.stall_timeout)
            self._stats.messages += 1
            self._take_frees()

    @property
    def holds_live_memory(self) -> bool:
        # The client may have opened the handle even if it leases no address. Only its disconnection shows that the
        # handle is closed.
        return True

    def close(self, disconnected: bool) -> None:
        super().close(disconnected)
        segment = self._dataset.segment
        if not disconnected and segment is not None:
            _abandoned.append(segment)

"""A dataset on its way to one client, and the memory that the client holds of it until it gives that back."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dissociated.datasets.sendable import SharedSegment, StaticMessage
from dissociated.datasets.static import StaticDataset
from dissociated.errors import ConnectionClosed, DeadlineExceeded
from dissociated.memory.leases import Ledger
from dissociated.memory.shared import Backing
from dissociated.monitoring.activity import ConnectionStats
from dissociated.protocol.events import AddressesFreed, Streams
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.sender import Sender
from dissociated.server.admission import Admission, Limits
from dissociated.server.encoding import encode_groups
from dissociated.server.requests import max_message, receive
from dissociated.transport.base import Connection


@dataclass(frozen=True)
class ClientRequest:
    """A client that has asked for a stream, and how it wants to be sent that."""

    connection: Connection
    sender: Sender
    limits: Limits
    admission: Admission
    stats: ConnectionStats
    #: Which streams go over this connection.
    streams: Streams
    #: Whether bodies are to be sent inline, although they could be shared.
    packed: bool
    #: Whether it takes addresses on a device.
    on_device: bool = False


class Sending(ABC):
    """Sends one stream to one client, and accounts for what the client holds of it until it gives that back.

    Keep this object until then: what clients fetch from must stay.
    """

    def __init__(self, client: ClientRequest) -> None:
        self._connection = client.connection
        self._sender = client.sender
        self._limits = client.limits
        self._stats = client.stats
        self._streams = client.streams
        self._by_address = not client.packed and bool(client.streams & Streams.BODIES)
        self._ledger = Ledger()
        self._half_closed = False  # the client has ended what it sends, so it can give nothing back any more
        client.stats.held = self._ledger

    @abstractmethod
    def send(self) -> None:
        """Send all but the end."""

    def drain(self, timeout: float) -> None:
        """Take free_data messages until the client holds nothing or is gone.

        Raises DeadlineExceeded where the client is silent for `timeout` seconds, ConnectionClosed where it went
        without a word while it held memory, and RemoteProtocolError.
        """
        while len(self._ledger):
            incoming = self._receive(timeout)
            if incoming is None:
                if self._connection.shares_memory and not self._half_closed and self._connection.peer_closed():
                    raise ConnectionClosed(f"the client went while it held {len(self._ledger)} addresses")
                if not self.holds_live:  # which whoever `ends` this waits for, without a limit
                    self._wait_peer_closed(timeout)
                return
            self._receive_free(incoming)

    @property
    def joined(self) -> bool:
        """Whether the client reads along with others, who wait for it."""
        return False

    @property
    def holds_live(self) -> bool:
        """Whether the client holds memory that is used again once it has been given back."""
        return False

    @property
    def mapped(self) -> Sequence[SharedSegment]:
        """The segments that the client has mapped and not given back."""
        return ()

    @property
    def kept_bytes(self) -> int | None:
        """Bytes of memory that a client holds although it was cut off; None for one that was not."""
        return None

    def stop(self) -> None:
        """The client wants nothing more, and may go on holding what it was sent."""

    def detach(self) -> None:
        """The client is cut off. What it holds stays until it lets go, and holds up nobody."""

    def end(self, disconnected: bool) -> None:
        """Hold nothing for this client any more. Unless it is `disconnected`, what it may map is not used again."""
        self._ledger.release_all()

    def _on_freed(self, addresses: Collection[int]) -> None:
        """The client holds these no more."""

    def _hold(self, addresses: Collection[int], pairs: int) -> None:
        """Account for addresses that are about to be sent, in so many pairs of an address and a length.

        The client may free all that it holds in one message, also while this side sends.
        """
        self._ledger.hold(addresses, pairs - len(addresses))
        self._connection.limit_tagged(max_message(self._ledger.max_freed))

    def _receive(self, timeout: float) -> Incoming | Run | None:
        return receive(self._connection, timeout, self._ledger.max_freed)

    def _take_frees(self) -> None:
        while self._connection.arrived():
            incoming = self._receive(self._limits.stall_timeout)
            if incoming is None:
                self._client_ended()
                return
            self._receive_free(incoming)

    def _receive_free(self, incoming: Incoming | Run) -> None:
        event = self._sender.receive(incoming)
        assert isinstance(event, AddressesFreed)  # the table allows nothing else now
        self._on_freed(self._ledger.release(event.addresses))

    def _client_ended(self) -> None:
        """The client sends no more. If it still listens it gets the whole stream, and what it leases until it hangs up.

        Raises ConnectionClosed where it is gone. Where that shows only by sending, as over TCP, who shares a live
        stream is taken to be gone: what is read next is for those who are there.
        """
        disconnected = self._connection.peer_closed()
        if disconnected or (disconnected is None and self.joined):
            raise ConnectionClosed("the client closed the connection")
        self._half_closed = True

    def _wait_peer_closed(self, timeout: float) -> None:
        """Wait until the client, which gives nothing back any more, has hung up."""
        end = time.monotonic() + timeout
        while self._connection.peer_closed() is False:
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"the client held memory for {timeout:g} s without a word")
            self._connection.wait(left)


class StaticSending(Sending):
    """Sends messages that stay, encoded once for all clients. What they lease lies in memory that stays as well."""

    def __init__(self, client: ClientRequest, dataset: StaticDataset) -> None:
        super().__init__(client)
        self._dataset = dataset
        self._admission = client.admission
        self._shared: list[SharedSegment] = []

    @property
    def mapped(self) -> Sequence[SharedSegment]:
        return self._shared if len(self._ledger) else ()

    def send(self) -> None:
        connection = self._connection
        if not (self._by_address and (connection.shares_memory or connection.exposes_memory)):
            self._send_messages(self._dataset.packed())
            return
        if connection.shares_memory:
            self._admission.admit_mapped(self._dataset.name)
        for number, (segment, messages) in enumerate(self._dataset.mapped()):
            region, growing = segment.region, segment.backing is Backing.LIVE
            if connection.shares_memory:
                self._shared.append(segment)
                connection.share(segment.descriptor, region.base, region.size, segment.backing)
            else:
                connection.retain(region)
            self._send_messages(messages, number, segment if growing else None)

    def _send_messages(
        self, messages: Sequence[StaticMessage], number: int | None = None, growing: SharedSegment | None = None
    ) -> None:
        """Send messages of the segment of this `number`, and none before its body is there."""
        connection, inline_limit = self._connection, self._limits.inline_limit or 0
        for group in encode_groups(
            self._dataset,
            messages,
            self._sender.sequence,
            connection,
            self._streams,
            number,
            growing is not None,
            inline_limit,
        ):
            if growing is not None:
                growing.wait(group.end)
            self._hold(group.addresses, group.pairs)  # first: of a group that is cut off, some may have arrived
            with self._stats.sending(connection, group.nbytes):
                connection.send(group.encoded, self._limits.stall_timeout)
            self._sender.sent(group.first, group.messages)
            self._stats.messages += group.messages
            self._take_frees()

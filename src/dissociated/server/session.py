"""One client of a server: a request, the stream that answers it, and the memory that comes back."""

from __future__ import annotations

import logging
from contextlib import suppress

from dissociated.codec.split import Splitter
from dissociated.datasets.base import Dataset
from dissociated.datasets.broadcast import BroadcastDataset
from dissociated.datasets.registry import Registry
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.streamed import StreamedDataset
from dissociated.errors import (
    ColumnNotFound,
    ConnectionClosed,
    DissociatedError,
    OptionError,
    SourceError,
    peer_message,
)
from dissociated.monitoring.activity import ConnectionStats
from dissociated.protocol.events import StreamRequested
from dissociated.protocol.request import Selection, parse_identifier
from dissociated.protocol.sender import Sender
from dissociated.protocol.states import State
from dissociated.server.admission import Admission, Limits
from dissociated.server.device import DeviceSending
from dissociated.server.live import BroadcastSending, StreamedSending
from dissociated.server.requests import TAGS, receive, wants_device, wants_packed
from dissociated.server.sending import ClientRequest, Sending, StaticSending
from dissociated.transport.base import Connection

_log = logging.getLogger(__name__)

_NO_TIMEOUT = 1e6  # seconds


class Session:
    """One connection: a request, the stream, and the frees that come back."""

    def __init__(
        self, registry: Registry, limits: Limits, admission: Admission, connection: Connection, stats: ConnectionStats
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._admission = admission
        self._connection = connection
        self._sender = Sender(TAGS)
        self._stats = stats
        self._sending: Sending | None = None  # what the client asked for

    def run(self) -> None:
        """Serve the client to its end. Raises the error that ended it before, of which the client was told."""
        try:
            request = self._request()
            if request is None:
                return
            ticket, selection = parse_identifier(request.identifier)
            published, granted = self._registry.resolve_ticket(ticket)
            self._stats.dataset = published
            with published.reading():
                published.check_unchanged()
                dataset = self._select(granted.open(), selection)  # counted first: so it is not evicted
                self._sending = _sending(self._client(request), dataset)
                self._serve_request(self._sending, published)
                if self._sender.state is State.ENDING:
                    self._sender.drained()
                    if not self._connection.finish(self._limits.stall_timeout):
                        raise ConnectionClosed("the client went before it had everything")
        except ConnectionClosed:
            raise  # there is nobody to tell
        except DissociatedError as error:
            self._abort(peer_message(error))
            raise
        except Exception:
            self._abort("the server failed for a reason that its log tells")
            raise
        finally:
            self._end()

    def _request(self) -> StreamRequested | None:
        arrived = receive(self._connection, self._limits.handshake_timeout)
        if arrived is None:
            return None
        self._admission.requested(self._connection)
        event = self._sender.receive(arrived)
        assert isinstance(event, StreamRequested)  # the table allows nothing else first
        return event

    def _select(self, dataset: Dataset, selection: Selection | None) -> Dataset:
        """What is wanted of it. Where that is not there, the client gets to know the whole schema, and then why."""
        if selection is None:
            return dataset
        try:
            return self._registry.select(dataset, selection)
        except (ColumnNotFound, OptionError):
            schema = Splitter(dataset.schema).schema_message.header
            self._connection.send(self._sender.send(schema, None), self._limits.stall_timeout)
            raise

    def _client(self, request: StreamRequested) -> ClientRequest:
        return ClientRequest(
            self._connection,
            self._sender,
            self._limits,
            self._admission,
            self._stats,
            request.streams,
            wants_packed(request.tag),
            wants_device(request.tag),
        )

    def _serve_request(self, sending: Sending, published: Dataset) -> None:
        """Send it, and wait until everything is given back."""
        self._stats.kept = lambda: sending.kept_bytes
        self._stats.outlives_server = lambda: (
            self._connection.shares_memory and not self._connection.backlog and not sending.holds_live
        )
        try:
            sending.send()
            published.check_unchanged()
            self._connection.send(self._sender.end(), self._limits.stall_timeout)
            self._stats.sent = True
        except ConnectionClosed:
            # The client may have stopped listening and still hold memory: then it goes on to give it back.
            self._sender.fail()
            sending.stop()
        except SourceError as error:
            if not sending.joined:
                raise
            # What it has been sent is used again once it is freed: until then the client may take its time.
            self._connection.send_close_reason(peer_message(error))
            self._sender.fail()
        sending.drain(self._limits.lease_timeout)
        self._connection.flush_close_reason(self._limits.stall_timeout)

    def _abort(self, reason: str) -> None:
        """Tell the client why there is no more. What it holds of a live stream stays until it lets go."""
        sending = self._sending
        if sending is None or not sending.holds_live:
            self._connection.abort(reason)
            return
        _log.info("%s was sent away, and still holds memory: %s", self._connection.peer, reason)
        sending.detach()
        self._connection.send_close_reason(reason)
        with suppress(DissociatedError):  # of one that breaks the rules, only its end is waited for
            self._sender.fail()
            sending.drain(_NO_TIMEOUT)
            self._connection.flush_close_reason(self._limits.stall_timeout)

    def _end(self) -> None:
        """Nothing is held for this client any more. What it may still map of a live stream is not used again."""
        sending = self._sending
        if sending is not None:
            disconnected = not sending.holds_live or self._connection.linger()
            self._stats.kept = self._stats.outlives_server = None  # which lead back here
            if self._stats.dataset is not None and not self._stats.dataset.stored:
                self._admission.left(sending.mapped)
            sending.end(disconnected)


def _sending(client: ClientRequest, dataset: Dataset) -> Sending:
    """Return the way in which `dataset` is sent to this client."""
    if client.on_device and dataset.device_segment is not None:
        from dissociated.datasets.device import DeviceDataset  # on first use: few need it

        if isinstance(dataset, DeviceDataset):
            return DeviceSending(client, dataset)
    match dataset:
        case StaticDataset():
            return StaticSending(client, dataset)
        case StreamedDataset():
            return StreamedSending(client, dataset)
        case BroadcastDataset():
            return BroadcastSending(client, dataset)
    raise TypeError(f"{type(dataset).__name__} is no kind of dataset that is sent")

"""The session of a server with one client: a request, the stream that answers it, and the frees of leased memory."""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext, suppress

from dissociated.base import tracing
from dissociated.codec.split import Splitter
from dissociated.datasets.base import Dataset
from dissociated.datasets.broadcast import BroadcastDataset
from dissociated.datasets.registry import Registry
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.streamed import StreamedDataset
from dissociated.errors import (
    ColumnNotFound,
    ConnectionClosed,
    DeadlineExceeded,
    DissociatedError,
    OptionError,
    SourceError,
)
from dissociated.monitoring.activity import ConnectionStats
from dissociated.protocol.close_reason import close_reason, reason_text
from dissociated.protocol.message import Incoming, Run
from dissociated.protocol.request import Selection
from dissociated.protocol.sender import Sender, StreamRequested
from dissociated.protocol.states import State
from dissociated.protocol.wire import Streams
from dissociated.server.admission import Admission, Limits
from dissociated.server.live import BroadcastSending, StreamedSending
from dissociated.server.requests import TAGS, receive, wants_device, wants_packed
from dissociated.server.sending import ClientRequest, DeviceSending, Sending, StaticSending
from dissociated.transport.base import Connection

_log = logging.getLogger(__name__)

_LAST_LOOK = 0.05  # seconds to find out whether the client has received everything, after the wait for that
_NO_TIMEOUT = 1e6  # seconds; the wait ends when the client has freed everything or is gone


class Session:
    """The serving of one stream, from the request to the last free."""

    def __init__(
        self,
        registry: Registry,
        limits: Limits,
        admission: Admission,
        connection: Connection,
        stats: ConnectionStats,
        first_message: Incoming | Run | None,
    ) -> None:
        """Prepare the serving of a client. `first_message` is its request if that was received already."""
        self._first_message = first_message
        self._registry = registry
        self._limits = limits
        self._admission = admission
        self._connection = connection
        self._sender = Sender(TAGS)
        self._stats = stats
        self._sending: Sending | None = None  # None until a valid request has arrived

    def run(self) -> bool:
        """Serve the client until the session ends.

        Returns:
            Whether the connection may carry another stream.

        Raises:
            ConnectionClosed: The client disconnects early.
            DissociatedError: Another error ends the session. The client was told the reason.
        """
        try:
            request = self._receive_request()
            if request is None:
                return False
            with self._traced(request.request.traceparent):
                return self._answer(request)
        except ConnectionClosed:
            raise  # the client is gone, so it is told no reason
        except DissociatedError as error:
            self._close_with(close_reason(error))
            raise
        except Exception:
            self._close_with("the server failed, and its log has the reason")
            raise
        finally:
            self._release()

    def _traced(self, traceparent: str | None) -> AbstractContextManager[None]:
        """Begin the span of the stream, which is the parent of spans that the source of the dataset begins."""
        if not tracing.is_active():
            return nullcontext()
        transport = self._stats.transport
        self._stats.span = span = tracing.begin("dissociated.stream", traceparent, server=True, transport=transport)
        return nullcontext() if span is None else span.current()

    def _answer(self, requested: StreamRequested) -> bool:
        """Serve the stream that the client requested. Return whether the connection may carry another."""
        request = requested.request
        published, granted = self._registry.resolve_ticket(request.ticket, request.part, self._is_client_gone)
        if request.reads_others_first:
            self._limits = self._limits.for_reading_others_first
        self._stats.dataset = published
        with published.reading():
            published.check_unchanged()
            # A dataset that has a reader is not evicted, so it is counted before it is opened. Only a ticket for some
            # columns has opened it already.
            dataset = self._select(granted.open(), request.selection)
            if self._stats.span is not None:
                self._stats.span.set(rows=dataset.rows)
            self._sending = _make_sending(self._client_request(requested), dataset)
            self._send_stream(self._sending, published)
            if self._sender.state is State.ENDING:
                self._sender.drained()
                self._wait_received()
            is_done = self._sender.state is State.DONE and not self._sending.holds_live_memory
            is_kept = request.keep and requested.streams is Streams.BOTH and not wants_device(requested.tag)
            return is_done and is_kept and self._connection.is_reusable

    def _receive_request(self) -> StreamRequested | None:
        """Return the client's request, or None if the client has disconnected without one."""
        message = self._first_message or receive(self._connection, self._limits.handshake_timeout)
        if message is None:
            return None
        self._admission.begin_stream(self._connection)
        event = self._sender.receive(message)
        assert isinstance(event, StreamRequested)  # the protocol's state table allows no other event first
        return event

    def _select(self, dataset: Dataset, selection: Selection | None) -> Dataset:
        """Return the selected part of `dataset`.

        If the selection is invalid, send the client the whole schema, so that it can name the columns that exist, and
        raise the error.
        """
        if selection is None:
            return dataset
        try:
            return self._registry.select(dataset, selection)
        except (ColumnNotFound, OptionError):
            schema = Splitter(dataset.schema).schema_message.header
            self._connection.send(self._sender.send(schema, None), self._limits.stall_timeout)
            raise

    def _is_client_gone(self) -> bool:
        return self._sending is not None and self._sending.is_client_gone()

    def _client_request(self, request: StreamRequested) -> ClientRequest:
        return ClientRequest(
            self._connection,
            self._sender,
            self._limits,
            self._admission,
            self._stats,
            request.streams,
            packed=wants_packed(request.tag),
            on_device=_may_be_on_device(request),
            frees_messages=request.request.frees_messages,
        )

    def _send_stream(self, sending: Sending, published: Dataset) -> None:
        """Send the stream, and wait until the client has freed everything."""
        self._stats.count_kept = lambda: sending.kept_bytes
        self._stats.count_missed = lambda: sending.missed
        self._stats.outlives_server = lambda: (
            self._connection.shares_memory and not self._connection.backlog and not sending.holds_live_memory
        )
        self._admission.begin_sending(self._connection)
        try:
            sending.send()
            published.check_unchanged()
            self._connection.send(self._sender.end(), self._limits.stall_timeout)
            self._stats.all_sent = True
        except ConnectionClosed:
            # The client may have stopped receiving and still hold memory. It then goes on to free that.
            self._sender.fail()
        except SourceError as error:
            if not sending.joined:
                raise
            # Memory of a live stream is reused only once it was freed, so the client may take the time that it needs.
            self._connection.close(close_reason(error), linger=self._limits.stall_timeout)
            self._sender.fail()
        self._end_sending()
        sending.drain(self._limits.lease_timeout)

    def _wait_received(self) -> None:
        """Wait until the client has received everything, if closing the connection would discard the rest.

        Raises:
            ConnectionClosed: The client disconnects first.
            RemoteProtocolError: The client sends something else instead of closing the connection.
        """
        if self._connection.discards_unread:
            with suppress(DeadlineExceeded):  # a client that stays may have received everything
                message = receive(self._connection, self._limits.stall_timeout)
                if message is not None:
                    self._sender.receive(message)
            self._connection.close(linger=_LAST_LOOK)
            if not self._connection.close():
                raise ConnectionClosed("the client disconnected before it had received everything")

    def _close_with(self, reason: str) -> None:
        """End the stream with `reason`, and wait for frees of live memory until the client holds none or is gone."""
        sending = self._sending
        if sending is None or not sending.holds_live_memory:
            self._connection.close(reason)
            return
        _log.info("client cut off, holds memory: peer=%s reason=%r", self._connection.peer, reason_text(reason))
        sending.cut_off()
        self._connection.close(reason, linger=math.inf)
        self._end_sending()
        with suppress(DissociatedError):  # after an error of the protocol, `_release` still waits for the disconnection
            self._sender.fail()
            sending.drain(_NO_TIMEOUT)

    def _end_sending(self) -> None:
        """Record that the stream or a reason was sent, unless an interrupt of the connection could still discard it."""
        if not self._connection.discards_unread:
            self._admission.end_sending(self._connection)

    def _release(self) -> None:
        """Release everything that is held for this client. Live memory that it may still map is not reused."""
        sending = self._sending
        if sending is not None:
            # Memory that is not live is never reused. So it does not matter whether a client that holds none is gone.
            disconnected = True
            if sending.holds_live_memory:
                self._connection.close(linger=math.inf)
                disconnected = self._connection.close()
            self._stats.detach()  # the functions of `_send_stream` in it would keep the session alive
            if self._stats.dataset is not None and not self._stats.dataset.stored:
                self._admission.watch_kept(sending.mapped)
            sending.close(disconnected)
            self._sending = None  # its dataset may refer to this session


def _may_be_on_device(request: StreamRequested) -> bool:
    return wants_device(request.tag) and request.streams is Streams.BOTH


def _make_sending(client: ClientRequest, dataset: Dataset) -> Sending:
    """Return the `Sending` that fits the kind of `dataset`."""
    if client.on_device and dataset.device_segment is not None:
        from dissociated.datasets.device import DeviceDataset  # imported on first use, since few servers need it

        if isinstance(dataset, DeviceDataset):
            return DeviceSending(client, dataset)
    match dataset:
        case StaticDataset():
            return StaticSending(client, dataset)
        case StreamedDataset():
            return StreamedSending(client, dataset)
        case BroadcastDataset():
            return BroadcastSending(client, dataset)
    raise TypeError(f"a {type(dataset).__name__} is not a dataset that can be sent")

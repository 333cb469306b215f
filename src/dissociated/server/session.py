"""One client of a server: a request, the stream that answers it, and the memory that comes back."""

from __future__ import annotations

import logging
from contextlib import suppress

from dissociated.codec.split import Splitter
from dissociated.datasets.base import Dataset
from dissociated.datasets.registry import Registry
from dissociated.datasets.ways import Broadcasting, Static, Streamed
from dissociated.errors import (
    ColumnNotFound,
    ConnectionClosed,
    DissociatedError,
    OptionError,
    SourceError,
    told,
)
from dissociated.monitoring.activity import Tally
from dissociated.protocol.events import StreamRequested
from dissociated.protocol.request import Selection, parse_identifier
from dissociated.protocol.sender import Sender
from dissociated.protocol.states import State
from dissociated.server.admission import Admission, Limits
from dissociated.server.live import BroadcastSending, StreamedSending
from dissociated.server.requests import TAGS, receive, wants_packed
from dissociated.server.sending import Client, Sending, StaticSending
from dissociated.transport.base import Connection

_log = logging.getLogger(__name__)

_FOREVER = 1e6  # seconds


class Session:
    """One connection: a request, the stream, and the frees that come back."""

    def __init__(
        self, registry: Registry, limits: Limits, admission: Admission, connection: Connection, tally: Tally
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._admission = admission
        self._connection = connection
        self._sender = Sender(TAGS)
        self._tally = tally
        self._sending: Sending | None = None  # what the client asked for

    def run(self) -> None:
        """Serve the client to its end. Raises whatever ended it before."""
        try:
            request = self._request()
            if request is None:
                return
            ticket, selection = parse_identifier(request.identifier)
            found, whole = self._registry.resolve_ticket(ticket)
            self._tally.dataset = found
            with found.reading():
                wanted = self._selected(whole.opened(), selection)  # counted first: so it is not evicted
                self._sending = wanted.sent(_ByDataset(self._client(request)))
                self._answer(self._sending)
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

    def _request(self) -> StreamRequested | None:
        arrived = receive(self._connection, self._limits.handshake_timeout)
        if arrived is None:
            return None
        self._admission.asked(self._connection)
        event = self._sender.receive(arrived)
        assert isinstance(event, StreamRequested)  # the table allows nothing else first
        return event

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

    def _client(self, asked: StreamRequested) -> Client:
        return Client(
            self._connection,
            self._sender,
            self._limits,
            self._admission,
            self._tally,
            asked.streams,
            wants_packed(asked.tag),
        )

    def _answer(self, sending: Sending) -> None:
        """Send it, and wait until everything is given back."""
        self._tally.kept = lambda: sending.kept
        try:
            sending.send()
            self._connection.send(self._sender.end(), self._limits.stall_timeout)
            self._tally.sent = True
        except ConnectionClosed:
            # The client may have stopped listening and still hold memory: then it goes on to give it back.
            self._sender.fail()
            sending.stop()
        except SourceError as error:
            if not sending.joined:
                raise
            # What it has been sent is used again once it is freed: until then the client may take its time.
            self._connection.farewell(told(error))
            self._sender.fail()
        sending.drain(self._limits.lease_timeout)
        self._connection.last_words(self._limits.stall_timeout)

    def _send_away(self, reason: str) -> None:
        """Tell the client why there is no more. What it holds of a live stream stays until it lets go."""
        sending = self._sending
        if sending is None or not sending.holds_live:
            self._connection.abort(reason)
            return
        _log.info("%s was sent away, and still holds memory: %s", self._connection.peer, reason)
        sending.set_aside()
        self._connection.farewell(reason)
        with suppress(DissociatedError):  # of one that breaks the rules, only its end is waited for
            self._sender.fail()
            sending.drain(_FOREVER)
            self._connection.last_words(self._limits.stall_timeout)

    def _end(self) -> None:
        """Nothing is held for this client any more. What it may still map of a live stream is not used again."""
        sending = self._sending
        if sending is not None:
            gone = not sending.holds_live or self._connection.outlast()
            self._tally.kept = None  # which leads back here
            sending.end(gone)


class _ByDataset:
    """The ways to send a dataset to a client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def static(self, wanted: Static) -> Sending:
        return StaticSending(self._client, wanted)

    def streamed(self, wanted: Streamed) -> Sending:
        return StreamedSending(self._client, wanted)

    def broadcast(self, wanted: Broadcasting) -> Sending:
        return BroadcastSending(self._client, wanted)

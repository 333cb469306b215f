"""The connections of a server. Each is accepted, and then served in a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from dissociated.base.limited_log import LimitedLog
from dissociated.datasets.registry import Registry
from dissociated.errors import (
    AccessDenied,
    ColumnNotFound,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    FilterRefused,
    LocalProtocolError,
    ServerFull,
    TransportError,
    log_message,
)
from dissociated.monitoring.activity import Activity, ConnectionStats
from dissociated.monitoring.status import ConsumerStatus
from dissociated.protocol.close_reason import close_reason
from dissociated.protocol.message import Incoming, Run
from dissociated.server.admission import Admission, Limits
from dissociated.server.requests import TAGS, frees_nothing, receive
from dissociated.server.session import Session
from dissociated.transport.base import Connection, Listener
from dissociated.transport.registry import transport
from dissociated.transport.trace import traced
from dissociated.uri import Uri

_log = logging.getLogger(__name__)

#: Seconds in which a client must take the rest of a message, or it does not learn why its stream ends.
TELL_TIMEOUT = 0.5
_ACCEPT_RETRY_DELAY = 0.2  # seconds, before the next try to accept
_DRAIN_INTERVAL = 0.05  # seconds between two polls of the streams in progress, since their end notifies nobody
_REFUSAL = "the server accepts no clients now: try again later"
_REPORT_INTERVAL = 5.0  # seconds between two calls that report which connections a server waits for


def open_listener(uri: Uri, certificate: tuple[str, str] | None, allow_rma: bool) -> Listener:
    """Open a listener at `uri`. The caller closes it.

    Args:
        uri: The address; its own `cert` and `key` parameters take precedence over `certificate`.
        certificate: Paths of the server's certificate and key, used for `tls:`.
        allow_rma: Whether clients over `ucx:` and `fabric:` may fetch bodies from this process's memory (RMA).

    Raises:
        UriError: The URI is invalid.
        TransportError: The server cannot listen at the address.
    """
    if uri.scheme == "tls" and certificate is not None:
        uri = uri.with_parameters(**{"cert": certificate[0], "key": certificate[1], **uri.parameters})
    if allow_rma and uri.scheme in ("ucx", "fabric"):
        uri = uri.with_parameters(rma="allow")
    return transport(uri.scheme).listen(uri)


class Connections:
    """The connections that `listeners` accept, whose clients request datasets of `registry`. Thread-safe.

    This object owns the listeners. To end it, call `refuse`, `stop_listening`, `interrupt` and `join`, in this order.
    `listeners` may still grow until `accept` is called.
    """

    def __init__(self, listeners: Sequence[Listener], registry: Registry, limits: Limits, activity: Activity) -> None:
        self._listeners = listeners
        self._registry = registry
        self._limits = limits
        self._activity = activity
        self._admission = Admission(limits, activity)
        self._peers_log = LimitedLog(_log)
        self._lock = threading.Lock()  # of `_threads` and of setting `_refusing`
        self._threads: dict[Connection, threading.Thread] = {}  # the serving thread of each open connection
        self._acceptors: list[threading.Thread] = []  # the thread of each listener
        self._refusing = threading.Event()  # set once new connections are refused

    def __len__(self) -> int:
        with self._lock:
            return len(self._threads)

    def accept(self) -> None:
        """Start to accept connections at every listener, each in a thread of its own."""
        for listener in self._listeners:
            thread = threading.Thread(target=self._accept, args=(listener,), name=f"accept {listener.uri}", daemon=True)
            thread.start()
            self._acceptors.append(thread)

    def refuse(self) -> None:
        """Refuse new connections from now on: their clients receive the reason and are disconnected."""
        with self._lock:
            self._refusing.set()
        self._admission.interrupt_idle()

    def stop_listening(self) -> None:
        """Close the listeners, so that no client can connect any more."""
        for listener in self._listeners:
            listener.close()

    def interrupt(self) -> None:
        """End every connection, whatever its state. Streams that are being sent have a moment to tell the reason."""
        self._admission.end_streams(TELL_TIMEOUT)
        with self._lock:
            connections = [*self._threads]
        for connection in connections:
            connection.interrupt()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for all threads to end. Call it after `stop_listening`."""
        end = time.monotonic() + timeout
        with self._lock:
            threads = [*self._threads.values(), *self._acceptors]
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self._peers_log.close()

    def drain(self, timeout: float, on_waiting: Callable[[Sequence[ConsumerStatus]], None]) -> bool:
        """Wait for streams in progress to end.

        A client that was sent a whole static dataset and only keeps its memory mapped is not waited for: the mapping
        stays valid without this process.

        Args:
            timeout: Seconds, in all.
            on_waiting: Called with the connections that are waited for, first at once and then whenever they have
                changed, but at most every `_REPORT_INTERVAL` seconds.

        Returns:
            Whether no stream is in progress any more.
        """
        self._activity.stopping = True
        end = time.monotonic() + timeout
        reported: set[int] = set()
        report_at = 0.0
        while consumers := self._activity.in_progress():
            now = time.monotonic()
            numbers = {consumer.connection for consumer in consumers}
            if numbers != reported and now >= report_at:
                on_waiting(consumers)
                reported, report_at = numbers, now + _REPORT_INTERVAL
            if now >= end:
                return False
            self._refusing.wait(min(_DRAIN_INTERVAL, end - now))
        return True

    def _accept(self, listener: Listener) -> None:
        has_warned = False
        while True:
            try:
                connection = listener.accept()
            except TransportError as error:
                # The process is probably out of descriptors. Some will be closed soon, and the client waits meanwhile.
                if not has_warned:
                    _log.warning("accept failed, will retry: listener=%s error=%s", listener.uri, error)
                has_warned = True
                self._refusing.wait(_ACCEPT_RETRY_DELAY)
                continue
            if connection is None:
                return
            has_warned = False
            self._admission.make_room()
            if not self._start(connection, listener):
                connection.close(close_reason(ServerFull(_REFUSAL)))

    def _start(self, connection: Connection, listener: Listener) -> bool:
        """Serve `connection` in a new thread. Return False if the server refuses clients or cannot start a thread."""
        with self._lock:
            if self._refusing.is_set():
                return False
            stats = self._activity.accept(str(listener.uri), connection.peer)
            connection = traced(connection, TAGS, stats.connection)
            name = f"serve {listener.uri} {stats.connection}"
            thread = threading.Thread(target=self._serve, args=(connection, stats), name=name, daemon=True)
            self._admission.begin(connection)
            try:
                thread.start()  # under the lock, so that `join` sees every thread that was started
            except RuntimeError as error:
                _log.warning("serving a client failed: connection=%r error=%s", connection, error)
                self._admission.end(connection)
                self._activity.end(stats, "failed")
                return False
            self._threads[connection] = thread
        return True

    def _serve(self, connection: Connection, stats: ConnectionStats) -> None:
        """Serve one stream after another, as long as the client requests them."""
        request = None  # the first is received by the session, after the handshake
        try:
            while self._serve_stream(connection, stats, request):
                request = self._next_request(connection)
                if request is None:
                    return
                stats = self._activity.begin(stats.listener, connection.peer)
        finally:
            connection.close()
            self._admission.end(connection)
            with self._lock:
                self._threads.pop(connection, None)

    def _next_request(self, connection: Connection) -> Incoming | Run | None:
        """Return the next message of a client whose stream has ended; None if the client is gone or may not wait."""
        if not self._admission.begin_idle(connection):
            return None
        timeout = self._limits.idle_timeout
        connection.request_deadline = time.monotonic() + timeout
        connection.limit_tagged(0)
        try:
            message = receive(connection, timeout)
            while isinstance(message, Incoming) and frees_nothing(message):
                message = receive(connection, timeout)
        except DissociatedError:
            return None
        if message is not None and self._refusing.is_set():
            connection.close(close_reason(ServerFull(_REFUSAL)))
            return None
        return message

    def _serve_stream(self, connection: Connection, stats: ConnectionStats, request: Incoming | Run | None) -> bool:
        """Serve one stream, and log its end. Close the connection unless another stream may follow.

        Args:
            connection: The connection.
            stats: The statistics of the stream.
            request: The client's request if it was received already; None for a new connection.

        Returns:
            Whether another stream may follow.
        """
        outcome, why, has_reference, is_reusable = "failed", "", False, False
        try:
            with ExitStack() as closing_connection:
                closing_connection.enter_context(connection)
                if request is None:
                    timeout = self._limits.handshake_timeout
                    connection.request_deadline = time.monotonic() + timeout
                    connection.handshake(timeout)
                session = Session(self._registry, self._limits, self._admission, connection, stats, request)
                is_reusable = session.run()
                if is_reusable:
                    closing_connection.pop_all()
            outcome, why = (
                ("done", "stream complete") if stats.all_sent else ("gone", "client disconnected before the end")
            )
            if stats.all_sent:
                stats.settle()
        except (TransportError, DeadlineExceeded) as error:
            outcome, why = "gone", str(error)
        except ServerFull as error:
            outcome, why = "refused", str(error)
            self._activity.refuse(stats.listener)
        except (AccessDenied, ColumnNotFound, DatasetNotFound, FilterRefused) as error:
            outcome, why = "refused", str(error)
        except LocalProtocolError:
            why = self._log_failure(stats)
        except DissociatedError as error:
            why, has_reference = log_message(error), error.reference is not None
        except Exception:
            why = self._log_failure(stats)
        finally:
            fields, peer = stats.fields() | {"outcome": outcome}, stats.peer
            level = logging.WARNING if outcome == "failed" else logging.INFO
            if outcome == "done" or has_reference:  # the client was told a reference, which must lead to this line
                _log.log(level, "stream ended: peer=%r reason=%s", peer, why, extra=fields)
            else:
                self._peers_log.write(
                    level, "stream ended: peer=%r reason=%s", peer, why, event=outcome, peer=peer, fields=fields
                )
            self._activity.end(stats, outcome)
            _end_span(stats, outcome)
            stats.dataset = None  # the thread refers to the statistics until the connection ends
        return is_reusable

    def _log_failure(self, stats: ConnectionStats) -> str:
        self._peers_log.write(
            logging.ERROR,
            "stream failed, internal error: peer=%r",
            stats.peer,
            event="internal error",
            peer=stats.peer,
            fields=stats.fields(),
            exc_info=True,
        )
        return "internal error"


def _end_span(stats: ConnectionStats, outcome: str) -> None:
    span, dataset = stats.span, stats.dataset
    if span is None:
        return
    # Only the catalog knows versions, so the client's span has the number.
    if dataset is not None:
        span.set(dataset=dataset.name)
    span.set(connection=stats.connection, messages=stats.messages, bytes=stats.bytes, outcome=outcome)
    span.end(outcome if outcome in ("failed", "refused") else None)

"""A Flight connection to a catalog, whose errors are converted into those of this library, and streams over it."""

from __future__ import annotations

import os
import re
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base import tracing
from dissociated.base.display import utc
from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound, leak, use_grpc
from dissociated.client.request import ReadRequest
from dissociated.codec.batches import BatchReader
from dissociated.codec.reader import check_field_names
from dissociated.control.access import check_token
from dissociated.control.catalog_uri import check_owner, is_unix, socket_path
from dissociated.control.flight_streams import receive_get
from dissociated.control.locations import Endpoint, flight_uris
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    ConnectionClosed,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    OptionError,
    RemoteProtocolError,
    UriError,
    parse_details,
    reported_error,
)
from dissociated.transport.base import check_timeout
from dissociated.transport.mailbox import Mailbox
from dissociated.uri import Uri

T = TypeVar("T")

_CONFIDENTIAL = ("grpc+tls:", "grpc+unix:")

#: gRPC would wait for up to two minutes before it tries again to reach a server that was not there.
_RECONNECT = {"grpc.initial_reconnect_backoff_ms": 100, "grpc.max_reconnect_backoff_ms": 2000}
#: Seconds after which a server that sends nothing during a call is asked whether it still answers. gRPC's servers
#: disconnect clients that ask more often than every five minutes.
_ASK_AFTER = 330.0
_KEEPALIVE_TIMEOUT = 20.0  # seconds, which is gRPC's default
_MAX_MILLISECONDS = (1 << 31) - 1
#: Bytes that a thread receives ahead of the reader of a Flight stream, so that the two take turns seldom if batches are
#: small.
_READAHEAD = 1 << 20
_CHUNK_SIZE = 1 << 10  # bytes of a message without its rows

#: The text that gRPC puts before the reason why a server cannot be reached.
_UNREACHABLE = re.compile(
    "Flight returned unavailable error, with message: "
    "(failed to connect to all addresses; last error: [A-Z_]+: \\S+ (Failed to connect to remote host: )?)?"
)


class CatalogConnection(ProcessBound):
    """A connection to the catalog at `uri`. The first call opens it, so a process forked before that opens its own.

    Args:
        uri: The URI of the catalog.
        timeout: Seconds in which the catalog answers a call.
        token: Bearer token that is sent with each call.
        tls_roots: PEM file with the certificates to trust.
        keepalive_timeout: Seconds for which the catalog's host may accept nothing before the connection counts as lost;
            by default as long as a call may take, but no less than gRPC's 20 s.

    Raises:
        UriError: `uri` is not the URI of a catalog.
        OptionError: The token or a file is invalid.
    """

    def __init__(
        self,
        uri: str,
        timeout: float,
        token: str | None,
        tls_roots: str | os.PathLike[str] | None,
        keepalive_timeout: float | None = None,
    ) -> None:
        if "://" not in uri or not Uri.parse(uri).scheme.startswith("grpc"):
            raise UriError(f"{uri!r} is not the URI of a catalog: give grpc://HOST:PORT")
        self.uri = uri
        self.timeout = check_timeout(timeout)
        roots = None if tls_roots is None else os.fspath(tls_roots)
        self._token, self._tls_roots = token, roots
        self._parameters = _client_options(None if token is None else check_token(token), roots)
        if keepalive_timeout is None:
            keepalive_timeout = max(_KEEPALIVE_TIMEOUT, timeout)
        self._parameters["generic_options"] += _lost_after(keepalive_timeout)
        self._connection: Any = None
        self._closed = False
        #: The trace that calls belong to if their thread has no current span.
        self.traceparent: str | None = None
        self._answered: float | None = None  # the time of the last answer, in seconds since the epoch
        self.bind_to_process()

    def call(self, call: Callable[[Any], T]) -> T:
        """Return the result of `call`, which gets the Flight client.

        Raises:
            CatalogError, AccessDenied, DeadlineExceeded: The call failed.
        """
        with self.errors():
            return call(self.connected())

    def with_uri(self, uri: str) -> CatalogConnection:
        """Return a connection to another server, which this one names. See `token_for`."""
        return CatalogConnection(uri, self.timeout, token_for(uri, self.uri, self._token), self._tls_roots)

    def call_options(self) -> Any:
        """Return the options of a call that must be answered within the timeout."""
        context = tracing.current_traceparent() or self.traceparent
        return flight.FlightCallOptions(timeout=self.timeout, headers=tracing.headers(context))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of Flight into CatalogError and its subclasses, AccessDenied and DeadlineExceeded."""
        try:
            yield
            self._answered = time.time()
        except DissociatedError:  # for instance of a source in a put; some of these are OSErrors, too
            raise
        except flight.FlightUnavailableError as error:
            if parse_details(error.extra_info)[0] == CatalogUnreachable.code:
                raise CatalogUnreachable(self._passed_on(error)) from None
            if _is_untrusted(error):
                raise AccessDenied(
                    f"the certificate of the catalog at {self.uri} is not trusted, or is for another host "
                    "(tls_roots, or --tls-roots FILE, names the certificates to trust)"
                ) from None
            last = "" if self._answered is None else f" It last answered at {utc(self._answered)}."
            raise CatalogUnreachable(
                f"no catalog answers at {self.uri}: is it running? ({_server_message(error)}){last} If its process was "
                "stopped or killed, start it again and connect to the address that it prints, which can have another "
                "port; `dissociated start` and `dissociated status` do that for your node on this host"
            ) from None
        except flight.FlightTimedOutError as error:
            if parse_details(error.extra_info)[0] == DeadlineExceeded.code:
                raise DeadlineExceeded(self._passed_on(error)) from None
            raise DeadlineExceeded(f"the catalog at {self.uri} did not answer for {self.timeout:g} s") from None
        except (flight.FlightUnauthenticatedError, flight.FlightUnauthorizedError) as error:
            if "middleware" not in self._parameters and isinstance(error, flight.FlightUnauthenticatedError):
                raise AccessDenied(
                    f"the catalog at {self.uri} requires a token: connect(uri, token=...), "
                    "--token-file FILE, or DISSOCIATED_TOKEN with DISSOCIATED_CATALOG"
                ) from None
            raise AccessDenied(_server_message(error)) from None
        except pa.ArrowKeyError as error:
            raise DatasetNotFound(_server_message(error)) from None
        except (pa.ArrowException, ValueError, OSError) as error:  # Flight raises OSError for errors within a stream
            reason = _server_message(error)
            message = f"the catalog at {self.uri} refused: {reason}"
            reported = reported_error(CatalogError, message, *parse_details(getattr(error, "extra_info", None)))
            reported.peer_reason = reason  # for the client of a node that relays the call
            raise reported from None

    def _passed_on(self, error: Exception) -> str:
        return f"the catalog at {self.uri} gave no answer: {_server_message(error)}"

    def close(self) -> None:
        """Close the connection. Streams that are open stay open."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def after_fork_in_child(self) -> None:
        """Leak the Flight client, as gRPC requires. Methods that do not call the catalog work in the child, too."""
        leak(self._connection)
        self._connection = None

    def connected(self) -> Any:
        """Return the Flight client.

        Raises:
            CatalogError: This connection is closed.
            ForkedError: A parent of this process used gRPC.
        """
        if self._connection is None:
            if self._closed:
                raise CatalogError(f"this client of the catalog at {self.uri} is closed")
            if is_unix(self.uri):
                check_owner(socket_path(self.uri))
            use_grpc()
            self._connection = flight.FlightClient(self.uri, **self._parameters)
        return self._connection


def token_for(uri: str, catalog: str, token: str | None) -> str | None:
    """Return the token to send to `uri`, which `catalog` has named; None for a token that only `catalog` protects.

    TLS and Unix sockets protect a token. It is not sent in the clear, whatever the catalog says.
    """
    is_exposed = catalog.startswith(_CONFIDENTIAL) and not uri.startswith(_CONFIDENTIAL)
    return None if is_exposed else token


def _lost_after(keepalive_timeout: float) -> list[tuple[str, int]]:
    """Return the options by which gRPC gives up a connection when the server's host acknowledges nothing.

    gRPC passes `keepalive_timeout` to the kernel as well, as TCP_USER_TIMEOUT. The kernel by itself repeats a packet
    ever more seldom, so a call would wait for up to its deadline after a broken link has been repaired. A process that
    is stopped or busy does not count as lost before `_ASK_AFTER`, because its kernel acknowledges, as long as the
    kernel has room for the data that this side sends. gRPC then waits a minute for its answer. But if the kernel has no
    more room, a process that reads nothing for `keepalive_timeout` counts as lost. So an upload needs a long time.
    """
    milliseconds = int(min(keepalive_timeout * 1000, _MAX_MILLISECONDS))
    connect_milliseconds = min(milliseconds, int(_KEEPALIVE_TIMEOUT * 1000))
    return [
        ("grpc.keepalive_time_ms", int(_ASK_AFTER * 1000)),
        ("grpc.keepalive_timeout_ms", milliseconds),
        ("grpc.http2.max_pings_without_data", 0),  # a client sends nothing during a long stream
        ("grpc.min_reconnect_backoff_ms", connect_milliseconds),  # the deadline for connecting
    ]


def _is_untrusted(error: Exception) -> bool:
    """Return whether gRPC did not accept the server's certificate.

    gRPC reports every failure to connect with one status, and only its text tells them apart.
    """
    # A second connection, with Python's ssl, may meet another server, and its rules differ from gRPC's: a certificate
    # that gRPC trusts could be refused, and a server that restarts would then look like an untrusted one.
    return any(sign in str(error) for sign in ("certificate verify failed", "is not in peer certificate"))


def _server_message(error: BaseException) -> str:
    """Return the message of the server, without additions of gRPC and libarrow."""
    text = str(error).partition(". gRPC client debug context")[0].partition(". Client context")[0]
    text = _UNREACHABLE.sub("", text.partition(". Detail: ")[0].strip())
    return text[1:-1] if text[:1] == text[-1:] and text[:1] in ("'", '"') else text  # a KeyError prints its repr


class _Bearer(flight.ClientMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no type hints
    """A middleware factory that sends a token with each call of a client."""

    def __init__(self, token: str) -> None:
        self._headers = {"authorization": f"Bearer {token}"}

    def start_call(self, info: Any) -> flight.ClientMiddleware:
        """Return the middleware that adds the header to one call."""
        return _BearerHeaders(self._headers)


class _BearerHeaders(flight.ClientMiddleware):  # type: ignore[misc]  # pyarrow has no type hints
    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = headers

    def sending_headers(self) -> dict[str, str]:
        return self._headers


def _client_options(token: str | None, tls_roots: str | None) -> dict[str, Any]:
    """Return the options of a Flight client that sends `token` and trusts only the certificates in `tls_roots`.

    Raises:
        OptionError: The file `tls_roots` cannot be read.
    """
    options: dict[str, Any] = {"generic_options": [*_RECONNECT.items()]}
    if token is not None:
        options["middleware"] = [_Bearer(token)]
    if tls_roots is not None:
        try:
            options["tls_root_certs"] = Path(tls_roots).read_bytes()
        except OSError as error:
            raise OptionError(f"cannot read {tls_roots} for TLS: {error.strerror}") from None
    return options


def open_flight(
    calls: CatalogConnection, endpoint: Endpoint, ticket: bytes, request: ReadRequest
) -> pa.RecordBatchReader:
    """Read the dataset of `ticket` over Flight, at the first location of the endpoint that answers.

    Args:
        calls: The server that described the endpoint, which is used if the endpoint has no Flight location.
        endpoint: The endpoint.
        ticket: The ticket.
        request: The options and limits of the read.
    """
    uris = flight_uris(endpoint) or [None]
    while True:
        uri = uris.pop(0)
        try:
            return read_flight(calls if uri in (None, calls.uri) else calls.with_uri(str(uri)), ticket, request)
        except (CatalogUnreachable, UriError):
            if not uris:
                raise


def read_flight(calls: CatalogConnection, ticket: bytes, request: ReadRequest) -> pa.RecordBatchReader:
    """Read the dataset of `ticket` from the server of these `calls`. Only options and limits of `request` apply.

    libarrow receives a batch without asking. So the size of a batch is checked before it is passed on to the reader.
    """
    options = request.options
    if options.memory_pool is not None:
        raise OptionError(
            "Flight allocates in libarrow's default pool: with memory_pool, take another transport than grpc"
        )
    call_options = flight.FlightCallOptions(
        read_options=options.with_fields(()).to_pyarrow(),
        headers=tracing.headers(request.traceparent or tracing.current_traceparent()),
    )
    chunks = iter(_FlightStream(calls, ticket, call_options, request))
    schema = next(chunks)
    options.check_depth(schema)
    return BatchReader(schema, receive_get(chunks))


def _check_metadata(size: int, request: ReadRequest) -> None:
    if size > request.max_metadata:
        raise RemoteProtocolError(
            f"a message has {size} bytes of metadata; at most {request.max_metadata} are accepted (max_metadata)"
        )


class _FlightStream(ProcessBound):
    """A Flight stream: its schema, and then its batches.

    A thread receives them, because the calls of pyarrow wait for a silent server forever. Nobody waits for this
    stream longer than the timeout of the request.
    """

    def __init__(self, calls: CatalogConnection, ticket: bytes, options: Any, request: ReadRequest) -> None:
        self._uri, self._timeout = calls.uri, request.timeout
        self._download = _Download(calls, request)
        weakref.finalize(self, self._download.stop).atexit = False
        self.bind_to_process()
        StreamThread(self._download, self._download.run, (flight.Ticket(ticket), options), "receive").start()

    def __iter__(self) -> Iterator[Any]:
        while items := self._receive():
            items.reverse()
            while items:
                yield items.pop()  # the consumer frees it
                self.check_process()

    def _receive(self) -> list[Any]:
        """Return the items that have arrived, at least one; none at the end."""
        self.check_process()
        try:
            return self._download.inbox.get_all(self._timeout)
        except DeadlineExceeded:
            self._download.stop()
            raise DeadlineExceeded(f"the server at {self._uri} was silent for {self._timeout:g} s") from None

    def after_fork_in_child(self) -> None:
        leak(self)  # the thread is missing here, and may have held its lock


class _Download:
    """The thread that receives a Flight stream."""

    def __init__(self, calls: CatalogConnection, request: ReadRequest) -> None:
        self.inbox: Mailbox[Any] = Mailbox(_READAHEAD)
        self._calls = calls
        self._request = request
        self._reader: Any = None

    def run(self, ticket: flight.Ticket, options: Any) -> None:
        """Receive the schema and the batches, until `stop` is called."""
        with self.inbox.filled_by("receiving"):
            self._reader = reader = self._calls.call(lambda client: client.do_get(ticket, options))
            with self._calls.errors():
                schema = check_field_names(reader.schema)
                _check_metadata(schema.serialize().size, self._request)
                self.inbox.put(schema, 1, None)
                for chunk in reader:
                    self.inbox.put(chunk, self._size(chunk) + _CHUNK_SIZE, None)
                    del chunk  # the consumer frees it
        self.stop()  # after an error, the server need not send the rest

    def _size(self, chunk: Any) -> int:
        """Return the size of a chunk's batch. Raise RemoteProtocolError if the request does not allow the chunk."""
        if chunk.app_metadata is not None:
            _check_metadata(chunk.app_metadata.size, self._request)
        size: int = 0 if chunk.data is None else chunk.data.get_total_buffer_size()
        if size > self._request.max_body:
            raise RemoteProtocolError(
                f"a record batch has {size} bytes in its buffers; at most {self._request.max_body} are accepted "
                "(max_body)"
            )
        return size

    def stop(self) -> None:
        """Make the thread end. If the server has not answered yet, it ends when the connection does.

        At exit, this is called while another thread may read the stream, which must not look complete.
        """
        self.inbox.close(ConnectionClosed("the download was stopped, or this process is ending"))
        if self._reader is not None:
            self._reader.cancel()

"""A Flight connection to a catalog, whose errors are converted into those of this library."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa

from dissociated.base.access import check_token
from dissociated.base.fork import ProcessBound, leak, use_grpc
from dissociated.control.catalog_uri import check_owner, is_unix, socket_path
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    UriError,
    parse_details,
    reported_error,
)
from dissociated.transport.base import check_timeout
from dissociated.uri import Uri

T = TypeVar("T")

_CONFIDENTIAL = ("grpc+tls:", "grpc+unix:")

#: The text that gRPC puts before the reason why a server cannot be reached.
_UNREACHABLE = re.compile(
    "Flight returned unavailable error, with message: "
    "(failed to connect to all addresses; last error: [A-Z_]+: \\S+ (Failed to connect to remote host: )?)?"
)


class CatalogConnection(ProcessBound):
    """A connection to the catalog at `uri`. The first call opens it, so a process forked before that opens its own.

    Raises:
        UriError: `uri` is not the URI of a catalog.
        OptionError: The token or a file is invalid.
    """

    def __init__(self, uri: str, timeout: float, token: str | None, tls_roots: str | os.PathLike[str] | None) -> None:
        import pyarrow.flight as flight

        from dissociated.client.bearer import client_options

        if not Uri.parse(uri).scheme.startswith("grpc"):
            raise UriError(f"{uri} is not the URI of a catalog: grpc://HOST:PORT")
        self.flight = flight
        self.uri = uri
        self.timeout = check_timeout(timeout)
        roots = None if tls_roots is None else os.fspath(tls_roots)
        self._token, self._tls_roots = token, roots
        self._parameters = client_options(None if token is None else check_token(token), roots)
        self._connection: Any = None
        self._closed = False
        self.bind_to_process()

    def call(self, call: Callable[[Any], T]) -> T:
        """Return the result of `call`, which gets the Flight client.

        Raises:
            CatalogError, AccessDenied, DeadlineExceeded: The call failed.
        """
        with self.errors():
            return call(self._connected())

    def elsewhere(self, uri: str) -> CatalogConnection:
        """Return a connection to another server, which this one names.

        A token that was protected by TLS or a Unix socket is not sent in the clear.
        """
        secret = self.uri.startswith(_CONFIDENTIAL) and not uri.startswith(_CONFIDENTIAL)
        return CatalogConnection(uri, self.timeout, None if secret else self._token, self._tls_roots)

    def options(self) -> Any:
        """Return the options of a call that must be answered within the timeout."""
        return self.flight.FlightCallOptions(timeout=self.timeout)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of Flight into CatalogError and its subclasses, AccessDenied and DeadlineExceeded."""
        try:
            yield
        except DissociatedError:  # for instance of a source in a put; some of these are OSErrors, too
            raise
        except self.flight.FlightUnavailableError as error:
            if parse_details(error.extra_info)[0] == CatalogUnreachable.code:
                raise CatalogUnreachable(self._passed_on(error)) from None
            if _is_untrusted(error):
                raise AccessDenied(
                    f"the certificate of the catalog at {self.uri} is not to be trusted, or not for that host "
                    "(tls_roots says which certificates are)"
                ) from None
            raise CatalogUnreachable(
                f"no catalog answers at {self.uri}: is it running? ({_server_message(error)})"
            ) from None
        except self.flight.FlightTimedOutError as error:
            if parse_details(error.extra_info)[0] == DeadlineExceeded.code:
                raise DeadlineExceeded(self._passed_on(error)) from None
            raise DeadlineExceeded(f"the catalog at {self.uri} did not answer for {self.timeout:g} s") from None
        except (self.flight.FlightUnauthenticatedError, self.flight.FlightUnauthorizedError) as error:
            if "middleware" not in self._parameters and isinstance(error, self.flight.FlightUnauthenticatedError):
                raise AccessDenied(f"the catalog at {self.uri} asks for a token: connect(uri, token=...)") from None
            raise AccessDenied(_server_message(error)) from None
        except pa.ArrowKeyError as error:
            raise DatasetNotFound(_server_message(error)) from None
        except (pa.ArrowException, ValueError, OSError) as error:  # Flight raises OSError for errors within a stream
            reason = _server_message(error)
            message = f"the catalog at {self.uri} refused: {reason}"
            reported = reported_error(CatalogError, message, *parse_details(getattr(error, "extra_info", None)))
            reported.peer_reason = reason  # A node that passes it on to its own client is no part of the story.
            raise reported from None

    def _passed_on(self, error: Exception) -> str:
        return f"the catalog at {self.uri} has no answer: {_server_message(error)}"

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

    def _connected(self) -> Any:
        if self._connection is None:
            if self._closed:
                raise CatalogError(f"this client of the catalog at {self.uri} is closed")
            if is_unix(self.uri):
                check_owner(socket_path(self.uri))
            use_grpc()
            self._connection = self.flight.FlightClient(self.uri, **self._parameters)
        return self._connection


class FlightBatches(ProcessBound):
    """The batches of a stream that was opened by one of these `calls`."""

    def __init__(self, calls: CatalogConnection, reader: Any) -> None:
        self._calls = calls
        self._reader = reader
        self.bind_to_process()

    def __iter__(self) -> FlightBatches:
        return self

    def __next__(self) -> Any:
        self.check_process()
        with self._calls.errors():
            batch = next(self._reader, None)
        if batch is None:
            raise StopIteration
        return batch

    def after_fork_in_child(self) -> None:
        leak(self._reader)


def _is_untrusted(error: Exception) -> bool:
    """Return whether gRPC did not accept the server's certificate.

    gRPC reports every failure to connect with one status, and only its text tells them apart.
    """
    return any(sign in str(error) for sign in ("certificate verify failed", "is not in peer certificate"))


def _server_message(error: BaseException) -> str:
    """Return the message of the server, without additions of gRPC and libarrow."""
    text = str(error).partition(". gRPC client debug context")[0].partition(". Client context")[0]
    text = _UNREACHABLE.sub("", text.partition(". Detail: ")[0].strip())
    return text[1:-1] if text[:1] == text[-1:] and text[:1] in ("'", '"') else text  # a KeyError prints its repr

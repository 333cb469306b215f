"""Every exception that this library raises on purpose.

    DissociatedError
    ├── UriError                 a URI that cannot be used, also a ValueError
    ├── ProtocolError
    │   ├── LocalProtocolError   this side asked for something the protocol forbids: a bug in the caller
    │   └── RemoteProtocolError  the peer broke the protocol; the connection is of no more use
    ├── TransportError           the medium failed: refused, reset, unreachable, in use
    │   ├── ConnectionClosed     the peer is gone, or this side closed the connection
    │   └── UnsafeMemory         another user's server shares a file, which could be cut short under this process
    ├── ForkedError              it belongs to the process that this one was forked from
    ├── AccessDenied             a ticket, a token or a certificate that is not accepted, also a PermissionError
    ├── RemoteError              the peer ended the stream and said why
    ├── ServerFull               a server has as many connections as it may have
    ├── DeadlineExceeded         nothing happened for as long as the caller was ready to wait, also a TimeoutError
    ├── SourceError              what was given to publish cannot be read
    │   └── FilterRefused        a server does not choose rows as the request asks
    ├── FormatError              bytes that are no Arrow IPC, cut off or damaged, or what it cannot hold, a ValueError
    ├── OptionError              an option with a value that makes no sense, also a ValueError
    │   └── ReadOnce             a live stream that all clients read together was asked for batches by number
    ├── WrongKind                tensors where record batches were asked for, or the other way round, also a TypeError
    ├── ColumnNotFound           a dataset has no such column, also a KeyError
    ├── StoreError               a segment or a file cannot be written or read: wrong content, not there
    │   ├── StoreFull            no space, and none can be made now
    │   └── NotPrivate           a directory or file that must be this user's alone is another's, or open to others
    ├── CatalogError             the catalog cannot be reached or refuses
    │   ├── CatalogUnreachable   nobody answers where it should be
    │   ├── CatalogDamaged       its database is not as it was written
    │   └── DatasetNotFound      no dataset of that name, also a KeyError
    ├── DeviceError              a device fails, or what it holds cannot be used as it is asked for
    │   ├── DeviceNotFound       no such device, or no driver or package for it, also a LookupError
    │   └── DeviceFull           no memory left on a device
    ├── PySparkNotFound          PySpark, or what it needs, is not installed, also a ModuleNotFoundError
    ├── JavaNotFound             there is no Java that Spark could run on
    └── JarNotMade               Spark's compiler could not make the data source for its JVM

Anything else that escapes is a bug of ours, with two exceptions. Some interfaces prescribe their own: DLPack a
BufferError, the columns of a batch a KeyError or IndexError. And libraries make others of these: DuckDB and Polars pull
batches through the Arrow C interface, and raise errors of their own that quote ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Self


class DissociatedError(Exception):
    """The root of the tree: catch this to catch everything below."""

    #: The short name of the class that travels to peers. It is unique among the classes here, and never changes.
    code = "failed"
    #: The text that a peer is told instead of the message, which may have secrets of somebody's own code in it.
    peer_reason: str | None = None
    #: The name by which a peer that is told `peer_reason` can find this error in the log.
    reference: str | None = None


def peer_message(error: DissociatedError) -> str:
    """Return the text by which a peer is told of an error."""
    return _with_reference(error, str(error) if error.peer_reason is None else error.peer_reason)


def log_message(error: DissociatedError) -> str:
    """Return the text that the log has of an error: all of it, and the reference by which a peer may ask for it."""
    return _with_reference(error, str(error))


def _with_reference(error: DissociatedError, text: str) -> str:
    return text if error.reference is None else f"{text} [{error.code} {error.reference}]"


def log_level(error: DissociatedError) -> int:
    """Return the level of an error of a client's: a warning if the client is told that the log has more."""
    return logging.INFO if error.reference is None else logging.WARNING


class Failure(NamedTuple):
    """An error to be raised again and again.

    It is not the exception itself, whose traceback would keep everything that its frames hold until the garbage
    collector comes by, or for ever where that leads through C++.
    """

    kind: type[DissociatedError]
    reason: str
    reference: str | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that `error` tells of."""
        reason = str(error) or type(error).__name__
        if isinstance(error, DissociatedError):
            return cls(type(error), reason, error.reference)
        return cls(DissociatedError, reason, None)

    def error(self) -> DissociatedError:
        """Make a new error of the same kind."""
        error = self.kind(self.reason)
        error.reference = self.reference
        return error


class UriError(DissociatedError, ValueError):
    """A URI that cannot be parsed, or that lacks what the protocol needs ("URI Specification")."""

    code = "uri"


class ProtocolError(DissociatedError):
    """The rules of the Dissociated IPC Protocol were broken."""

    code = "protocol"


class LocalProtocolError(ProtocolError):
    """This side tried to do what its state forbids. Nothing was sent."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids. The connection must be closed; nothing else is harmed."""

    code = "remote_protocol"


class TransportError(DissociatedError):
    """The medium that carries messages failed."""

    code = "transport"


class ConnectionClosed(TransportError):
    """The peer closed the connection or died, or this side closed it."""

    code = "connection_closed"


class UnsafeMemory(TransportError):
    """A server of another user shares a file, which could be cut short under whoever maps it."""

    code = "unsafe_memory"


class ForkedError(DissociatedError):
    """A server, client or connection belongs to the process that this one was forked from, and is of no use here."""

    code = "forked"


class AccessDenied(DissociatedError, PermissionError):
    """A ticket, a token or a certificate is not accepted."""

    code = "access_denied"


class RemoteError(DissociatedError):
    """The peer ended the stream on purpose and gave this reason.

    If the peer gave the code of an error about the request, the exception is of that class, too: see `reported_error`.
    """

    code = "remote"


class ServerFull(DissociatedError):
    """A server has as many connections as it may have."""

    code = "server_full"


class DeadlineExceeded(DissociatedError, TimeoutError):
    """The peer was silent for longer than the caller was ready to wait."""

    code = "deadline_exceeded"


class SourceError(DissociatedError):
    """A source that was published cannot be read, or can be read no more."""

    code = "source_failed"

    @classmethod
    def told(cls, message: str, peer_reason: str | None = None) -> Self:
        """Make an error of which a peer is told the message, or `peer_reason` instead.

        All other errors that come out of a source are concealed: see `dissociated.datasets.source_errors`.
        """
        error = cls(message)
        error.peer_reason = message if peer_reason is None else peer_reason
        return error


class FilterRefused(SourceError):
    """A server does not choose rows as the request asks. The client then chooses them itself."""

    code = "filter_refused"


class FormatError(DissociatedError, ValueError):
    """Bytes that are no valid Arrow IPC, are cut off or damaged; or data that cannot be written so."""

    code = "format"


class OptionError(DissociatedError, ValueError):
    """An option was given a value that makes no sense."""

    code = "option"


class ReadOnce(OptionError):
    """A live stream that all clients read together was asked for batches by their numbers."""

    code = "read_once"


class WrongKind(DissociatedError, TypeError):
    """A dataset holds tensors where record batches were asked for, or the other way round."""

    code = "wrong_kind"


class ColumnNotFound(DissociatedError, KeyError):
    """A column was asked for that the dataset does not have."""

    code = "column_not_found"

    __str__ = Exception.__str__  # KeyError would print the repr


class StoreError(DissociatedError):
    """A segment or a file cannot be written or read, or is closed."""

    code = "store"


class StoreFull(StoreError):
    """A store, or the file system that it lies in, has no room, and none can be made now."""

    code = "store_full"


class NotPrivate(StoreError):
    """A directory or a file that must be this user's alone is another's, open to others, or a symbolic link."""

    code = "not_private"


class CatalogError(DissociatedError):
    """The catalog cannot be reached, or refuses what it was asked."""

    code = "catalog"


class CatalogUnreachable(CatalogError):
    """No catalog answers there, or it ended within the call."""

    code = "catalog_unreachable"


class CatalogDamaged(CatalogError):
    """The database of a catalog is not as it was written."""

    code = "catalog_damaged"


class DatasetNotFound(CatalogError, KeyError):
    """The catalog knows no dataset of that name."""

    code = "dataset_not_found"

    __str__ = Exception.__str__  # KeyError would print the repr


class DeviceError(DissociatedError):
    """A device, such as a GPU, fails: its driver refuses, its context is lost, memory of a peer cannot be opened.

    Or what lies on it cannot be had in the way that was asked for.
    """

    code = "device"


class DeviceNotFound(DeviceError, LookupError):
    """There is no such device here, or what it takes is not installed."""

    code = "device_not_found"


class DeviceFull(DeviceError):
    """There is no memory left on the device."""

    code = "device_full"


class JavaNotFound(DissociatedError):
    """There is no Java that Spark could run on."""

    code = "java_not_found"


class JarNotMade(DissociatedError):
    """Spark's compiler could not make the data source for its JVM."""

    code = "jar_not_made"


class PySparkNotFound(DissociatedError, ModuleNotFoundError):
    """PySpark, or a package that it needs, is not installed."""

    code = "pyspark_not_found"


#: The classes by the numbers that close reasons carry (docs/framing.md). A number is never given to another class.
NUMBERED_ERRORS: Mapping[int, type[DissociatedError]] = {
    1: DissociatedError,
    2: UriError,
    3: ProtocolError,
    4: LocalProtocolError,
    5: RemoteProtocolError,
    6: TransportError,
    7: ConnectionClosed,
    8: UnsafeMemory,
    9: ForkedError,
    10: AccessDenied,
    11: RemoteError,
    12: ServerFull,
    13: DeadlineExceeded,
    14: SourceError,
    15: FilterRefused,
    16: FormatError,
    17: OptionError,
    18: ReadOnce,
    19: WrongKind,
    20: ColumnNotFound,
    21: StoreError,
    22: StoreFull,
    23: NotPrivate,
    24: CatalogError,
    25: CatalogUnreachable,
    26: CatalogDamaged,
    27: DatasetNotFound,
    28: DeviceError,
    29: DeviceNotFound,
    30: DeviceFull,
    31: PySparkNotFound,
    32: JavaNotFound,
    33: JarNotMade,
}
_CLASSES = {kind.code: kind for kind in NUMBERED_ERRORS.values()}
#: These tell of the connection, the process or the device of the side that raises them. If a peer reports one of them,
#: nothing of the kind has happened on this side: it must not try another route, or wait, because of that.
_OF_ONE_SIDE = (
    CatalogUnreachable,
    DeadlineExceeded,
    DeviceError,
    ForkedError,
    ProtocolError,
    TransportError,
    UriError,
)


def error_number(error: DissociatedError) -> int:
    """Return the number of the class whose code `error` has."""
    return next((number for number, kind in NUMBERED_ERRORS.items() if kind.code == error.code), 1)


def error_details(error: DissociatedError) -> bytes:
    """Return the code of `error` and its reference, if it has one: the details of an error of Flight."""
    return f"{error.code} {error.reference or ''}".strip().encode()


def parse_details(details: bytes | None) -> tuple[str | None, str | None]:
    """Return the code and the reference in the details of an error of Flight: None for each that is missing."""
    code, _, reference = (details or b"").decode(errors="replace").partition(" ")
    return (code, reference or None) if code in _CLASSES else (None, None)


def reported_error(
    base: type[RemoteError | CatalogError], message: str, code: str | None, reference: str | None = None
) -> DissociatedError:
    """Return the error that a peer reports.

    Args:
        base: the class that says how the error came here: RemoteError or CatalogError.
        message: the text that the peer gave.
        code: the code that the peer gave. An unknown one, and one that tells of the peer's own side, give a `base`.
        reference: the name by which the log of the peer has more.

    Returns:
        A `base`, which is of the class with this `code`, too.
    """
    error = _REPORTED.get((base, code or ""), base)(message)
    error.reference = reference
    return error


def _reported_class(base: type[DissociatedError], kind: type[DissociatedError]) -> type[DissociatedError]:
    if issubclass(base, kind) or issubclass(kind, _OF_ONE_SIDE):
        return base
    if issubclass(kind, base):
        return kind

    def reduce(error: DissociatedError) -> tuple[Any, ...]:  # pickle finds a class by its name, which is that of `kind`
        return reported_error, (base, str(error), error.code, error.reference)

    return type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": __name__, "__reduce__": reduce})


_REPORTED = {
    (base, kind.code): _reported_class(base, kind) for base in (RemoteError, CatalogError) for kind in _CLASSES.values()
}

"""Every exception that this library raises on purpose.

    DissociatedError
    ├── UriError                 a URI that cannot be used, also a ValueError
    ├── ProtocolError
    │   ├── LocalProtocolError   this side asked for something the protocol forbids: a bug in the caller
    │   └── RemoteProtocolError  the peer broke the protocol; the connection cannot be used any more
    ├── TransportError           the medium failed: refused, reset, unreachable, in use
    │   ├── ConnectionClosed     the peer is gone, or this side closed the connection
    │   └── UnsafeMemory         another user's server shares a file, which could be cut short under this process
    ├── ForkedError              the object belongs to the process that this one was forked from
    ├── AccessDenied             a ticket, a token or a certificate that is not accepted, also a PermissionError
    ├── RemoteError              the peer ended the stream and gave a reason
    ├── ServerFull               a server has reached its limit of connections
    ├── DeadlineExceeded         the peer did not answer before the caller's deadline, also a TimeoutError
    ├── SourceError              a published source cannot be read
    │   └── FilterRefused        a server does not apply the row filter of the request
    ├── FormatError              invalid, truncated or damaged Arrow IPC, or data that it cannot hold, also a ValueError
    ├── OptionError              an option with an invalid value, also a ValueError
    │   └── ReadOnce             a stream that can be read only once was asked for batches by number
    ├── WrongKind                tensors where record batches were asked for, or the other way round, also a TypeError
    ├── ColumnNotFound           a dataset has no such column, also a KeyError
    ├── StoreError               a segment or a file cannot be written or read: invalid content, missing, closed
    │   ├── StoreFull            no space, and none can be freed now
    │   └── NotPrivate           a directory or file that must be this user's alone is another's, or open to others
    ├── CatalogError             the catalog cannot be reached or refuses
    │   ├── CatalogUnreachable   no catalog answers at its address
    │   ├── CatalogDamaged       its database is corrupt
    │   ├── NodeUnreachable      a node of the catalog that is needed does not answer
    │   └── DatasetNotFound      no dataset of that name, also a KeyError
    ├── DeviceError              a device fails, or its data cannot be accessed as requested
    │   ├── DeviceNotFound       no such device, or no driver or package for it, also a LookupError
    │   └── DeviceFull           no memory left on a device
    ├── PySparkNotFound          PySpark, or a package that it needs, is not installed, also a ModuleNotFoundError
    ├── JavaNotFound             no Java was found for Spark
    └── JarNotMade               Spark's compiler could not make the data source for its JVM

Any other exception is a bug in this library, with two exceptions. Some interfaces prescribe the exception: DLPack a
BufferError, the columns of a batch a KeyError or IndexError. And some libraries replace ours: DuckDB and Polars pull
batches through the Arrow C interface, and raise their own exceptions, which quote the message of ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Self


class DissociatedError(Exception):
    """The base class of all exceptions of this library: catch it to catch every one of them.

    Example:
        ```python
        import dissociated as dis

        try:
            table = client.read("flights").read_all()
        except dis.DissociatedError as error:
            print(error.code, error)
        ```
    """

    #: The short name of the class that travels to peers. It is unique among the classes here, and never changes.
    code = "failed"
    #: The text that is sent to the peer instead of the message, if the message may hold secrets of the user's code.
    peer_reason: str | None = None
    #: The identifier of this error in the log, which is sent to the peer with `peer_reason`. If a peer has reported
    #: the error, the identifier is that of the peer's log.
    reference: str | None = None


def peer_message(error: DissociatedError) -> str:
    """Return the text that is sent to a peer about `error`."""
    return _with_reference(error, str(error) if error.peer_reason is None else error.peer_reason)


def log_message(error: DissociatedError) -> str:
    """Return the text of `error` for the log: the whole message, and the reference that the peer was given."""
    return _with_reference(error, str(error))


def _with_reference(error: DissociatedError, text: str) -> str:
    suffix = f" [{error.code} {error.reference}]"  # which an error that a peer reported has already
    return text if error.reference is None or text.endswith(suffix) else f"{text}{suffix}"


def log_level(error: DissociatedError) -> int:
    """Return the log level for an error of a client: WARNING if the client was given a reference, otherwise INFO."""
    return logging.INFO if error.reference is None else logging.WARNING


class Failure(NamedTuple):
    """An error that can be raised several times.

    It does not hold the exception itself. The traceback of an exception keeps the objects of its frames alive until
    the garbage collector runs, or forever if the reference cycle passes through C++.
    """

    kind: type[DissociatedError]
    reason: str
    reference: str | None
    peer_reason: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return the failure that describes `error`."""
        reason = str(error) or type(error).__name__
        if isinstance(error, DissociatedError):
            return cls(type(error), reason, error.reference, error.peer_reason)
        return cls(DissociatedError, reason, None)

    def error(self) -> DissociatedError:
        """Return a new exception of the same class, with the same messages and reference."""
        error = self.kind(self.reason)
        error.reference, error.peer_reason = self.reference, self.peer_reason
        return error


class UriError(DissociatedError, ValueError):
    """A URI that cannot be parsed, or that lacks a parameter which the protocol requires ("URI Specification")."""

    code = "uri"


class ProtocolError(DissociatedError):
    """A violation of the Dissociated IPC Protocol.

    Attributes:
        rule: The name of the broken rule in docs/framing.md; None if no rule of that page is broken.
    """

    code = "protocol"

    def __init__(self, message: str, rule: str | None = None) -> None:
        super().__init__(message)
        self.rule = rule


class LocalProtocolError(ProtocolError):
    """An operation of this side that the state of the protocol forbids. Nothing was sent."""

    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    """A message of the peer that the protocol forbids. The connection must be closed; others are not affected."""

    code = "remote_protocol"


class TransportError(DissociatedError):
    """A failure of the medium that carries messages."""

    code = "transport"


class ConnectionClosed(TransportError):
    """A connection that the peer closed, that this side closed, or whose peer died."""

    code = "connection_closed"


class UnsafeMemory(TransportError):
    """A file that a server of another user shares: its owner could truncate it while this process has it mapped."""

    code = "unsafe_memory"


class ForkedError(DissociatedError):
    """A server, client or connection of the process that this one was forked from, which cannot be used here."""

    code = "forked"


class AccessDenied(DissociatedError, PermissionError):
    """A ticket, a token or a certificate that is not accepted."""

    code = "access_denied"


class RemoteError(DissociatedError):
    """An error that the peer reported when it ended the stream.

    If the peer gave the code of an error about the request, the exception is of that class, too: see `reported_error`.
    """

    code = "remote"
    #: The number of the error in docs/framing.md, as the peer has sent it; None if it has sent none.
    number: int | None = None


class ServerFull(DissociatedError):
    """A server that has reached its limit of connections."""

    code = "server_full"


class DeadlineExceeded(DissociatedError, TimeoutError):
    """A peer that did not answer, or took no data, before the caller's deadline."""

    code = "deadline_exceeded"


class SourceError(DissociatedError):
    """A published source that cannot be read, or cannot be read any further."""

    code = "source_failed"

    @classmethod
    def for_peer(cls, message: str, peer_reason: str | None = None) -> Self:
        """Return an error whose text is sent to the peer.

        The text of all other errors that a source raises is concealed: see `dissociated.datasets.source_errors`.

        Args:
            message: The message of the error.
            peer_reason: The text for the peer, if it differs from `message`.
        """
        error = cls(message)
        error.peer_reason = message if peer_reason is None else peer_reason
        return error


class FilterRefused(SourceError):
    """A row filter that the server does not apply. The client then filters the rows itself."""

    code = "filter_refused"


class FormatError(DissociatedError, ValueError):
    """Bytes that are invalid, truncated or damaged Arrow IPC; or data that Arrow IPC cannot hold."""

    code = "format"


class OptionError(DissociatedError, ValueError):
    """An option with an invalid value."""

    code = "option"


class ReadOnce(OptionError):
    """A request for batches by number of a stream that can be read only once, by all clients together or by one."""

    code = "read_once"


class WrongKind(DissociatedError, TypeError):
    """A dataset of tensors that was requested as record batches, or the other way round."""

    code = "wrong_kind"


class ColumnNotFound(DissociatedError, KeyError):
    """A requested column that the dataset does not have."""

    code = "column_not_found"

    __str__ = Exception.__str__  # KeyError would print the repr


class StoreError(DissociatedError):
    """A segment or a file that cannot be written or read, or is closed."""

    code = "store"


class StoreFull(StoreError):
    """A store, or its file system, that has no space, and in which none can be freed now."""

    code = "store_full"


class NotPrivate(StoreError):
    """A directory or file that must be private, but belongs to another user, is open to others, or is a symlink."""

    code = "not_private"


class CatalogError(DissociatedError):
    """A catalog that cannot be reached, or that refuses a request."""

    code = "catalog"


class CatalogUnreachable(CatalogError):
    """A catalog that does not answer at its address, or that ended during the call."""

    code = "catalog_unreachable"


class CatalogDamaged(CatalogError):
    """A catalog whose database is corrupt."""

    code = "catalog_damaged"


class NodeUnreachable(CatalogError):
    """A node of a catalog that holds what is requested, or is to store it, and does not answer."""

    code = "node_unreachable"


class DatasetNotFound(CatalogError, KeyError):
    """A dataset name that the catalog does not know.

    Example:
        ```python
        import dissociated as dis

        try:
            client.drop("trips")
        except dis.DatasetNotFound:
            print("already dropped")
        ```
    """

    code = "dataset_not_found"

    __str__ = Exception.__str__  # KeyError would print the repr


class DeviceError(DissociatedError):
    """A failure of a device, such as a GPU, or data on it that cannot be accessed as requested.

    Examples of failures: the driver refuses a call, the context is lost, or memory of a peer cannot be opened.
    """

    code = "device"


class DeviceNotFound(DeviceError, LookupError):
    """A device that this host does not have, or whose driver or package is not installed."""

    code = "device_not_found"


class DeviceFull(DeviceError):
    """A device that has no free memory."""

    code = "device_full"


class JavaNotFound(DissociatedError):
    """A missing Java installation, which Spark requires."""

    code = "java_not_found"


class JarNotMade(DissociatedError):
    """A failure of Spark's compiler to build the data source for its JVM."""

    code = "jar_not_made"


class PySparkNotFound(DissociatedError, ModuleNotFoundError):
    """A missing installation of PySpark, or of a package that it needs."""

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
    34: NodeUnreachable,
}
_CLASSES = {kind.code: kind for kind in NUMBERED_ERRORS.values()}
#: Errors about the connection, the process or the device of the side that raises them. If a peer reports such an error,
#: this side must not react as if its own connection had failed, for example by another route or by waiting.
_OF_ONE_SIDE = (
    CatalogUnreachable,
    DeadlineExceeded,
    DeviceError,
    ForkedError,
    ProtocolError,
    TransportError,
    UriError,
)


def error_number(error: DissociatedError | type[DissociatedError]) -> int:
    """Return the number of the error class with the code of `error`; 1, the base class, if there is none."""
    return next((number for number, kind in NUMBERED_ERRORS.items() if kind.code == error.code), 1)


def error_details(error: DissociatedError) -> bytes:
    """Encode the code of `error`, and its reference if it has one, as the details of a Flight error."""
    return f"{error.code} {error.reference or ''}".strip().encode()


def parse_details(details: bytes | None) -> tuple[str | None, str | None]:
    """Return the code and the reference in the details of a Flight error; each is None if it is missing."""
    code, _, reference = (details or b"").decode(errors="replace").partition(" ")
    return (code, reference or None) if code in _CLASSES else (None, None)


def reported_error(
    base: type[RemoteError | CatalogError], message: str, code: str | None, reference: str | None = None
) -> DissociatedError:
    """Return the exception for an error that a peer reports.

    Args:
        base: The class for the way in which the error arrived: RemoteError or CatalogError.
        message: The text from the peer.
        code: The error code from the peer. If it is unknown, or is about the peer's own side, it is ignored.
        reference: The identifier of the error in the peer's log.

    Returns:
        An instance of `base`, which is also an instance of the class with this `code`.
    """
    error = _REPORTED.get((base, code or ""), base)(message)
    error.reference = reference
    return error


def _reported_class(base: type[DissociatedError], kind: type[DissociatedError]) -> type[DissociatedError]:
    if issubclass(base, kind) or issubclass(kind, _OF_ONE_SIDE):
        return base
    if issubclass(kind, base):
        return kind

    # Pickle finds a class by its name, and this class has the name of `kind`.
    def reduce(error: DissociatedError) -> tuple[Any, ...]:
        return reported_error, (base, str(error), error.code), vars(error)

    return type(kind.__name__, (kind, base), {"__doc__": kind.__doc__, "__module__": __name__, "__reduce__": reduce})


_REPORTED = {
    (base, kind.code): _reported_class(base, kind) for base in (RemoteError, CatalogError) for kind in _CLASSES.values()
}

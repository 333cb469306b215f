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
    ├── DeadlineExceeded         nothing happened for as long as the caller was ready to wait, also a TimeoutError
    ├── SourceError              what was given to publish cannot be read
    ├── FormatError              bytes that are no Arrow IPC, cut off or damaged, or what it cannot hold, a ValueError
    ├── OptionError              an option with a value that makes no sense, also a ValueError
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
from typing import Self


class DissociatedError(Exception):
    """The root of the tree: catch this to catch everything below."""

    #: The text that a peer is told instead of the message, which may have secrets of somebody's own code in it.
    peer_reason: str | None = None
    #: The code and the number by which a peer that is told `peer_reason` can name this error; the log has them, too.
    reference: str | None = None


def peer_message(error: DissociatedError) -> str:
    """Return what a peer is told of an error."""
    return str(error) if error.peer_reason is None else error.peer_reason


def log_message(error: DissociatedError) -> str:
    """Return what the log has of an error: all of it, and the reference by which a peer may ask for it."""
    return str(error) if error.reference is None else f"{error} [{error.reference}]"


def log_level(error: DissociatedError) -> int:
    """Return the level of an error of a client's: a warning if the client is told that the log has more."""
    return logging.INFO if error.reference is None else logging.WARNING


class UriError(DissociatedError, ValueError):
    """A URI that cannot be parsed, or that lacks what the protocol needs ("URI Specification")."""


class ProtocolError(DissociatedError):
    """The rules of the Dissociated IPC Protocol were broken."""


class LocalProtocolError(ProtocolError):
    """This side tried to do what its state forbids. Nothing was sent."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids. The connection must be closed; nothing else is harmed."""


class TransportError(DissociatedError):
    """The medium that carries messages failed."""


class ConnectionClosed(TransportError):
    """The peer closed the connection or died, or this side closed it."""


class UnsafeMemory(TransportError):
    """A server of another user shares a file, which could be cut short under whoever maps it."""


class ForkedError(DissociatedError):
    """A server, client or connection belongs to the process that this one was forked from, and is of no use here."""


class AccessDenied(DissociatedError, PermissionError):
    """A ticket, a token or a certificate is not accepted."""


class RemoteError(DissociatedError):
    """The peer ended the stream on purpose and gave this reason."""


class DeadlineExceeded(DissociatedError, TimeoutError):
    """The peer was silent for longer than the caller was ready to wait."""


class SourceError(DissociatedError):
    """A source that was published cannot be read, or can be read no more."""

    @classmethod
    def told(cls, message: str, peer_reason: str | None = None) -> Self:
        """Make an error of which a peer is told the message, or `peer_reason` instead.

        All other errors that come out of a source are concealed: see `dissociated.datasets.source_errors`.
        """
        error = cls(message)
        error.peer_reason = message if peer_reason is None else peer_reason
        return error


class FormatError(DissociatedError, ValueError):
    """Bytes that are no valid Arrow IPC, are cut off or damaged; or data that cannot be written so."""


class OptionError(DissociatedError, ValueError):
    """An option was given a value that makes no sense."""


class WrongKind(DissociatedError, TypeError):
    """A dataset holds tensors where record batches were asked for, or the other way round."""


class ColumnNotFound(DissociatedError, KeyError):
    """A column was asked for that the dataset does not have."""

    __str__ = Exception.__str__  # KeyError would print the repr


class StoreError(DissociatedError):
    """A segment or a file cannot be written or read, or is closed."""


class StoreFull(StoreError):
    """A store, or the file system that it lies in, has no room, and none can be made now."""


class NotPrivate(StoreError):
    """A directory or a file that must be this user's alone is another's, open to others, or a symbolic link."""


class CatalogError(DissociatedError):
    """The catalog cannot be reached, or refuses what it was asked."""


class CatalogUnreachable(CatalogError):
    """No catalog answers there, or it ended within the call."""


class CatalogDamaged(CatalogError):
    """The database of a catalog is not as it was written."""


class DatasetNotFound(CatalogError, KeyError):
    """The catalog knows no dataset of that name."""

    __str__ = Exception.__str__  # KeyError would print the repr


class DeviceError(DissociatedError):
    """A device, such as a GPU, fails: its driver refuses, its context is lost, memory of a peer cannot be opened.

    Or what lies on it cannot be had in the way that was asked for.
    """


class DeviceNotFound(DeviceError, LookupError):
    """There is no such device here, or what it takes is not installed."""


class DeviceFull(DeviceError):
    """There is no memory left on the device."""


class JavaNotFound(DissociatedError):
    """There is no Java that Spark could run on."""


class JarNotMade(DissociatedError):
    """Spark's compiler could not make the data source for its JVM."""


class PySparkNotFound(DissociatedError, ModuleNotFoundError):
    """PySpark, or a package that it needs, is not installed."""

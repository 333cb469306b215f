"""Conversion of exceptions of a source into errors that conceal their text from clients.

The text of an exception of user code may contain a password or a path, and so may libarrow's messages about the files
that it reads. So the text stays in the log. A client receives the type of the exception, and a reference by which the
text can be found in the log. Errors that are meant for clients, made by `SourceError.for_peer`, are not changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.errors import DissociatedError, FormatError, SourceError


@contextmanager
def source_errors(name: str) -> Iterator[None]:
    """Convert exceptions of this library's code that reads the source of `name` into SourceError.

    Clients see the text of this library's own errors, and of no other exception.

    Raises:
        SourceError: For a FormatError, and for every exception that is not a DissociatedError.
    """
    try:
        yield
    except FormatError as error:
        raise SourceError(f"the source of {name!r} failed: {error}") from error
    except DissociatedError:
        raise
    except Exception as error:
        raise _concealed(name, error) from error


@contextmanager
def foreign_errors(name: str) -> Iterator[None]:
    """Convert exceptions of the publisher's code into SourceError, with a text that clients do not see.

    That code may use this library itself. The text of the library's errors is then concealed, too, since it may
    describe other servers and datasets.

    Raises:
        SourceError: For every exception. Errors that are meant for clients are raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SourceError) and error.peer_reason is not None:
            raise
        raise _concealed(name, error) from error


def foreign_reader(name: str, reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Return a reader of the same batches that raises the errors of `foreign_errors`."""
    return BatchReader(reader.schema, _foreign_batches(name, reader))


def _foreign_batches(name: str, reader: pa.RecordBatchReader) -> Iterator[BatchAndMetadata]:
    with foreign_errors(name):
        yield from batches(reader)


def concealed(name: str, message: str, kind: str) -> SourceError:
    """Return an error whose `message` stays in the log. Clients are told its `kind`, and a reference to the log."""
    failed = SourceError(message)
    failed.reference = secrets.token_hex(6)
    failed.peer_reason = f"the source of {name!r} failed ({kind}): the log of its server says more"
    return failed


def _concealed(name: str, error: Exception) -> SourceError:
    kind = type(error).__name__
    return concealed(name, f"the source of {name!r} failed: {kind}: {error}", kind)

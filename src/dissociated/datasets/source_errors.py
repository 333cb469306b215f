"""Exceptions of a source, as errors that conceal their text from clients.

The text of an exception of somebody's own code may have a password or a path in it, and so may what libarrow says of
the files that it reads. So it stays in the log. A client is told the kind of the exception, and a reference that finds
the text in the log. Errors that were made to be told, by `SourceError.told`, pass as they are.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.errors import DissociatedError, FormatError, SourceError

#: The code of an error whose text stays in the log.
SOURCE_FAILED = "source_failed"


@contextmanager
def source_errors(name: str) -> Iterator[None]:
    """Turn whatever this library's reading of the source of `name` raises into a SourceError, but for its own errors.

    The text of its own errors is told, and no other.
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
    """Turn whatever the publisher's code raises into a SourceError whose text no client is told.

    That code may use this library, whose errors then speak of things that are not for these clients.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, SourceError) and error.peer_reason is not None:
            raise
        raise _concealed(name, error) from error


def foreign_reader(name: str, reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Return a reader of the same batches, whose errors are those of `foreign_errors`."""
    return BatchReader(reader.schema, _foreign_batches(name, reader))


def _foreign_batches(name: str, reader: pa.RecordBatchReader) -> Iterator[BatchAndMetadata]:
    with foreign_errors(name):
        yield from batches(reader)


def _concealed(name: str, error: Exception) -> SourceError:
    kind = type(error).__name__
    failed = SourceError(f"the source of {name!r} failed: {kind}: {error}")
    failed.reference = f"{SOURCE_FAILED} {secrets.token_hex(6)}"
    failed.peer_reason = f"the source of {name!r} failed ({kind}): the log of its server says more [{failed.reference}]"
    return failed

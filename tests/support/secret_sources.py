"""Sources that raise exceptions with a secret in their text, and a check that clients do not see the secret."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from support.helpers import wait_until

SECRETS = ("hunter2", "/secret/path")
TEXT = "password=hunter2 /secret/path"
BATCH = pa.record_batch({"n": [1, 2, 3]})
REFERENCE = re.compile(r"source_failed [0-9a-f]{12}")

#: Exceptions that a publisher's code may raise, among them this library's own.
ERRORS: dict[str, Callable[[], Exception]] = {
    "ValueError": lambda: ValueError(TEXT),
    "OSError with a text alone": lambda: OSError(TEXT),
    "FileNotFoundError": lambda: FileNotFoundError(2, "No such file", TEXT),
    "ArrowInvalid": lambda: pa.ArrowInvalid(TEXT),
    "FlightServerError": lambda: flight.FlightServerError(TEXT),
    "FlightUnavailableError": lambda: flight.FlightUnavailableError(TEXT, TEXT.encode()),
    "SourceError": lambda: dis.errors.SourceError(TEXT),
    "FormatError": lambda: dis.errors.FormatError(TEXT),
    "DatasetNotFound": lambda: dis.errors.DatasetNotFound(TEXT),
    "AccessDenied": lambda: dis.errors.AccessDenied(TEXT),
    "ColumnNotFound": lambda: dis.errors.ColumnNotFound(TEXT),
    "ConnectionClosed": lambda: dis.errors.ConnectionClosed(TEXT),
    "DeadlineExceeded": lambda: dis.errors.DeadlineExceeded(TEXT),
    "RemoteError": lambda: dis.errors.RemoteError(TEXT),
}


class Capsule:
    """A source that reports errors through Arrow's C interface, which keeps only their text."""

    def __init__(self, make: Callable[[], Exception]) -> None:
        self._make = make

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return raising(self._make, 1)().__arrow_c_stream__(requested_schema)


def raising(make: Callable[[], Exception], after: int) -> Callable[[], pa.RecordBatchReader]:
    def batches() -> Iterator[pa.RecordBatch]:
        for _ in range(after):
            yield BATCH
        raise make()

    return lambda: pa.RecordBatchReader.from_batches(BATCH.schema, batches())


def unopened(make: Callable[[], Exception]) -> Callable[[], pa.RecordBatchReader]:
    """Return a source that fails the second time it is opened. The first opening is for its schema."""
    opened: list[None] = []

    def opening() -> pa.RecordBatchReader:
        opened.append(None)
        if len(opened) > 1:
            raise make()
        return one_batch()

    return opening


def one_batch() -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(BATCH.schema, [BATCH])


SOURCES: dict[str, Callable[[Callable[[], Exception]], Any]] = {
    "before the first batch": lambda make: raising(make, 0),
    "after a batch": lambda make: raising(make, 1),
    "when it is opened": unopened,
    "through the C interface": Capsule,
}


def told(read: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return everything that a client can see of the error that ends the reading of `read`'s result."""
    with pytest.raises(Exception) as caught:
        read(*arguments, **options).read_all()
    seen = ""
    chain: BaseException | None = caught.value
    while chain is not None:
        seen += f"{chain!r} {chain} {getattr(chain, 'extra_info', '')!r}"
        chain = chain.__cause__ or chain.__context__
    return seen


def check(log: pytest.LogCaptureFixture, read: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Fail unless the text of the source's exception is in the log and hidden from the client."""
    log.clear()
    seen = told(read, *arguments, **options)
    assert not [secret for secret in SECRETS if secret in seen]
    (reference,) = {*REFERENCE.findall(seen)}

    def logged() -> bool:
        messages = [record.getMessage() for record in log.records if record.levelno >= logging.WARNING]
        return any(reference in message and TEXT in message for message in messages)

    wait_until(logged, f"the log has it under {reference}")

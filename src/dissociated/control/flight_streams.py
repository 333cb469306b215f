"""Streams of record batches over Flight, with additional data as JSON in `app_metadata`.

    {"dissociated.metadata": [[KEY, VALUE], ...]}       custom metadata of a batch, both in base64
    {"dissociated.end": {"batches": B, "rows": R}}      the end marker of DoPut: the last message, without a batch

In DoPut, metadata are in the message of their batch. In DoGet they precede it, in a message with an empty batch, since
pyarrow sends `app_metadata` only with a batch whose dictionaries have been sent. If the first batch of a stream has
metadata, one more empty batch precedes it to send the dictionaries, and the metadata have `"dissociated.first": true`.

The end marker is needed because a server cannot tell an interrupted stream from a complete one: an exception in the
client leaves the `with` block of the writer, or the writer is collected, and either closes the stream normally.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base import strict_json, tracing
from dissociated.codec.split import BatchAndMetadata
from dissociated.codec.validation import Validator
from dissociated.control.messages import parse_app_metadata
from dissociated.errors import CatalogError, DissociatedError

_METADATA_KEY = "dissociated.metadata"
_FIRST_KEY = "dissociated.first"
_END_KEY = "dissociated.end"
_MAX_MESSAGE = 3 << 20  # bytes in a message, for clients whose gRPC accepts 4 MiB


# DoPut


def upload(client: Any, descriptor: Any, schema: pa.Schema, pairs: Iterable[BatchAndMetadata]) -> dict[str, Any]:
    """Send batches by DoPut, followed by the end marker, and return the answer of the server.

    Args:
        client: A Flight client.
        descriptor: The descriptor of the dataset.
        schema: The schema of the batches.
        pairs: The batches with their metadata. If they raise an error of this library, the caller gets it.

    Raises:
        FlightError: The server refused the stream, or failed.
        CatalogError: The answer is missing or invalid.
    """
    options = flight.FlightCallOptions(headers=tracing.headers(tracing.current_traceparent()))
    writer, metadata_reader = client.do_put(descriptor, schema, options)
    try:
        _send(pairs, writer, Validator(schema))
        answer = metadata_reader.read()
    except BaseException as error:
        try:
            writer.close()
        except (pa.ArrowException, OSError):
            if isinstance(error, DissociatedError) or not isinstance(error, Exception):
                raise error from None
            raise  # The error of the server is the cause; the first error only says that it takes no more data.
        raise
    writer.close()
    if answer is None:
        raise CatalogError("the server read the whole stream, and sent no answer")
    return parse_answer(answer, "a put, all of which it took,")


def parse_answer(content: pa.Buffer, question: str) -> dict[str, Any]:
    """Parse a catalog's answer, a JSON object, to a `question`. Raise CatalogError if it is invalid."""
    try:
        plain = strict_json.loads(content.to_pybytes())
    except ValueError:
        plain = None
    if not isinstance(plain, dict):
        raise CatalogError(f"the server's answer to {question} is not JSON of a catalog")
    return plain


def _send(pairs: Iterable[BatchAndMetadata], writer: Any, validator: Validator) -> None:
    batches = rows = 0
    for batch, metadata in pairs:
        batch = validator.check(batch)
        if metadata:
            writer.write_with_metadata(batch, _encode_app_metadata({_METADATA_KEY: _encode_metadata(metadata)}))
        else:
            writer.write_batch(batch)
        batches, rows = batches + 1, rows + batch.num_rows
    writer.write_metadata(_encode_app_metadata({_END_KEY: {"batches": batches, "rows": rows}}))
    writer.done_writing()


def receive_put(reader: Iterable[Any], cancelled: Callable[[], bool], marked: bool) -> Iterator[BatchAndMetadata]:
    """Yield the batches that arrive in `reader`, with their metadata.

    Args:
        reader: The Flight reader of a DoPut.
        cancelled: A function that returns whether the call was cancelled, for example by the end of the client's
            process.
        marked: Whether the stream must have an end marker.

    Raises:
        CatalogError: The stream ended, but was cancelled, or its end marker is missing or wrong.
    """
    batches = rows = 0
    end = None
    for chunk in reader:
        app_metadata = _decode_app_metadata(chunk.app_metadata)
        if chunk.data is not None:
            batches, rows = batches + 1, rows + chunk.data.num_rows
            yield chunk.data, _decode_metadata(app_metadata)
        end = app_metadata.get(_END_KEY, end)
    if cancelled() or (marked and end != {"batches": batches, "rows": rows}):
        raise CatalogError(f"the stream broke off after {rows:,} rows: nothing was published")


# DoGet


def generate_get(pairs: Iterator[BatchAndMetadata]) -> Iterator[Any]:
    """Yield the items of a `flight.GeneratorStream`: readers over runs of batches, with metadata between them.

    pyarrow tracks sent dictionaries within one reader, so a run goes on until a batch has metadata. The batches must
    come from `checked`.
    """
    following = next(pairs, None)

    def run() -> Iterator[pa.RecordBatch]:
        nonlocal following
        while following is not None:
            yield following[0]
            following = next(pairs, None)
            if following is not None and following[1]:
                return

    first = True
    while following is not None:
        batch, metadata = following
        if metadata:
            app_metadata: dict[str, Any] = {_METADATA_KEY: _encode_metadata(metadata)}
            if first:
                app_metadata[_FIRST_KEY] = True
                yield pa.RecordBatchReader.from_batches(batch.schema, [batch.slice(0, 0)])
            yield batch.slice(0, 0), _encode_app_metadata(app_metadata)
        first = False
        yield pa.RecordBatchReader.from_batches(batch.schema, run())


def checked(schema: pa.Schema, pairs: Iterable[BatchAndMetadata], split: bool) -> Iterator[BatchAndMetadata]:
    """Yield `pairs` with every batch checked.

    Args:
        schema: The schema of the batches.
        pairs: The batches with their metadata.
        split: Whether to divide batches that exceed the default message size of gRPC. The first piece keeps the
            metadata.

    Raises:
        SourceError: The next batch is invalid, and libarrow would abort on it.
    """
    validator = Validator(schema)
    for batch, metadata in pairs:
        checked = validator.check(batch, full=split)  # Only full validation checks the offsets at which pieces end.
        for number, piece in enumerate(_split(checked) if split else [checked]):
            yield piece, None if number else metadata


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield pieces of a batch that are small enough for one message, unless a single row is larger."""
    if batch.num_rows <= 1 or pa.ipc.get_record_batch_size(batch) <= _MAX_MESSAGE:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _split(batch.slice(0, middle))
    yield from _split(batch.slice(middle))


def receive_get(reader: Any) -> Iterator[BatchAndMetadata]:
    """Yield the batches that arrive in a Flight `reader`, with their metadata.

    The stream may come from another implementation, and then all its batches are yielded without metadata.
    """
    metadata = None
    # An empty first batch is kept here until the next message tells whether it only carried dictionaries.
    empty: list[pa.RecordBatch] = []
    for number, chunk in enumerate(reader):
        app_metadata = _decode_app_metadata(chunk.app_metadata)
        if _METADATA_KEY in app_metadata:
            metadata = _decode_metadata(app_metadata)
            if app_metadata.get(_FIRST_KEY):
                empty.clear()
            continue
        for batch in empty:
            yield batch, None
        empty.clear()
        if chunk.data is None:
            continue
        if not number and not chunk.data.num_rows:
            empty.append(chunk.data)
        else:
            yield chunk.data, metadata
            metadata = None
    for batch in empty:
        yield batch, None


def _encode_app_metadata(plain: dict[str, Any]) -> pa.Buffer:
    return pa.py_buffer(json.dumps(plain).encode())


def _decode_app_metadata(content: pa.Buffer | None) -> dict[str, Any]:
    return {} if content is None else parse_app_metadata(content.to_pybytes(), {})


def _encode_metadata(metadata: pa.KeyValueMetadata) -> list[list[str]]:
    return [[base64.b64encode(text).decode() for text in item] for item in metadata.items()]


def _decode_metadata(app_metadata: dict[str, Any]) -> pa.KeyValueMetadata | None:
    try:
        items = [(base64.b64decode(key), base64.b64decode(value)) for key, value in app_metadata.get(_METADATA_KEY, ())]
    except (TypeError, ValueError):
        raise CatalogError("the metadata of a record batch is invalid") from None
    return pa.KeyValueMetadata(items) if items else None

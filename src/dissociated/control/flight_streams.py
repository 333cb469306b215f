"""What travels beside record batches over Flight, as JSON in `app_metadata`.

    {"dissociated.metadata": [[KEY, VALUE], ...]}       custom metadata of a batch, both in base64
    {"dissociated.end": {"batches": B, "rows": R}}      of DoPut, last and without a batch: that was all

Metadata of a batch come with it in DoPut. In DoGet they come just before it, with an empty batch: pyarrow sends
`app_metadata` only beside batches whose dictionaries have been sent already. Where that is the first batch of all,
dictionaries are sent first, with one more empty batch, and `"dissociated.first": true` says so.

A stream that broke off looks to a server like one that is over (its writer was closed by a `with` that was left by an
exception, or collected): hence the end.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa

from dissociated.base import strict_json
from dissociated.codec.split import BatchAndMetadata
from dissociated.codec.validation import Validator
from dissociated.errors import CatalogError, DissociatedError

_METADATA_KEY = "dissociated.metadata"
_FIRST_KEY = "dissociated.first"
_END_KEY = "dissociated.end"
_MAX_MESSAGE = 3 << 20  # bytes of a batch for clients of gRPC that take 4 MiB


# DoPut


def upload(client: Any, descriptor: Any, schema: pa.Schema, pairs: Iterable[BatchAndMetadata]) -> dict[str, Any]:
    """Send all of it by DoPut of a Flight `client`, and the end. Returns what the server answers.

    Raises what `pairs` raise, or else what the server says.
    """
    writer, metadata_reader = client.do_put(descriptor, schema)
    try:
        _send(pairs, writer, Validator(schema))
        answer = metadata_reader.read()
    except BaseException as error:
        try:
            writer.close()
        except (pa.ArrowException, OSError):
            if isinstance(error, DissociatedError) or not isinstance(error, Exception):
                raise error from None
            raise  # what the server says, where the other only says that it takes no more
        raise
    writer.close()
    if answer is None:
        raise CatalogError("the server took everything, and gave no answer")
    return parse_answer(answer, "a put, all of which it took,")


def parse_answer(content: pa.Buffer, question: str) -> dict[str, Any]:
    """What a catalog answers to a `question`: an object in JSON. Raises CatalogError."""
    try:
        plain = strict_json.loads(content.to_pybytes())
    except ValueError:
        plain = None
    if not isinstance(plain, dict):
        raise CatalogError(f"the server's answer to {question} is no JSON of a catalog")
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
    """Everything that comes by a Flight `reader`. Raises CatalogError in place of its end where that is not all.

    So it is where the call is `cancelled`, as by the end of its process; and where a stream that is `marked` has
    another end than it must.
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
        raise CatalogError(f"the writer broke off after {rows:,} rows: nothing is published")


# DoGet


def generate_get(pairs: Iterator[BatchAndMetadata]) -> Iterator[Any]:
    """What a `flight.GeneratorStream` sends: runs of batches, which know their dictionaries, and metadata between.

    The batches are those of `checked`.
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
                yield _reader([batch.slice(0, 0)])
            yield batch.slice(0, 0), _encode_app_metadata(app_metadata)
        first = False
        yield pa.RecordBatchReader.from_batches(batch.schema, run())


def checked(schema: pa.Schema, pairs: Iterable[BatchAndMetadata], split: bool) -> Iterator[BatchAndMetadata]:
    """Return the same batches, each checked. With `split`, those larger than gRPC takes by itself come as several.

    Raises SourceError before a batch on which libarrow would abort.
    """
    validator = Validator(schema)
    for batch, metadata in pairs:
        checked = validator.check(batch, full=split)  # pieces end at offsets that nothing less looks at
        for number, piece in enumerate(_split(checked) if split else [checked]):
            yield piece, None if number else metadata


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Pieces of it that are small enough, but for a row that is larger by itself."""
    if batch.num_rows <= 1 or pa.ipc.get_record_batch_size(batch) <= _MAX_MESSAGE:
        yield batch
        return
    middle = batch.num_rows // 2
    yield from _split(batch.slice(0, middle))
    yield from _split(batch.slice(middle))


def receive_get(reader: Any) -> Iterator[BatchAndMetadata]:
    """The same batches and metadata, where it arrives by a Flight `reader`; all batches of a stream of others."""
    metadata = None
    empty: list[pa.RecordBatch] = []  # an empty first batch, until it is known whether it is one
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


def _reader(batches: list[pa.RecordBatch]) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(batches[0].schema, batches)


def _encode_app_metadata(plain: dict[str, Any]) -> pa.Buffer:
    return pa.py_buffer(json.dumps(plain).encode())


def _decode_app_metadata(content: pa.Buffer | None) -> dict[str, Any]:
    """What it says, if it is ours."""
    if content is None:
        return {}
    try:
        plain = strict_json.loads(content.to_pybytes())
    except ValueError:
        return {}
    return plain if isinstance(plain, dict) else {}


def _encode_metadata(metadata: pa.KeyValueMetadata) -> list[list[str]]:
    return [[base64.b64encode(one).decode() for one in item] for item in metadata.items()]


def _decode_metadata(app_metadata: dict[str, Any]) -> pa.KeyValueMetadata | None:
    try:
        items = [(base64.b64decode(key), base64.b64decode(value)) for key, value in app_metadata.get(_METADATA_KEY, ())]
    except (TypeError, ValueError):
        raise CatalogError("the metadata of a record batch are not what they should be") from None
    return pa.KeyValueMetadata(items) if items else None

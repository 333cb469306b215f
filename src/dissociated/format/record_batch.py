"""Encoding of the metadata of record batches and dictionary batches. Bodies are not needed."""

from __future__ import annotations

from collections.abc import Sequence

from dissociated.format.flatbuffer import REFERENCE, Builder
from dissociated.format.message import V5, HeaderType


def encode_record_batch(
    num_rows: int,
    nodes: Sequence[tuple[int, int]],
    buffers: Sequence[tuple[int, int]],
    variadic: Sequence[int],
    body_length: int,
    *,
    dictionary: int | None = None,
    compression: tuple[int, int] | None = None,
    custom_metadata: Sequence[tuple[bytes | None, bytes | None]] = (),
    version: int = V5,
) -> bytes:
    """Return the flatbuffer of a record batch message, or of a dictionary batch message.

    Args:
        num_rows: Number of rows.
        nodes: Length and null count of each node.
        buffers: Offset and length of each buffer, in bytes.
        variadic: Number of data buffers of each column of views.
        body_length: Length of the body in bytes, padding included.
        dictionary: Id of the dictionary; None for a record batch.
        compression: Codec and method, as `BodyCompression` of Message.fbs numbers them; None for an uncompressed body.
        custom_metadata: Keys and values; None for a key or value that its pair leaves out.
        version: MetadataVersion of Schema.fbs.
    """
    builder = Builder()
    type_ = HeaderType.RECORD_BATCH if dictionary is None else HeaderType.DICTIONARY_BATCH
    _, _, header, _, metadata = builder.table(
        0,
        [("h", version), ("B", type_), REFERENCE, ("q", body_length), REFERENCE if custom_metadata else None],
    )
    if dictionary is not None:
        _, header = builder.table(header, [("q", dictionary), REFERENCE])
    _, nodes_at, buffers_at, compression_at, variadic_at = builder.table(
        header,
        [
            ("q", num_rows),
            REFERENCE,
            REFERENCE,
            None if compression is None else REFERENCE,
            REFERENCE if variadic else None,
        ],
    )
    builder.extents(nodes_at, nodes)
    builder.extents(buffers_at, buffers)
    if compression is not None:
        codec, method = compression
        builder.table(compression_at, [("b", codec), ("b", method)])
    if variadic:
        builder.numbers(variadic_at, "q", variadic)
    if custom_metadata:
        _add_custom_metadata(builder, metadata, custom_metadata)
    return builder.finish()


def _add_custom_metadata(builder: Builder, reference: int, pairs: Sequence[tuple[bytes | None, bytes | None]]) -> None:
    """Write a vector of `KeyValue` tables to which the offset at `reference` refers."""
    for at, pair in zip(builder.references(reference, len(pairs)), pairs, strict=True):
        places = builder.table(at, [None if text is None else REFERENCE for text in pair])
        for place, text in zip(places, pair, strict=True):
            if text is not None:
                builder.text(place, text)

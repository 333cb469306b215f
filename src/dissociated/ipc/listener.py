"""What is told of a stream that is pushed into a decoder."""

from __future__ import annotations

import pyarrow as pa


class Listener:
    """What a decoder calls. Override the methods that are of interest. What they raise comes out of the decoder.

    A method may call `reset` of the decoder; what is fed after that is another stream. It must not feed it.
    """

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        """The schema, and the one that the batches have: only of the fields that are included."""

    def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None:
        """A record batch, if `on_record_batch_with_metadata_decoded` is not overridden. One of them must be.

        Raises NotImplementedError.
        """
        raise NotImplementedError(f"{type(self).__name__} has no on_record_batch_decoded")

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        """A record batch and its custom metadata; None where it has none."""
        self.on_record_batch_decoded(batch)

    def on_eos(self) -> None:
        """The end of the stream."""


class CollectListener(Listener):
    """Keeps everything that was decoded."""

    def __init__(self) -> None:
        #: The schema of the stream; None until it is decoded.
        self.schema: pa.Schema | None = None
        #: The schema that the batches have: only the fields that are included.
        self.filtered_schema: pa.Schema | None = None
        #: The record batches, in order.
        self.batches: list[pa.RecordBatch] = []
        #: The metadata of each batch; None where it has none.
        self.custom_metadata: list[pa.KeyValueMetadata | None] = []
        #: Whether the stream has ended.
        self.ended = False

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        """Keep both schemas."""
        self.schema, self.filtered_schema = schema, filtered_schema

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        """Keep the batch and its metadata."""
        self.batches.append(batch)
        self.custom_metadata.append(custom_metadata)

    def on_eos(self) -> None:
        """Remember that the stream has ended."""
        self.ended = True

"""Datasets of tensors: streams of tensor messages alone, which have no schema.

A catalog describes them by an empty schema whose metadata lists the tensors as JSON.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.codec.tensor import TENSOR_FORMATS, Tensor, split_tensor
from dissociated.control.dataset_info import TensorInfo, tensors_schema
from dissociated.datasets.base import Dataset, Source
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.static_message import MappedMessages, StaticMessage
from dissociated.errors import FormatError, SourceError
from dissociated.protocol.request import Selection
from dissociated.store.segment import TensorSegment


def as_tensors(source: Source) -> Sequence[Tensor] | None:
    """Return `source` as a sequence of tensors, or None if it is neither a tensor nor a sequence of tensors."""
    if type(source) in TENSOR_FORMATS:
        return [source]
    if isinstance(source, (list, tuple)) and source and all(type(tensor) in TENSOR_FORMATS for tensor in source):
        return source
    return None


class TensorDataset(StaticDataset):
    """A dataset of tensors, which are sent inline from their own memory, and to clients that map memory from one copy.

    The copy is made when the first such client connects. Raises SourceError if a tensor cannot be encoded.
    """

    filterable = False

    def __init__(self, name: str, tensors: Sequence[Tensor], options: WriteOptions | None = None) -> None:
        described = [
            TensorInfo(
                TENSOR_FORMATS[type(tensor)].value, str(tensor.type), tuple(tensor.shape), tuple(tensor.dim_names)
            )
            for tensor in tensors
        ]
        super().__init__(name, tensors_schema(described))
        try:
            self._messages = [split_tensor(tensor, options) for tensor in tensors]
        except FormatError as error:
            raise SourceError(f"cannot publish {name!r}: {error}") from None
        self.nbytes = sum(message.parsed.body_length for message in self._messages)
        self._packed = [StaticMessage(*message) for message in self._messages]
        self._mapped: Sequence[MappedMessages] | None = None
        self._copying = threading.Lock()

    def select(self, selection: Selection) -> Dataset:
        return self  # tensors have no columns; a client that expects batches sees that in the first message

    def open_reader(self) -> pa.RecordBatchReader:
        raise SourceError(
            f"{self.name!r} holds tensors, for which Flight has no messages: use read_tensors, over another transport"
        )

    def packed(self) -> Sequence[StaticMessage]:
        return self._packed

    def mapped(self) -> Sequence[MappedMessages]:
        with self._copying:
            if self._mapped is None:
                segment = TensorSegment(self.name, self._messages)
                messages = [
                    message._replace(extents=extents)
                    for message, extents in zip(self._packed, segment.addresses, strict=True)
                ]
                self._mapped = [MappedMessages(segment, messages)]
            return self._mapped

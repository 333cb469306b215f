"""Tensors under a name: a stream of nothing but tensors, which have no schema."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pyarrow as pa

from dissociated.codec.options import WriteOptions
from dissociated.codec.tensor import TENSOR_FORMATS, Tensor, split_tensor
from dissociated.datasets.base import Dataset, Source
from dissociated.datasets.sendable import MappedMessages, StaticMessage
from dissociated.datasets.static import StaticDataset
from dissociated.datasets.tensor_info import TensorInfo, tensors_schema
from dissociated.errors import FormatError, SourceError
from dissociated.protocol.request import Selection
from dissociated.store.segment import TensorSegment


def as_tensors(source: Source) -> Sequence[Tensor] | None:
    """The tensors that `source` is, one or a sequence of them; None where it is something else."""
    if type(source) in TENSOR_FORMATS:
        return [source]
    if isinstance(source, (list, tuple)) and source and all(type(one) in TENSOR_FORMATS for one in source):
        return source
    return None


class TensorDataset(StaticDataset):
    """Tensors. They are sent from where they lie; the first client that can map memory gets them copied there, once.

    Raises SourceError for one that cannot be written.
    """

    filterable = False

    def __init__(self, name: str, tensors: Sequence[Tensor], options: WriteOptions | None = None) -> None:
        described = [
            TensorInfo(TENSOR_FORMATS[type(one)].value, str(one.type), tuple(one.shape), tuple(one.dim_names))
            for one in tensors
        ]
        super().__init__(name, tensors_schema(described))
        try:
            self._messages = [split_tensor(one, options) for one in tensors]
        except FormatError as error:
            raise SourceError(f"cannot publish {name!r}: {error}") from None
        self.nbytes = sum(message.parsed.body_length for message in self._messages)
        self._packed = [StaticMessage(*message) for message in self._messages]
        self._mapped: Sequence[MappedMessages] | None = None
        self._copying = threading.Lock()

    def select(self, selection: Selection) -> Dataset:
        return self  # there are no columns: who reads it as batches learns that from the first message

    def open_reader(self) -> pa.RecordBatchReader:
        raise SourceError(
            f"{self.name!r} holds tensors, which are no record batches, and Flight has no messages for them: "
            "read it with read_tensors, over another transport"
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

"""The description of a dataset of tensors: an empty schema whose metadata lists the tensors as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

_KEY = b"dissociated.tensors"
_MAX_LISTED = 256  # largest number of tensors in the list


class TensorInfo(NamedTuple):
    """The format (dense, COO, CSR, CSC or CSF), type and shape of a tensor, and the names of its dimensions, if any."""

    format: str
    type: str
    shape: tuple[int, ...]
    names: tuple[str, ...]


class TensorsInfo(NamedTuple):
    """The number of tensors in a dataset, and the descriptions of the first of them."""

    number: int
    first: tuple[TensorInfo, ...]


def tensors_schema(tensors: Sequence[TensorInfo]) -> pa.Schema:
    """Return an empty schema whose metadata describes these tensors."""
    listed = {"count": len(tensors), "first": [tensor._asdict() for tensor in tensors[:_MAX_LISTED]]}
    return pa.schema([], metadata={_KEY: json.dumps(listed)})


def parse_tensors_info(schema: pa.Schema) -> TensorsInfo | None:
    """Return the description of tensors in a schema, or None if the schema describes no tensors."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        return None
    try:
        plain = json.loads(text)
        first = (
            TensorInfo(
                str(tensor["format"]), str(tensor["type"]), (*map(int, tensor["shape"]),), (*map(str, tensor["names"]),)
            )
            for tensor in plain["first"]
        )
        return TensorsInfo(int(plain["count"]), tuple(first))
    except (ValueError, KeyError, TypeError):
        return TensorsInfo(0, ())  # the metadata has this key, but was written by other software

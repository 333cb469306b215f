"""How a dataset of tensors is described: by an empty schema, whose metadata lists them as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

_KEY = b"dissociated.tensors"
_MAX_LISTED = 256  # of a dataset of more, the first are listed


class TensorInfo(NamedTuple):
    """A tensor: its format (dense, COO, CSR, CSC or CSF), type, shape, and the names of its dimensions, if any."""

    format: str
    type: str
    shape: tuple[int, ...]
    names: tuple[str, ...]


class TensorsInfo(NamedTuple):
    """How many tensors a dataset has, and what its first ones are."""

    number: int
    first: tuple[TensorInfo, ...]


def tensors_schema(tensors: Sequence[TensorInfo]) -> pa.Schema:
    """An empty schema whose metadata describes these tensors."""
    listed = {"count": len(tensors), "first": [one._asdict() for one in tensors[:_MAX_LISTED]]}
    return pa.schema([], metadata={_KEY: json.dumps(listed)})


def parse_tensors_info(schema: pa.Schema) -> TensorsInfo | None:
    """What a schema says of tensors; None for the schema of anything else."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        return None
    try:
        plain = json.loads(text)
        first = (
            TensorInfo(str(one["format"]), str(one["type"]), (*map(int, one["shape"]),), (*map(str, one["names"]),))
            for one in plain["first"]
        )
        return TensorsInfo(int(plain["count"]), tuple(first))
    except (ValueError, KeyError, TypeError):
        return TensorsInfo(0, ())  # somebody else's words for it

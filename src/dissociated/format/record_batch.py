"""The metadata of record batches and dictionaries whose buffers nobody here may look into."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain

from dissociated.format.flatbuffer import Builder
from dissociated.format.message import HeaderType

_V5 = 4
_REFERENCE = ("I", 0)


def encode_record_batch(
    num_rows: int,
    nodes: Sequence[tuple[int, int]],
    buffers: Sequence[tuple[int, int]],
    variadic: Sequence[int],
    body_length: int,
    dictionary: int | None = None,
) -> bytes:
    """The message of a record batch, or of the `dictionary` of that id: length and null count of each node, offset and
    length of each buffer, and how many buffers each column of views has beside its own."""
    builder = Builder()
    type_ = HeaderType.RECORD_BATCH if dictionary is None else HeaderType.DICTIONARY_BATCH
    _, _, header, _ = builder.table(0, [("h", _V5), ("B", type_), _REFERENCE, ("q", body_length)])
    if dictionary is not None:
        _, header = builder.table(header, [("q", dictionary), _REFERENCE])
    _, nodes_at, buffers_at, _, variadic_at = builder.table(
        header, [("q", num_rows), _REFERENCE, _REFERENCE, None, _REFERENCE if variadic else None]
    )
    for at, structs in ((nodes_at, nodes), (buffers_at, buffers)):
        builder.vector(at, len(structs), struct.pack(f"<{2 * len(structs)}q", *chain.from_iterable(structs)))
    if variadic:
        builder.vector(variadic_at, len(variadic), struct.pack(f"<{len(variadic)}q", *variadic))
    return builder.finish()

"""The footer of an Arrow IPC file (File.fbs), which lists the positions of its dictionaries and record batches.

libarrow reads the schema and the custom metadata of a footer. Every offset is checked before it is followed.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from dissociated.base.buffers import Buffer
from dissociated.errors import FormatError
from dissociated.format.flatbuffer import fields, follow

#: struct Block { offset: long; metaDataLength: int; bodyLength: long; }
#: The length of the metadata includes its prefix and padding.
BLOCK = np.dtype(
    {
        "names": ["offset", "metadata_length", "body_length"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)

#: A Message { version, header_type, header }: the offset of its root, its vtable, and the table, padded to 32 bytes.
_MESSAGE = struct.Struct("<I HHHHHxx iIhB x4x")
_SCHEMA_HEADER = 1  # in the union MessageHeader

_u32 = struct.Struct("<I").unpack_from
_i16 = struct.Struct("<h").unpack_from
#: No file is larger, so adding offsets and lengths below this limit cannot overflow.
_MAX_FILE_SIZE = 1 << 60


class Footer(NamedTuple):
    """The blocks of a file, in the order of the footer, as structured arrays of type BLOCK.

    The arrays are views of the parsed bytes. They are writable if those bytes are.
    """

    dictionaries: np.ndarray
    record_batches: np.ndarray
    #: value of the enum MetadataVersion: 3 is V4, 4 is V5
    version: int


def parse_footer(footer: Buffer) -> Footer:
    """Read the flatbuffer of a footer.

    Raises:
        FormatError: The bytes are not a valid footer.
    """
    try:
        root = _u32(footer)[0]
        # Footer { version, schema, dictionaries: [Block], recordBatches: [Block], custom_metadata }
        version_at, schema_at, dictionaries_at, batches_at = fields(footer, root, 4)
        if not schema_at:
            raise FormatError("the Arrow IPC file has a footer without a schema")
        return Footer(
            _blocks(footer, root, dictionaries_at),
            _blocks(footer, root, batches_at),
            _i16(footer, root + version_at)[0] if version_at else 0,
        )
    except (struct.error, IndexError) as error:
        raise FormatError(f"the Arrow IPC file has a footer that cannot be read ({error})") from None


def schema_message(footer: bytes) -> bytes:
    """Return the flatbuffer of a schema message that embeds this footer and refers to the schema in it.

    The footer can be embedded whole because the offsets in a flatbuffer are relative. Some files, such as those of
    Polars 2, have their schema in the footer only.

    Raises:
        FormatError: The footer is damaged.
    """
    version = parse_footer(footer).version
    root = _u32(footer)[0]
    table, header = 16, 20
    try:
        schema = _MESSAGE.size + follow(footer, root + fields(footer, root, 2)[1])
        message = _MESSAGE.pack(table, 10, 12, 8, 10, 4, table - 4, schema - header, version, _SCHEMA_HEADER)
    except struct.error as error:
        raise FormatError(f"the Arrow IPC file has a footer whose schema lies outside it ({error})") from None
    return message + footer + bytes(-len(footer) % 8)


def _blocks(footer: Buffer, root: int, field: int) -> np.ndarray:
    if not field:
        return np.empty(0, BLOCK)
    vector = follow(footer, root + field)
    count = _u32(footer, vector)[0]
    if vector + 4 + count * BLOCK.itemsize > len(footer):
        raise FormatError(f"the Arrow IPC file has a footer whose {count} blocks lie outside it")
    blocks = np.frombuffer(footer, BLOCK, count, vector + 4) if count else np.empty(0, BLOCK)
    sensible = (
        (blocks["offset"] >= 0)
        & (blocks["offset"] < _MAX_FILE_SIZE)
        & (blocks["metadata_length"] > 0)
        & (blocks["body_length"] >= 0)
        & (blocks["body_length"] < _MAX_FILE_SIZE)
    )
    if not sensible.all():
        raise FormatError(f"the Arrow IPC file has a footer with the impossible block {blocks[~sensible][0]}")
    return blocks

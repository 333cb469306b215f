"""Details of a message's flatbuffer that people read, such as its version and codec. Pairing does not need them."""

from __future__ import annotations

import struct
from typing import NamedTuple

from dissociated.errors import FormatError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.message import Header, HeaderType

_CODEC_NAMES = {0: "lz4", 1: "zstd"}


class Details(NamedTuple):
    """Details of a message, in the terms of Message.fbs. A field that the message's type lacks is None."""

    #: version of the metadata: "V1" to "V5"
    version: str
    #: byte order of a schema: "little" or "big"
    byte_order: str | None = None
    #: number of rows of a record batch, or of values of a dictionary
    rows: int | None = None
    #: codec that compresses the buffers; None if they are not compressed
    codec: str | None = None
    #: id of a dictionary
    dictionary: int | None = None
    #: whether a dictionary batch appends to the dictionary
    is_delta: bool = False


def details(header: bytes, parsed: Header) -> Details:
    """Read the details of a message.

    Args:
        header: The flatbuffer of the message.
        parsed: Its positions, from `parse_header`.

    Raises:
        FormatError: The flatbuffer is damaged.
    """
    try:
        message = Table.read(header, root(header), 3)
        version = f"V{message.scalar(0, 'h') + 1}"
        if parsed.type is HeaderType.SCHEMA:
            return Details(version, byte_order="big" if message.table(2, 1).scalar(0, "h") else "little")
        if parsed.type is HeaderType.RECORD_BATCH:
            return _batch(Details(version), message.table(2, 4))
        if parsed.type is HeaderType.DICTIONARY_BATCH:
            dictionary = message.table(2, 3)
            found = Details(version, dictionary=dictionary.scalar(0, "q"), is_delta=bool(dictionary.scalar(2, "?")))
            return _batch(found, dictionary.table(1, 4))
        return Details(version)
    except (struct.error, IndexError) as error:
        raise FormatError(f"there is a damaged {parsed.type.name} message ({error})") from None


def _batch(found: Details, batch: Table) -> Details:
    codec = None
    if batch.fields[3]:
        number = batch.table(3, 1).scalar(0, "b")
        codec = _CODEC_NAMES.get(number, f"codec {number}")
    return found._replace(rows=batch.scalar(0, "q"), codec=codec)

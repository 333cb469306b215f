"""What a message's flatbuffer says beside what pairing needs, for people who look at it."""

from __future__ import annotations

import struct
from typing import NamedTuple

from dissociated.errors import FormatError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.message import Header, HeaderType

_CODEC_NAMES = {0: "lz4", 1: "zstd"}


class Details(NamedTuple):
    """A message in the words of Message.fbs; None for what its type does not have."""

    #: of the metadata: "V1" to "V5"
    version: str
    #: of a schema: "little" or "big"
    byte_order: str | None = None
    #: of a record batch, or of the values of a dictionary
    rows: int | None = None
    codec: str | None = None
    dictionary: int | None = None
    is_delta: bool = False


def details(header: bytes, parsed: Header) -> Details:
    """Read them. Raises FormatError where the flatbuffer is damaged."""
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

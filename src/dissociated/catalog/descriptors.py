"""What Flight's descriptors and messages say, as a catalog takes them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow.flight as flight

from dissociated.errors import CatalogError

_FIRST_FIELD = 0x0A  # of a protobuf message, as bytes


def parse_descriptor(descriptor: flight.FlightDescriptor) -> dict[str, Any]:
    """What a descriptor asks for: a name, and whatever else its command says."""
    if descriptor.descriptor_type == flight.DescriptorType.PATH and len(descriptor.path) == 1:
        return {"name": descriptor.path[0].decode(errors="replace")}
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        if not descriptor.command.lstrip().startswith(b"{"):
            return {"name": descriptor.command.decode(errors="replace")}
        asked = parse_json(descriptor.command, 'a command is a name, or JSON: {"name": "...", ...}')
        if isinstance(asked.get("name"), str):
            return asked
    raise CatalogError("a dataset is described by a path of one part, or a command: its name, or JSON with its name")


def parse_json(text: bytes, otherwise: str) -> dict[str, Any]:
    """An object in JSON. Raises CatalogError that says `otherwise`."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CatalogError(f"{otherwise} ({error})") from None
    if not isinstance(found, dict):
        raise CatalogError(otherwise)
    return found


def first_field(message: bytes) -> bytes:
    """The first field of a protobuf message that has only that: bytes. Raises ValueError where it is none."""
    length = shift = 0
    for at, byte in enumerate(message[1:6], 1):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if message[0] == _FIRST_FIELD and len(message) == at + 1 + length:
                return message[at + 1 :]
            break
    raise ValueError("not a message of Flight.proto with one field")

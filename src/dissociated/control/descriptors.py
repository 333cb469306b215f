"""Parsers for Flight descriptors, list criteria and action messages that clients send to a catalog."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow.flight as flight

from dissociated.base import strict_json
from dissociated.errors import CatalogError

_JSON_TYPES: Mapping[type, str] = {str: "a text", int: "a whole number", bool: "true or false", dict: "an object"}
_FIRST_FIELD = 0x0A  # the tag of field 1, of the wire type for bytes, in a protobuf message


#: The keys that a command may have besides `name`, with the type of each value. Unknown keys are errors, since they are
#: misspelt or ask for something that this version cannot do.
_CALLER: Mapping[str, type] = {"host": str, "boot_id": str}
_GET: Mapping[str, type] = {"version": int, **_CALLER, "embed": int}
# `Commit` checks these values itself.
_COMMIT: Mapping[str, type] = {"mode": object, "tags": object, "ttl": object, "exists": object}
_PUT: Mapping[str, type] = {**_COMMIT, "key": str, "end": bool, "nbytes": int, "staged": bool}
_LIST: Mapping[str, type] = {"prefix": str, "tags": dict, **_CALLER}


def parse_criteria(criteria: bytes) -> dict[str, Any]:
    """Return the parsed criteria of a list; an empty dict, which selects everything, if they are empty."""
    if not criteria:
        return {}
    return _check_keys(_parse_json(criteria, 'the criteria are JSON: {"prefix": "...", "tags": {...}}'), _LIST)


def parse_get(descriptor: flight.FlightDescriptor) -> dict[str, Any]:
    """Return the name and options of a dataset to read. Raise CatalogError if the descriptor is invalid."""
    return _parse(descriptor, _GET)


def parse_put(descriptor: flight.FlightDescriptor) -> dict[str, Any]:
    """Return the name and options of a dataset to publish. Raise CatalogError if the descriptor is invalid."""
    return _parse(descriptor, _PUT)


def descriptor_name(descriptor: Any) -> str:
    """Return the name in a FlightDescriptor."""
    content = b"/".join(descriptor.path or ()) or descriptor.command or b""
    return content.decode(errors="backslashreplace")


def _parse(descriptor: flight.FlightDescriptor, types: Mapping[str, type]) -> dict[str, Any]:
    """Return the content of a descriptor: the name, and the other keys of a command."""
    if descriptor.descriptor_type == flight.DescriptorType.PATH and len(descriptor.path) == 1:
        return {"name": descriptor.path[0].decode(errors="replace")}
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        if not descriptor.command.lstrip().startswith(b"{"):
            return {"name": descriptor.command.decode(errors="replace")}
        command = _parse_json(descriptor.command, 'a command is a name, or JSON: {"name": "...", ...}')
        if isinstance(command.get("name"), str):
            return _check_keys(command, {"name": str, **types})
    raise CatalogError("a dataset is described by a path of one part, or a command: its name, or JSON with its name")


def _check_keys(command: dict[str, Any], types: Mapping[str, type]) -> dict[str, Any]:
    for key, value in command.items():
        if key not in types:
            raise CatalogError(f"the key {key!r} is unknown: the keys are {', '.join(types)}")
        if value is not None and not isinstance(value, types[key]):
            raise CatalogError(f"{key!r} is {_JSON_TYPES[types[key]]}, not {json.dumps(value)}")
    return command


def _parse_json(text: bytes, expected: str) -> dict[str, Any]:
    """Parse a JSON object. Raise CatalogError with the text `expected` if that fails."""
    try:
        parsed = strict_json.loads(text)
    except ValueError as error:
        raise CatalogError(f"{expected} ({error})") from None
    if not isinstance(parsed, dict):
        raise CatalogError(expected)
    return parsed


def first_field(message: bytes) -> bytes:
    """Return the bytes in a protobuf message that has field 1 only. Raise ValueError for any other message."""
    length = shift = 0
    for at, byte in enumerate(message[1:6], 1):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if message[0] == _FIRST_FIELD and len(message) == at + 1 + length:
                return message[at + 1 :]
            break
    raise ValueError("not a message of Flight.proto with one field")

"""Fields of protobuf messages, and a check that a message has exactly a given shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from dissociated.base.buffers import Buffer
from dissociated.errors import FormatError

FieldValue: TypeAlias = int | memoryview
Fields: TypeAlias = list[tuple[int, FieldValue]]
#: The content of a field: a number of any value, a number in a range (0 if the field is missing), text, bytes, 4 or 8
#: bytes, or the name of a message in the same grammar.
FieldKind: TypeAlias = str | range
#: Messages by name, each as the kinds of its fields by number. A `*` before the name of a kind allows repetition.
#: `ONE_OF` in place of a number: exactly one of the fields in this mapping is present.
Grammar: TypeAlias = Mapping[str, Mapping[int, "FieldKind | Mapping[int, FieldKind]"]]

ONE_OF = 0
NUMBER, TEXT, BYTES, FIXED32, FIXED64 = "number", "text", "bytes", "fixed32", "fixed64"
_VARINT, _DELIMITED = 0, 2  # wire types
_WIRE_TYPES = {NUMBER: _VARINT, FIXED64: 1, BYTES: _DELIMITED, FIXED32: 5}
_FIXED_LENGTHS = {1: 8, 5: 4}
_MAX_NESTING = 100  # libprotobuf refuses messages that nest deeper


def check_message(message: Buffer, name: str, grammar: Grammar) -> None:
    """Raise FormatError unless `message` is the message `name` of this grammar.

    Libprotobuf merges the occurrences of a field that is not repeated, and keeps fields that it does not know. Both are
    refused here, so that every reader of an accepted message reads the same.
    """
    _check(message, name, grammar, 0)


def _check(message: Buffer, name: str, grammar: Grammar, depth: int) -> None:
    if depth > _MAX_NESTING:
        raise FormatError(f"the protobuf message is nested deeper than {_MAX_NESTING} levels")
    shape = grammar[name]
    choice = shape.get(ONE_OF)
    alternatives = choice if isinstance(choice, Mapping) else {}
    present = set()
    chosen = 0
    for number, wire_type, value in _wire_fields(message):
        kind = alternatives.get(number) or shape.get(number)
        if kind is None or isinstance(kind, Mapping):
            raise FormatError(f"{name} has a field {number}, which is not accepted")
        if isinstance(kind, str) and kind.startswith("*"):
            kind = kind[1:]
        elif number in present:
            raise FormatError(f"{name} has the field {number} more than once")
        present.add(number)
        chosen += number in alternatives
        _check_value(value, wire_type, f"{name}, field {number}", kind, grammar, depth)
    if alternatives and chosen != 1:
        raise FormatError(f"{name} has {chosen} of the fields of which exactly one is required")
    for number, kind in shape.items():
        if isinstance(kind, range) and number not in present and 0 not in kind:
            raise FormatError(f"{name}, field {number} is missing")


def _check_value(value: FieldValue, wire_type: int, place: str, kind: FieldKind, grammar: Grammar, depth: int) -> None:
    named = NUMBER if isinstance(kind, range) else kind
    if wire_type != _WIRE_TYPES.get(named, _DELIMITED):
        raise FormatError(f"{place} has the wire type {wire_type}")
    if isinstance(kind, range):
        if value not in kind:
            raise FormatError(f"{place} is {value}; it must be from {kind.start} to {kind.stop - 1}")
    elif kind == TEXT and not isinstance(value, int):
        try:
            str(value, "utf-8")
        except UnicodeDecodeError:  # libprotobuf would also write a line to stderr
            raise FormatError(f"{place} is not valid UTF-8") from None
    elif kind in grammar and not isinstance(value, int):
        _check(value, kind, grammar, depth + 1)


def fields(message: Buffer) -> Iterator[tuple[int, FieldValue]]:
    """Yield the number and the value, a number or bytes, of each field. Raises FormatError."""
    for number, _, value in _wire_fields(message):
        yield number, value


def _wire_fields(message: Buffer) -> Iterator[tuple[int, int, FieldValue]]:
    remaining = memoryview(message)
    while remaining:
        key, remaining = _varint(remaining)
        wire_type = key & 7
        if wire_type == _VARINT:
            number, remaining = _varint(remaining)
            yield key >> 3, wire_type, number
            continue
        length = _FIXED_LENGTHS.get(wire_type, 0)
        if wire_type == _DELIMITED:
            length, remaining = _varint(remaining)
        elif not length:
            raise FormatError("the bytes are not a protobuf message")
        if length > len(remaining):
            raise FormatError("the protobuf message is cut off")
        yield key >> 3, wire_type, remaining[:length]
        remaining = remaining[length:]


def _varint(remaining: memoryview) -> tuple[int, memoryview]:
    value = 0
    for at, byte in enumerate(remaining[:10]):
        value |= (byte & 0x7F) << (7 * at)
        if byte < 0x80:
            return value, remaining[at + 1 :]
    raise FormatError("the protobuf message is cut off")


def messages(parsed_fields: Sequence[tuple[int, FieldValue]], field_number: int) -> list[Fields]:
    """Return the fields of each message in the fields of this number."""
    return [
        [*fields(value)] for number, value in parsed_fields if number == field_number and not isinstance(value, int)
    ]


def number(parsed_fields: Sequence[tuple[int, FieldValue]], field_number: int) -> int:
    """Return the number in the field of this number, 0 if there is none."""
    return next((value for number, value in parsed_fields if number == field_number and isinstance(value, int)), 0)


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a field of bytes."""
    return _encode_varint(number << 3 | _DELIMITED) + _encode_varint(len(content)) + content


def _encode_varint(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _encode_varint(value >> 7)

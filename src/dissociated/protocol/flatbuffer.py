"""Reads flatbuffers that come from a peer: every offset is checked before it is followed.

What lies outside the bytes raises struct.error or IndexError, for callers to say what that means.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from dissociated.errors import FormatError

_u16 = struct.Struct("<H").unpack_from
_u32 = struct.Struct("<I").unpack_from
_i32 = struct.Struct("<i").unpack_from
_SLOTS = [struct.Struct(f"<{count}H").unpack_from for count in range(8)]


def fields(header: bytes, table: int, count: int) -> tuple[int, ...]:
    """Where the first `count` fields of the flatbuffer table lie, from its position on; 0 where one is left out."""
    vtable = table - _i32(header, table)[0]
    if vtable < 0:
        raise IndexError("a table outside the message")
    present = (_u16(header, vtable)[0] - 4) // 2
    if present >= count:
        offsets: tuple[int, ...] = _SLOTS[count](header, vtable + 4)
        return offsets
    offsets = _SLOTS[max(present, 0)](header, vtable + 4)
    return (*offsets, *[0] * (count - len(offsets)))


def follow(header: bytes, at: int) -> int:
    """Where the flatbuffer offset at this position leads."""
    return at + int(_u32(header, at)[0])


def root(header: bytes) -> int:
    """Where the root table lies."""
    return follow(header, 0)


class Table(NamedTuple):
    """A flatbuffer table, whose fields are read by their number in its definition."""

    header: bytes
    at: int
    fields: tuple[int, ...]

    @classmethod
    def read(cls, header: bytes, at: int, count: int) -> Table:
        """The table at this position, as far as its first `count` fields."""
        return cls(header, at, fields(header, at, count))

    def scalar(self, number: int, code: str, default: int = 0) -> int:
        """A number, by its code in `struct`."""
        field = self.fields[number]
        return int(struct.unpack_from(f"<{code}", self.header, self.at + field)[0]) if field else default

    def struct(self, number: int, codes: str) -> tuple[int, ...]:
        """A struct that lies in the table itself. Raises IndexError where it is left out."""
        return struct.unpack_from(f"<{codes}", self.header, self.at + self._present(number))

    def table(self, number: int, count: int) -> Table:
        """A table that this one refers to. Raises IndexError where it is left out."""
        return Table.read(self.header, follow(self.header, self.at + self._present(number)), count)

    def vector(self, number: int, codes: str) -> list[tuple[Any, ...]]:
        """The elements of a vector of numbers or structs; none where it is left out."""
        if not self.fields[number]:
            return []
        at, count, width = self._vector(number, struct.calcsize(f"<{codes}"))
        return [*struct.iter_unpack(f"<{codes}", self.header[at : at + count * width])]

    def tables(self, number: int, count: int) -> list[Table]:
        """The elements of a vector of tables; none where it is left out."""
        if not self.fields[number]:
            return []
        at, length, _ = self._vector(number, 4)
        return [Table.read(self.header, follow(self.header, at + 4 * index), count) for index in range(length)]

    def text(self, number: int) -> str:
        """A string; empty where it is left out. Raises FormatError where it is no UTF-8."""
        if not self.fields[number]:
            return ""
        at, length, _ = self._vector(number, 1)
        try:
            return bytes(self.header[at : at + length]).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"a name that is no UTF-8 ({error})") from None

    def _present(self, number: int) -> int:
        if not self.fields[number]:
            raise IndexError(f"field {number} of a table is missing")
        return self.fields[number]

    def _vector(self, number: int, width: int) -> tuple[int, int, int]:
        vector = follow(self.header, self.at + self.fields[number])
        count = int(_u32(self.header, vector)[0])
        if vector + 4 + count * width > len(self.header):
            raise IndexError(f"a vector of {count} elements leaves the message")
        return vector + 4, count, width

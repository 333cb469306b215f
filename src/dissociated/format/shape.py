"""The sizes of an array's buffers, which follow from its type (a field of a schema) and from its number of values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.flatbuffer import Table

_V5 = 4
_NULL, _STRUCT, _UNION, _FIXED_SIZE_LIST, _RUN_END_ENCODED = 1, 13, 14, 16, 22
_VIEWS = (23, 24)
#: A buffer: bits for each value, and whether it has an extra element, as offsets have. The metadata does not give the
#: size of data that offsets delimit, so that counts as 0 bits.
_BITMAP, _DATA = (1, False), (0, False)
_Buffer = tuple[int, bool]


def _fixed(width: Callable[[Table], int]) -> Callable[[Table], tuple[_Buffer, ...]]:
    return lambda type_: ((width(type_), False),)


def _by_unit(*widths: int, default: int = 0) -> Callable[[Table], tuple[_Buffer, ...]]:
    def buffers(type_: Table) -> tuple[_Buffer, ...]:
        unit = type_.scalar(0, "h", default)
        if not 0 <= unit < len(widths):
            raise FormatError(f"the schema has a field of the unknown unit {unit}")
        return ((widths[unit], False),)

    return buffers


def _are(*buffers: _Buffer) -> Callable[[Table], tuple[_Buffer, ...]]:
    return lambda type_: buffers


#: The buffers of a type except its validity bitmap, by the type's number in the union `Type` of Schema.fbs. Defaults
#: are those of Schema.fbs.
_BUFFERS: dict[int, Callable[[Table], tuple[_Buffer, ...]]] = {
    _NULL: _are(),
    2: _fixed(lambda int_: int_.scalar(0, "i")),
    3: _by_unit(16, 32, 64),  # FloatingPoint
    4: _are((32, True), _DATA),  # Binary
    5: _are((32, True), _DATA),  # Utf8
    6: _are(_BITMAP),  # Bool
    7: _fixed(lambda decimal: decimal.scalar(2, "i", 128)),
    8: _by_unit(32, 64, default=1),  # Date
    9: _fixed(lambda time: time.scalar(1, "i", 32)),
    10: _are((64, False)),  # Timestamp
    11: _by_unit(32, 64, 128),  # Interval
    12: _are((32, True)),  # List
    _STRUCT: _are(),
    _UNION: lambda union: ((8, False), (32, False)) if union.scalar(0, "h") == 1 else ((8, False),),
    15: _fixed(lambda binary: 8 * binary.scalar(0, "i")),
    _FIXED_SIZE_LIST: _are(),
    17: _are((32, True)),  # Map
    18: _are((64, False)),  # Duration
    19: _are((64, True), _DATA),  # LargeBinary
    20: _are((64, True), _DATA),  # LargeUtf8
    21: _are((64, True)),  # LargeList
    _RUN_END_ENCODED: _are(),
    23: _are((128, False)),  # BinaryView, without its data buffers, whose number is in the message
    24: _are((128, False)),  # Utf8View
    25: _are((32, False), (32, False)),  # ListView
    26: _are((64, False), (64, False)),  # LargeListView
}


class Shape(NamedTuple):
    """The buffers of one node, and the number of nodes that follow as its children."""

    validity: bool
    buffers: tuple[_Buffer, ...]
    #: Whether there are further buffers, whose number is in the message.
    views: bool
    children: int
    #: Least number of values that each child has for each value of this node.
    items: int

    @property
    def buffer_count(self) -> int:
        return self.validity + len(self.buffers)


def shape_of(field: Table, version: int) -> Shape:
    """Return the shape of a field's values, also if the field is dictionary-encoded.

    Raises:
        FormatError: The type is unknown.
    """
    type_ = field.scalar(2, "B")
    if type_ not in _BUFFERS:
        raise FormatError(f"the schema has a field of the unknown type {type_}")
    details = field.table(3, 3)
    validity = not (type_ == _NULL or (type_ in (_UNION, _RUN_END_ENCODED) and version >= _V5))
    buffers = _BUFFERS[type_](details)
    if type_ == _FIXED_SIZE_LIST:
        items = details.scalar(0, "i")
    else:
        is_sparse_union = type_ == _UNION and len(buffers) == 1
        items = int(type_ == _STRUCT or is_sparse_union)
    return Shape(validity, buffers, type_ in _VIEWS, len(field.tables(5, 7)), items)


def shape_of_indices(encoding: Table) -> Shape:
    """Return the shape of a dictionary-encoded field, which is that of its indices."""
    width = encoding.table(1, 1).scalar(0, "i") if encoding.fields[1] else 32
    return Shape(True, ((width, False),), False, 0, 0)


def check_sizes(
    shapes: Iterator[Shape],
    nodes: Iterator[tuple[int, int]],
    lengths: Iterator[int],
    views: Iterator[int],
    least: int,
) -> None:
    """Check that the next node has at least `least` values and large enough buffers, and check its children likewise.

    Args:
        shapes: Shapes of the remaining nodes.
        nodes: Length and null count of each remaining node.
        lengths: Lengths of the remaining buffers, in bytes.
        views: Number of data buffers of each remaining column of views.
        least: Least number of values of the next node.

    Raises:
        RemoteProtocolError: The node has too few values, or a buffer is too short.
        StopIteration: There are fewer nodes, buffers or counts than the shapes need.
    """
    shape = next(shapes)
    count, nulls = next(nodes)
    if count < max(least, 0):
        raise RemoteProtocolError(f"the peer sent a column of {count} values; at least {least} are required")
    needed = [count if nulls else 0] if shape.validity else []
    needed += [(count + more) * bits for bits, more in shape.buffers]
    for bits in needed:
        length = next(lengths)
        if 8 * length < bits and (count or length):  # without values, offsets may be left out
            raise RemoteProtocolError(
                f"the peer sent a buffer of {length} bytes for {count} values, which need {-(-bits // 8)} bytes"
            )
    for _ in range(next(views) if shape.views else 0):
        next(lengths)
    for _ in range(shape.children):
        check_sizes(shapes, nodes, lengths, views, count * shape.items)

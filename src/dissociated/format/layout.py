"""The number of nodes and buffers that a stream's messages have by its schema, and the sizes of these buffers.

libarrow takes as many buffers from a message as the schema needs, starting with the first. If the message has more,
libarrow takes buffers for something that they are not. So the numbers must be equal.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple

from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.message import V5, Header, HeaderType, buffer_extents, no_message

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
    validity = not (type_ == _NULL or (type_ in (_UNION, _RUN_END_ENCODED) and version >= V5))
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


#: Deepest nesting that libarrow reads, and the least number of bytes that a field takes in a message.
_MAX_DEPTH = 64
_MIN_FIELD_SIZE = 8
#: Number of schemas whose layout is cached, and the size in bytes above which a schema is not cached.
_MAX_CACHED_SCHEMAS, _MAX_CACHED_SIZE = 64, 1 << 16


class Layout:
    """The nodes and buffers of a field, its children included, and the ids of the dictionaries that it uses.

    `views` counts the columns of views. Each of these has further buffers, whose number is in the message.
    """

    def __init__(self) -> None:
        self.nodes = self.buffers = self.views = 0
        self.dictionaries: set[int] = set()
        #: Shapes of the nodes, in order.
        self.shapes: list[Shape] = []

    def add(self, shape: Shape) -> None:
        """Count a node."""
        self.nodes += 1
        self.buffers += shape.buffer_count
        self.views += shape.views
        self.shapes.append(shape)


class SchemaLayout:
    """The layouts of the `fields` of a schema, and the layouts of dictionary values by id.

    Raises:
        FormatError: The schema cannot be read.
    """

    def __init__(self, schema: bytes) -> None:
        self.fields: list[Layout] = []
        self.values: dict[int, Layout] = {}
        # Upper bound of the number of fields. Without it, tables that refer to each other in a circle would never end.
        self._remaining_fields = len(schema) // _MIN_FIELD_SIZE
        try:
            message = Table.read(schema, root(schema), 3)
            self._version = message.scalar(0, "h")
            for field in message.table(2, 4).tables(1, 7):
                self.fields.append(top := Layout())
                self._add(field, top, top, 0)
        except (struct.error, IndexError) as error:
            raise FormatError(f"not an Arrow IPC message: {error}") from None
        self._buffers = sum(field.buffers for field in self.fields)
        self._views = sum(field.views for field in self.fields)

    def _add(self, field: Table, top: Layout, into: Layout, depth: int) -> None:
        """Count a field in the layout `into`. The values of an encoded field count in the layout of its dictionary."""
        self._remaining_fields -= 1
        if self._remaining_fields < 0 or depth > _MAX_DEPTH:
            raise FormatError("the schema has a cycle of fields")
        if field.fields[4]:
            encoding = field.table(4, 2)
            id_ = encoding.scalar(0, "q")
            top.dictionaries.add(id_)
            into.add(shape_of_indices(encoding))
            into = self.values[id_] = Layout()
        into.add(shape_of(field, self._version))
        for child in field.tables(5, 7):
            self._add(child, top, into, depth + 1)

    def buffers_of(self, header: bytes, parsed: Header) -> int | None:
        """Return the number of buffers that a record batch or dictionary batch must have.

        Returns:
            The number, or None for a dictionary that the schema does not have.

        Raises:
            struct.error, IndexError: `header` is not a message.
        """
        buffers, views = self._buffers, self._views
        if parsed.type is HeaderType.DICTIONARY_BATCH:
            values = self.values.get(dictionary_of(header)[0])
            if values is None:
                return None
            buffers, views = values.buffers, values.views
        if not views:
            return buffers
        return buffers + sum(int(count) for (count,) in _batch(header).vector(4, "q"))

    def check_sizes(self, header: bytes, parsed: Header) -> None:
        """Check that the columns and buffers of a record batch or dictionary batch are long enough for its rows.

        The content of buffers is not read. So the size of data that offsets delimit, such as strings, is not checked.

        Raises:
            RemoteProtocolError: A column or buffer is too short, or `header` does not fit the schema.
        """
        fields = self.fields
        if parsed.type is HeaderType.DICTIONARY_BATCH:
            values = self.values.get(dictionary_of(header)[0])
            if values is None:
                raise RemoteProtocolError("the peer sent a dictionary that no column uses", rule="metadata-message")
            fields = [values]
        try:
            batch = _batch(header)
            rows = batch.scalar(0, "q")
            if rows < 0:
                raise RemoteProtocolError(f"the peer sent a batch of {rows} rows", rule="metadata-message")
            nodes, views = iter(batch.vector(1, "qq")), (int(count) for (count,) in batch.vector(4, "q"))
            lengths = iter(buffer_extents(header, parsed)[1])
            for field in fields:
                check_sizes(iter(field.shapes), nodes, lengths, views, rows)
        except (struct.error, IndexError, StopIteration) as error:
            raise RemoteProtocolError(
                f"the peer sent metadata that does not match its schema ({error!r})", rule="metadata-message"
            ) from None


@lru_cache(maxsize=_MAX_CACHED_SCHEMAS)
def _cached(schema: bytes) -> SchemaLayout | None:
    return _read(schema)


def _read(schema: bytes) -> SchemaLayout | None:
    try:
        return SchemaLayout(schema)
    except FormatError:
        return None


def layout_of(schema: bytes) -> SchemaLayout | None:
    """Return the layout of a schema, or None if it cannot be read. libarrow reports the reason in that case."""
    return _cached(schema) if len(schema) <= _MAX_CACHED_SIZE else _read(schema)


def dictionary_of(header: bytes) -> tuple[int, bool]:
    """Return the id of a dictionary batch, and whether it is a delta.

    Raises:
        RemoteProtocolError: `header` is not a message.
    """
    try:
        batch = Table.read(header, root(header), 3).table(2, 3)
        return batch.scalar(0, "q"), bool(batch.scalar(2, "B"))
    except (struct.error, IndexError) as error:
        raise no_message(error) from None


def _batch(header: bytes) -> Table:
    """Return the RecordBatch table of a record batch or dictionary batch."""
    message = Table.read(header, root(header), 3)
    batch = message.table(2, 5)
    return batch.table(1, 5) if message.scalar(1, "B") == HeaderType.DICTIONARY_BATCH else batch


def nulls_are_counted(header: bytes) -> bool:
    """Return whether a record batch or dictionary batch has a null count for each of its columns.

    Raises:
        RemoteProtocolError: `header` is not a message.
    """
    try:
        return all(nulls >= 0 for _, nulls in _batch(header).vector(1, "qq"))
    except (struct.error, IndexError) as error:
        raise no_message(error) from None


def is_little_endian(schema: bytes) -> bool:
    """Return whether the bodies of a stream with this schema are little-endian.

    Raises:
        RemoteProtocolError: `schema` is not a message.
    """
    try:
        return Table.read(schema, root(schema), 3).table(2, 4).scalar(0, "h") == 0
    except (struct.error, IndexError) as error:
        raise no_message(error) from None

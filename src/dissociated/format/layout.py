"""The number of nodes and buffers that a stream's messages have by its schema, and the sizes of these buffers.

libarrow takes as many buffers from a message as the schema needs, starting with the first. If the message has more,
libarrow takes buffers for something that they are not. So the numbers must be equal.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.message import Header, HeaderType, buffer_extents
from dissociated.format.shape import Shape, check_sizes, shape_of, shape_of_indices

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
        raise RemoteProtocolError(
            f"the peer sent metadata that is not an Arrow IPC message ({error})", rule="metadata-message"
        ) from None


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
        raise RemoteProtocolError(
            f"the peer sent metadata that is not an Arrow IPC message ({error})", rule="metadata-message"
        ) from None


def is_little_endian(schema: bytes) -> bool:
    """Return whether the bodies of a stream with this schema are little-endian.

    Raises:
        RemoteProtocolError: `schema` is not a message.
    """
    try:
        return Table.read(schema, root(schema), 3).table(2, 4).scalar(0, "h") == 0
    except (struct.error, IndexError) as error:
        raise RemoteProtocolError(
            f"the peer sent metadata that is not an Arrow IPC message ({error})", rule="metadata-message"
        ) from None

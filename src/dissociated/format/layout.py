"""How many nodes and buffers the messages of a stream have, and how long these are, by its schema.

libarrow takes from a message as many buffers as the schema needs, from the first on. Where there are others, they would
be read as something else than they are: so the number must be the very same.
"""

from __future__ import annotations

import struct
from functools import lru_cache

from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.message import Header, HeaderType, buffer_extents
from dissociated.format.shape import Shape, check_sizes, shape_of, shape_of_indices

#: libarrow reads no schema that nests deeper; and a field takes so many bytes of a message at least.
_MAX_DEPTH = 64
_MIN_FIELD_SIZE = 8
#: Schemas that are looked at again and again: how many are kept, and up to which size.
_MAX_CACHED_SCHEMAS, _MAX_CACHED_SIZE = 64, 1 << 16


class Layout:
    """How many nodes and buffers a field has, those of its children included, and which dictionaries it uses.

    Each of its `views` has as many more buffers as the message says.
    """

    def __init__(self) -> None:
        self.nodes = self.buffers = self.views = 0
        self.dictionaries: set[int] = set()
        #: Those of its nodes, in their order.
        self.shapes: list[Shape] = []

    def add(self, shape: Shape) -> None:
        """Count a node."""
        self.nodes += 1
        self.buffers += shape.buffer_count
        self.views += shape.views
        self.shapes.append(shape)


class SchemaLayout:
    """The layouts of the `fields` of a schema, and of what each dictionary holds, by its id.

    Raises FormatError for a schema that cannot be read.
    """

    def __init__(self, schema: bytes) -> None:
        self.fields: list[Layout] = []
        self.values: dict[int, Layout] = {}
        # fields that it can have: tables may refer to each other in circles
        self._left = len(schema) // _MIN_FIELD_SIZE
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
        """Count a field `into` a layout; what is encoded in a dictionary into that of its values."""
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH:
            raise FormatError("a schema has fields without end")
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
        """How many buffers the message of a batch or dictionary must have; None for a dictionary that is not known.

        Raises struct.error or IndexError for what is no message.
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
        """Check that the buffers of a batch or dictionary, and the columns in it, are as long as its rows need.

        What lies in them is not looked at, so for data whose length offsets say that is unknown. Raises
        RemoteProtocolError.
        """
        fields = self.fields
        if parsed.type is HeaderType.DICTIONARY_BATCH:
            values = self.values.get(dictionary_of(header)[0])
            if values is None:
                raise RemoteProtocolError("the peer sent a dictionary that no column uses")
            fields = [values]
        try:
            batch = _batch(header)
            rows = batch.scalar(0, "q")
            if rows < 0:
                raise RemoteProtocolError(f"the peer sent a batch of {rows} rows")
            nodes, views = iter(batch.vector(1, "qq")), (int(count) for (count,) in batch.vector(4, "q"))
            lengths = iter(buffer_extents(header, parsed)[1])
            for field in fields:
                check_sizes(iter(field.shapes), nodes, lengths, views, rows)
        except (struct.error, IndexError, StopIteration) as error:
            raise RemoteProtocolError(f"the peer sent metadata that is not of its schema ({error!r})") from None


@lru_cache(maxsize=_MAX_CACHED_SCHEMAS)
def _cached(schema: bytes) -> SchemaLayout | None:
    return _read(schema)


def _read(schema: bytes) -> SchemaLayout | None:
    try:
        return SchemaLayout(schema)
    except FormatError:
        return None


def layout_of(schema: bytes) -> SchemaLayout | None:
    """The layout of a schema; None for one that cannot be read, of which libarrow will say why."""
    return _cached(schema) if len(schema) <= _MAX_CACHED_SIZE else _read(schema)


def dictionary_of(header: bytes) -> tuple[int, bool]:
    """The id of a dictionary batch, and whether it is a delta. Raises RemoteProtocolError for what is no message."""
    try:
        batch = Table.read(header, root(header), 3).table(2, 3)
        return batch.scalar(0, "q"), bool(batch.scalar(2, "B"))
    except (struct.error, IndexError) as error:
        raise RemoteProtocolError(f"the peer sent metadata that is no Arrow IPC message ({error})") from None


def _batch(header: bytes) -> Table:
    """The RecordBatch of a message, or that of the dictionary which it has."""
    message = Table.read(header, root(header), 3)
    batch = message.table(2, 5)
    return batch.table(1, 5) if message.scalar(1, "B") == HeaderType.DICTIONARY_BATCH else batch


def nulls_are_counted(header: bytes) -> bool:
    """Whether a record batch or dictionary says of each column how many nulls it has. Raises RemoteProtocolError."""
    try:
        return all(nulls >= 0 for _, nulls in _batch(header).vector(1, "qq"))
    except (struct.error, IndexError) as error:
        raise RemoteProtocolError(f"the peer sent metadata that is no Arrow IPC message ({error})") from None


def is_little_endian(schema: bytes) -> bool:
    """Whether the bodies of a stream with this schema are. Raises RemoteProtocolError for what is no message."""
    try:
        return Table.read(schema, root(schema), 3).table(2, 4).scalar(0, "h") == 0
    except (struct.error, IndexError) as error:
        raise RemoteProtocolError(f"the peer sent metadata that is no Arrow IPC message ({error})") from None

"""Selection of columns from a stream of IPC messages: new metadata, and bodies made of slices of the old ones.

A record batch lists its nodes and buffers in the order of its fields, and the type of a field determines how many it
has. So the buffers of other columns can be left out without reading a body, whatever its compression or byte order.
Dictionaries keep their ids; dictionaries that no selected column uses are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from dissociated.base.buffers import Buffer, slicer
from dissociated.errors import FormatError, RemoteProtocolError
from dissociated.format.flatbuffer import Table, follow, root
from dissociated.format.layout import SchemaLayout, dictionary_of
from dissociated.format.message import Header, HeaderType, buffer_extents, parse_header
from dissociated.format.record_batch import encode_record_batch


class BodySlice(NamedTuple):
    """A piece of a projected body: `padding` zero bytes, then the bytes from `begin` to `end` of the original body."""

    padding: int
    begin: int
    end: int


class ProjectedMessage(NamedTuple):
    """A message of the projected stream.

    Attributes:
        header: Its flatbuffer.
        parsed: The positions in `header`.
        indices: Indices of its buffers among those of the original message.
        cuts: Pieces of the original body that make up its body.
        padding: Number of zero bytes after the last piece.
    """

    header: bytes
    parsed: Header
    indices: Sequence[int]
    cuts: Sequence[BodySlice]
    padding: int

    def body(self, parts: Sequence[Buffer]) -> list[Buffer]:
        """Return the body of this message.

        Args:
            parts: The parts of the original body.

        Returns:
            Slices of `parts`, by reference, and padding.
        """
        cut = slicer(parts)
        pieces = [piece for padding, begin, end in self.cuts for piece in (bytes(padding), *cut(begin, end))]
        return [*pieces, bytes(self.padding)]


class Projection:
    """A selection of a schema's top-level fields. `header` is the schema message with these fields alone.

    Raises:
        FormatError: The schema cannot be read.
    """

    def __init__(self, schema: bytes, indices: Sequence[int]) -> None:
        self._indices = frozenset(indices)
        with _damaged():
            self._layouts = SchemaLayout(schema).fields
            self.header = _with_fields(schema, Table.read(schema, root(schema), 3).table(2, 4), indices)
            self._dictionaries = {dictionary for index in indices for dictionary in self._layouts[index].dictionaries}

    def project(self, header: bytes, parsed: Header) -> ProjectedMessage | None:
        """Project a message.

        Returns:
            The projected message, or None for a dictionary that no selected column uses.

        Raises:
            FormatError: The message does not fit the schema.
        """
        with _damaged():
            if parsed.type is HeaderType.DICTIONARY_BATCH:
                if dictionary_of(header)[0] not in self._dictionaries:
                    return None
                return ProjectedMessage(
                    header, parsed, range(parsed.buffer_count), [BodySlice(0, 0, parsed.body_length)], 0
                )
            if parsed.type is not HeaderType.RECORD_BATCH:
                raise FormatError(f"a {parsed.type.name} message is among the record batches")
            return self._project(header, parsed)

    def _project(self, header: bytes, parsed: Header) -> ProjectedMessage:
        message = Table.read(header, root(header), 5)
        batch = message.table(2, 5)
        nodes, extents = batch.vector(1, "qq"), _extents(header, parsed)
        variadic = [count for (count,) in batch.vector(4, "q")]
        if any(count < 0 for count in variadic):
            raise FormatError("a record batch has a negative number of buffers")
        selected: tuple[list[tuple[int, int]], list[int], list[int]] = [], [], []
        node = buffer = view = 0
        for index, layout in enumerate(self._layouts):
            ends = node + layout.nodes, buffer + layout.buffers + sum(variadic[view : view + layout.views])
            if index in self._indices:
                selected[0].extend(nodes[node : ends[0]])
                selected[1].extend(range(buffer, ends[1]))
                selected[2].extend(variadic[view : view + layout.views])
            node, buffer, view = *ends, view + layout.views
        if (node, buffer, view) != (len(nodes), len(extents), len(variadic)):
            raise FormatError("a record batch has a number of buffers that its schema does not explain")
        selected_extents = [extents[index] for index in selected[1]]
        offsets, cuts, length, padding = _packed(selected_extents)
        moved = [(offset, size) for offset, (_, size) in zip(offsets, selected_extents, strict=True)]
        metadata = [(_text(pair, 0), _text(pair, 1)) for pair in message.tables(4, 2)]
        encoded = _encode(message, batch, selected[0], moved, selected[2], length, metadata)
        return ProjectedMessage(encoded, parse_header(encoded), selected[1], cuts, padding)


def with_custom_metadata(header: bytes, key: bytes, value: bytes | None) -> tuple[bytes, bytes | None]:
    """Set a value in the custom metadata of a record batch message, or remove it.

    Args:
        header: The flatbuffer of the message.
        key: The key.
        value: The new value; None removes the key.

    Returns:
        The new flatbuffer, and the value that the key had before; None if it had none.

    Raises:
        FormatError: The message is invalid.
    """
    with _damaged():
        message = Table.read(header, root(header), 5)
        batch = message.table(2, 5)
        pairs = [(_text(pair, 0), _text(pair, 1)) for pair in message.tables(4, 2)]
        before = next((old for name, old in pairs if name == key), None)
        changed = [pair for pair in pairs if pair[0] != key] + ([] if value is None else [(key, value)])
        nodes, buffers = batch.vector(1, "qq"), batch.vector(2, "qq")
        variadic = [count for (count,) in batch.vector(4, "q")]
        return _encode(message, batch, nodes, buffers, variadic, message.scalar(3, "q"), changed), before


def _extents(header: bytes, parsed: Header) -> list[tuple[int, int]]:
    """Return offset and length of each buffer. Raise FormatError if a buffer lies outside the body."""
    extents = [*zip(*buffer_extents(header, parsed), strict=True)]
    if any(offset < 0 or length < 0 or offset + length > parsed.body_length for offset, length in extents):
        raise FormatError("a message has buffers outside its body")
    return extents


def _packed(extents: Sequence[tuple[int, int]]) -> tuple[list[int], list[BodySlice], int, int]:
    """Lay out buffers one after the other, with the alignment that they have.

    Args:
        extents: Offset and length of each buffer in the original body.

    Returns:
        The new offset of each buffer, the pieces of the original body, the length of the new body, and the number of
            zero bytes at its end.
    """
    alignment = 64 if all(offset % 64 == 0 for offset, _ in extents) else 8
    offsets: list[int] = []
    cuts: list[BodySlice] = []
    end = 0
    for offset, length in extents:
        at = end + -end % alignment
        offsets.append(at)
        if not length:
            continue
        # The buffer and its padding follow the previous piece in the original body, too: extend that piece.
        if cuts and offset - cuts[-1].end == at - end:
            cuts[-1] = cuts[-1]._replace(end=offset + length)
        else:
            cuts.append(BodySlice(at - end, offset, offset + length))
        end = at + length
    padding = -end % alignment
    return offsets, cuts, end + padding, padding


def _with_fields(header: bytes, schema: Table, indices: Sequence[int]) -> bytes:
    """Return a schema message with only these fields: the vector of fields is shortened in place, all else stays."""
    if not schema.fields[1]:
        return header
    vector = follow(header, schema.at + schema.fields[1])
    (count,) = struct.unpack_from("<I", header, vector)
    places = [vector + 4 + 4 * index for index in range(count)]
    changed = bytearray(header)
    struct.pack_into("<I", changed, vector, len(indices))
    for place, index in zip(places, indices, strict=False):
        struct.pack_into("<I", changed, place, follow(header, places[index]) - place)
    return bytes(changed)


def _encode(
    message: Table,
    batch: Table,
    nodes: Sequence[tuple[int, int]],
    buffers: Sequence[tuple[int, int]],
    variadic: Sequence[int],
    body_length: int,
    custom_metadata: Sequence[tuple[bytes | None, bytes | None]],
) -> bytes:
    """Encode a record batch with these nodes, buffers and metadata, and everything else as in `batch` and `message`."""
    compression = None
    if batch.fields[3]:
        encoding = batch.table(3, 2)
        compression = encoding.scalar(0, "b"), encoding.scalar(1, "b")
    return encode_record_batch(
        batch.scalar(0, "q"),
        nodes,
        buffers,
        variadic,
        body_length,
        compression=compression,
        custom_metadata=custom_metadata,
        version=message.scalar(0, "h"),
    )


def _text(pair: Table, field: int) -> bytes | None:
    """Return the key or value of custom metadata, or None if it is left out."""
    return pair.content(field) if pair.fields[field] else None


@contextmanager
def _damaged() -> Iterator[None]:
    try:
        yield
    except (struct.error, IndexError, RemoteProtocolError) as error:
        raise FormatError(f"not an Arrow IPC message: {error}") from None

"""The command inspect: shows the messages of an Arrow IPC stream or file."""

from __future__ import annotations

import argparse
import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from dissociated.base.oserrors import store_errors
from dissociated.cli import terminal, text
from dissociated.cli.inputs import check_arrow
from dissociated.errors import FormatError, SourceError
from dissociated.format.flatbuffer import Table, root
from dissociated.format.index import Entry, Index
from dissociated.format.message import Header, HeaderType, buffer_extents
from dissociated.memory.shared import map_read_only

_INSPECT = """\
Show the columns of an Arrow IPC stream or file, and the type, position and length in bytes of each message. Bodies are
not read, so large files take no longer."""
_DEFAULT_LIMIT = 20  # messages shown without --all
_NAMES = {
    HeaderType.SCHEMA: "schema",
    HeaderType.DICTIONARY_BATCH: "dictionary",
    HeaderType.RECORD_BATCH: "record batch",
    HeaderType.TENSOR: "tensor",
    HeaderType.SPARSE_TENSOR: "sparse tensor",
}
_CODEC_NAMES = {0: "lz4", 1: "zstd"}


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the description, the options and the function of `inspect` to its parser."""
    parser.description = _INSPECT
    parser.add_argument("file", type=Path, metavar="FILE", help="an Arrow IPC stream or file")
    parser.add_argument("--all", action="store_true", help=f"show every message instead of the first {_DEFAULT_LIMIT}")
    parser.add_argument("--buffers", action="store_true", help="also show the place of each buffer")
    parser.add_argument("--json", action="store_true", help="print JSON, for other programs: every message and buffer")
    parser.set_defaults(run=_run_inspect)


class _Details(NamedTuple):
    """Details of a message, in the terms of Message.fbs. A field that the message's type lacks is None."""

    #: version of the metadata: "V1" to "V5"
    version: str
    #: byte order of a schema: "little" or "big"
    byte_order: str | None = None
    #: number of rows of a record batch, or of values of a dictionary
    rows: int | None = None
    #: codec that compresses the buffers; None if they are not compressed
    codec: str | None = None
    #: id of a dictionary
    dictionary: int | None = None
    #: whether a dictionary batch appends to the dictionary
    is_delta: bool = False


class _Message(NamedTuple):
    entry: Entry
    details: _Details
    #: The offset from the beginning of the file, and the length, of each buffer.
    buffers: list[tuple[int, int]]


def _run_inspect(arguments: argparse.Namespace) -> None:
    """Print the messages of a file."""
    path: Path = arguments.file
    if path.is_dir():
        raise SourceError(f"{str(path)!r} is a directory: give one file")
    check_arrow(path, "inspect shows Arrow IPC only", parquet=False)
    with store_errors(f"opening {path}"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        memory = memoryview(map_read_only(file.fileno(), size))
    try:
        if not size:
            raise FormatError("the file is empty")
        index = Index(memory)
        messages = [_message(index, number) for number in range(len(index))]
        if arguments.json:
            print(json.dumps(_plain_file(path, memory, index, messages), indent=2))
        else:
            _print_file(path, memory, index, messages, arguments)
    except FormatError as error:
        raise FormatError(f"{str(path)!r}: {error}") from None


def _message(index: Index, number: int) -> _Message:
    message = index.message(number)
    offsets, lengths = buffer_extents(message.header, message.parsed)
    at = message.body_at
    buffers = [(at + offset, length) for offset, length in zip(offsets, lengths, strict=True)]
    return _Message(index[number], _read_details(message.header, message.parsed), buffers)


def _read_details(header: bytes, parsed: Header) -> _Details:
    """Read the details of a message.

    Args:
        header: The flatbuffer of the message.
        parsed: Its positions, from `parse_header`.

    Raises:
        FormatError: The flatbuffer is damaged.
    """
    try:
        message = Table.read(header, root(header), 3)
        version = f"V{message.scalar(0, 'h') + 1}"
        if parsed.type is HeaderType.SCHEMA:
            return _Details(version, byte_order="big" if message.table(2, 1).scalar(0, "h") else "little")
        if parsed.type is HeaderType.RECORD_BATCH:
            return _add_batch(_Details(version), message.table(2, 4))
        if parsed.type is HeaderType.DICTIONARY_BATCH:
            dictionary = message.table(2, 3)
            details = _Details(version, dictionary=dictionary.scalar(0, "q"), is_delta=bool(dictionary.scalar(2, "?")))
            return _add_batch(details, dictionary.table(1, 4))
        return _Details(version)
    except (struct.error, IndexError) as error:
        raise FormatError(f"a {parsed.type.name} message is damaged ({error})") from None


def _add_batch(details: _Details, batch: Table) -> _Details:
    codec = None
    if batch.fields[3]:
        number = batch.table(3, 1).scalar(0, "b")
        codec = _CODEC_NAMES.get(number, f"codec {number}")
    return details._replace(rows=batch.scalar(0, "q"), codec=codec)


def _print_file(
    path: Path, memory: memoryview, index: Index, messages: list[_Message], arguments: argparse.Namespace
) -> None:
    schema, custom = _schema(memory, index)
    kind = "file" if index.is_file else "stream"
    first = messages[0].details if messages else None
    summary = [f"Arrow IPC {kind}", text.size(len(memory))]
    if first is not None:
        summary += [f"metadata {first.version}", *([f"{first.byte_order}-endian"] if first.byte_order else [])]
    print(text.printable(f"{path}: {', '.join(summary)}"))
    batches = [m for m in messages if m.entry.type is HeaderType.RECORD_BATCH]
    codecs = sorted({m.details.codec for m in messages if m.details.codec})
    if batches:
        rows = text.plural(sum(m.details.rows or 0 for m in batches), "row")
        batch_count = "1 record batch" if len(batches) == 1 else f"{text.count(len(batches))} record batches"
        compressed = f", compressed by {' and '.join(codecs)}" if codecs else ""
        print(f"{rows} in {batch_count}, bodies of {text.size(index.body_size)}{compressed}")
    if schema is not None:
        fields = [(field.name, str(field.type), "" if field.nullable else "not null") for field in schema]
        print()
        terminal.print_table(("COLUMN", "TYPE", ""), fields)
    for owner, metadata in (("SCHEMA", schema.metadata if schema is not None else None), ("FILE", custom)):
        if metadata:
            pairs = [(_shorten(key), _shorten(value)) for key, value in metadata.items()]
            print()
            terminal.print_table((f"METADATA OF THE {owner}", "VALUE"), pairs)
    first_messages = messages if arguments.all else messages[:_DEFAULT_LIMIT]
    lines = [
        (
            str(number),
            _message_name(m),
            text.count(m.entry.offset),
            text.count(m.entry.metadata_length),
            text.count(m.entry.body_length),
            text.count(m.details.rows),
            text.count(len(m.buffers)),
        )
        for number, m in enumerate(first_messages)
    ]
    head = ("#", "MESSAGE", "OFFSET", "METADATA", "BODY", "ROWS", "BUFFERS")
    print()
    terminal.print_table(head, lines, right=(0, 2, 3, 4, 5, 6))
    if len(first_messages) < len(messages):
        print(f"and {text.count(len(messages) - len(first_messages))} more: --all shows them")
    if arguments.buffers:
        buffers = [
            (str(number), str(buffer_number), text.count(offset), text.count(length))
            for number, m in enumerate(first_messages)
            for buffer_number, (offset, length) in enumerate(m.buffers)
        ]
        print()
        terminal.print_table(("#", "BUFFER", "OFFSET", "LENGTH"), buffers, right=(0, 1, 2, 3))


def _message_name(message: _Message) -> str:
    name = _NAMES[message.entry.type]
    if message.details.dictionary is not None:
        name += f" {message.details.dictionary}" + (", delta" if message.details.is_delta else "")
    return name


def _shorten(value: bytes) -> str:
    characters = value.decode(errors="replace")
    return characters if len(characters) <= 60 else f"{characters[:59]}…"


def _schema(memory: memoryview, index: Index) -> tuple[Any, Any]:
    """Decode the schema, or None, and the custom metadata of a file, with libarrow."""
    import pyarrow as pa

    from dissociated.codec.reader import arrow_errors, read_schema

    if not index or index[0].type is not HeaderType.SCHEMA:
        return None, None
    schema = read_schema(index.message(0).header, FormatError)
    if not index.is_file:
        return schema, None
    with arrow_errors(FormatError), pa.ipc.open_file(pa.py_buffer(memory)) as file:
        return schema, file.metadata


def _plain_file(path: Path, memory: memoryview, index: Index, messages: list[_Message]) -> dict[str, Any]:
    schema, custom = _schema(memory, index)
    return {
        "path": str(path),
        "format": "file" if index.is_file else "stream",
        "bytes": len(memory),
        "rows": sum(m.details.rows or 0 for m in messages if m.entry.type is HeaderType.RECORD_BATCH),
        "schema": [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in schema or ()],
        "schema_metadata": _plain_metadata(schema.metadata if schema is not None else None),
        "file_metadata": _plain_metadata(custom),
        "messages": [
            {
                "type": _NAMES[m.entry.type],
                "offset": m.entry.offset,
                "metadata_length": m.entry.metadata_length,
                "body_length": m.entry.body_length,
                **{name: value for name, value in m.details._asdict().items() if value is not None},
                "buffers": [{"offset": offset, "length": length} for offset, length in m.buffers],
            }
            for m in messages
        ],
    }


def _plain_metadata(metadata: Any) -> dict[str, str]:
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in (metadata or {}).items()}

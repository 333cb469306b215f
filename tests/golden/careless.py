"""A server without checks: it sends the content of an IPC stream or file as it is, message by message.

This library's server rejects most damaged files when they are published. This one delivers their damage to a client.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from dissociated.errors import DissociatedError, RemoteProtocolError
from dissociated.format.message import Header, HeaderType, buffer_extents, parse_header
from dissociated.memory.region import Region
from dissociated.memory.remote import with_spans
from dissociated.memory.shared import Backing, create_memfd, seal
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection, Listener
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from protocol.wire import address_list, end_of_stream, metadata, tag
from support.helpers import PATIENCE

BASE = 1 << 20  # the address of a file's first byte
#: URIs to listen at.
ANY = {
    "shm": "shm:",
    "tcp": "tcp://127.0.0.1:0",
    "inproc": "inproc:",
    "ucx": "ucx:?rma=allow",
    "fabric": "fabric:?rma=allow",
}


class Piece(NamedTuple):
    """A piece of content that looks like a message; `parsed` is None if its metadata cannot be parsed."""

    header: bytes
    parsed: Header | None
    body_at: int
    body: bytes


def take_apart(content: bytes) -> Iterator[Piece]:
    """Split `content` into messages as far as possible. A length that leads outside covers all the rest."""
    at = 8 if content.startswith(b"ARROW1") else 0
    while at + 4 <= len(content):
        if content[at : at + 4] == b"\xff\xff\xff\xff":
            at += 4
        length = int.from_bytes(content[at : at + 4], "little", signed=True)
        if not length:
            return
        header = content[at + 4 :][: length if length > 0 else None]
        at += 4 + len(header)
        try:
            parsed = parse_header(header)
        except RemoteProtocolError:
            yield Piece(header, None, at, content[at:])
            return
        body = content[at:][: parsed.body_length]
        yield Piece(header, parsed, at, body)
        at += len(body)


def messages(content: bytes, start: int | None) -> Iterator[Message]:
    """Yield the messages to send: with bodies, or with addresses if `start` is the address of the first byte."""
    sequence = 0
    for sequence, piece in enumerate(take_apart(content), 1):
        number = sequence - 1
        yield Message(None, (metadata(number, piece.header),))
        if piece.parsed is None or start is None:
            if piece.parsed is None or piece.parsed.type is not HeaderType.SCHEMA:
                yield Message(tag(number), (piece.body,))
        elif piece.parsed.type is not HeaderType.SCHEMA:
            yield Message(tag(number, 1), (addresses(start, piece, piece.parsed),))
    yield Message(None, (end_of_stream(sequence),))


def addresses(start: int, piece: Piece, parsed: Header) -> bytes:
    """Return the address list for the buffers in the metadata, even if they lie outside."""
    start += piece.body_at
    extents = zip(*buffer_extents(piece.header, parsed), strict=True)
    listed = [((start + offset) % 2**64, length % 2**64) if length else (0, 0) for offset, length in extents]
    if sum(length for _, length in listed) >= 2**64:
        return b""  # no list can express this
    return address_list(*listed)


def serve(scheme: str, path: Path, by_address: bool) -> tuple[Listener, str]:
    """Serve a single client, in a thread that ends when the client is gone. The caller closes the listener."""
    listener, content = transport(scheme).listen(Uri.parse(ANY[scheme])), path.read_bytes()
    located = replace(listener.uri, want_data=7, free_data=9)
    region, start = Region(BASE, pa.py_buffer(content)), BASE if by_address else None
    if by_address and listener.exposes_memory:
        span = listener.expose(region)
        start, located = span.base, with_spans(located, [span])
    threading.Thread(target=_serve, args=(listener, content, start, region), name="careless").start()
    return listener, str(located)


def _serve(listener: Listener, content: bytes, start: int | None, region: Region) -> None:
    """Serve the client, and withdraw the exposed `region` at the end."""
    connection = listener.accept()
    if connection is None:
        return
    with connection, suppress(DissociatedError):  # the client has disconnected
        connection.receive(PATIENCE, _allocate)
        if start is not None and connection.shares_memory:
            _share(connection, content)
        connection.send(list(messages(content, start)), PATIENCE)
        while connection.receive(PATIENCE, _allocate) is not None:
            pass  # addresses that the client gives back


def _share(connection: Connection, content: bytes) -> None:
    descriptor = create_memfd("careless")
    try:
        os.write(descriptor, content)
        seal(descriptor, Backing.SEALED)
        connection.memory.share(descriptor, BASE, len(content), Backing.SEALED, PATIENCE)
    finally:
        os.close(descriptor)


def _allocate(_: int | None, length: int) -> bytearray:
    return bytearray(length)

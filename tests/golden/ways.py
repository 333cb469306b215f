"""Every way to read an Arrow IPC stream or file on disk. To add a way, add a row to WAYS."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import pyarrow as pa

import dissociated as dis
from dissociated import ipc
from dissociated.errors import SourceError
from dissociated.format.encapsulated import END_OF_STREAM
from support.certificates import Certificates
from support.helpers import PATIENCE, location

from .careless import serve

MAX_BODY = 1 << 28  # bytes
LISTEN = {
    "shm": "shm:",
    "tcp": "tcp://127.0.0.1:0",
    "inproc": "inproc:",
    "tls": "tls://127.0.0.1:0",
    "ucx": "ucx:",
    "fabric": "fabric:",
}


class Arrived(NamedTuple):
    """The schema and the batches that were read, each batch with its metadata."""

    schema: pa.Schema
    batches: list[tuple[pa.RecordBatch, pa.KeyValueMetadata | None]]


Read = Callable[[dis.Server, Path], Arrived]


def server(ways: Iterable[str]) -> dis.Server:
    """Return the server for these ways. Its certificate lies beside the file that SSL_CERT_FILE names."""
    schemes = {scheme for way in ways for scheme in way.split("-")} & LISTEN.keys() or {"shm"}
    certified = Certificates.beside(Path(os.environ["SSL_CERT_FILE"]))
    return dis.Server(
        [LISTEN[scheme] for scheme in sorted(schemes)],
        catalog=None,
        allow_rma=True,
        handshake_timeout=PATIENCE,
        stall_timeout=PATIENCE,
        **certified.options,
    )


def _publish(server: dis.Server, path: Path) -> None:
    """Publish a file in place, or a copy with an end marker if the stream has none and would be rejected."""
    try:
        server.publish("data", path)
    except SourceError as error:
        if "no end-of-stream marker" not in str(error):
            raise
        with NamedTemporaryFile() as whole:
            whole.write(path.read_bytes() + END_OF_STREAM)
            whole.flush()
            server.publish("data", whole.name)


def read_all(reader: pa.RecordBatchReader) -> Arrived:
    batches = []
    while True:
        try:
            batches.append(tuple(reader.read_next_batch_with_custom_metadata()))
        except StopIteration:
            return Arrived(reader.schema, batches)


def by_libarrow(_: dis.Server, path: Path) -> Arrived:
    """Read with libarrow alone, without our code."""
    if not is_file(path):
        return read_all(pa.ipc.open_stream(path))
    file = pa.ipc.open_file(path)
    batches = [tuple(file.get_batch_with_custom_metadata(index)) for index in range(file.num_record_batches)]
    return Arrived(file.schema, batches)


def in_process(server: dis.Server, path: Path) -> Arrived:
    """Read like the catalog's Flight server. This reader has no metadata of single batches."""
    _publish(server, path)
    reader = server.dataset("data").open_reader()
    return Arrived(reader.schema, [(batch, None) for batch in reader])


def opened(memory_map: bool) -> Read:
    """Return a way that uses the readers of files and streams, mapped or as a plain file."""

    def read(_: dis.Server, path: Path) -> Arrived:
        if not is_file(path):
            return read_all(ipc.open_stream(path, memory_map=memory_map))
        with ipc.open_file(path, memory_map=memory_map) as file:
            batches = [tuple(file.get_batch_with_custom_metadata(index)) for index in range(file.num_record_batches)]
            return Arrived(file.schema, batches)

    return read


def awaited(_: dis.Server, path: Path) -> Arrived:
    """Read with the asynchronous readers."""

    arrived = []

    async def read() -> None:  # returns nothing: asyncio prints results, and printing damaged data may crash
        async with await ipc.open_either_async(path) as reader:
            batches = [batch async for batch in reader.batches(custom_metadata=True)]
            arrived.append(Arrived(reader.schema, [tuple(batch) for batch in batches]))

    asyncio.run(read())
    return arrived[0]


def pushed(size: int) -> Read:
    """Return a way that feeds the decoder in pieces of `size` bytes."""

    def read(_: dis.Server, path: Path) -> Arrived:
        listener, content = ipc.CollectListener(), path.read_bytes()
        decoder = ipc.StreamDecoder(listener, max_body=MAX_BODY)
        for start in range(0, len(content), size):
            decoder.consume(content[start : start + size])
        decoder.finish()
        return Arrived(listener.schema, [*zip(listener.batches, listener.custom_metadata, strict=True)])

    return read


def published(scheme: str, bodies: str) -> Read:
    """Return a way that reads a file which a server serves in place."""

    def read(server: dis.Server, path: Path) -> Arrived:
        _publish(server, path)
        return _ask(server, location(server, "data", scheme, bodies=bodies))

    return read


def apart(scheme: str) -> Read:
    """Return a way that reads a published file with metadata and bodies over two connections."""

    def read(server: dis.Server, path: Path) -> Arrived:
        _publish(server, path)
        return _ask(server, [location(server, "data", scheme, streams=streams) for streams in ("metadata", "bodies")])

    return read


def live(scheme: str, bodies: str) -> Read:
    """Return a way in which libarrow reads the file for each client, and the server encodes it again."""

    def read(server: dis.Server, path: Path) -> Arrived:
        server.publish("data", lambda: _reader(path))
        return _ask(server, location(server, "data", scheme, bodies=bodies))

    return read


def careless(scheme: str, bodies: str) -> Read:
    """Return a way that reads from the server without checks."""

    def read(_: dis.Server, path: Path) -> Arrived:
        listener, uri = serve(scheme, path, by_address=bodies == "any")
        with closing(listener):
            return read_all(dis.open_stream(uri, b"data", allow_rma=True, timeout=PATIENCE, max_body=MAX_BODY))

    return read


def _ask(server: dis.Server, uri: str | list[str]) -> Arrived:
    ticket = server.ticket("data")
    return read_all(dis.open_stream(uri, ticket, allow_rma=True, timeout=PATIENCE, max_body=MAX_BODY))


def _reader(path: Path) -> pa.RecordBatchReader:
    if not is_file(path):
        return pa.ipc.open_stream(path)
    file = pa.ipc.open_file(path)
    batches: Iterator[pa.RecordBatch] = (file.get_batch(index) for index in range(file.num_record_batches))
    return pa.RecordBatchReader.from_batches(file.schema, batches)


def is_file(path: Path) -> bool:
    """Return whether the name says that this is an IPC file rather than a stream."""
    return path.suffix == ".arrow_file" or path.parent.name == "arrow-ipc-file"


#: Media that only run the ways specific to them, because each connection takes long.
_SLOW = ("tls", "ucx", "fabric")
#: Kinds of bodies by medium. Media without addresses are tested with both as well, except for TLS, which differs from
#: tcp only below the frames.
_BODIES = {scheme: ("packed",) if scheme == "tls" else ("any", "packed") for scheme in LISTEN}
_ADDRESSES = ("shm", "ucx", "fabric")

_PUBLISHED = {
    f"published-{scheme}-{bodies}": published(scheme, bodies) for scheme in LISTEN for bodies in _BODIES[scheme]
}
_LIVE = {
    f"live-{scheme}-{bodies}": live(scheme, bodies)
    for scheme in LISTEN
    for bodies in _BODIES[scheme]
    if scheme not in _SLOW
}
_APART = {f"apart-{scheme}": apart(scheme) for scheme in LISTEN if scheme not in _SLOW}
_CARELESS = {
    f"careless-{scheme}-{bodies}": careless(scheme, bodies)
    for scheme in LISTEN
    for bodies in _BODIES[scheme]
    if scheme != "tls" and (bodies == "packed" or scheme in _ADDRESSES)
}

#: Ways without a medium.
DIRECT = {
    "libarrow": by_libarrow,
    "opened-mapped": opened(memory_map=True),
    "opened-plain": opened(memory_map=False),
    "awaited": awaited,
    "pushed-whole": pushed(1 << 30),
    "pushed-in-pieces": pushed(61),
    "in-process": in_process,
}


def medium(way: str) -> str:
    """Return the scheme that a way uses, or an empty string."""
    return next((part for part in way.split("-") if part in LISTEN), "")


def slow(way: str) -> bool:
    """Return whether a way takes much longer than others."""
    return medium(way) in _SLOW


WAYS: dict[str, Read] = {**DIRECT, **_PUBLISHED, **_LIVE, **_APART, **_CARELESS}

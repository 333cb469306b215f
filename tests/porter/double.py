"""A client and a server in plain Python with its standard library, written from docs/framing.md alone.

pyarrow writes and reads the Arrow IPC bytes; it knows nothing of the framing. The constants are copied from the page.
"""

from __future__ import annotations

import array
import fcntl
import json
import mmap
import os
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

PREAMBLE = bytes.fromhex("44 49 53 53 4F 43 00 01")
UNTAGGED, TAGGED, REGION, ABORT, RUN = 1, 2, 3, 4, 5
SEALED = 1
PATIENCE = 20.0  # seconds


class Aborted(Exception):
    """The error of a peer that gave up, with its reason."""


class Broken(Exception):
    """The name of the rule that the peer has broken."""


class Frame(NamedTuple):
    kind: int
    tag: int
    payload: bytes


class Message(NamedTuple):
    """The flatbuffer of an IPC message, and its packed body, which is None for a schema."""

    header: bytes
    body: bytes | None


# The framing


def encode(kind: int, payload: bytes, tag: int = 0) -> bytes:
    return struct.pack("<QQ", kind << 56 | len(payload), tag) + payload + bytes(-len(payload) % 8)


class Wire:
    """A connection that sends and receives frames, and the descriptors that come with them."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        self.socket = sock
        self.descriptors: list[int] = []
        self._greeted = self._was_greeted = False

    def send(self, *frames: bytes, descriptors: Sequence[int] = ()) -> None:
        data = b"".join(frames)
        if not self._greeted:
            self._greeted, data = True, PREAMBLE + data
            if descriptors:  # descriptors belong to the first byte of the frame, not to the preamble
                self.socket.sendall(PREAMBLE)
                data = data[len(PREAMBLE) :]
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            data = data[self.socket.sendmsg([data], rights) :]
        self.socket.sendall(data)

    def receive(self) -> Frame | None:
        """Return the next frame, or None if the stream ends between two frames."""
        if not self._was_greeted:
            assert self._exactly(8) == PREAMBLE
            self._was_greeted = True
        head = self._exactly(16, may_end=True)
        if not head:
            return None
        word, tag = struct.unpack("<QQ", head)
        length = word & (1 << 56) - 1
        payload = self._exactly(length + -length % 8)
        assert not any(payload[length:])
        frame = Frame(word >> 56, tag, payload[:length])
        if frame.kind == ABORT:
            raise Aborted(frame.payload.decode())
        assert frame.kind == TAGGED or not frame.tag
        return frame

    def read_all(self) -> None:
        """Read and drop every frame up to the end."""
        while self.receive() is not None:
            pass

    def _exactly(self, size: int, may_end: bool = False) -> bytes:
        data = bytearray()
        while len(data) < size:
            if self.socket.family == socket.AF_UNIX:
                piece, rights, _, _ = self.socket.recvmsg(min(size - len(data), 1 << 20), socket.CMSG_SPACE(253 * 4))
                for _, _, raw in rights:
                    self.descriptors.extend(array.array("i", raw))
            else:
                piece = self.socket.recv(min(size - len(data), 1 << 20))
            if not piece:
                assert may_end, "the peer ended within a frame"
                assert not data, "the peer ended within the head of a frame"
                return b""
            data += piece
        return bytes(data)

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def taken_apart(payload: bytes) -> Iterator[Frame]:
    """Yield the messages of a RUN."""
    n, u, t = struct.unpack_from("<QQQ", payload)
    tags = struct.unpack_from(f"<{n}Q", payload, 24)
    untagged = 24 + 8 * n
    tagged = untagged + n * u + -(n * u) % 8
    for index in range(n):
        yield Frame(UNTAGGED, 0, payload[untagged + index * u : untagged + (index + 1) * u])
        yield Frame(TAGGED, tags[index], payload[tagged + index * t : tagged + (index + 1) * t])


def run_of(pairs: Sequence[tuple[bytes, int, bytes]]) -> bytes:
    """Encode a RUN of (untagged message, tag, tagged message); all messages of a kind have the same size."""
    untagged, tags, tagged = zip(*pairs, strict=True)
    parts = b"".join(untagged), struct.pack(f"<{len(tags)}Q", *tags), b"".join(tagged)
    return encode(
        RUN,
        struct.pack("<QQQ", len(pairs), len(untagged[0]), len(tagged[0]))
        + parts[1]
        + parts[0]
        + bytes(-len(parts[0]) % 8)
        + parts[2]
        + bytes(-len(parts[2]) % 8),
    )


# Arrow IPC


def split(batches: Sequence[pa.RecordBatch]) -> list[Message]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [
        Message(one.metadata.to_pybytes(), None if one.type == "schema" else one.body.to_pybytes()) for one in messages
    ]


def join(messages: Iterable[Message]) -> pa.Table:
    parts = []
    for header, body in messages:
        header += bytes(-len(header) % 8)
        parts.append(struct.pack("<Ii", 0xFFFFFFFF, len(header)) + header + (body or b""))
    return pa.ipc.open_stream(b"".join(parts)).read_all()


def slot(header: bytes, table: int, number: int) -> int:
    """Return the position of a field in a flatbuffer's table, or 0 if the field is missing."""
    vtable = table - int(struct.unpack_from("<i", header, table)[0])
    if 4 + 2 * number >= struct.unpack_from("<H", header, vtable)[0]:
        return 0
    offset = int(struct.unpack_from("<H", header, vtable + 4 + 2 * number)[0])
    return table + offset if offset else 0


def follow(header: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", header, at)[0])


def buffers(header: bytes) -> tuple[int, list[tuple[int, int]]]:
    """Return bodyLength, and (offset, length) of each `Buffer` of a record batch or dictionary batch."""
    message = follow(header, 0)
    length_at = slot(header, message, 3)
    length = int(struct.unpack_from("<q", header, length_at)[0]) if length_at else 0
    batch = follow(header, slot(header, message, 2))
    if header[slot(header, message, 1)] == 2:  # DictionaryBatch { id, data, isDelta }
        batch = follow(header, slot(header, batch, 1))
    at = slot(header, batch, 2)
    if not at:
        return length, []
    vector = follow(header, at)
    (count,) = struct.unpack_from("<I", header, vector)
    return length, [struct.unpack_from("<qq", header, vector + 4 + 16 * index) for index in range(count)]


# The client


def address_of(uri: str) -> tuple[str, str, dict[str, str]]:
    scheme, _, rest = uri.partition("://")
    place, _, query = rest.partition("?")
    return scheme, place, dict(one.split("=", 1) for one in query.split("&"))


def dial(uri: str) -> Wire:
    scheme, place, _ = address_of(uri)
    if scheme == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(place)
        return Wire(sock)
    host, _, port = place.rpartition(":")
    return Wire(socket.create_connection((host, int(port))))


def structured(ticket: bytes, **members: object) -> bytes:
    return b"DISSREQ\x01" + struct.pack("<I", len(ticket)) + ticket + json.dumps(members).encode()


def ticket_and_members(identifier: bytes) -> tuple[bytes, dict[str, object]]:
    """Return the ticket of a request, and the members of the object after it."""
    if not identifier.startswith(b"DISSREQ\x01"):
        return identifier, {}
    rest = 12 + int(struct.unpack_from("<I", identifier, 8)[0])
    return identifier[12:rest], json.loads(identifier[rest:])


class Client:
    """A client that requests a stream and reads it whole, converting all messages to messages with packed bodies."""

    def __init__(self, uri: str, ticket: bytes, keep: bool = False) -> None:
        self.wire = dial(uri)
        self._regions: list[tuple[int, mmap.mmap]] = []
        self.ask(uri, ticket, keep)

    def ask(self, uri: str, ticket: bytes, keep: bool = False) -> None:
        """Request a stream, after everything of the last one was freed."""
        parameters = address_of(uri)[2]
        for _, memory in self._regions:
            memory.close()
        self._regions.clear()
        self._kept = keep
        self._frees_messages = b'"frees": "messages"' in ticket
        self._free_data = int(parameters["free_data"]) if "free_data" in parameters else None
        self._headers: dict[int, bytes] = {}
        self.bodies: dict[int, tuple[int, bytes]] = {}
        self._count: int | None = None
        self.kinds: set[int] = set()  # kinds of frames, and kinds of bodies times 100
        request = structured(ticket, keep=True) if keep else ticket
        self.wire.send(encode(TAGGED, request, int(parameters["want_data"])))

    def messages(self, half_close: bool = False) -> list[Message]:
        if half_close:
            self.wire.socket.shutdown(socket.SHUT_WR)
        while not self.complete:
            frame = self.wire.receive()
            assert frame is not None, "the stream is cut off"
            self.kinds.add(frame.kind)
            if frame.kind == REGION:
                base, size, _ = struct.unpack("<QQQ", frame.payload)
                descriptor = self.wire.descriptors.pop(0)
                self._regions.append((base, mmap.mmap(descriptor, size, prot=mmap.PROT_READ)))
                os.close(descriptor)
            else:
                for one in taken_apart(frame.payload) if frame.kind == RUN else (frame,):
                    self.take(one)
        found = [self._message(number) for number in range(self._count or 0)]
        if half_close or not self._leased:
            return found
        self.give_back()
        if not self._kept:
            assert self.wire.receive() is None  # nothing is leased: the server closes
        return found

    @property
    def complete(self) -> bool:
        return self._count is not None and len(self._headers) == self._count and len(self.bodies) >= self._count - 1

    def take(self, frame: Frame) -> None:
        if frame.kind == TAGGED:
            assert not frame.tag >> 32 & 0xFFFFFF
            self.bodies[frame.tag & 0xFFFFFFFF] = frame.tag >> 56, frame.payload
            self.kinds.add(100 * (frame.tag >> 56))
            return
        kind, number = struct.unpack_from("<BI", frame.payload)
        if kind == 0:
            self._count = number
        else:
            self._headers[number] = frame.payload[5:]

    def _message(self, number: int) -> Message:
        header = self._headers[number]
        if number not in self.bodies:
            return Message(header, None)
        kind, content = self.bodies[number]
        if kind == 0:
            return Message(header, content)
        length, extents = buffers(header)
        total, count, *pairs = struct.unpack(f"<{len(content) // 8}Q", content)
        assert total == sum(size for _, size in extents)
        assert count == len(extents)
        body = bytearray(length)
        for (offset, size), address, told in zip(extents, pairs[0::2], pairs[1::2], strict=True):
            assert told == size
            if size:
                base, memory = next((b, m) for b, m in self._regions if b <= address and address + size <= b + len(m))
                body[offset : offset + size] = memory[address - base : address - base + size]
            else:
                assert address == 0
        return Message(header, bytes(body))

    @property
    def _leased(self) -> list[int]:
        if self._frees_messages:
            return [number for number, (kind, _) in self.bodies.items() if kind]
        lists = [struct.unpack(f"<{len(body) // 8}Q", body) for kind, body in self.bodies.values() if kind]
        return [address for one in lists for address, size in zip(one[2::2], one[3::2], strict=True) if size]

    def give_back(self) -> None:
        leased = self._leased
        for first in range(0, len(leased), 8192):
            some = leased[first : first + 8192]
            self.wire.send(encode(TAGGED, struct.pack(f"<{len(some)}Q", *some), self._free_data or 0))

    def close(self) -> None:
        self.wire.close()
        for _, memory in self._regions:
            memory.close()


# The server


class Region:
    """A sealed memfd that clients may map, from the address `base` on."""

    def __init__(self, base: int, content: bytes) -> None:
        self.base, self.size = base, len(content)
        self.descriptor = os.memfd_create("porter", os.MFD_ALLOW_SEALING)
        os.write(self.descriptor, content)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)

    @property
    def frame(self) -> bytes:
        return encode(REGION, struct.pack("<QQQ", self.base, self.size, SEALED))


def metadata(number: int, header: bytes) -> bytes:
    return struct.pack("<BI", 1, number) + header


def end(count: int) -> bytes:
    return encode(UNTAGGED, struct.pack("<BI", 0, count))


def address_list(pairs: Sequence[tuple[int, int]]) -> bytes:
    flat = [number for pair in pairs for number in pair]
    return struct.pack(f"<{2 + len(flat)}Q", sum(size for _, size in pairs), len(pairs), *flat)


class Server:
    """A server that answers each request for `ticket` with `answer`, one client after the other."""

    WANT, FREE, PACKED = 11, 13, 1 << 63 | 15

    def __init__(self, scheme: str, path: str, ticket: bytes, answer: Callable[[Server, Wire], None]) -> None:
        if scheme == "shm":
            self._listening = socket.socket(socket.AF_UNIX)
            self._listening.bind(path)
            self._listening.listen()
        else:
            self._listening = socket.create_server(("127.0.0.1", 0))
            path = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.uri = f"{scheme}://{path}?want_data={self.WANT}&free_data={self.FREE}"
        self._ticket, self._answer = ticket, answer
        self.is_packed = False  # whether the client has requested packed bodies
        self.frees_messages = False  # whether the client frees messages
        self.held: Counter[int] = Counter()  # what the client of this connection still has to free
        self.leased: list[int] = []
        self.freed: list[int] = []
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def lease(self, pairs: Sequence[tuple[int, int]], number: int) -> bytes:
        """Return the address list of a message, and record the addresses, or the message, as leased."""
        addresses = [number] if self.frees_messages else [address for address, size in pairs if size]
        self.leased += addresses
        self.held.update(addresses)
        return address_list(pairs)

    def _run(self) -> None:
        while True:
            try:
                wire = Wire(self._listening.accept()[0])
            except OSError:
                return
            try:
                self._serve(wire)
            except Broken as broken:
                wire.send(encode(ABORT, f"the client breaks {broken}\0005".encode()))
            except (Aborted, ConnectionError):
                pass  # the client may go at any time
            except BaseException as error:
                self.failures.append(error)
            finally:
                wire.close()

    def _serve(self, wire: Wire) -> None:
        keep: object = True
        while keep and (request := wire.receive()) is not None:
            self.held.clear()
            if request.kind != TAGGED:
                raise Broken("client-frames")
            if request.tag not in (self.WANT, self.PACKED):
                raise Broken("client-tags")
            ticket, members = ticket_and_members(request.payload)
            if ticket != self._ticket or "part" in members:
                self.refuse(wire)
                return
            keep = members.get("keep")
            self.is_packed = request.tag == self.PACKED
            self.frees_messages = "frees" in members
            self._answer(self, wire)
            self.collect(wire)

    def refuse(self, wire: Wire) -> None:
        """Answer a client whose ticket is unknown."""
        wire.send(encode(ABORT, b"there is no such ticket\00027"))

    def collect(self, wire: Wire) -> None:
        """Receive frees until the client holds nothing, or is gone."""
        while self.held and (frame := wire.receive()) is not None:
            if frame.kind != TAGGED:
                raise Broken("client-frames")
            if frame.tag != self.FREE:
                raise Broken("client-tags")
            if not frame.payload or len(frame.payload) % 8:
                raise Broken("free-length")
            for (address,) in struct.iter_unpack("<Q", frame.payload):
                self.free(address)

    def free(self, address: int) -> None:
        """Take an address back."""
        if not self.held[address]:
            raise Broken("free-leased")
        self.held[address] -= 1
        self.held += Counter()  # without those that are not held any more
        self.freed.append(address)

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE)
        if self.failures:
            raise self.failures[0]

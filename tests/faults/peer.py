"""Peers with their own implementation of the framing, so that they can break each of its rules.

The module imports nothing of dissociated: the layouts are written a second time, following docs/framing.md and the
docstrings. It also runs as a process of its own, to be killed or stopped:

    python peer.py server SCHEME ADDRESS    runs the steps that come as JSON on standard input, see `play`
    python peer.py client SCHEME ADDRESS
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import signal
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

PREAMBLE = b"DISSOC\x00\x01"
UNTAGGED, TAGGED, REGION, ABORT, RUN = 1, 2, 3, 4, 5
FILE, SEALED, LIVE = 0, 1, 2
PACKED, ADDRESSES = 0, 1

#: Tags that the scripted servers put into their URIs.
WANT, FREE = 7, 9

#: Environment variables with the files of the certificate and the key of a server over tls.
CERTIFICATE, KEY = "DISSOCIATED_TEST_CERTIFICATE", "DISSOCIATED_TEST_KEY"

#: Seconds that anything in these tests may wait.
PATIENCE = 20.0


def head(kind: int, length: int, tag: int = 0) -> bytes:
    return struct.pack("<QQ", kind << 56 | length, tag)


def frame(kind: int, payload: bytes = b"", tag: int = 0) -> bytes:
    return head(kind, len(payload), tag) + payload + bytes(-len(payload) % 8)


def metadata(sequence: int, header: bytes) -> bytes:
    return frame(UNTAGGED, struct.pack("<BI", 1, sequence) + header)


def end(count: int) -> bytes:
    return frame(UNTAGGED, struct.pack("<BI", 0, count))


def body(sequence: int, payload: bytes, kind: int = PACKED) -> bytes:
    return frame(TAGGED, payload, kind << 56 | sequence)


def addresses(*pairs: tuple[int, int], total: int | None = None, count: int | None = None) -> bytes:
    """Return a body of kind 1: total, count, pairs. The total and the count may be wrong."""
    lengths = [length for _, length in pairs]
    flat = [sum(lengths) if total is None else total, len(pairs) if count is None else count]
    for pair in pairs:
        flat += pair
    return struct.pack(f"<{len(flat)}Q", *flat)


def run(count: int, untagged_size: int, tagged_size: int, *parts: bytes) -> bytes:
    """Return a run of messages from its tags, its untagged messages and its tagged messages."""
    padded = b"".join(part + bytes(-len(part) % 8) for part in parts)
    return frame(RUN, struct.pack("<QQQ", count, untagged_size, tagged_size) + padded)


def want(ticket: bytes, tag: int = WANT) -> bytes:
    return PREAMBLE + frame(TAGGED, ticket, tag)


def free(*given_back: int, tag: int = FREE) -> bytes:
    return frame(TAGGED, struct.pack(f"<{len(given_back)}Q", *given_back), tag)


def region(base: int, size: int, backing: int) -> bytes:
    return frame(REGION, struct.pack("<QQQ", base, size, backing))


class Frame(NamedTuple):
    kind: int
    tag: int
    payload: bytes


def is_end(received: Frame) -> bool:
    return received.kind == UNTAGGED and received.payload[0] == 0


class RawConnection:
    """A stream socket with framing methods that allow misuse."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(PATIENCE)
        self.socket = sock
        self.descriptors: list[int] = []
        self._greeted = False

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def send_with(self, data: bytes, descriptors: Iterable[int]) -> None:
        """Send `data`, with descriptors attached to its first byte."""
        rights = array.array("i", descriptors)
        sent = self.socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert sent == len(data)

    def read_exactly(self, size: int) -> bytes:
        """Read `size` bytes. Raise EOFError if the peer closes the connection first."""
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._read(min(size - len(data), 1 << 20))
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise EOFError(f"the peer ended after {len(data)} of {size} bytes")
            data += piece
        return bytes(data)

    def _read(self, size: int) -> bytes:
        if isinstance(self.socket, ssl.SSLSocket):
            return self.socket.recv(size)
        piece, rights, _, _ = self.socket.recvmsg(size, socket.CMSG_SPACE(16 * 4))
        for _, _, raw in rights:
            self.descriptors.extend(array.array("i", raw))
        return piece

    def expect(self, opening: bytes) -> None:
        """Fail unless the peer begins with these bytes, which include its preamble."""
        assert self.read_exactly(len(opening)) == opening
        self._greeted = True

    def read_frame(self) -> Frame:
        if not self._greeted:
            assert self.read_exactly(8) == PREAMBLE
            self._greeted = True
        word, tag = struct.unpack("<QQ", self.read_exactly(16))
        length = word & (1 << 56) - 1
        payload = self.read_exactly(length + -length % 8)
        assert not any(payload[length:])
        return Frame(word >> 56, tag, payload[:length])

    def read_frames(self) -> list[Frame]:
        """Read every frame to the end of the connection, which must lie between two frames."""
        frames = []
        while True:
            try:
                frames.append(self.read_frame())
            except EOFError as error:
                if "after 0 of" not in str(error):
                    raise
                return frames

    def read_rest(self) -> bytes:
        """Read every byte to the end of the connection."""
        data = bytearray()
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(1 << 20):
                data += piece
        return bytes(data)

    def hold(self) -> None:
        """Send nothing, and wait until the peer closes the connection."""
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(1 << 20):
                pass

    def close(self) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Script = Callable[[RawConnection], None]


class RawServer:
    """A server that runs `script` on one connection after another, and enforces no rule."""

    def __init__(self, scheme: str, address: str, script: Script) -> None:
        self.listening, place = listen(scheme, address)
        self.uri = f"{scheme}://{place}?want_data={WANT}&free_data={FREE}"
        self._address = address if scheme == "shm" else None
        self._script = script
        self._failure: BaseException | None = None
        self._done = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="raw server")
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock = self.listening.accept()[0]
            except OSError:
                return
            with RawConnection(self._wrapped(sock)) as connection:
                try:
                    self._script(connection)
                except (ConnectionResetError, BrokenPipeError):
                    pass  # The peer may close the connection at any time.
                except BaseException as error:
                    self._failure = error
            self._done.release()

    def _wrapped(self, sock: socket.socket) -> socket.socket:
        if not self.uri.startswith("tls:"):
            return sock
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(os.environ[CERTIFICATE], os.environ[KEY])
        return context.wrap_socket(sock, server_side=True)

    def wait_done(self) -> None:
        """Wait until the script has finished on one more connection."""
        assert self._done.acquire(timeout=PATIENCE), "the script of the raw server hangs"
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        if self._address is not None:
            os.unlink(self._address)
        if self._failure is not None:
            raise self._failure


def listen(scheme: str, address: str) -> tuple[socket.socket, str]:
    if scheme == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(address)
        sock.listen()
        return sock, address
    sock = socket.create_server(("127.0.0.1", 0))
    return sock, f"127.0.0.1:{sock.getsockname()[1]}"


def connect(uri: str) -> RawConnection:
    """Connect to the server at `uri`, and send nothing."""
    scheme, _, rest = uri.partition("://")
    place = rest.partition("?")[0]
    if scheme == "shm":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(place)
    else:
        host, _, port = place.rpartition(":")
        sock = socket.create_connection((host, int(port)))
        if scheme == "tls":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
    return RawConnection(sock)


def want_of(uri: str) -> int:
    """Return the want_data value in `uri`."""
    return int(uri.partition("want_data=")[2].partition("&")[0])


def free_of(uri: str) -> int:
    """Return the free_data value in `uri`."""
    return int(uri.partition("free_data=")[2].partition("&")[0])


def play(connection: RawConnection, steps: list[list[Any]], say: Callable[[str], None]) -> None:
    """Run scripted steps.

    Steps: send HEX; region BASE SIZE BACKING (a memfd of zeros, sealed as required); read N frames; stream (read to its
    end); reached (tell the parent); hold (until the peer closes the connection); sleep (forever).
    """

    for name, *rest in steps:
        if name == "send":
            connection.send(bytes.fromhex(rest[0]))
        elif name == "region":
            base, size, backing = rest
            descriptor = os.memfd_create("peer", os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, size)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            if backing == SEALED:
                seals |= fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            connection.send_with(region(base, size, backing), [descriptor])
            os.close(descriptor)
        elif name == "read":
            for _ in range(rest[0]):
                connection.read_frame()
        elif name == "reached":
            say("reached")
        elif name == "stream":
            while not is_end(connection.read_frame()):
                pass
        elif name == "sleep":
            signal.pause()
        elif name == "hold":
            connection.socket.settimeout(None)
            connection.hold()
        else:
            raise ValueError(name)


def main() -> None:
    def say(line: str) -> None:
        print(line, flush=True)

    role, scheme, address = sys.argv[1:]
    steps = json.loads(sys.stdin.readline())
    if role == "server":
        sock, place = listen(scheme, address)
        say(f"{scheme}://{place}?want_data={WANT}&free_data={FREE}")
        connection = RawConnection(sock.accept()[0])
    else:
        connection = connect(f"{scheme}://{address}")
    play(connection, steps, say)


if __name__ == "__main__":
    main()

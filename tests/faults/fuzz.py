"""Replays good conversations with random mutations, and counts what comes of it. Run as a process of its own:

    python -m faults.fuzz client|server|file SCHEME SEED COUNT

prints a JSON object: how often each exception came out, and an example of each; "read" where nothing was noticed.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import resource
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Callable

import pyarrow as pa

import dissociated as dis
from dissociated.errors import DissociatedError
from helpers import clients_end

from .peer import (
    PREAMBLE,
    REGION,
    UNTAGGED,
    RawConnection,
    connect,
    frame,
    free,
    free_of,
    is_end,
    listen,
    want,
    want_of,
)

MEMORY = 4 << 30  # bytes that the process may map
SILENCE = 0.05  # seconds after which a server has said all
TIMEOUT = 2.0

Piece = tuple[bytes, bytes | None]  # what is sent, and the content of the memory that is shared beside it


def dataset() -> pa.Table:
    """Something of everything: nulls, strings, nested types, dictionaries, batches enough for a run, an empty one."""
    rows = 20 * 16
    table = pa.table(
        {
            "n": pa.array([None if n % 5 == 0 else n for n in range(rows)], pa.int32()),
            "text": pa.array([f"text {n}" * (n % 3) for n in range(rows)]),
            "view": pa.array([f"view {n}" * (n % 4) for n in range(rows)], pa.string_view()),
            "list": pa.array([[n] * (n % 4) for n in range(rows)], pa.list_(pa.int16())),
            "struct": pa.array([{"a": n, "b": n % 2 == 0} for n in range(rows)]),
            "kind": pa.array(["x", "y", None, "z"] * (rows // 4)).dictionary_encode(),
        }
    )
    return pa.Table.from_batches([*table.to_batches(max_chunksize=16), table.to_batches()[0].slice(0, 0)])


def record(server: dis.Server, uri: str) -> list[Piece]:
    """What the server says, frame by frame."""
    pieces: list[Piece] = [(PREAMBLE, None)]
    with connect(uri) as connection:
        connection.send(want(server.ticket("numbers"), want_of(uri)))
        while True:
            kind, tag, payload = got = connection.read_frame()
            memory = None
            if kind == REGION:
                (descriptor,) = connection.descriptors
                memory = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
                os.close(connection.descriptors.pop())
            pieces.append((frame(kind, payload, tag), memory))
            if kind == UNTAGGED and is_end(got):
                return pieces


def mutate(pieces: list[Piece], random: random.Random) -> list[Piece]:
    pieces = list(pieces)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at = random.randrange(len(pieces))
        data, memory = pieces[at]
        how = random.randrange(11) if data else 5
        if how < 4:
            pieces[at] = changed(data, random), memory
        elif how == 4 and memory:
            pieces[at] = data, changed(memory, random)
        elif how == 5:
            del pieces[at]
        elif how == 6:
            pieces.insert(random.randrange(len(pieces)), pieces[at])
        elif how == 7:
            other = random.randrange(len(pieces))
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif how == 8:
            pieces[at] = data[: random.randrange(len(data))], memory
        elif how == 9:
            cut = random.randrange(len(data))
            pieces[at] = data[:cut] + random.randbytes(random.randrange(1, 20)) + data[cut:], memory
        elif memory:
            pieces[at] = data, memory[: random.randrange(len(memory))]
        else:
            del pieces[at:]
        if not pieces:
            return [(b"", None)]
    return pieces


def changed(data: bytes, random: random.Random) -> bytes:
    if not data:
        return data
    mutated = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(len(mutated))
        if random.random() < 0.5:
            mutated[at] ^= 1 << random.randrange(8)
        else:
            few = random.choice((b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff" * 8))
            mutated[at : at + len(few)] = few[: len(mutated) - at]
    return bytes(mutated)


class Outcomes:
    """What came out, and the first example of each."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.examples: dict[str, str] = {}

    def add(self, name: str, example: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        self.examples.setdefault(name, example)

    def validate(self, table: pa.Table) -> None:
        """Bodies are whatever the peer says they are. This is how to find out, without touching what is not there."""
        try:
            table.validate(full=True)
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            self.add("not valid", str(error))

    def attempt(self, number: int, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except DissociatedError as error:
            self.add(f"ours: {type(error).__name__}", f"{number}: {error}")
        except Exception as error:
            names = ", ".join(kind.__name__ for kind in type(error).__mro__[:3])
            self.add(f"other: {names}", f"{number}: {error!r}")
        else:
            self.add("read", str(number))


def fuzz_client(pieces: list[Piece], scheme: str, random: random.Random, count: int) -> Outcomes:
    with tempfile.TemporaryDirectory() as directory:
        listening, place = listen(scheme, f"{directory}/raw.sock")
        uri = f"{scheme}://{place}?want_data=7&free_data=9"
        turn: list[list[Piece]] = []

        def serve() -> None:
            while True:
                try:
                    sock = listening.accept()[0]
                except OSError:
                    return
                with RawConnection(sock) as connection:
                    try:
                        replay(connection, turn[0])
                        connection.socket.shutdown(socket.SHUT_WR)
                        connection.hold()
                    except OSError:
                        pass  # the client has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        outcomes = Outcomes()

        def attempt() -> None:
            outcomes.validate(dis.open_stream(uri, b"ticket", timeout=TIMEOUT, max_body=1 << 28).read_all())

        for number in range(count):
            turn[:] = [mutate(pieces, random) if number else pieces]
            outcomes.attempt(number, attempt)
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
    return outcomes


def replay(connection: RawConnection, pieces: list[Piece]) -> None:
    import fcntl

    for data, memory in pieces:
        if not data:
            continue
        if memory is None:
            connection.send(data)
            continue
        descriptor = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        try:
            os.write(descriptor, memory)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, 0xF)
            connection.send_with(data, [descriptor])
        finally:
            os.close(descriptor)


def fuzz_server(server: dis.Server, uri: str, random: random.Random, count: int) -> Outcomes:
    """Mutates what a client says: its request and its frees. What a server logs as its own fault is an outcome."""
    outcomes = Outcomes()

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:  # that a client breaks rules is a warning
                outcomes.add(f"logged: {record.levelname}", f"{number}: {record.getMessage()} {record.exc_info}")

    logging.getLogger("dissociated").addHandler(Log())
    held: list[int] = []
    number = 0
    for data, _ in record(server, uri):
        if data[15:16] == b"\1":  # the body of a message, by address
            words = struct.unpack(f"<{len(data) // 8}Q", data)
            held += (address for address, length in zip(words[4::2], words[5::2], strict=True) if length)
    tag = free_of(uri) if "free_data" in uri else 9
    conversation: list[Piece] = [
        (PREAMBLE, None),
        (want(server.ticket("numbers"), want_of(uri))[len(PREAMBLE) :], None),
        *((free(address, tag=tag), None) for address in held),
    ]
    for number in range(count):
        pieces = mutate(conversation, random) if number else conversation[:2]

        def attempt(pieces: list[Piece] = pieces) -> None:
            with connect(uri) as connection:
                try:
                    for data, _ in pieces:
                        connection.send(data)
                    connection.socket.shutdown(socket.SHUT_WR)
                    connection.socket.settimeout(SILENCE)
                    connection.hold()
                except OSError:
                    pass  # the server has had enough, or waits until this client hangs up what it leases

        outcomes.attempt(number, attempt)
        if number % 50 == 0:  # it goes on serving
            dis.open_stream(uri, server.ticket("numbers"), timeout=TIMEOUT).read_all().validate(full=True)
    return outcomes


def fuzz_file(server: dis.Server, random: random.Random, count: int) -> Outcomes:
    """Mutates files before they are published, and reads what can be published."""
    outcomes = Outcomes()
    table = dataset()
    files = []
    for new in pa.ipc.new_stream, pa.ipc.new_file:
        sink = pa.BufferOutputStream()
        with new(sink, table.schema) as writer:
            # A file has room for one dictionary, and so has its reader.
            writer.write_table(table)
        files.append(sink.getvalue().to_pybytes())
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/file"

        def attempt() -> None:
            server.publish("file", path)
            for uri in server.locations("file"):
                table = dis.open_stream(uri, server.ticket("file"), timeout=TIMEOUT).read_all()
                outcomes.validate(table)
            server.dataset("file").open_reader()

        for number in range(count):
            data = files[number % 2]
            if number > 1:
                data = changed(data, random) if number % 5 else data[: random.randrange(len(data))]
            with open(path, "wb") as file:  # a new one: what is mapped must not change
                file.write(data)
            outcomes.attempt(number, attempt)
            os.unlink(path)
    return outcomes


def main() -> None:
    faulthandler.enable()
    role, scheme, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dice = random.Random(seed)
    with dis.Server(["shm:" if scheme == "shm" else "tcp://127.0.0.1:0"], catalog=None) as server:
        server.publish("numbers", dataset())
        (uri,) = server.locations("numbers")
        if role == "client":
            pieces = record(server, uri)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            outcomes = fuzz_client(pieces, scheme, dice, count)
        elif role == "server":
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            outcomes = fuzz_server(server, uri, dice, count)
        else:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            outcomes = fuzz_file(server, dice, count)
    clients_end()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if left:
        outcomes.add("left: threads", str(left))
    print(json.dumps({"counts": outcomes.counts, "examples": outcomes.examples}))


if __name__ == "__main__":
    main()

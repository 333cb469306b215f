"""Replay good conversations with random mutations, send hostile requests, and count the outcomes.

    python -m faults.fuzz ROLE SCHEME SEED COUNT

prints a JSON object: how often each outcome came, an example of each, and an example of each that no user should see.
The outcome "read" means that nobody noticed the mutation. Roles are client, server and file, and those in
`faults.requests`. In the folder `tests`,

    python -m faults.fuzz --seconds 600 [ROLE ...]

runs each role in its own processes, with other seeds each time, and prints the first example of each bad outcome, among
them processes that crash. Equal roles, seeds and counts give equal runs.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import logging
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

import pyarrow as pa

import dissociated as dis
from support.helpers import clients_end

from .outcomes import Outcomes, changed
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
from .requests import ROLES, failures

MEMORY = 4 << 30  # bytes that the process may map
REQUESTS_MEMORY = 12 << 30  # bytes for roles in which gRPC and libarrow start threads
LONG_COUNT, LONG_TIMEOUT = 1500, 300.0
SILENCE = 0.05  # seconds of silence after which the server has said everything
TIMEOUT = 2.0

Piece = tuple[bytes, bytes | None]  # the sent bytes, and the content of the memory shared with them


def dataset() -> pa.Table:
    """Return a table with nulls, strings, nested types, dictionaries, enough batches for a run, and an empty batch."""
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
    """Record the server's frames of one conversation."""
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
                        pass  # The client has closed the connection.

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
    """Mutate the request and the frees of a client. An error that the server logs as its own is an outcome."""
    outcomes = Outcomes()

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:  # Clients that break rules cause warnings.
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
                    # The server has closed the connection, or waits for this client to close it because of its leases.
                    pass

        outcomes.attempt(number, attempt)
        if number % 50 == 0:  # The server still serves others.
            dis.open_stream(uri, server.ticket("numbers"), timeout=TIMEOUT).read_all().validate(full=True)
    return outcomes


def fuzz_file(server: dis.Server, random: random.Random, count: int) -> Outcomes:
    """Mutate files before they are published, and read every file that can be published."""
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
            with open(path, "wb") as file:  # Use a new file, because a mapped file must not change.
                file.write(data)
            outcomes.attempt(number, attempt)
            os.unlink(path)
    return outcomes


def play(role: str, scheme: str, seed: int, count: int) -> Outcomes:
    """Run a role in this process."""
    dice = random.Random(seed)
    if role in ROLES:
        resource.setrlimit(resource.RLIMIT_AS, (REQUESTS_MEMORY, REQUESTS_MEMORY))
        outcomes = Outcomes()
        with failures(outcomes):
            ROLES[role](outcomes, dice, count)
        return outcomes
    with dis.Server(["shm:" if scheme == "shm" else "tcp://127.0.0.1:0"], catalog=None) as server:
        server.publish("numbers", dataset())
        (uri,) = server.locations("numbers")
        if role == "client":
            pieces = record(server, uri)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            return fuzz_client(pieces, scheme, dice, count)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        return fuzz_server(server, uri, dice, count) if role == "server" else fuzz_file(server, dice, count)


def main() -> None:
    if "--seconds" in sys.argv:
        sys.exit(play_for(float(sys.argv[2]), sys.argv[3:]))
    faulthandler.enable()
    role, scheme, seed, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    shown = os.dup(1)
    os.dup2(2, 1)  # Silence the commands that a role runs.
    outcomes = play(role, scheme, seed, count)
    clients_end()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    left = [name for name in left if not name.startswith("Dummy-")]  # threads of gRPC that called Python once
    if left:
        outcomes.add("left: threads", str(left))
    result = {"counts": outcomes.counts, "examples": outcomes.examples, "unexpected": outcomes.unexpected()}
    os.write(shown, json.dumps(result).encode())


def play_for(seconds: float, chosen: list[str]) -> int:
    """Run roles in turn until the time is up, print the bad outcomes of each, and return how many roles had any."""
    end = time.monotonic() + seconds
    found = 0
    plays = [(role, "tcp") for role in ROLES]
    plays += [(role, scheme) for role in ("client", "server", "file") for scheme in ("tcp", "shm")]
    for number, (role, scheme) in enumerate(itertools.cycle(one for one in plays if one[0] in (chosen or one))):
        if time.monotonic() > end:
            return found
        arguments = [role, scheme, str(int(time.time()) + number), str(LONG_COUNT)]
        command = [sys.executable, "-m", "faults.fuzz", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_TIMEOUT, check=False)
        except subprocess.TimeoutExpired:
            bad = {"hang": f"it did not end in {LONG_TIMEOUT} s"}
        else:
            crash = {"crash": f"status {done.returncode}: {done.stderr[-3000:]}"}
            bad = crash if done.returncode else json.loads(done.stdout)["unexpected"]
        found += bool(bad)
        print(" ".join(arguments), "found:" if bad else "good", flush=True)
        for name, example in bad.items():
            print(f"    {name}: {example}", flush=True)
    return found


if __name__ == "__main__":
    main()

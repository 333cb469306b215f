"""Helpers for every test: waiting for a condition, and checks for leaked resources."""

from __future__ import annotations

import base64
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, ModuleType, TracebackType
from typing import Any
from urllib.parse import quote

import pyarrow as pa

import dissociated as dis
from dissociated.control.commit import StagedSegment
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint

#: Deadline, in seconds, of everything that a test waits for. Only failing tests wait this long.
PATIENCE = 20.0

#: A function that starts a server, by default over shm and tcp and without a catalog.
Serve = Callable[..., dis.Server]


def location(server: dis.Server, name: str, scheme: str, **options: Any) -> str:
    """Return the URI of a dataset over the transport `scheme`. The options are those of `Server.locations`."""
    (uri,) = (uri for uri in server.locations(name, **options) if uri.partition(":")[0] == scheme)
    return uri


def open_live(server: dis.Server, scheme: str, **options: Any) -> pa.RecordBatchReader:
    """Read the dataset named "live"."""
    return dis.open_stream(location(server, "live", scheme), server.ticket("live"), timeout=PATIENCE, **options)


def open_over_flight(client: dis.Client, ticket: bytes) -> pa.RecordBatchReader:
    """Read the stream of a ticket over Flight, from the server of this client."""
    endpoint = Endpoint(ticket, ())
    return client.read_endpoint(DatasetInfo("", pa.schema([]), None, None, (endpoint,)), endpoint, transport="grpc")


def commit_of(
    name: str, segments: Iterable[str | StagedSegment], schema: pa.Schema | None = None, **options: Any
) -> dis.Commit:
    """Return the commit of staged segments, which may be names in the stage of the catalog's own node."""
    staged = [StagedSegment(segment) if isinstance(segment, str) else segment for segment in segments]
    return dis.Commit(name, staged, schema, **options)


def misnamed(table: pa.Table) -> pa.Table:
    """Return `table` with a name that is not UTF-8 in place of each column name NAME, as damaged files have it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue().to_pybytes().replace(b"NAME", b"N\xffME")).read_all()


def serving(server: dis.Server) -> set[threading.Thread]:
    """Return the threads that serve one connection each, by their names."""
    names = tuple(f"serve {uri} " for uri in server.endpoints.listener_uris())
    return {thread for thread in threading.enumerate() if thread.name.startswith(names)}


def connections_left(server: dis.Server, but: Iterable[threading.Thread] = (), patience: float = PATIENCE) -> int:
    """Return how many connections of `server` stay open after a wait, not counting the threads in `but`."""
    end = monotonic() + patience
    while (left := serving(server).difference(but)) and monotonic() < end:
        _join(left, patience)  # The next iteration joins the threads that the listener started meanwhile.
    return server.connections


def clients_end(but: Iterable[threading.Thread] = ()) -> set[threading.Thread]:
    """Wait for the client threads whose arrays were all dropped: they release the memory last.

    Threads in `but` are ignored. An earlier test may have left them with live arrays.

    Returns:
        The threads that did not end.
    """
    threads = {thread for thread in threading.enumerate() if thread.name == "give back"}.difference(but)
    _join(threads)
    return {thread for thread in threads if thread.is_alive()}


def _join(threads: Iterable[threading.Thread], patience: float = PATIENCE) -> None:
    end = monotonic() + patience

    def joined(thread: threading.Thread) -> bool:
        try:
            thread.join(max(0.0, end - monotonic()))
        except RuntimeError:  # It is just starting, and cannot be joined.
            return False
        return True

    for thread in threads:
        wait_until(partial(joined, thread), f"{thread.name} starts")


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """Return the open descriptors of a process (default: this one) and their targets."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # The descriptor of this listing, or a descriptor closed meanwhile.
            found[int(entry.name)] = os.readlink(entry)
    return found


def files_below(directory: Path, pid: int | str = "self") -> set[str]:
    """Return the files below `directory` that a process (default: this one) has open or mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(None, 5)[5] for line in lines if str(directory) in line}
    found = {*descriptors(pid).values(), *mapped}
    return {target for target in found if target.startswith(f"{directory}/") and not os.path.isdir(target)}


def wait_until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until `condition` holds. Fail with the message `what` after `patience` seconds.

    Conditions read all of /proc, or ask a server: a long wait asks less often, and leaves the processor to others.
    """
    began = monotonic()
    while not condition():
        waited = monotonic() - began
        assert waited < patience, f"waited {patience:g} s in vain: {what}"
        sleep(min(max(waited / 100, 0.005), 0.05))


class Child(subprocess.Popen[str]):
    """A process that is killed when its `with` block fails. `Popen` would wait for it forever."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)


def rest_of(process: subprocess.Popen[str]) -> str:
    """Return the rest of a process's output once it ends. `communicate` would lose lines that were read ahead."""
    assert process.stdout is not None
    with process:
        return process.stdout.read()


@contextmanager
def case(what: object) -> Iterator[None]:
    """Add the name of the case to a failure."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {what}")
        raise


def written_forms(secret: bytes) -> set[str]:
    """Return the forms in which a log might contain `secret`."""
    encoded = base64.b64encode(secret).decode()
    urlsafe = base64.urlsafe_b64encode(secret).decode()
    plain = {secret.hex(), encoded, encoded.rstrip("="), urlsafe, repr(secret)[2:-1], secret.decode("latin-1")}
    return plain | {quote(encoded, safe=""), quote(secret, safe="")}


_CLOSING = 5.0  # seconds that threads of C++, such as gRPC's, may take to close a descriptor


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fail if the block leaves a new thread or descriptor behind."""
    threads, before = set(threading.enumerate()), descriptors()

    def left() -> tuple[set[threading.Thread], dict[int, str]]:
        now = {number: target for number, target in descriptors().items() if number not in before}
        return set(threading.enumerate()) - threads, now

    yield
    if any(left()):  # Collect only if something is left: doing so after each test takes a tenth of the run.
        gc.collect()
        _join(left()[0])
        end = monotonic() + _CLOSING
        while left()[1] and monotonic() < end:
            sleep(0.01)
    left_threads, left_descriptors = left()
    assert not left_threads, "threads are left behind"
    assert not left_descriptors, f"descriptors are left behind: {_described(left_descriptors)}"


def _described(targets: dict[int, str]) -> dict[int, str]:
    """Add the addresses of sockets to the targets of descriptors."""
    described = {}
    for number, target in targets.items():
        described[number] = target
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            described[number] += f" {copy.family.name} of {copy.getsockname()!r}"
            described[number] += f" to {copy.getpeername()!r}"
    return described


class Interruption:
    """A Ctrl-C in this thread before the line number `at` that the functions of a module reach.

    Each line counts once, and only within the `with` block. In the main thread a real SIGINT is raised.
    """

    def __init__(self, module: ModuleType, *functions: str, at: int = 0) -> None:
        self.came = False
        self._file = module.__file__
        self._functions = functions
        self._at = at
        self._lines: set[int] = set()

    def __enter__(self) -> Interruption:
        self._tracing = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._tracing)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename != self._file or frame.f_code.co_name not in self._functions:
            return None
        if event == "line" and not self.came:
            self._lines.add(frame.f_lineno)
            if len(self._lines) > self._at:
                self.came = True
                if threading.current_thread() is threading.main_thread():
                    signal.raise_signal(signal.SIGINT)
                else:
                    raise KeyboardInterrupt
        return self._trace


@contextmanager
def no_threads() -> Iterator[None]:
    """Make the start of every Python thread fail, by asking for stacks larger than the memory."""
    size = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(size)


def as_big_endian(stream: bytes) -> bytes:
    """Return `stream` with a schema that declares big-endian bodies, which libarrow does not write on our machines.

    `Schema.endianness` is absent when it is little-endian. Its slot is made to point to a 1 appended to the message.
    """
    (length,) = struct.unpack_from("<i", stream, 4)
    header = bytearray(stream[8 : 8 + length])

    def slot(table: int, index: int) -> int:
        return table - int(struct.unpack_from("<i", header, table)[0]) + 4 + 2 * index

    def follow(at: int) -> int:
        return at + int(struct.unpack_from("<I", header, at)[0])

    message = follow(0)
    schema = follow(message + struct.unpack_from("<H", header, slot(message, 2))[0])
    struct.pack_into("<H", header, slot(schema, 0), len(header) - schema)
    header += struct.pack("<q", 1)
    return stream[:4] + struct.pack("<i", len(header)) + bytes(header) + stream[8 + length :]


#: A script that forks for each case, so that each starts with the library imported, and no native library loaded.
_COMPLAINTS = """
import json, os, sys
import dissociated as dis

dis.Server, dis.open_stream
for script, environment in json.loads(sys.argv[1]):
    if os.fork():
        assert os.wait()[1] == 0, script
        continue
    os.environ.update(environment)
    try:
        exec(script)
    except dis.errors.TransportError as error:
        print(json.dumps(str(error)), flush=True)
        os._exit(0)
    os._exit(1)
"""


def complaints(cases: Mapping[str, tuple[str, Mapping[str, str]]], **environment: str) -> dict[str, str]:
    """Run programs that cannot use a transport, and return the message of each program's TransportError.

    Args:
        cases: Pairs of a script and its environment variables, by name.
        environment: Variables that are set before the interpreter starts, for all cases.
    """
    run = subprocess.run(
        [sys.executable, "-c", _COMPLAINTS, json.dumps(list(cases.values()))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not run.returncode, run.stderr
    messages = [json.loads(line) for line in run.stdout.splitlines()]
    return dict(zip(cases, messages, strict=True))

"""What every test may use: one way to wait, and an account of what is left behind."""

from __future__ import annotations

import base64
import gc
import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep
from types import FrameType, ModuleType, TracebackType
from typing import Any
from urllib.parse import quote

import pyarrow as pa

import dissociated as dis

#: Seconds that anything awaited may take. Nothing waits this long but a test that fails.
PATIENCE = 20.0

#: Makes a server, of shm and tcp unless it is told otherwise, and without a catalog.
Serve = Callable[..., dis.Server]


def location(server: dis.Server, name: str, scheme: str, **options: Any) -> str:
    """Where a dataset is over one of the server's transports. The options are those of `Server.locations`."""
    (uri,) = (uri for uri in server.locations(name, **options) if uri.partition(":")[0] == scheme)
    return uri


def open_live(server: dis.Server, scheme: str, **options: Any) -> pa.RecordBatchReader:
    """Read the dataset that is called live."""
    return dis.open_stream(location(server, "live", scheme), server.ticket("live"), timeout=PATIENCE, **options)


def serving(server: dis.Server) -> set[threading.Thread]:
    """The threads that serve a connection each."""
    return set(server._connections.threads())


def connections_left(server: dis.Server, but: Iterable[threading.Thread] = (), patience: float = PATIENCE) -> int:
    """How many connections of `server` are still open, after each had time to end, `but` these."""
    end = monotonic() + patience
    while (left := serving(server).difference(but)) and monotonic() < end:
        _join(left, patience)  # and then those that a listener had not come to yet
    return server.connections


def clients_end(but: Iterable[threading.Thread] = ()) -> None:
    """Wait for the threads of clients whose arrays have all been dropped: they let go of the memory last.

    `but` these, which another test may have left with arrays that are still there.
    """
    _join(thread for thread in {*threading.enumerate()}.difference(but) if thread.name == "give back")


def _join(threads: Iterable[threading.Thread], patience: float = PATIENCE) -> None:
    end = monotonic() + patience
    for thread in threads:
        thread._started.wait(PATIENCE)  # type: ignore[attr-defined]  # one that is just starting cannot be joined
        thread.join(max(0.0, end - monotonic()))


def descriptors(pid: int | str = "self") -> dict[int, str]:
    """The open descriptors of this process, or of that one, and what they refer to."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists the directory, or one that has been closed since
            found[int(entry.name)] = os.readlink(entry)
    return found


def files_below(directory: Path, pid: int | str = "self") -> set[str]:
    """The files below it that this process has open or mapped, or that one."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split(None, 5)[5] for line in lines if str(directory) in line}
    found = {*descriptors(pid).values(), *mapped}
    return {target for target in found if target.startswith(f"{directory}/") and not os.path.isdir(target)}


def wait_until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until `condition` holds; fail with `what` where it does not in time."""
    deadline = monotonic() + patience
    while not condition():
        assert monotonic() < deadline, f"waited {patience:g} s in vain: {what}"
        sleep(0.005)


class Child(subprocess.Popen[str]):
    """A process that does not outlive a test that fails: leaving its `with` would wait for it for ever."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        super().__exit__(kind, error, trace)


def rest_of(process: subprocess.Popen[str]) -> str:
    """What a process whose lines are read still says until it ends: `communicate` loses what was read ahead of them."""
    assert process.stdout is not None
    with process:
        return process.stdout.read()


@contextmanager
def case(what: object) -> Iterator[None]:
    """One case of many in a test: a failure says which."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case: {what}")
        raise


def written_forms(secret: bytes) -> set[str]:
    """How a secret might be written in a log."""
    encoded = base64.b64encode(secret).decode()
    urlsafe = base64.urlsafe_b64encode(secret).decode()
    plain = {secret.hex(), encoded, encoded.rstrip("="), urlsafe, repr(secret)[2:-1], secret.decode("latin-1")}
    return plain | {quote(encoded, safe=""), quote(secret, safe="")}


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Fails if a thread or a descriptor is left that was not there before."""
    threads, before = set(threading.enumerate()), descriptors()

    def left() -> tuple[set[threading.Thread], dict[int, str]]:
        now = {number: target for number, target in descriptors().items() if number not in before}
        return set(threading.enumerate()) - threads, now

    yield
    if any(left()):  # to look for garbage after each test takes a tenth of the time of all
        gc.collect()
        _join(left()[0])
    left_threads, left_descriptors = left()
    assert not left_threads, "threads are left behind"
    assert not left_descriptors, f"descriptors are left behind: {left_descriptors}"


class Interruption:
    """Ctrl-C in this thread, before line number `at` that is come to in these functions of a module.

    A line counts once. Within its `with` alone. In the main thread the signal itself is raised.
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
    """No thread of Python's is to be had: their stacks are larger than any memory."""
    size = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(size)


def as_big_endian(stream: bytes) -> bytes:
    """The same stream with a schema that says its bodies are big-endian, which libarrow writes on no machine of ours.

    `Schema.endianness` is left out where it is little: its slot is made to point to a 1 behind everything else.
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


def complaint(script: str, **environment: str) -> str:
    """What a program ends with that cannot use a transport: the one line that says why."""
    program = f"""
import dissociated as dis
try:
{textwrap.indent(script, "    ")}
except dis.errors.TransportError as error:
    print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not run.returncode, run.stderr
    (line,) = run.stdout.splitlines()
    return line

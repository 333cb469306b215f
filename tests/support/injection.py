"""Faults of the file system and of the clock, injected into this process or into a child process.

The library has no hooks for tests: these classes wrap the functions of `os`, which the library always calls by their
module. A child arms itself from its environment (`Fault.environment`): a fork in `forks.py`, any other Python by
`sitecustomize.py` here. SQLite makes its system calls in C, and lets programs replace each by its name (`SQLiteFault`).
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

#: The functions of `os` behind each operation.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "rename": ("rename", "replace"),
    "link": ("link",),
    "unlink": ("unlink", "remove", "rmdir"),
    "mkdir": ("mkdir",),
    "create": ("open",),
    "write": ("write", "writev", "pwrite", "pwritev", "sendfile"),
    "allocate": ("posix_fallocate", "ftruncate"),
    "fsync": ("fsync", "fdatasync"),
    "chmod": ("chmod", "fchmod", "utime"),
}
_VARIABLE = "DISSOCIATED_TEST_FAULT"
#: The environment variable that steps the clock of a child, in seconds.
CLOCK = "DISSOCIATED_TEST_CLOCK"
_CREATING = os.O_CREAT | (os.O_TMPFILE & ~os.O_DIRECTORY)


@dataclass
class Fault:
    """A fault of calls on files below the directory `below`, within a `with` block or once it is armed.

    Of the `operations`, call number `at` (from 0) and the following calls, `times` in all, raise `error`, an errno. If
    `error` is None, the fault kills this process in place of the call: everything before has happened, and nothing
    after.
    """

    below: str
    at: int = 0
    error: int | None = errno.EIO
    operations: tuple[str, ...] = tuple(OPERATIONS)
    times: int = 1
    #: The calls so far, each with its operation and the name of the file.
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._wrapped: dict[str, Callable[..., Any]] = {}

    @property
    def came(self) -> bool:
        """Return whether the process made enough calls to reach the fault."""
        return len(self.calls) > self.at

    def environment(self) -> dict[str, str]:
        """Return the environment of a child that arms this fault."""
        told = {name: value for name, value in asdict(self).items() if name != "calls"}
        return {**child_environment(), _VARIABLE: json.dumps(told)}

    def arm(self) -> None:
        """Make these calls fail from now on."""
        for operation in self.operations:
            for name in OPERATIONS[operation]:
                self._wrapped[name] = getattr(os, name)
                setattr(os, name, self._wrap(operation, self._wrapped[name]))

    def disarm(self) -> None:
        """Restore all functions."""
        for name, function in self._wrapped.items():
            setattr(os, name, function)
        self._wrapped.clear()

    def __enter__(self) -> Fault:
        self.arm()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disarm()

    def _wrap(self, operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if operation != "create" or arguments[1] & _CREATING:
                for path in _paths(arguments, options):
                    if path.startswith(f"{self.below}/"):
                        self._count(operation, path)
                        break
            return function(*arguments, **options)

        return call

    def _count(self, operation: str, path: str) -> None:
        with self._lock:
            number = len(self.calls)
            self.calls.append(f"{operation} {os.path.relpath(path, self.below)}")
        if self.at <= number < self.at + self.times:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            assert self.error is not None
            raise OSError(self.error, os.strerror(self.error))


def _paths(arguments: Iterable[Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files that a call of a function of `os` affects."""
    directory = options.get("dir_fd")
    for argument in arguments:
        if isinstance(argument, bool):
            continue
        if isinstance(argument, int):
            yield _path(argument)
            if argument != -1:
                return  # the arguments after a descriptor are no files
        elif isinstance(argument, str | bytes | os.PathLike):
            path = os.fsdecode(argument)
            yield path if directory is None else os.path.join(_path(directory), path)


def _path(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""


def calls(step: int) -> Iterator[int]:
    """Yield the numbers of the calls at which a test injects a fault, in a run of its own: every `step`-th.

    The first is random, so that later runs of the tests reach the other calls. Each run takes a store or a catalog of
    its own. DISSOCIATED_EVERY_CALL in the environment selects every call, which takes some minutes more.
    """
    if os.environ.get("DISSOCIATED_EVERY_CALL"):
        step = 1
    return itertools.count(random.randrange(step), step)


def child_environment() -> dict[str, str]:
    """Return the environment of a child that can import the modules of the tests."""
    here = Path(__file__).parent
    path = (str(here), str(here.parent), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def arm_from_environment() -> None:
    """Arm the fault in the environment, if there is one, and step the clock by the seconds in `CLOCK`."""
    if (seconds := os.environ.get(CLOCK)) is not None:
        _step_clock(float(seconds))
    if (told := os.environ.get(_VARIABLE)) is not None:
        parsed = json.loads(told)
        Fault(**{**parsed, "operations": tuple(parsed["operations"])}).arm()


@contextmanager
def clock_step(seconds: float) -> Iterator[None]:
    """Move the wall clock of this process forward or back. `time.monotonic` is not affected."""
    before = _step_clock(seconds)
    try:
        yield
    finally:
        time.time = before


def _step_clock(seconds: float) -> Callable[[], float]:
    """Move the wall clock, and return the function that read it before."""
    before = time.time
    time.time = lambda: before() + seconds
    return before


class SQLiteFault:
    """A fault of SQLite's writing system calls within a `with` block: calls from number `at` (from 0), `times` in all.

    `error` is an errno; None kills the process in place of the call. See `sqlite3_vfs.xSetSystemCall`.
    """

    _SIGNATURES: Mapping[str, Any] = {
        "pwrite": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
        "pwrite64": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64),
        "write": (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t),
        "ftruncate": (ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    }

    def __init__(self, at: int, error: int | None = errno.EIO, times: int = 1) -> None:
        self.calls = 0
        self._at = at
        self._error = error
        self._times = times
        self._kept: list[Any] = []

    @property
    def came(self) -> bool:
        """Return whether SQLite made enough calls to reach the fault."""
        return self.calls > self._at

    def __enter__(self) -> SQLiteFault:
        self._vfs = _Vfs.find()
        for name, signature in self._SIGNATURES.items():
            address = self._vfs.get(name)
            if address:
                kind = ctypes.CFUNCTYPE(*signature, use_errno=True)
                self._kept.append(kind(self._wrap(kind(address))))
                self._vfs.set(name, ctypes.cast(self._kept[-1], ctypes.c_void_p).value)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name in self._SIGNATURES:
            self._vfs.set(name, None)  # restores the system's function

    def _wrap(self, function: Any) -> Callable[..., int]:
        def call(*arguments: int) -> int:
            number = self.calls
            self.calls += 1
            if not self._at <= number < self._at + self._times:
                return int(function(*arguments))
            if self._error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            ctypes.set_errno(self._error or 0)
            return -1

        return call


def sqlite_calls_can_fail() -> bool:
    """Return whether `SQLiteFault` works here: a Python with SQLite built in may hide its functions."""
    try:
        _Vfs.find()
    except (ImportError, AttributeError, OSError):
        return False
    return True


class _Vfs:
    """SQLite's file system for Unix, in the library that Python's module `sqlite3` is linked to."""

    class _Struct(ctypes.Structure):
        _fields_ = (
            ("version", ctypes.c_int),
            ("file_size", ctypes.c_int),
            ("path_length", ctypes.c_int),
            ("next", ctypes.c_void_p),
            ("name", ctypes.c_char_p),
            ("data", ctypes.c_void_p),
            *((f"method_{number}", ctypes.c_void_p) for number in range(13)),
            ("set_call", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)),
            ("get_call", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)),
        )

    def __init__(self, address: int) -> None:
        self._address = address
        self._struct = self._Struct.from_address(address)
        assert self._struct.version >= 3

    @classmethod
    def find(cls) -> _Vfs:
        import _sqlite3

        find = ctypes.CDLL(_sqlite3.__file__).sqlite3_vfs_find
        find.restype = ctypes.c_void_p
        find.argtypes = [ctypes.c_char_p]
        return cls(find(None))

    def get(self, name: str) -> int | None:
        found: int | None = self._struct.get_call(self._address, name.encode())
        return found

    def set(self, name: str, address: int | None) -> None:
        self._struct.set_call(self._address, name.encode(), address)

"""Descendants of a process, the sidecar of a Java process, and the shared memory for functions and exported rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from support.forks import MARK

_NAMES = "/memfd:dissociated:function", "/memfd:dissociated:spark"


def descendants(root: int) -> set[int]:
    """Return the processes below `root` that run, which are no zombies."""
    parents: dict[int, int] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended
            state, parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(process)] = int(parent)
    below, added = set[int](), {root}
    while added:
        below |= added
        added = {process for process, parent in parents.items() if parent in below} - below
    return below - {root}


def marked() -> set[int]:
    """Return all forks of the tests and other processes with their mark, also those whose parents have ended."""
    mark, found = f"{MARK}={os.getpid()}".encode(), set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.add(int(process))
    return found


def sidecar(java: int) -> int:
    """Return the sidecar of a Java process. The sidecar may be a fork, whose child of Java has the same input."""

    def has_input(process: str, pipe: str) -> bool:
        with suppress(OSError):  # it has ended
            return os.readlink(f"/proc/{process}/fd/0") == pipe
        return False

    processes = [*filter(str.isdigit, os.listdir("/proc"))]
    for process in processes:
        with suppress(OSError):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
            if b"dissociated.spark.sidecar" in command and int(parent) == java:
                pipe = os.readlink(f"/proc/{process}/fd/0")
                forks = [int(other) for other in processes if other != process and has_input(other, pipe)]
                return forks[0] if forks else int(process)
    raise AssertionError("there is no sidecar")


def function_memory(processes: set[int]) -> int:
    """Return the bytes of memfds that these processes have open or mapped for functions, or for exported rows."""
    return sum({file: blocks * 512 for process in processes for file, blocks in _memfds(process)}.values())


def _memfds(process: int) -> Iterator[tuple[int, int]]:
    """Yield inode and blocks of each memfd for functions or exported rows that a process has open or mapped."""
    for place in ("fd", "map_files"):
        with suppress(OSError):  # it has ended
            for link in Path(f"/proc/{process}/{place}").iterdir():
                with suppress(OSError):  # it was closed meanwhile
                    if os.readlink(link).startswith(_NAMES):
                        status = os.stat(link)
                        yield status.st_ino, status.st_blocks

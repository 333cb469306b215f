"""Descendants of a process, and the shared memory that they hold for functions and exported rows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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


def marked(variable: str, value: str) -> set[int]:
    """Return the processes that were started with this environment variable, also those whose parents have ended."""
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or belongs to another user
            if f"{variable}={value}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                found.add(int(process))
    return found


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

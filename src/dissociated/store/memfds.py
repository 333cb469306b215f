"""Sealed memfds that writers have handed over: segments without a name, which live no longer than their node.

They are to a store what a directory is, in memory alone. What was removed is kept as long as somebody has it open or
mapped: the kernel tells, as it does of files. Whoever made a memfd may go on holding it; that it does not tell.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dissociated.memory.region import pages
from dissociated.memory.shared import create_memfd, is_sealed, reopen_read_only
from dissociated.store.directory import Version

#: Where the kernel shows what a process has open.
FD = Path("/proc/self/fd")


@dataclass(frozen=True)
class Memfd:
    """A descriptor that nobody else has, so that the kernel can tell whether somebody uses the memory."""

    descriptor: int
    inode: int
    size: int
    staged: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        """Where this process opens it."""
        return FD / str(self.descriptor)


class Memfds:
    """The memfds of a store. Not safe to use from many threads: the store has a lock. Close it after use."""

    def __init__(self) -> None:
        self._staged: dict[str, Memfd] = {}
        self._committed: dict[str, Sequence[Memfd]] = {}  # by the ids of versions
        self._uses: Counter[Memfd] = Counter()  # how often each is staged or committed
        self._paths: dict[Path, Memfd] = {}  # of these
        self._trash: list[Memfd] = []
        self._inodes: Counter[int] = Counter()  # of all, with the trash
        probe = create_memfd("probe")
        readable = reopen_read_only(probe)
        os.close(probe)
        self._leases = _is_unused(readable)  # without them nobody could tell
        os.close(readable)

    # What is staged

    def open(self, descriptor: int) -> Memfd | None:
        """What somebody hands over, to be staged or closed; None where it could still be changed."""
        if not is_sealed(descriptor):
            return None
        status = os.fstat(descriptor)
        # Holes count, too: to read them takes memory.
        return Memfd(reopen_read_only(descriptor), status.st_ino, pages(status.st_size))

    def stage(self, memfd: Memfd) -> str:
        """Keep it until it is committed, under the name that is returned."""
        name = f"{secrets.token_hex(16)}.memfd"
        self._staged[name] = memfd
        self._keep(memfd)
        return name

    def staged(self, name: str) -> Path | None:
        """The path of one that is staged."""
        found = self._staged.get(name)
        return None if found is None else found.path

    def unstage(self, name: str) -> None:
        """It is not staged any more."""
        found = self._staged.pop(name, None)
        if found is not None:
            self._release([found])

    def sweep(self, forgotten: float) -> None:
        """Let go of what was staged so many seconds ago."""
        oldest = time.monotonic() - forgotten
        for name in [name for name, memfd in self._staged.items() if memfd.staged < oldest]:
            self.unstage(name)

    # What a directory does

    def has(self, paths: Iterable[Path]) -> bool:
        """Whether all of these are paths of memfds here."""
        return all(path in self._paths for path in paths)

    def publish(self, version: Version, paths: Sequence[Path]) -> None:
        """Make these a version."""
        found = [self._paths[path] for path in paths]
        self._committed[version.id] = found
        for memfd in found:
            self._keep(memfd)

    def files(self, version: Version) -> list[Path]:
        """Where this process opens the segments of a version."""
        return [memfd.path for memfd in self._committed[version.id]]

    def sizes(self, version: Version) -> dict[int, int]:
        """What the memfds of a version take, in bytes, by their inodes."""
        return {memfd.inode: memfd.size for memfd in self._committed[version.id]}

    def confirm(self, version: Version) -> None:
        """Nothing to do: what is known of a version is not kept here."""

    def remove(self, version: Version) -> None:
        """Make a version disappear. Whoever reads it is undisturbed."""
        self._release(self._committed.pop(version.id))

    def empty_trash(self) -> None:
        """Close what nobody uses any more."""
        used = []
        for memfd in self._trash:
            if self._leases and not _is_unused(memfd.descriptor):
                used.append(memfd)
            else:
                os.close(memfd.descriptor)
                self._inodes[memfd.inode] -= 1
                if not self._inodes[memfd.inode]:
                    del self._inodes[memfd.inode]
        self._trash = used

    # Bytes

    def counts(self, memfd: Memfd) -> bool:
        """Whether the bytes of the same memory count already."""
        return memfd.inode in self._inodes

    def uncommitted(self, committed: Container[int]) -> tuple[int, int]:
        """Bytes that are only staged, and only removed and still used by somebody. `committed` are inodes."""
        staged = {one.inode: one.size for one in self._staged.values() if one.inode not in committed}
        trash = {one.inode: one.size for one in self._trash if one.inode not in committed and one.inode not in staged}
        return sum(staged.values()), sum(trash.values())

    def _keep(self, memfd: Memfd) -> None:
        if memfd not in self._uses:
            self._paths[memfd.path] = memfd
            self._inodes[memfd.inode] += 1
        self._uses[memfd] += 1

    def _release(self, memfds: Iterable[Memfd]) -> None:
        for memfd in memfds:
            self._uses[memfd] -= 1
            if not self._uses[memfd]:
                del self._uses[memfd]
                del self._paths[memfd.path]
                self._trash.append(memfd)

    def close(self) -> None:
        """Let go of everything."""
        for memfd in (*self._uses, *self._trash):
            os.close(memfd.descriptor)
        for collection in (self._staged, self._committed, self._uses, self._paths, self._trash, self._inodes):
            collection.clear()


def _is_unused(descriptor: int) -> bool:
    """Whether nobody has opened the same memory once more, or mapped that: then the kernel grants a lease."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO, should somebody open it now, would kill
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True

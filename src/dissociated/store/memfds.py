"""Sealed memfds that writers have handed over: segments without a name, which live no longer than their node.

They are to a store what a directory is, in memory alone. What was removed is kept as long as somebody has it open or
mapped: the kernel tells, as it does of files. Whoever made a memfd may go on holding it; that it does not tell.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dissociated.memory.region import pages
from dissociated.memory.shared import can_tell_unused, is_sealed, is_unused, reopen_read_only
from dissociated.store.directory import Version

#: Where the kernel shows what a process has open.
FD = Path("/proc/self/fd")


@dataclass(frozen=True)
class Memfd:
    """A descriptor that nobody else has, so that the kernel can tell whether somebody uses the memory."""

    descriptor: int
    device: int
    inode: int
    size: int

    @property
    def file(self) -> tuple[int, int]:
        """What tells the memory from all other."""
        return self.device, self.inode

    @property
    def path(self) -> Path:
        """Where this process opens it."""
        return FD / str(self.descriptor)


class Memfds:
    """The memfds of a store. Not safe to use from many threads: the store has a lock. Close it after use."""

    def __init__(self) -> None:
        self._staged: dict[str, tuple[Memfd, float]] = {}  # and since when
        self._committed: dict[str, Sequence[Memfd]] = {}  # by the ids of versions
        self._uses: Counter[Memfd] = Counter()  # how often each is staged or committed
        self._paths: dict[Path, Memfd] = {}  # of these
        self._trash: list[Memfd] = []
        self._known: dict[tuple[int, int], Memfd] = {}  # by their files: all, with the trash
        self._can_tell = can_tell_unused()

    # What is staged

    def open(self, descriptor: int) -> Memfd | None:
        """What somebody hands over, to be staged or discarded; None where it could still be changed."""
        if not is_sealed(descriptor):
            return None
        status = os.fstat(descriptor)
        known = self._known.get((status.st_dev, status.st_ino))
        if known is not None:
            return known  # two descriptors of ours would each take the other for a use
        # Holes count, too: to read them takes memory.
        return Memfd(reopen_read_only(descriptor), status.st_dev, status.st_ino, pages(status.st_size))

    def discard(self, memfd: Memfd) -> None:
        """It is not staged after all."""
        if not self.counts(memfd):
            os.close(memfd.descriptor)

    def stage(self, memfd: Memfd) -> str:
        """Keep it until it is committed, under the name that is returned."""
        name = f"{secrets.token_hex(16)}.memfd"
        self._staged[name] = memfd, time.monotonic()
        self._keep(memfd)
        return name

    def staged(self, name: str) -> Path | None:
        """The path of one that is staged."""
        found = self._staged.get(name)
        return None if found is None else found[0].path

    def unstage(self, name: str) -> None:
        """It is not staged any more."""
        found = self._staged.pop(name, None)
        if found is not None:
            self._release([found[0]])

    def sweep(self, forgotten: float) -> None:
        """Let go of what was staged so many seconds ago."""
        oldest = time.monotonic() - forgotten
        for name in [name for name, (_, since) in self._staged.items() if since < oldest]:
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

    def is_used(self, version: Version, names: Mapping[int, int]) -> bool:
        """See `Directory.is_used`; memfds have no names."""
        return any(self._is_used(memfd) for memfd in self._committed[version.id])

    def confirm(self, version: Version) -> None:
        """Nothing to do: what is known of a version is not kept here."""

    def remove(self, version: Version, lost: bool = False, superseded: bool = False) -> None:
        """Make a version disappear. Whoever reads it is undisturbed. `Places` has recorded its number."""
        self._release(self._committed.pop(version.id))

    def empty_trash(self) -> None:
        """Close what nobody uses any more."""
        used = []
        for memfd in self._trash:
            if self._is_used(memfd):
                used.append(memfd)
            else:
                os.close(memfd.descriptor)
                del self._known[memfd.file]
        self._trash = used

    # Bytes

    def counts(self, memfd: Memfd) -> bool:
        """Whether the bytes of the same memory count already."""
        return memfd.file in self._known

    def uncommitted(self, committed: Container[int]) -> tuple[int, int]:
        """Bytes that are only staged, and only removed and still used by somebody. `committed` are inodes."""
        staged = {one.inode: one.size for one, _ in self._staged.values() if one.inode not in committed}
        trash = {one.inode: one.size for one in self._trash if one.inode not in committed and one.inode not in staged}
        return sum(staged.values()), sum(trash.values())

    def _is_used(self, memfd: Memfd) -> bool:
        return self._can_tell and not is_unused(memfd.descriptor)

    def _keep(self, memfd: Memfd) -> None:
        if memfd not in self._uses:
            self._paths[memfd.path] = memfd
            if self.counts(memfd):
                self._trash.remove(memfd)
            self._known[memfd.file] = memfd
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
        for collection in (self._staged, self._committed, self._uses, self._paths, self._trash, self._known):
            collection.clear()

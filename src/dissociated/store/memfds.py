"""Sealed memfds that writers have handed over: segments without a name, which exist no longer than their node.

`Memfds` has the methods of `Directory`, for versions in memory alone. A removed memfd is kept as long as another
process has it open or mapped, which the kernel tells, as for files. The kernel does not tell whether the process that
created a memfd still holds its writable descriptor, and it tells nothing about a memfd that root has handed over to
another user's node. Such a memfd counts as unused.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dissociated.control.version import Version
from dissociated.memory.region import pages
from dissociated.memory.shared import can_tell_unused, is_sealed, is_unused, reopen_read_only

#: The directory in which the kernel lists the open descriptors of this process.
FD = Path("/proc/self/fd")


@dataclass(frozen=True)
class Memfd:
    """A memfd, with a descriptor of its own, through which the kernel can tell whether other processes use it."""

    descriptor: int
    device: int
    inode: int
    size: int
    #: Whether the kernel tells if other processes use it. Unless privileged, only the owner of the memfd is told.
    can_tell: bool

    @property
    def file(self) -> tuple[int, int]:
        """The device and the inode, which identify the memory."""
        return self.device, self.inode

    @property
    def path(self) -> Path:
        """The path at which this process can open the memfd."""
        return FD / str(self.descriptor)


class Memfds:
    """The memfds of a store, to be closed after use. Not thread-safe: the lock of the store protects it."""

    def __init__(self) -> None:
        self._staged: dict[str, tuple[Memfd, float]] = {}  # by name, with the time of staging
        self._committed: dict[str, Sequence[Memfd]] = {}  # by the ids of versions
        self._uses: Counter[Memfd] = Counter()  # how often each is staged or committed
        self._paths: dict[Path, Memfd] = {}  # staged and committed memfds by path
        self._trash: list[Memfd] = []
        self._by_file: dict[tuple[int, int], Memfd] = {}  # all memfds, the trash included, by `Memfd.file`
        self._can_tell = can_tell_unused()

    # Staging

    def open(self, descriptor: int) -> Memfd | None:
        """Open a memfd that a writer hands over. The caller stages or discards it.

        Return None if the memfd is not sealed, and so could still be changed.
        """
        if not is_sealed(descriptor):
            return None
        status = os.fstat(descriptor)
        memfd = self._by_file.get((status.st_dev, status.st_ino))
        if memfd is not None:
            return memfd  # with a second descriptor of this process, the memfd would count as used
        # Holes count, too: reading them allocates memory.
        can_tell = self._can_tell and status.st_uid == os.geteuid()
        return Memfd(reopen_read_only(descriptor), status.st_dev, status.st_ino, pages(status.st_size), can_tell)

    def discard(self, memfd: Memfd) -> None:
        """Close a memfd that was opened and is not staged after all."""
        if not self.counts(memfd):
            os.close(memfd.descriptor)

    def stage(self, memfd: Memfd) -> str:
        """Keep a memfd until it is committed. Return its name."""
        name = f"{secrets.token_hex(16)}.memfd"
        self._staged[name] = memfd, time.monotonic()
        self._keep(memfd)
        return name

    def staged_path(self, name: str) -> Path | None:
        """Return the path of the staged memfd `name`, or None."""
        entry = self._staged.get(name)
        return None if entry is None else entry[0].path

    def staged_names(self) -> list[str]:
        """Return the names of the staged memfds."""
        return [*self._staged]

    def unstage(self, name: str) -> None:
        """Release the staged memfd `name`, if there is one."""
        entry = self._staged.pop(name, None)
        if entry is not None:
            self._release([entry[0]])

    def sweep(self, staging_timeout: float) -> None:
        """Release the memfds that were staged more than `staging_timeout` seconds ago."""
        oldest = time.monotonic() - staging_timeout
        for name in [name for name, (_, since) in self._staged.items() if since < oldest]:
            self.unstage(name)

    # The methods of a directory

    def has(self, paths: Iterable[Path]) -> bool:
        """Return whether all of `paths` are paths of memfds of this store."""
        return all(path in self._paths for path in paths)

    def publish(self, version: Version, paths: Sequence[Path]) -> None:
        """Commit the memfds at `paths` as a version."""
        memfds = [self._paths[path] for path in paths]
        self._committed[version.id] = memfds
        for memfd in memfds:
            self._keep(memfd)

    def files(self, version: Version) -> list[Path]:
        """Return the paths at which this process can open the segments of a version."""
        return [memfd.path for memfd in self._committed[version.id]]

    def sizes(self, version: Version) -> dict[int, int]:
        """Return the bytes that the memfds of a version take, by inode."""
        return {memfd.inode: memfd.size for memfd in self._committed[version.id]}

    def is_used(self, version: Version, names: Mapping[int, int]) -> bool:
        """Return whether another process uses a memfd of a version: see `Directory.is_used`. `names` is ignored."""
        return any(self._is_used(memfd) for memfd in self._committed[version.id])

    def confirm(self, version: Version) -> None:
        """Do nothing: memfds have no manifest."""

    def remove(self, version: Version, lost: bool = False, superseded: bool = False) -> None:
        """Remove a version. Its readers keep the memory. `Places` has recorded its number before."""
        self._release(self._committed.pop(version.id))

    def empty_trash(self) -> None:
        """Close the removed memfds that are no longer used."""
        used_memfds = []
        for memfd in self._trash:
            if self._is_used(memfd):
                used_memfds.append(memfd)
            else:
                os.close(memfd.descriptor)
                del self._by_file[memfd.file]
        self._trash = used_memfds

    # Bytes

    def counts(self, memfd: Memfd) -> bool:
        """Return whether the bytes of this memory are counted already."""
        return memfd.file in self._by_file

    def uncommitted(self, committed: Container[int]) -> tuple[int, int]:
        """Return the bytes of staged and of removed memfds, without memory that is counted elsewhere.

        Args:
            committed: The inodes of committed memfds.
        """
        staged = {memfd.inode: memfd.size for memfd, _ in self._staged.values() if memfd.inode not in committed}
        removed = {
            memfd.inode: memfd.size
            for memfd in self._trash
            if memfd.inode not in committed and memfd.inode not in staged
        }
        return sum(staged.values()), sum(removed.values())

    def _is_used(self, memfd: Memfd) -> bool:
        return memfd.can_tell and not is_unused(memfd.descriptor)

    def _keep(self, memfd: Memfd) -> None:
        if memfd not in self._uses:
            self._paths[memfd.path] = memfd
            if self.counts(memfd):
                self._trash.remove(memfd)
            self._by_file[memfd.file] = memfd
        self._uses[memfd] += 1

    def _release(self, memfds: Iterable[Memfd]) -> None:
        for memfd in memfds:
            self._uses[memfd] -= 1
            if not self._uses[memfd]:
                del self._uses[memfd]
                del self._paths[memfd.path]
                self._trash.append(memfd)

    def close(self) -> None:
        """Close all memfds."""
        for memfd in (*self._uses, *self._trash):
            os.close(memfd.descriptor)
        for collection in (self._staged, self._committed, self._uses, self._paths, self._trash, self._by_file):
            collection.clear()

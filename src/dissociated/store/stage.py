"""Where writers on this host put segments until they are committed: a private directory, in memory if it can be."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import threading
from pathlib import Path

from dissociated.buffers import MAX_METADATA
from dissociated.errors import StoreError
from dissociated.fork import ProcessBound
from dissociated.oserrors import store_errors
from dissociated.store.segment import Segment

_MEMORY = Path("/dev/shm")


class Stage(ProcessBound):
    """A directory for segments that are being written, made on first use and removed with `close`.

    What is committed is opened and unlinked, so its memory is held by whoever serves it and by nothing else: a
    server that is killed leaves behind only what was never committed, and the next one removes that.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._base = base
        self._directory: Path | None = None
        self._lock: int | None = None  # a descriptor
        self._making = threading.Lock()
        self.bind_to_process()

    @property
    def directory(self) -> Path:
        """Where to write. Raises StoreError where there can be no such directory."""
        with self._making:  # the catalog answers several writers at once
            return self._directory or self._make()

    def _make(self) -> Path:
        base = self._base or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        home = base / f"dissociated-{os.geteuid()}"
        with store_errors(f"the staging directory below {home}"):
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            if home.lstat().st_uid != os.geteuid():
                raise StoreError(f"{home} belongs to somebody else")
            lock = _lock(home, wait=True)  # so that nobody takes what is being made for abandoned
            try:
                _remove_abandoned(home)
                directory = home / f"{os.getpid()}-{secrets.token_hex(4)}"
                directory.mkdir(mode=0o700)
                self._lock = _lock(directory)
            finally:
                os.close(lock)
        self._directory = directory
        return directory

    def take(self, names: list[str], max_metadata: int = MAX_METADATA) -> list[Segment]:
        """Open these finished segments and unlink their files. Nothing is unlinked where one cannot be served.

        Raises StoreError for one that is no segment, or whose metadata is longer than `max_metadata` bytes.
        """
        paths = [self.path(name) for name in names]
        segments = [Segment.open(path, follow=False) for path in paths]
        for segment in segments:
            segment.check_metadata(max_metadata)
        for path in paths:
            path.unlink(missing_ok=True)
        return segments

    def names(self) -> list[str]:
        """The files there."""
        with self._making:
            return [] if self._directory is None else os.listdir(self._directory)

    def discard(self, names: list[str]) -> None:
        """Remove these files, as far as they exist."""
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """The path of a file there. Raises StoreError for a name that leads elsewhere."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise StoreError(f"{name!r} is not the name of a file in the staging directory")
        return self.directory / name

    def close(self) -> None:
        """Remove the directory and what is in it."""
        if self.is_inherited:
            return
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def after_fork_in_child(self) -> None:
        self._unlock()


def _lock(directory: Path, wait: bool = False) -> int:
    """Lock a directory, for as long as the descriptor is open. Raises BlockingIOError if somebody else has."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(home: Path) -> None:
    # A lock, not a process id, tells the living from the dead: containers that share /dev/shm may not share those.
    for entry in home.iterdir():
        try:
            lock = _lock(entry)
        except OSError:
            continue  # somebody lives there
        shutil.rmtree(entry, ignore_errors=True)
        os.close(lock)

"""A private directory for segments that writers on this host have not committed yet, in memory if possible."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
from pathlib import Path

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.fork import ProcessBound
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory
from dissociated.errors import StoreError
from dissociated.store.layout import STAGING, new_id, write_id
from dissociated.store.segment import Segment

_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"\d+-[0-9a-f]{8}")  # the name of a stage's directory


class Stage(ProcessBound):
    """A directory for segments that are being written, made on first use and removed by `close`.

    It has the layout of a store: a staging directory next to a file with the id, by which writers recognize it.

    Committed segments are opened and unlinked, so that only the server holds their memory. A server that is killed
    leaves only uncommitted segments behind, and the next server removes them.
    """

    def __init__(self, base: Path | None = None) -> None:
        #: An id that is unique among stages and stores.
        self.id = new_id()
        self._base = base
        self._directory: Path | None = None
        self._lock: int | None = None  # a descriptor
        self._making = threading.Lock()
        self.bind_to_process()

    @property
    def directory(self) -> Path:
        """The directory to write to, which is made if necessary. Raises StoreError if that is impossible."""
        with self._making:  # the catalog answers several writers at once
            return self._directory or self._make()

    def _make(self) -> Path:
        base = self._base or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        home = base / f"dissociated-{os.geteuid()}"
        with store_errors(f"the staging directory below {home}"):
            opened = open_private_directory(home, create=True)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX)  # so that no other process removes the new directory as abandoned
                _remove_abandoned(home, opened)
                name = f"{os.getpid()}-{secrets.token_hex(4)}"
                self._lock = open_private_directory(name, within=opened, create=True)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_id(self._lock, self.id)
                os.close(open_private_directory(STAGING, within=self._lock, create=True))
            except BaseException:
                self._unlock()  # the unfinished directory is then abandoned, and removed by the next stage
                raise
            finally:
                os.close(opened)
        self._directory = home / name / STAGING
        return self._directory

    def take(self, names: list[str], max_metadata: int = MAX_METADATA) -> list[Segment]:
        """Open finished segments and unlink their files. If one cannot be served, no file is unlinked.

        Raises StoreError if a file is no segment, or its metadata has more than `max_metadata` bytes.
        """
        paths = [self.path(name) for name in names]
        segments = [Segment.open(path, follow=False) for path in paths]
        for segment in segments:
            segment.check_metadata(max_metadata)
        for path in paths:
            path.unlink(missing_ok=True)
        return segments

    def names(self) -> list[str]:
        """Return the names of the files in the directory."""
        with self._making:
            return [] if self._directory is None else os.listdir(self._directory)

    def discard(self, names: list[str]) -> None:
        """Remove files. Missing files are ignored."""
        for name in names:
            self.path(name).unlink(missing_ok=True)

    def path(self, name: str) -> Path:
        """Return the path of a file in the directory. Raises StoreError for a name that leads elsewhere."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise StoreError(f"{name!r} is not the name of a file in the staging directory")
        return self.directory / name

    def close(self) -> None:
        """Remove the directory with its files."""
        if self.is_inherited:
            return
        if self._directory is not None:
            shutil.rmtree(self._directory.parent, ignore_errors=True)
            self._directory = None
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def after_fork_in_child(self) -> None:
        self._unlock()


def _remove_abandoned(home: Path, opened: int) -> None:
    # A lock, not a process id, shows that an owner is alive: containers may share /dev/shm without sharing process ids.
    for name in os.listdir(opened):
        if not _NAME.fullmatch(name):
            continue  # not a stage
        try:
            lock = open_private_directory(name, within=opened)
        except (OSError, StoreError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its owner is alive
        else:
            shutil.rmtree(home / name, ignore_errors=True)
        finally:
            os.close(lock)

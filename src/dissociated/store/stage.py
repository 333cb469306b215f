"""Where writers on this host put segments until they are committed: a private directory, in memory if it can be."""

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
_NAME = re.compile(r"\d+-[0-9a-f]{8}")  # of the directory of one stage


class Stage(ProcessBound):
    """A directory for segments that are being written, made on first use and removed with `close`.

    It lies as the staging directory of a store does, beside a file with the id, by which writers know it.

    What is committed is opened and unlinked, so its memory is held by whoever serves it and by nothing else: a
    server that is killed leaves behind only what was never committed, and the next one removes that.
    """

    def __init__(self, base: Path | None = None) -> None:
        #: Tells it from every other stage and store.
        self.id = new_id()
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
            opened = open_private_directory(home, create=True)
            try:
                fcntl.flock(opened, fcntl.LOCK_EX)  # so that nobody takes what is being made for abandoned
                _remove_abandoned(home, opened)
                name = f"{os.getpid()}-{secrets.token_hex(4)}"
                self._lock = open_private_directory(name, within=opened, create=True)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_id(self._lock, self.id)
                os.close(open_private_directory(STAGING, within=self._lock, create=True))
            except BaseException:
                self._unlock()  # what was made is abandoned
                raise
            finally:
                os.close(opened)
        self._directory = home / name / STAGING
        return self._directory

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
    # A lock, not a process id, tells the living from the dead: containers that share /dev/shm may not share those.
    for name in os.listdir(opened):
        if not _NAME.fullmatch(name):
            continue  # it is no stage
        try:
            lock = open_private_directory(name, within=opened)
        except (OSError, StoreError):
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its server lives
        else:
            shutil.rmtree(home / name, ignore_errors=True)
        finally:
            os.close(lock)

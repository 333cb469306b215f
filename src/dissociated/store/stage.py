"""Stages: private directories for segments that writers have not committed yet."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.descriptors import locked, owned
from dissociated.base.fork import ProcessBound
from dissociated.base.host import boot_id, directory_id
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory
from dissociated.errors import CatalogError, StoreError
from dissociated.store.layout import STAGING, check_staged_name, new_id, store_id, write_id
from dissociated.store.segment import Segment

_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"\d+-[0-9a-f]{8}")  # the name of a stage's directory


@dataclass(frozen=True)
class StagePlace:
    """The directory in which writers put segments, as a catalog describes it.

    The catalog is not trusted. A process writes only to the path from `open`, which leads to the staging directory of
    the node `node`, owned by this user.

    Attributes:
        directory: The path of the directory.
        host: The name of its host.
        boot_id: The boot id of its host's kernel.
        node: The id of the node that has it.
        flight: The URI of that node's catalog; in the answer of the node itself empty, because its address can differ
            for each client.
        limited: Whether writers must reserve room.
        inode: An identifier that differs for a directory at the same path in another container.
        handover: The path of the Unix socket at which the node accepts sealed memfds; empty if it accepts none.
    """

    directory: str
    host: str
    boot_id: str
    node: str = ""
    flight: str = ""
    limited: bool = False
    inode: str = ""
    handover: str = ""

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Self:
        """Return the stage in a JSON object, without unknown fields. Raise CatalogError if the object is invalid."""
        values = {field.name: plain[field.name] for field in fields(cls) if field.name in plain}
        try:
            place = cls(**values)
        except TypeError:
            place = None
        if place is None or any(
            type(value) is not (bool if name == "limited" else str) for name, value in values.items()
        ):
            raise CatalogError("the server's answer to 'stage' is invalid")
        return place

    def to_json(self) -> dict[str, Any]:
        """Return the stage as JSON."""
        return asdict(self)

    @property
    def here(self) -> bool:
        """Whether this process can write to the directory."""
        try:
            with self.open() as path:
                return os.access(path, os.W_OK | os.X_OK)
        except StoreError:
            return False

    @contextmanager
    def open(self) -> Iterator[Path]:
        """Open the staging directory, and yield a path to it that no other process can redirect.

        The path is valid within the `with` block.

        Raises:
            StoreError: This host has no such directory, other users can access it, or it belongs to another node.
        """
        path = Path(self.directory)
        with store_errors(f"the staging directory {path}"):
            if self.boot_id != boot_id():
                raise StoreError(f"the staging directory {str(path)!r} is on another host")
            with owned(open_private_directory(path.parent)) as store:
                if path.name != STAGING or store_id(store, path.parent) != self.node:
                    raise StoreError(f"{str(path)!r} is not the staging directory of the node {self.node!r}")
                staging = open_private_directory(STAGING, within=store)
        with owned(staging):
            if self.inode != directory_id(staging):
                raise StoreError(f"{str(path)!r} is another directory than the node's: it may be in another container")
            yield Path(f"/proc/self/fd/{staging}")


class Stage(ProcessBound):
    """A directory for segments that are being written, in memory if possible.

    It is made on first use, and removed by `close`.

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
        # Locked, so that no other process removes the new directory as abandoned.
        with (
            store_errors(f"the staging directory below {home}"),
            locked(open_private_directory(home, create=True)) as opened,
        ):
            try:
                _remove_abandoned(home, opened)
                name = f"{os.getpid()}-{secrets.token_hex(4)}"
                self._lock = open_private_directory(name, within=opened, create=True)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                write_id(self._lock, self.id)
                os.close(open_private_directory(STAGING, within=self._lock, create=True))
            except BaseException:
                self._unlock()  # the unfinished directory is then abandoned, and removed by the next stage
                raise
        self._directory = home / name / STAGING
        return self._directory

    def take(self, names: list[str], max_metadata: int = MAX_METADATA) -> list[Segment]:
        """Open finished segments and unlink their files. If one cannot be served, no file is unlinked.

        Raises StoreError if a file is no whole segment, or its metadata has more than `max_metadata` bytes.
        """
        paths = [self.path(name) for name in names]
        segments = [Segment.open(path, follow=False) for path in paths]
        for segment in segments:
            segment.check_whole()
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
        check_staged_name(name)
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

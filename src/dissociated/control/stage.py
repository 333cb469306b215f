"""The description of a stage: the directory of a node in which writers put segments."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from dissociated.base.host import boot_id, directory_id
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory
from dissociated.errors import CatalogError, StoreError
from dissociated.store.layout import STAGING, store_id


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
        flight: The URI of that node's catalog.
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
            store = open_private_directory(path.parent)
            try:
                if path.name != STAGING or store_id(store, path.parent) != self.node:
                    raise StoreError(f"{str(path)!r} is not the staging directory of the node {self.node!r}")
                staging = open_private_directory(STAGING, within=store)
            finally:
                os.close(store)
        try:
            if self.inode != directory_id(staging):
                raise StoreError(f"{str(path)!r} is another directory than the node's: it may be in another container")
            yield Path(f"/proc/self/fd/{staging}")
        finally:
            os.close(staging)

"""Where writers put segments, as a catalog tells them."""

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
    """The directory where writers put segments, and its host. The catalog that names it may lie.

    A process writes only where `open` leads: into the staging directory of that node, which belongs to this user.

    `node` is the node that has it, `flight` where that answers. Where it is `limited`, writers must reserve room.
    `inode` tells the directory from one that has the same path in another container.
    `handover` is the Unix socket where it takes sealed memfds, empty where it takes none.
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
        """From JSON, of which it leaves out what it does not know. Raises CatalogError."""
        told = {one.name: plain[one.name] for one in fields(cls) if one.name in plain}
        try:
            place = cls(**told)
        except TypeError:
            place = None
        if place is None or any(
            type(value) is not (bool if name == "limited" else str) for name, value in told.items()
        ):
            raise CatalogError("the server answers to 'stage' with what is no place of segments")
        return place

    @property
    def here(self) -> bool:
        """Whether this process can write there."""
        try:
            with self.open() as path:
                return os.access(path, os.W_OK | os.X_OK)
        except StoreError:
            return False

    @contextmanager
    def open(self) -> Iterator[Path]:
        """Open the staging directory, and give a path to it that nobody can make lead elsewhere.

        The path is good within the `with`. Raises StoreError if there is no such directory on this host, if it is not
        this user's alone, or not that of the node.
        """
        path = Path(self.directory)
        with store_errors(f"the staging directory {path}"):
            if self.boot_id != boot_id():
                raise StoreError(f"the staging directory {path} is on another host")
            store = open_private_directory(path.parent)
            try:
                if path.name != STAGING or store_id(store, path.parent) != self.node:
                    raise StoreError(f"{path} is not the staging directory of the node {self.node}")
                staging = open_private_directory(STAGING, within=store)
            finally:
                os.close(store)
        try:
            if self.inode != directory_id(staging):
                raise StoreError(f"{path} is another directory for the node {self.node}, as in another container")
            yield Path(f"/proc/self/fd/{staging}")
        finally:
            os.close(staging)

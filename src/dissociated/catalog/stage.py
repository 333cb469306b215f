"""Where writers put segments, as a catalog tells them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from dissociated.errors import CatalogError
from dissociated.host import boot_id, directory_id


@dataclass(frozen=True)
class StagePlace:
    """Where writers put segments, and on which host that is.

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
            return self.boot_id == boot_id() and self.inode == directory_id(self.directory)
        except OSError:
            return False

"""Where writers put segments, as a catalog tells them."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def here(self) -> bool:
        """Whether this process can write there."""
        try:
            return self.boot_id == boot_id() and self.inode == directory_id(self.directory)
        except OSError:
            return False

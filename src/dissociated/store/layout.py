"""The names in the directory of a store, which tell a store from other directories, and its files from others.

Nothing is removed or written over whose name the store has not given.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from dissociated.base.private import read_private_file, write_private_file
from dissociated.errors import StoreError

STAGING = "staging"
SEGMENTS = "segments"
TRASH = "trash"
#: The numbers of datasets whose last version is gone: see `numbers.py`.
NUMBERS = "numbers"
#: Locked by the process that starts a node.
START_LOCK = "starting"
#: The output of a node that was started in the background.
NODE_LOG = "node.log"
_ID = "id"
#: The files that may be made before the id is.
_BEFORE_ID = {START_LOCK, NODE_LOG, f"{_ID}.draft"}
_ID_FORMAT = re.compile(r"[0-9a-f]{16}")
_VERSION = r"\d+-[0-9a-f]+"
_DRAFT = re.compile(rf"{_VERSION}\.(new|gone)")
_REMOVED_SEGMENT = re.compile(rf"{_VERSION}-\d+\.arrows")
_REMEDY = "Choose an empty directory, or one that does not exist"


def new_id() -> str:
    """Return an id that tells a store from every other."""
    return secrets.token_hex(8)


def store_id(directory: int, path: Path) -> str:
    """Return the id of the store in an open directory, which errors call `path`.

    Raises FileNotFoundError if there is none, OSError, and StoreError if it is none that a store has written.
    """
    found = read_private_file(_ID, within=directory).decode("ascii", "replace")
    if not _ID_FORMAT.fullmatch(found):
        raise StoreError(f"{path} is no store: its file {_ID!r} is not one that a store has written. {_REMEDY}")
    return found


def known_id(directory: int, path: Path) -> str | None:
    """Return the id of the store in an open directory, or None if the directory is empty, and so may become a store.

    Raises StoreError if it is something else, and OSError.
    """
    try:
        return store_id(directory, path)
    except FileNotFoundError:
        foreign = sorted({*os.listdir(directory)} - _BEFORE_ID)
    if foreign:
        raise StoreError(f"{path} is no store, and is not empty: it has {foreign[0]!r}. {_REMEDY}")
    return None


def write_id(directory: int, id: str) -> None:
    """Make an open directory that of the store with this id. Raises OSError and NotPrivate."""
    write_private_file(_ID, id.encode(), within=directory)


def is_draft(name: str) -> bool:
    """Return whether a directory in the staging directory is a version that is being committed or removed."""
    return _DRAFT.fullmatch(name) is not None


def is_removed_segment(name: str) -> bool:
    """Return whether a file in the trash is a segment of a version that was removed."""
    return _REMOVED_SEGMENT.fullmatch(name) is not None

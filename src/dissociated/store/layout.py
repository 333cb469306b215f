"""The names of files in a store's directory. They show that a directory is a store, and which files are its own.

The store removes and overwrites only files that have one of its own names.
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
#: The file of the version numbers of removed datasets: see `numbers.py`.
NUMBERS = "numbers"
#: The file of the keys of commits: see `keys.py`.
KEYS = "keys"
#: The file that names the spill directory while versions of the store lie there.
SPILLED = "spilled"
#: The file that a process locks while it starts a node.
START_LOCK = "starting"
#: The output of a node that was started in the background.
NODE_LOG = "node.log"
_ID = "id"
#: The files that may exist before the store has its id.
_BEFORE_ID = {START_LOCK, NODE_LOG, f"{_ID}.draft"}
_ID_FORMAT = re.compile(r"[0-9a-f]{16}")
_VERSION = r"[0-9]+-[0-9a-f]+"
_DRAFT = re.compile(rf"{_VERSION}\.(new|gone)")
_REMOVED_SEGMENT = re.compile(rf"{_VERSION}-\d+\.arrows")
_NAME_MAX = 255  # bytes in the name of a file
_REMEDY = "choose an empty directory, or one that does not exist"


def new_id() -> str:
    """Return a new random id for a store."""
    return secrets.token_hex(8)


def store_id(directory: int, path: Path) -> str:
    """Return the id of the store in an open directory.

    Args:
        directory: The descriptor of the directory.
        path: The path of the directory, for errors.

    Raises:
        FileNotFoundError: The directory has no id.
        OSError: The id cannot be read.
        StoreError: The id is not in the format of a store.
    """
    content = read_private_file(_ID, within=directory).decode("ascii", "replace")
    if not _ID_FORMAT.fullmatch(content):
        raise StoreError(f"{str(path)!r} is not a store: its file {_ID!r} was not written by a store: {_REMEDY}")
    return content


def known_id(directory: int, path: Path) -> str | None:
    """Return the id of the store in an open directory, or None if the directory is empty and may become a store.

    Raises StoreError if the directory is neither empty nor a store, and OSError.
    """
    try:
        return store_id(directory, path)
    except FileNotFoundError:
        foreign = sorted({*os.listdir(directory)} - _BEFORE_ID)
    if foreign:
        raise StoreError(f"{str(path)!r} is not a store, and is not empty: it has {foreign[0]!r}: {_REMEDY}")
    return None


def write_id(directory: int, id: str) -> None:
    """Write the id of a store into its open directory. Raises OSError and NotPrivate."""
    write_private_file(_ID, id.encode(), within=directory)


def check_staged_name(name: str) -> None:
    """Raise StoreError unless this is the name of a file in a staging directory, and leads nowhere else."""
    is_name = Path(name).name == name and name not in ("", ".", "..") and "\0" not in name
    if not is_name or len(os.fsencode(name)) > _NAME_MAX:
        raise StoreError(f"{name[:_NAME_MAX]!r} is not the name of a file in the staging directory")


def commit_key_of(name: str) -> str:
    """Return the key of the commit that a staged segment was written for: the part of its name before the last dash.

    The key itself may have dashes.
    """
    return name.rpartition("-")[0]


def is_version(name: str) -> bool:
    """Return whether an entry among the segments has the name of a version, which is the version's id."""
    return re.fullmatch(_VERSION, name) is not None


def is_draft(name: str) -> bool:
    """Return whether a directory in the staging directory is a version that is being committed or removed."""
    return _DRAFT.fullmatch(name) is not None


def is_removed_segment(name: str) -> bool:
    """Return whether a file in the trash is a segment of a version that was removed."""
    return _REMOVED_SEGMENT.fullmatch(name) is not None

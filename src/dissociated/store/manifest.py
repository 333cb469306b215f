"""The manifest of a version: the JSON file in its directory that describes it."""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeGuard, cast

import pyarrow as pa

from dissociated.control.version import Version
from dissociated.errors import StoreError
from dissociated.store.files import open_regular

#: The file in the directory of a version that describes the version.
MANIFEST = "manifest.json"
_MANIFEST_VERSION = 1
#: The errors of reading a damaged manifest, or the schema in it.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, pa.ArrowException)
_MAX_SECONDS = 1e11  # since the epoch: later dates cannot be shown


def encode_manifest(version: Version) -> bytes:
    """Return the manifest of `version`. Its first lines name the version, even if the rest is damaged."""
    plain = {"name": version.name, "version": version.number, **version.to_json()}
    part = plain.pop("part")
    plain |= {name: part[name] for name in ("id", "ticket", "rows", "nbytes")}
    plain |= {"number": version.serial, "staged": version.segments_digest, "format": _MANIFEST_VERSION}
    return json.dumps(plain, indent=1).encode()


def decode_lines(manifest: bytes) -> dict[str, Any]:
    """Return the members of a damaged manifest that can be decoded, each of which has a line of its own."""
    members: dict[str, Any] = {}
    for line in manifest.splitlines():
        if line.startswith(b' "'):  # more spaces are within a member
            with suppress(*DAMAGE):
                members |= json.loads(b"{%s}" % line.rstrip(b","))
    return members


def read_manifest(entry: Path, name: str = MANIFEST) -> bytes:
    """Read the manifest of an entry, which has another name if the version was refused.

    Raises OSError, and StoreError if the entry is no directory or its manifest no regular file.
    """
    if not stat.S_ISDIR(entry.lstat().st_mode):
        raise StoreError("the entry is not a directory")
    try:
        descriptor = open_regular(entry / name, os.O_RDONLY)
    except FileNotFoundError:
        raise StoreError(f"the entry has no {MANIFEST}") from None
    except StoreError:
        raise StoreError(f"{MANIFEST} is not a regular file") from None
    with open(descriptor, "rb") as file:
        return file.read()


def decode_manifest(manifest: bytes) -> Version:
    """Decode a manifest and check the types of all its values.

    Raises StoreError if a later version of this library wrote it, and one of `DAMAGE` if it is damaged.
    """
    plain = json.loads(manifest)
    format = plain.pop("format") if isinstance(plain, dict) else None
    if is_count(format) and format > _MANIFEST_VERSION:
        raise StoreError(f"the version was written by a later release (format {format!r}): read it with that release")
    if format != _MANIFEST_VERSION:
        raise ValueError(f"format {format!r}")
    part = {
        "id": plain.pop("id"),
        "node": "",
        "ticket": plain.pop("ticket"),
        "rows": plain.pop("rows"),
        "nbytes": plain.pop("nbytes"),
        "serial": plain.pop("number"),
    }
    version = Version.parse({**plain, "part": part})
    names = (version.id, version.name, version.key, version.segments_digest)
    texts = (*names, *version.before, *chain(*version.tags.items()))
    counts = (version.serial, version.part.rows, version.part.nbytes, version.number, version.catalog)
    if not (
        all(isinstance(text, str) and text.encode() is not None for text in texts)  # `encode` rejects lone surrogates
        and all(is_count(count) for count in counts)
        and all(isinstance(flag, bool) for flag in (version.prepared, version.whole))
        and is_seconds(version.created)
        and (version.ttl is None or is_seconds(version.ttl))
        and isinstance(plain["before"], list)
    ):
        raise TypeError("a value of another type")
    pa.ipc.read_schema(pa.py_buffer(version.schema))
    return version


def is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer from 0 to 2**63 - 1, the range of a database column."""
    return type(value) is int and 0 <= value < 1 << 63


def is_seconds(value: object) -> bool:
    """Return whether `value` is a time in seconds since the epoch."""
    return type(value) in (int, float) and 0 <= cast(float, value) <= _MAX_SECONDS

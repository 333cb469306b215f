"""The trash of a store: removed segments, which stay as long as a process has them open or mapped.

Unused segments may stay a little longer for reuse: overwriting allocated pages is faster than allocating new ones.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from dissociated.base.host import machine_memory
from dissociated.store.files import claim_unused
from dissociated.store.layout import is_removed_segment

_log = logging.getLogger(__name__)

#: The share of the limit, or of the machine's memory, that unused segments may keep for reuse.
_REUSE_SHARE = 1 / 8
_REUSE_SECONDS = 60.0
_REUSE_FILES = 64  # a cap, since each removal examines all of them
_REUSE_MIN_SIZE = 1 << 16  # bytes; smaller files are not worth keeping


def reuse_bytes(store: Path, limit: int | None) -> int:
    """Return the bytes that the trash of a store may keep for reuse: 0 unless the store lies in memory."""
    return int(_REUSE_SHARE * (limit or machine_memory())) if _in_memory(store) else 0


def empty(trash: Path, keep: int) -> None:
    """Remove the segments that no process has open or mapped, except up to `keep` bytes that stay for reuse.

    Files that are not segments of the store stay.
    """
    files = _REUSE_FILES
    oldest = time.time() - _REUSE_SECONDS
    # Errors are only logged: the segments are removed already, and take memory just until the next call.
    try:
        paths = [*trash.iterdir()]
    except OSError as error:
        _log.warning("emptying the trash failed, it is tried again: error=%s", str(error))
        return
    for path in paths:
        descriptor = claim_unused(path) if is_removed_segment(path.name) else None
        if descriptor is None:
            continue
        try:
            status = os.fstat(descriptor)
            recent = status.st_ctime >= oldest  # the time of the move to the trash
            if files and recent and _REUSE_MIN_SIZE <= status.st_size <= keep:
                keep -= status.st_size
                files -= 1
            else:
                path.unlink()
        except OSError as error:
            _log.warning("removal from the trash failed, it is tried again: error=%s", str(error))
        finally:
            os.close(descriptor)


def _in_memory(directory: Path) -> bool:
    """Return whether a directory lies in a tmpfs."""
    device = os.stat(directory).st_dev
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, filesystem = line.partition(" - ")
        if fields.split()[2] == device_number:
            return filesystem.split()[0] == "tmpfs"
    return False

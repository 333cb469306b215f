"""The trash of a store: segments that were removed, for as long as somebody has them open or mapped.

What nobody has any more may stay a little longer: writing over pages that are there is faster than taking fresh ones.
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

#: What part of the limit, or of the machine's memory, removed segments may keep to be written over; and seconds.
_REUSE_SHARE = 1 / 8
_REUSE_SECONDS = 60.0
_REUSE_FILES = 64  # since all are looked at whenever something is removed
_REUSE_MIN_SIZE = 1 << 16  # bytes from which on a file is worth that


def reuse_bytes(store: Path, limit: int | None) -> int:
    """How many bytes the trash of a store may keep to be written over: none unless it lies in memory."""
    return int(_REUSE_SHARE * (limit or machine_memory())) if _in_memory(store) else 0


def empty(trash: Path, keep: int) -> None:
    """Remove the segments that nobody has open or mapped. `keep` bytes of them may stay for a while.

    Anything else that lies there is left alone.
    """
    files = _REUSE_FILES
    oldest = time.time() - _REUSE_SECONDS
    # Errors are logged: a removed segment is removed, and only takes memory until the next time.
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
            recent = status.st_ctime >= oldest  # since when it is in the trash
            if files and recent and _REUSE_MIN_SIZE <= status.st_size <= keep:
                keep -= status.st_size
                files -= 1
            else:
                path.unlink()
        except OSError as error:
            _log.warning("removing from the trash failed, it is tried again: error=%s", str(error))
        finally:
            os.close(descriptor)


def _in_memory(directory: Path) -> bool:
    """Whether a directory lies in a tmpfs."""
    device = os.stat(directory).st_dev
    device_number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device_number:
            return rest.split()[0] == "tmpfs"
    return False

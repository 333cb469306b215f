"""Where files lie that are made once for this user: scripts around a Java, the jar for a Spark."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def private_directory() -> Path:
    """Our directory in this user's cache, or in the temporary directory; nobody else can write to it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for directory in (Path(cache, "dissociated"), Path(tempfile.gettempdir(), f"dissociated-{os.getuid()}")):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
        except OSError:
            continue
        ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if ours and os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="dissociated-"))

"""Directory for files that are made once per user: scripts around a Java, the jar for a Spark."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dissociated.base.private import open_private_directory
from dissociated.errors import NotPrivate


def private_directory() -> Path:
    """Return the directory of this library in the user's cache, or else in the temporary directory.

    Create it if it is missing. No other user can write to it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for directory in (Path(cache, "dissociated"), Path(tempfile.gettempdir(), f"dissociated-{os.getuid()}")):
        try:
            os.close(open_private_directory(directory, create=True, readable=True))
        except (NotPrivate, OSError):
            continue
        if os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="dissociated-"))

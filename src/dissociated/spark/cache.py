"""Where files lie that are made once for this user: scripts around a Java, the jar for a Spark."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dissociated.base.private import open_private_directory
from dissociated.errors import NotPrivate


def private_directory() -> Path:
    """Our directory in this user's cache, or in the temporary directory; nobody else can write to it."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for directory in (Path(cache, "dissociated"), Path(tempfile.gettempdir(), f"dissociated-{os.getuid()}")):
        try:
            os.close(open_private_directory(directory, create=True, readable=True))
        except (NotPrivate, OSError):
            continue
        if os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="dissociated-"))

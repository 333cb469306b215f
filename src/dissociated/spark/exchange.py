"""Objects and memory that Python passes to Spark's JVM: text that the JVM stores, and memfds that it opens."""

from __future__ import annotations

import base64
import os
import pickle
import weakref
from typing import Any

from dissociated.memory.shared import create_memfd


def pickled(value: Any) -> str:
    """Return `value` in ASCII, for `unpickled`. The JVM passes it from the driver to tasks and back unchanged."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpickled(text: str) -> Any:
    """Return the object that `pickled` encoded.

    Never pass other text: unpickling runs the functions that the text names.
    """
    return pickle.loads(base64.b64decode(text))


class JvmMemfd:
    """A memfd that Spark's JVM opens by its path. It is closed at the latest when this object is collected."""

    def __init__(self, name: str = "spark", writable: bool = False) -> None:
        """Create an empty memfd. If it is `writable`, the JVM may also write to it. The `name` is for people."""
        self.descriptor = create_memfd(name)
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._close.atexit = False
        if writable:
            os.fchmod(self.descriptor, 0o600)

    @property
    def path(self) -> str:
        """The path by which the JVM opens the memfd, until it is closed."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        """Close the memfd."""
        self._close()

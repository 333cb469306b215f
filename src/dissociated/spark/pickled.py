"""Python objects as text, which the JVM stores: it passes them from the driver to tasks and back unchanged."""

from __future__ import annotations

import base64
import pickle
from typing import Any


def pickled(value: Any) -> str:
    """Return `value` in ASCII, for `unpickled`."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpickled(text: str) -> Any:
    """Return the object that `pickled` encoded.

    Never pass other text: unpickling runs the functions that the text names.
    """
    return pickle.loads(base64.b64decode(text))

"""Python objects as text, for the JVM to keep: it hands them from the driver to tasks, and back to us unchanged."""

from __future__ import annotations

import base64
import pickle
from typing import Any


def pickled(what: Any) -> str:
    """The object as ASCII."""
    return base64.b64encode(pickle.dumps(what)).decode()


def unpickled(text: str) -> Any:
    """The object again. Only for what `pickled` made: unpickling runs what it names."""
    return pickle.loads(base64.b64decode(text))

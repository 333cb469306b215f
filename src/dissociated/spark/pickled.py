"""Python objects as text, for the JVM to keep: it hands them from the driver to tasks, and back."""

from __future__ import annotations

import base64
import pickle
from typing import Any


def pickled(what: Any) -> str:
    return base64.b64encode(pickle.dumps(what)).decode()


def unpickled(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))

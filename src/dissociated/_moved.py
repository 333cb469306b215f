"""Documented names at their old places, for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any


def moved(old: str, *places: str) -> Callable[[str], Any]:
    """The `__getattr__` of the module `old`, whose names are in `places` now. Says so with a DeprecationWarning."""

    def find(name: str) -> Any:
        for place in () if name.startswith("_") else places:
            module = import_module(place)
            if hasattr(module, name):
                warnings.warn(
                    f"{old}.{name} has moved: import it from {place}; the old place goes with the next release",
                    DeprecationWarning,
                    stacklevel=2,
                )
                return getattr(module, name)
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find

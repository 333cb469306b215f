"""Threads that work for a medium while nobody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dissociated.errors import TransportError


def start_thread(run: Callable[[], object], name: str, what: str) -> None:
    """Start one. Raises TransportError, which says `what` takes a thread, where there is none to be had."""
    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:
        raise TransportError(f"{what}: {error}") from None

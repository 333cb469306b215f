"""Descriptors that are open for the length of a `with` block."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def owned(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(descriptor: int) -> Iterator[int]:
    """Lock a file or directory for this block alone, as soon as no other process has it locked. Then close it."""
    with owned(descriptor):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor

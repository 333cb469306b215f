"""Descriptors that are open for the length of a `with` block."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


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
        with unlocking(descriptor):
            yield descriptor


@contextmanager
def try_locked(descriptor: int) -> Iterator[bool]:
    """Lock a file or directory for this block, if no other process has it locked. Yield whether it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        is_locked = False
    else:
        is_locked = True
    with unlocking(descriptor) if is_locked else nullcontext():
        yield is_locked


@contextmanager
def unlocking(descriptor: int) -> Iterator[None]:
    """Unlock a file after the block. Closing it is not enough: a process that was forked meanwhile has it open, too."""
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)

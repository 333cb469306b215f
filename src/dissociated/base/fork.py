"""Servers, clients and connections in a process that is forked: they stay with the process that made them.

A child has copies of all objects and none of the threads that work for them; its descriptors are the parent's, locks
may be held by threads that it does not have, and gRPC does not work in it any more. So a resource of one process is a
`ProcessBound`. As soon as a child begins, before anything else runs there, its copy is marked as inherited, and closes
the child's descriptors, without a word to the peer. The methods by which users use or end the resource look at that
mark first: in the child they raise ForkedError, or do nothing if they only end it. Memory that is mapped stays
readable.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from contextlib import suppress

from dissociated.errors import ForkedError


class ProcessBound:
    """A resource of the process that made it."""

    #: Whether this is a child's copy of a resource of its parent. No id of a process tells: ids are used again.
    is_inherited = False

    def bind_to_process(self) -> None:
        """Make this a resource of the current process, and its copy in a child that is forked an inherited one."""
        global _watching
        with _lock:
            if not _watching:
                os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
                _watching = True
            _bound_objects.add(self)

    def after_fork_in_child(self) -> None:
        """Give back what a child's copy holds, such as its descriptors.

        Called once, in the child, with no other thread running: it takes no lock, and never raises.
        """

    def check_process(self) -> None:
        """Raise ForkedError if this is a child's copy of a resource of its parent."""
        if self.is_inherited:
            raise ForkedError(
                f"this {type(self).__name__} belongs to the process that this one was forked from: make one here"
            )


_bound_objects: weakref.WeakSet[ProcessBound] = weakref.WeakSet()
_watching = False
_lock = threading.Lock()  # of these; held throughout a fork
_grpc: int | None = None  # the process that began to use gRPC


def _begin_child() -> None:
    global _bound_objects
    inherited, _bound_objects = [*_bound_objects], weakref.WeakSet()
    _lock.release()
    for bound in inherited:
        bound.is_inherited = True
        with suppress(AttributeError):  # one that another thread was just making
            bound.after_fork_in_child()


def leak(bound: object) -> None:
    """See to it that nothing finalizes `bound` in this process, at its exit neither.

    That would wait for threads of the parent's, or change what the parent uses.
    """
    for reference in weakref.getweakrefs(bound):
        if isinstance(reference.__callback__, weakref.finalize):
            reference.__callback__.detach()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(bound))


def use_grpc() -> None:
    """gRPC is used from now on. Raises ForkedError where a parent of this process used it: here, it would hang."""
    global _grpc
    if _grpc is None:
        _grpc = os.getpid()
    elif _grpc != os.getpid():
        raise ForkedError(
            "gRPC, which catalogs are asked by, was used before this process was forked, and does not work in it: "
            "start the process by spawn or forkserver, which a Client can be sent to, or fork before the first call; "
            "endpoints that are known can be read here over shm or tcp, with read_endpoint or open_stream"
        )

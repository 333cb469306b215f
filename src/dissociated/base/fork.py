"""Servers, clients and connections in a process that forks. They stay with the process that made them.

A child has copies of all objects, but none of the threads that work for them. Its descriptors are the parent's, its
locks may be held by threads that it lacks, and gRPC does not work in it. So a resource of one process is a
`ProcessBound`. When a child begins, before any other code runs in it, its copy of the resource is marked as inherited
and closes the child's descriptors, without a message to the peer. Methods that use or end the resource check that mark:
in the child they raise ForkedError, or do nothing if they only end it. Mapped memory stays readable.
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

    #: Whether this is a child's copy of a resource of its parent. Process ids cannot tell, because they are reused.
    is_inherited = False

    def bind_to_process(self) -> None:
        """Bind this resource to the current process. Its copy in a forked child is then marked as inherited."""
        global _watching
        with _lock:
            if not _watching:
                os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
                _watching = True
            _bound_objects.add(self)

    def after_fork_in_child(self) -> None:
        """Release what a child's copy holds, such as descriptors.

        It is called once, in the child, while no other thread runs. It takes no lock, and never raises.
        """

    def check_process(self) -> None:
        """Raise ForkedError if this is a child's copy of a resource of its parent."""
        if self.is_inherited:
            raise ForkedError(
                f"this {type(self).__name__} belongs to the process that forked this one: make a new one in this "
                "process"
            )


_bound_objects: weakref.WeakSet[ProcessBound] = weakref.WeakSet()
_watching = False
_lock = threading.Lock()  # guards both; held throughout a fork
_grpc: int | None = None  # the process that began to use gRPC


def _begin_child() -> None:
    global _bound_objects
    inherited, _bound_objects = [*_bound_objects], weakref.WeakSet()
    _lock.release()
    for instance in inherited:
        instance.is_inherited = True
    for instance in inherited:
        # An AttributeError is of an object that another thread had not finished making, an OSError of a descriptor that
        # another thread was closing. Neither may keep the other objects from their release.
        with suppress(AttributeError, OSError):
            instance.after_fork_in_child()


def hold_over_forks(lock: threading.Lock) -> None:
    """Hold a lock over each fork from now on. A child would otherwise lack the thread that holds it."""
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def leak(instance: object) -> None:
    """Prevent finalization of `instance` in this process, also at its exit.

    A finalizer would wait for threads of the parent, or change what the parent uses.
    """
    for reference in weakref.getweakrefs(instance):
        if isinstance(reference.__callback__, weakref.finalize):
            reference.__callback__.detach()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(instance))


def use_grpc() -> None:
    """Record that this process uses gRPC.

    Raises:
        ForkedError: A parent of this process used gRPC, which would hang in this process.
    """
    global _grpc
    if _grpc is None:
        _grpc = os.getpid()
    elif _grpc != os.getpid():
        raise ForkedError(
            "gRPC, which clients use to ask catalogs, was used before this process was forked, and does not work in "
            "it: start the process with spawn or forkserver, or fork before the first call; known endpoints can be "
            "read here over shm or tcp, with read_endpoint or open_stream"
        )

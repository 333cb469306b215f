"""What becomes of servers, clients and connections in a process that is forked: they stay with its parent.

A child has copies of all objects and none of the threads that work for them; its descriptors are the parent's, locks
may be held by threads that it does not have, and gRPC does not work in it any more. So whatever is bound to a process
(`bind_to_process`) is told as soon as a child begins, before anything else runs there, and leaves: it closes the
child's copies of descriptors, without a word to whoever is at the other end, and does nothing from then on. Closing it
in the child is allowed and does nothing; whatever else is asked of it raises ForkedError. Memory that is mapped stays
readable.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from contextlib import suppress
from types import new_class
from typing import Any, Protocol

from dissociated.errors import ForkedError


class ProcessBound(Protocol):
    """What belongs to the process that made it."""

    def after_fork_in_child(self) -> None:
        """This is a child's copy. Called once, with no other thread running: it takes no lock, and never raises."""


_bound_objects: weakref.WeakSet[ProcessBound] = weakref.WeakSet()
_watching = False
_lock = threading.Lock()  # of these; held throughout a fork
_grpc: int | None = None  # the process that began to use gRPC


def bind_to_process(bound: ProcessBound) -> None:
    """From now on, a child that is forked calls `bound.after_fork_in_child()`."""
    global _watching
    with _lock:
        if not _watching:
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_begin_child)
            _watching = True
        _bound_objects.add(bound)


def _begin_child() -> None:
    global _bound_objects
    inherited, _bound_objects = [*_bound_objects], weakref.WeakSet()
    _lock.release()
    for bound in inherited:
        with suppress(AttributeError):  # one that another thread was just making
            bound.after_fork_in_child()


def invalidate(bound: Any) -> None:
    """What `after_fork_in_child` does at last: `bound` is the parent's, and here it only says so."""
    kind = type(bound)
    bound.__class__ = new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(_INVALID))


#: What owners do at the end, in finalizers too.
_CLOSERS = ("abort", "close", "finish", "interrupt", "join", "leave", "settle", "stop", "stop_receiving", "wake")


def _attribute(bound: object, name: str) -> Any:
    if name in _CLOSERS:
        return _nothing
    if name.startswith("__"):
        return object.__getattribute__(bound, name)
    return _refuse(bound)


def _refuse(bound: object, *_: object) -> Any:
    raise ForkedError(f"{bound!r} belongs to the process that this one was forked from: make one here")


def _nothing(*_: object) -> None:
    pass


#: What is different with that which has left.
_INVALID: dict[str, Any] = {
    "__slots__": (),
    "__getattribute__": _attribute,
    "__enter__": _refuse,
    "__exit__": _nothing,
    "__next__": _refuse,
    "__repr__": lambda bound: f"<{type(bound).__name__} of the parent process>",
}


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

"""Memory of libfabric's endpoints: registered in domains, kept for operations in progress, and returned afterwards."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NamedTuple

from dissociated.base.once import once
from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.libfabric import Ofi

_CONTEXT_SIZE = 8  # pointers that a provider may keep in the context of an operation (struct fi_context2)
#: A key in a URI: whether addresses are virtual addresses of the server rather than offsets, and libfabric's key.
RMA_KEY = struct.Struct("<BQ")


class Domain:
    """A fabric and a domain in it, with which memory is registered. The last endpoint that leaves it closes it."""

    def __init__(self, ofi: Ofi, info: Any) -> None:
        self._ofi = ofi
        self._lock = threading.Lock()
        self._users = 0
        null, action = ofi.ffi.NULL, "opening a domain"
        fabric, domain = ofi.ffi.new("struct fid_fabric **"), ofi.ffi.new("struct fid_domain **")
        ofi.check(ofi.lib.fi_fabric(info.fabric_attr, fabric, null), action)
        self.fabric = fabric[0]
        code = self.fabric.ops.domain(self.fabric, info, domain, null)
        if code < 0:
            ofi.close(self.fabric)
        ofi.check(code, action)
        self.domain = domain[0]
        self._keys = count(1)

    def enter(self) -> None:
        """Count another endpoint that shares the domain."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Count a closed endpoint, and close the domain after the last one."""
        with self._lock:
            self._users -= 1
            if not self._users:
                for opened in (self.domain, self.fabric):
                    self._ofi.close(opened)

    def register(self, memory: Any, access: int) -> Any:
        """Register `memory`, so that libfabric or peers can use it with the rights in `access`.

        Returns:
            The registration, which must be passed to `unregister` before the memory is released.
        """
        registered, null = self._ofi.ffi.new("struct fid_mr **"), self._ofi.ffi.NULL
        fid = self._ofi.ffi.addressof(self.domain.fid)
        code = self.domain.mr.reg(fid, memory, len(memory), access, 0, next(self._keys), 0, registered, null)
        self._ofi.check(code, "registering memory")
        return registered[0]

    def unregister(self, registered: Any) -> None:
        """End the access of libfabric and of peers to registered memory."""
        self._ofi.close(registered)


class Completion(NamedTuple):
    """The result of an operation. `error` is 0 or an errno; `pointer` is the address of an untagged message.

    `last` is false if the operation continues: its buffer has room for more untagged messages, or some are still being
    received.
    """

    error: int
    flags: int
    length: int
    pointer: Any
    tag: int
    last: bool


Done = Callable[[Completion], None]


class Filling:
    """The fill state of a buffer for untagged messages.

    The flag MULTI_RECV means that no further message is put into the buffer. With rxm of libfabric 1.17, some messages
    may still be in progress then, because large ones are fetched from the sender. Rxm puts messages next to each other
    until less than `least` bytes are left, so a gap shows that a message is missing. For other providers `least` is
    None, and the flag alone counts.
    """

    __slots__ = ("_address", "_end", "_full", "_least", "_received", "_size")

    def __init__(self, address: int, size: int, least: int | None) -> None:
        self._address, self._size, self._least = address, size, least
        self._received = self._end = 0  # bytes of received messages, and the offset at which the last of them ends
        self._full = False

    def take(self, address: int, length: int, flags: int) -> bool:
        """Count a completion, with a message or only a flag. Return whether the buffer is full and all is received."""
        if flags & c.RECV:
            self._received += length
            self._end = max(self._end, address + length - self._address)
        self._full |= bool(flags & c.MULTI_RECV)
        return self._full and (self._least is None or self._has_all(self._least))

    def _has_all(self, least: int) -> bool:
        return self._received == self._end and self._size - self._end < least


class Operation(NamedTuple):
    """An operation in progress. `context` identifies it in libfabric."""

    context: Any
    on_done: Done
    keep: Any  # memory that must stay alive
    filling: Filling | None  # set for a buffer of many untagged messages, whose operation completes several times
    registered: list[Any]  # registrations of memory, which end with the operation
    fetches: bool  # whether the operation reads memory of the peer


class Operations:
    """The operations of one endpoint by their contexts. Owns the registrations of their memory."""

    domain: Domain  #: the domain of the registrations; set before the first operation

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi
        self._by_context: dict[int, Operation] = {}

    @property
    def fetching(self) -> bool:
        """Whether an operation reads memory of a peer."""
        return any(operation.fetches for operation in self._by_context.values())

    def begin(
        self,
        on_done: Done,
        keep: Any,
        context: Any = None,
        filling: Filling | None = None,
        registered: Sequence[Any] = (),
        fetches: bool = False,
    ) -> Operation:
        """Record an operation that is passed to libfabric next. `keep` stays alive until the operation has ended."""
        if context is None:
            context = self._ffi.new(f"void *[{_CONTEXT_SIZE}]")
        operation = Operation(context, on_done, keep, filling, [*registered], fetches)
        self._by_context[self._key(context)] = operation
        return operation

    def remove(self, operation: Operation) -> None:
        """Remove an operation that libfabric did not accept, or that has ended."""
        del self._by_context[self._key(operation.context)]
        self._unregister(operation)

    def end(self, entry: Any, error: int) -> tuple[Operation, bool] | None:
        """Return the operation of the completion `entry`, and whether it has ended; None if it was removed before."""
        operation = self._by_context.get(self._key(entry.op_context))
        if operation is None:
            return None
        filling = operation.filling
        # After an error, libfabric may still write to the buffer, so it is kept until the endpoint is closed.
        whole = filling is None or (not error and filling.take(self._key(entry.buf), entry.len, entry.flags))
        if whole:
            self.remove(operation)
        return operation, whole

    def unregister_all(self) -> None:
        """Unregister the memory of all operations. The endpoint must be closed."""
        for operation in self._by_context.values():
            self._unregister(operation)

    def clear(self) -> None:
        """Remove all operations, and release the memory that they kept alive."""
        self._by_context.clear()

    def _unregister(self, operation: Operation) -> None:
        while operation.registered:  # `pop` ensures that each is unregistered once, even if a signal interrupts this
            self.domain.unregister(operation.registered.pop())

    def _key(self, context: Any) -> int:
        return int(self._ffi.cast("uintptr_t", context))


_MIN_CLOSED = 4  # endpoints that are closed before their memory is returned to the system


class Heap:
    """The part of the C library's heap that endpoints use.

    An endpoint takes 33 MB of it. glibc keeps freed memory, separately for each thread that has allocated, so a process
    that opens and closes many connections would keep gigabytes. Freed memory is therefore returned to the system as
    soon as more endpoints were closed than are open, and at least `_MIN_CLOSED`. That takes a few milliseconds, and the
    next endpoint takes 20 more, because its memory has page faults again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may interrupt its owner
        self._open = self._closed = 0  # endpoints that are open, and those closed since memory was last returned

    def opened(self) -> None:
        """Count an endpoint that is being opened."""
        with self._lock:
            self._open += 1

    def closed(self) -> None:
        """Count an endpoint that was closed, and return memory to the system if it is time."""
        with self._lock:
            self._open -= 1
            self._closed += 1
            if self._closed < max(self._open, _MIN_CLOSED):
                return
            self._closed = 0
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it; other C libraries keep less memory
        if trim is not None:
            trim(0)


@once
def heap_of(pid: int) -> Heap:
    """Return the heap of process `pid`. A forked child does not close the endpoints of its parent."""
    return Heap()

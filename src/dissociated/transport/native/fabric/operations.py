"""The operations in progress of a libfabric endpoint, each with the memory that must stay until it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dissociated.transport.native.fabric import libfabric as c
from dissociated.transport.native.fabric.domain import Domain

_CONTEXT_SIZE = 8  # pointers that a provider may keep in the context of an operation (struct fi_context2)


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

    def forget(self, operation: Operation) -> None:
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
            self.forget(operation)
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

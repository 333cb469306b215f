"""The operations that an endpoint of libfabric has begun, each with what must stay until it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dissociated.transport.native.fabric import _ofi as c
from dissociated.transport.native.fabric.domain import Domain

_CONTEXT_SIZE = 8  # pointers that a provider may keep in the context of an operation (struct fi_context2)


class Completion(NamedTuple):
    """How an operation ended. `error` is 0 or an errno; `pointer` is where an untagged message lies.

    `last` is false where it goes on: there is room for more untagged messages, or some are still being received.
    """

    error: int
    flags: int
    length: int
    pointer: Any
    tag: int
    last: bool


Done = Callable[[Completion], None]


class Filling:
    """How much of a buffer for untagged messages has been received.

    MULTI_RECV says that nothing more is put into it. With rxm of libfabric 1.17 some messages are still on their way
    then: large ones are fetched from the sender, small ones are there at once. With rxm they lie side by side, until
    less than `least` bytes are left, so that one can see which are missing. Of other providers that is not known
    (None), nor that they do this.
    """

    __slots__ = ("_address", "_end", "_full", "_least", "_received", "_size")

    def __init__(self, address: int, size: int, least: int | None) -> None:
        self._address, self._size, self._least = address, size, least
        self._received = self._end = 0  # bytes of messages, and where the last ends that is known
        self._full = False

    def take(self, address: int, length: int, flags: int) -> bool:
        """A message has been received, or nothing but a flag. Whether the buffer is full, and nothing on its way."""
        if flags & c.RECV:
            self._received += length
            self._end = max(self._end, address + length - self._address)
        self._full |= bool(flags & c.MULTI_RECV)
        return self._full and (self._least is None or self._has_all(self._least))

    def _has_all(self, least: int) -> bool:
        return self._received == self._end and self._size - self._end < least


class Operation(NamedTuple):
    """One that was begun. `context` is what libfabric calls it."""

    context: Any
    done: Done
    keep: Any  # memory that must stay
    filling: Filling | None  # of one that ends more than once: a buffer for untagged messages
    registered: list[Any]  # memory, for as long as it lasts
    fetches: bool  # whether the peer's memory is being read


class Operations:
    """Those of one endpoint, by their contexts. Owns the memory that is registered for them."""

    domain: Domain  #: with which it is registered; set before any is

    def __init__(self, ffi: Any) -> None:
        self._ffi = ffi
        self._by_context: dict[int, Operation] = {}

    @property
    def fetching(self) -> bool:
        """Whether memory of a peer's is being read."""
        return any(operation.fetches for operation in self._by_context.values())

    def begin(
        self,
        done: Done,
        keep: Any,
        context: Any = None,
        filling: Filling | None = None,
        registered: Sequence[Any] = (),
        fetches: bool = False,
    ) -> Operation:
        """One that is given to libfabric next. `keep` stays until it has ended, and `done` is called then."""
        if context is None:
            context = self._ffi.new(f"void *[{_CONTEXT_SIZE}]")
        operation = Operation(context, done, keep, filling, [*registered], fetches)
        self._by_context[self._key(context)] = operation
        return operation

    def forget(self, operation: Operation) -> None:
        """Libfabric did not take it, or has ended it."""
        del self._by_context[self._key(operation.context)]
        self._unregister(operation)

    def end(self, entry: Any, error: int) -> tuple[Operation, bool] | None:
        """The one that `entry` says has ended, and whether in whole; None for one that was cut off."""
        operation = self._by_context.get(self._key(entry.op_context))
        if operation is None:
            return None
        filling = operation.filling
        # After an error nothing tells what libfabric still writes to: that buffer stays until the endpoint is closed.
        whole = filling is None or (not error and filling.take(self._key(entry.buf), entry.len, entry.flags))
        if whole:
            self.forget(operation)
        return operation, whole

    def unregister_all(self) -> None:
        """The endpoint is closed, and uses no memory any more."""
        for operation in self._by_context.values():
            self._unregister(operation)

    def clear(self) -> None:
        """Let go of what had to stay."""
        self._by_context.clear()

    def _unregister(self, operation: Operation) -> None:
        while operation.registered:  # each once, although a signal may interrupt this: then it is called again
            self.domain.unregister(operation.registered.pop())

    def _key(self, context: Any) -> int:
        return int(self._ffi.cast("uintptr_t", context))

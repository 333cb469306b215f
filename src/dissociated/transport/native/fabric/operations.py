"""The operations that an endpoint of libfabric has begun, each with what must stay until it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dissociated.transport.native.fabric import _ofi as c
from dissociated.transport.native.fabric.domain import Domain

_CONTEXT_SIZE = 8  # pointers that a provider may keep in the context of an operation (struct fi_context2)


class Completion(NamedTuple):
    """How an operation ended. `error` is 0 or an errno; `pointer` is where an untagged message lies."""

    error: int
    flags: int
    length: int
    pointer: Any
    tag: int


Done = Callable[[Completion], None]


class Operation(NamedTuple):
    """One that was begun. `context` is what libfabric calls it."""

    context: Any
    done: Done
    keep: Any  # memory that must stay
    many: bool  # whether it ends more than once: a buffer for untagged messages
    registered: Sequence[Any]  # memory, for as long as it lasts
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
        many: bool = False,
        registered: Sequence[Any] = (),
        fetches: bool = False,
    ) -> Operation:
        """One that is given to libfabric next. `keep` stays until it has ended, and `done` is called then."""
        if context is None:
            context = self._ffi.new(f"void *[{_CONTEXT_SIZE}]")
        operation = Operation(context, done, keep, many, registered, fetches)
        self._by_context[self._key(context)] = operation
        return operation

    def forget(self, operation: Operation) -> None:
        """Libfabric did not take it."""
        del self._by_context[self._key(operation.context)]
        self._unregister(operation)

    def end(self, entry: Any, error: int) -> Operation | None:
        """The one that `entry` says has ended, in whole or in part; None for one that was cut off."""
        operation = self._by_context.get(self._key(entry.op_context))
        if operation is not None and (error or entry.flags & c.MULTI_RECV or not operation.many):
            del self._by_context[self._key(operation.context)]
            self._unregister(operation)
        return operation

    def unregister_all(self) -> None:
        """The endpoint is closed, and uses no memory any more."""
        for operation in self._by_context.values():
            self._unregister(operation)

    def clear(self) -> None:
        """Let go of what had to stay."""
        self._by_context.clear()

    def _unregister(self, operation: Operation) -> None:
        for memory in operation.registered:
            self.domain.unregister(memory)

    def _key(self, context: Any) -> int:
        return int(self._ffi.cast("uintptr_t", context))

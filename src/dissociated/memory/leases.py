"""Who still holds which address.

The server counts sends: an address sent twice must come back twice. The client holds a lease for each message
and gives it back when the last array that lies in the message's body is collected; a segment that libarrow reads in
place is one lease.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol, Self
from weakref import finalize

import pyarrow as pa

from dissociated.base.once import once
from dissociated.errors import DeviceError, RemoteProtocolError
from dissociated.memory.device.base import Device


class Ledger:
    """The server's account of what one connection holds. Not thread-safe: a connection has one thread."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()
        self._sends = 0  # of the addresses that are held, each as often as it was sent
        self._empty = 0  # buffers without bytes that were sent, and that the client may give back, too

    def __len__(self) -> int:
        """How many addresses are held."""
        return len(self._held)

    @property
    def max_freed(self) -> int:
        """How many addresses the client may still free: that many may be in one message."""
        return self._sends + self._empty

    def hold(self, addresses: Collection[int], empty: int = 0) -> None:
        """Account for `addresses` that are being sent, each once more, beside so many `empty` buffers."""
        self._held.update(addresses)
        self._sends += len(addresses)
        self._empty += empty

    def release(self, addresses: Sequence[int]) -> list[int]:
        """The peer freed these. Returns those that nobody holds any more.

        0 is passed over: it is the address of a buffer without bytes, and some give that back, too.
        Raises RemoteProtocolError for an address that the peer does not hold (unknown, or freed already); what
        stands before it in `addresses` has then been released.
        """
        counts = self._held
        released = []
        zeros = 0
        for address in addresses:
            count = counts.get(address, 0)
            if count > 1:
                counts[address] = count - 1
            elif count:
                del counts[address]
                released.append(address)
            elif address:
                raise RemoteProtocolError(f"the client freed the address {address:#x}, which it does not hold")
            else:
                zeros += 1
        self._sends -= len(addresses) - zeros
        self._empty = max(0, self._empty - zeros)
        return released

    def release_all(self) -> list[int]:
        """The peer is gone: everything it held is free."""
        released = list(self._held)
        self._held.clear()
        self._sends = self._empty = 0
        return released


#: What comes back of an address that is still in use: a forked process maps it, and nobody can tell for how long. No
#: buffer has this address.
STILL_HELD = 0

#: Seconds after which a device is asked again that could not tell what is used: each time breaks off a capture there.
RETRY_INTERVAL = 5.0

_forks = 0  # how often this process has begun, or ended, to fork


@once
def _count_forks() -> None:
    def count() -> None:
        global _forks
        _forks += 1

    os.register_at_fork(before=count, after_in_parent=count, after_in_child=count)


class _Lease:
    """What a buffer refers to that lies in leased memory: the memory, which stays mapped, and its owner."""

    __slots__ = ("__weakref__", "_memory", "_owner")

    def __init__(self, memory: pa.Buffer, owner: object = None) -> None:
        self._memory = memory
        self._owner = owner


class _Ended(weakref.ref[_Lease]):
    """That a lease has ended: `callback` is then called with this, which must be kept until then.

    A `__del__` would be Python's code, where a signal may be handled: Ctrl-C would be lost there, and the lease too.
    """

    __slots__ = ("_addresses", "_device", "_forks", "_memory")

    def __new__(cls, lease: _Lease, callback: Callable[[_Ended], object], *_: object) -> Self:
        return super().__new__(cls, lease, callback)

    def __init__(
        self,
        lease: _Lease,
        callback: Callable[[_Ended], object],
        addresses: Sequence[int],
        memory: pa.Buffer,
        device: Device | None,
    ) -> None:
        self._addresses = addresses
        self._memory = None if device is None else memory  # which streams may read for longer
        self._device = device
        self._forks = _forks

    def addresses(self) -> Sequence[int]:
        """What may be given back, once nothing reads it any more on a device: that is waited for.

        Raises DeviceError where nobody can tell.
        """
        if self._forks != _forks:
            return (STILL_HELD,) * len(self._addresses)
        if self._device is not None and (fence := self._device.fence()) is not None:
            fence.synchronize()
        return self._addresses


class FreeQueue:
    """A client's leases, and what of them has ended: that is only queued then, and a connection's thread takes it.

    What was leased before this process forked is held by the child too, which says nothing when it lets go: such
    addresses come back as STILL_HELD. The child's leases keep `owner`, and so its copy of the connection: while that
    is open the server gives nothing of it to others.
    """

    def __init__(self, owner: object = None) -> None:
        _count_forks()
        # Its `put` is C alone, and reentrant, so it may be called at any point of any thread.
        self._queue: SimpleQueue[Sequence[int] | _Ended | None] = SimpleQueue()
        self._leases: set[_Ended] = set()  # until they have ended, and are taken
        self._unsure: list[_Ended] = []  # which a device may still read, for all that it says
        self._owner = owner

    def lease(self, memory: pa.Buffer, addresses: Sequence[int], device: Device | None = None) -> pa.Buffer:
        """The same memory as a buffer, at whose end, when the last array in it is collected, `addresses` are queued.

        On a `device` streams may go on to read it then: who takes the addresses waits for these, and lets go of it.
        """
        lease = _Lease(memory, self._owner)
        self._leases.add(_Ended(lease, self._queue.put, addresses, memory, device))
        return pa.foreign_buffer(memory.address, memory.size, lease)

    def put(self, addresses: Sequence[int], /) -> None:
        """Take addresses that are not leased."""
        self._queue.put(addresses)

    def wake(self) -> None:
        """Make a waiting `take` return what there is, even nothing."""
        self._queue.put(None)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to take now."""
        return self._queue.empty()

    @property
    def idle(self) -> bool:
        """Whether nothing is leased any more, and there is nothing to take."""
        return not self._leases and self._queue.empty()

    def take(self, limit: int) -> list[int]:
        """Wait for leases to end, or for `wake`. Returns their addresses, coalesced up to about `limit`.

        Those that a device may still read come later: it is asked again when others end, and every few seconds.
        """
        addresses: list[int] = []
        try:
            item = self._queue.get(timeout=RETRY_INTERVAL if self._unsure else None)
        except Empty:
            item = None
        unsure, self._unsure = self._unsure, []
        for ended in unsure:  # once, and not for each that has ended
            addresses += self._addresses_of(ended)
        while True:
            if item is not None:
                addresses += self._addresses_of(item) if isinstance(item, _Ended) else item
            if len(addresses) >= limit or self._queue.empty():
                return addresses
            item = self._queue.get()

    def _addresses_of(self, ended: _Ended) -> Sequence[int]:
        try:
            addresses = ended.addresses()
        except DeviceError:
            self._unsure.append(ended)
            return ()
        self._leases.remove(ended)
        return addresses


class AddressSink(Protocol):
    """Where addresses go whose lease has ended: a SimpleQueue, or what else may be called anywhere."""

    def put(self, addresses: Sequence[int], /) -> object:
        """Take them. Called from finalizers, at any point of any thread: enqueue, do nothing else."""


def leased_buffer(memory: pa.Buffer, addresses: Sequence[int], returns: AddressSink) -> pa.Buffer:
    """Return the same memory as a buffer. `addresses` are returned when the last array in it is collected.

    A process that ends does not return them: its peer learns that from the connection.
    """
    lease = _Lease(memory)
    finalize(lease, returns.put, addresses).atexit = False
    return pa.foreign_buffer(memory.address, memory.size, lease)

"""Who still holds which address.

The server counts sends: an address sent twice must come back twice. The client holds a lease for each message
and gives it back when the last array that lies in the message's body is collected; a segment that libarrow reads in
place is one lease.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import pyarrow as pa

from dissociated.errors import DeviceError, RemoteProtocolError
from dissociated.memory.device.base import Device, Event
from dissociated.once import once


class Ledger:
    """The server's account of what one connection holds. Not thread-safe: a connection has one thread."""

    def __init__(self) -> None:
        self._held: Counter[int] = Counter()

    def __len__(self) -> int:
        """How many addresses are held."""
        return len(self._held)

    def hold(self, addresses: Iterable[int]) -> None:
        """These addresses are being sent, each once more."""
        self._held.update(addresses)

    def release(self, addresses: Sequence[int]) -> list[int]:
        """The peer freed these. Returns those that nobody holds any more.

        0 is passed over: it is the address of a buffer without bytes, and some give that back, too.
        Raises RemoteProtocolError for an address that the peer does not hold (unknown, or freed already); what
        stands before it in `addresses` has then been released.
        """
        counts = self._held
        released = []
        for address in addresses:
            count = counts.get(address, 0)
            if count > 1:
                counts[address] = count - 1
            elif count:
                del counts[address]
                released.append(address)
            elif address:
                raise RemoteProtocolError(f"the client freed the address {address:#x}, which it does not hold")
        return released

    def release_all(self) -> list[int]:
        """The peer is gone: everything it held is free."""
        released = list(self._held)
        self._held.clear()
        return released


#: What comes back of an address that is still in use: a forked process maps it, or a device reads it, and nobody can
#: tell for how long. No buffer has this address.
STILL_HELD = 0

_forks = 0  # how often this process has begun, or ended, to fork


@once
def _count_forks() -> None:
    def count() -> None:
        global _forks
        _forks += 1

    os.register_at_fork(before=count, after_in_parent=count, after_in_child=count)


class _OnDevice(NamedTuple):
    """Addresses of memory on a device, which streams may read until after this event."""

    addresses: Sequence[int]
    memory: pa.Buffer
    after: Event | None


_Queue = SimpleQueue[Sequence[int] | _OnDevice | None]


class FreeQueue:
    """Where a client's leases go when they end. Finalizers only enqueue; a connection's thread drains.

    SimpleQueue.put is reentrant, so it may be called from a finalizer at any point of any thread.

    What was leased before this process forked is held by the child too, which says nothing when it lets go: such
    addresses come back as STILL_HELD. The child's leases keep `owner`, and so its copy of the connection: while that
    is open the server gives nothing of it to others.
    """

    def __init__(self, owner: object = None, queue: _Queue | None = None) -> None:
        _count_forks()
        self._queue: _Queue = SimpleQueue() if queue is None else queue
        self._owner = owner
        self._forks = _forks

    def current(self) -> FreeQueue:
        """The queue for leases that begin now: this one, or after a fork another one, which is drained with this."""
        return self if self._forks == _forks else FreeQueue(self._owner, self._queue)

    def put(self, addresses: Sequence[int], /) -> None:
        """Take addresses whose lease has ended."""
        self._queue.put(addresses if self._forks == _forks else (STILL_HELD,) * len(addresses))

    def put_from_device(self, addresses: Sequence[int], memory: pa.Buffer, device: Device) -> None:
        """The same for `memory` on a device. Who takes them waits until nothing reads it, and lets go of it."""
        if self._forks != _forks:
            return self.put(addresses)
        try:
            self._queue.put(_OnDevice(addresses, memory, device.fence()))
        except DeviceError:
            self._queue.put((STILL_HELD,) * len(addresses))

    def wake(self) -> None:
        """Make a waiting `take` return what there is, even nothing."""
        self._queue.put(None)

    def take(self, limit: int) -> list[int]:
        """Wait for leases to end, or for `wake`. Returns their addresses, coalesced up to about `limit`."""
        addresses: list[int] = []
        while True:
            item = self._queue.get()
            if item is None:
                return addresses
            addresses += _let_go(item) if isinstance(item, _OnDevice) else item
            del item  # while the next is waited for, it may hold memory
            if len(addresses) >= limit or self._queue.empty():
                return addresses


def _let_go(item: _OnDevice) -> Sequence[int]:
    if item.after is not None:
        with suppress(DeviceError):  # a device that is lost reads nothing any more
            item.after.synchronize()
    return item.addresses


class AddressSink(Protocol):
    """Where addresses go whose lease has ended: `FreeQueue`, a SimpleQueue, or what else may be called anywhere."""

    def put(self, addresses: Sequence[int], /) -> object:
        """Take them. Called from finalizers, at any point of any thread: enqueue, do nothing else."""


class Lease:
    """Keeps memory mapped and addresses in it held, for as long as anything refers to it."""

    __slots__ = ("_addresses", "_memory", "_put")

    def __init__(self, memory: pa.Buffer, addresses: Sequence[int], returns: AddressSink) -> None:
        self._memory = memory
        self._addresses = addresses
        self._put = returns.put

    def __del__(self) -> None:
        self._put(self._addresses)


class _DeviceLease:
    """The same for memory on a device."""

    __slots__ = ("_addresses", "_device", "_memory", "_returns")

    def __init__(self, memory: pa.Buffer, addresses: Sequence[int], returns: FreeQueue, device: Device) -> None:
        self._memory = memory
        self._addresses = addresses
        self._returns = returns
        self._device = device

    def __del__(self) -> None:
        self._returns.put_from_device(self._addresses, self._memory, self._device)


def leased_buffer(memory: pa.Buffer, addresses: Sequence[int], returns: AddressSink) -> pa.Buffer:
    """The same memory as a buffer, at whose end, when the last array in it is collected, `addresses` are returned."""
    return pa.foreign_buffer(memory.address, memory.size, Lease(memory, addresses, returns))


def leased_on_device(memory: pa.Buffer, addresses: Sequence[int], returns: FreeQueue, device: Device) -> pa.Buffer:
    """The same for memory on a device, which its streams may go on to read after the last array is collected."""
    return pa.foreign_buffer(memory.address, memory.size, _DeviceLease(memory, addresses, returns, device))

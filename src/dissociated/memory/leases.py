"""Leases: the account of addresses that a peer holds.

The server counts sends: an address that was sent twice must be freed twice. The client has a lease for each message,
and frees the message's addresses, or its number, when the last array in its body is collected. A segment that libarrow
reads in place has one lease.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Self
from weakref import finalize

import pyarrow as pa

from dissociated.base.once import once
from dissociated.errors import DeviceError, RemoteProtocolError
from dissociated.memory.device.base import Device


class Ledger(ABC):
    """The server's account of the memory that the client of one connection holds.

    It is not thread-safe: a connection has one thread.
    """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of leases that are held."""

    @property
    @abstractmethod
    def max_freed(self) -> int:
        """Return the largest number of integers that the client may still send to free memory."""

    @abstractmethod
    def hold(self, leased: Mapping[int, Sequence[int]], empty: int = 0) -> None:
        """Record that messages are sent.

        Args:
            leased: The leased addresses of each message whose body is sent by address, by its number.
            empty: The number of buffers without bytes in these bodies.
        """

    @abstractmethod
    def release(self, freed: Sequence[int]) -> list[int]:
        """Record that the client freed the memory that `freed` names.

        Returns:
            The addresses that the client no longer holds.

        Raises:
            RemoteProtocolError: The client does not hold some of this memory. The memory named before it in `freed` has
                been released.
        """

    @abstractmethod
    def withdraw(self, leased: Mapping[int, Sequence[int]]) -> None:
        """Undo `hold`, because the messages were not sent."""

    @abstractmethod
    def clear(self) -> None:
        """End all leases, after the client has disconnected."""


class MessageLedger(Ledger):
    """The account of a client that frees messages by their numbers. Each body by address is one lease."""

    def __init__(self) -> None:
        self._leased: dict[int, Sequence[int]] = {}

    def __len__(self) -> int:
        return len(self._leased)

    @property
    def max_freed(self) -> int:
        return len(self._leased)

    def hold(self, leased: Mapping[int, Sequence[int]], empty: int = 0) -> None:
        self._leased.update(leased)

    def release(self, freed: Sequence[int]) -> list[int]:
        released: list[int] = []
        for number in freed:
            addresses = self._leased.pop(number, None)
            if addresses is None:
                raise RemoteProtocolError(
                    f"the client freed message {number}, which it does not hold", rule="free-leased"
                )
            released += addresses
        return released

    def withdraw(self, leased: Mapping[int, Sequence[int]]) -> None:
        self.release([*leased])

    def clear(self) -> None:
        self._leased.clear()


class AddressLedger(Ledger):
    """The account of a client that frees addresses. An address that is held in several messages counts as one lease."""

    def __init__(self) -> None:
        self._addresses: set[int] = set()
        self._repeats: Counter[int] = Counter()  # number of further sends of addresses that were sent again
        self._sends = 0  # number of sends that the client has not freed
        self._empty = 0  # number of buffers without bytes that the client may free, too

    def __len__(self) -> int:
        return len(self._addresses)

    @property
    def max_freed(self) -> int:
        return self._sends + self._empty

    def hold(self, leased: Mapping[int, Sequence[int]], empty: int = 0) -> None:
        addresses = [*chain.from_iterable(leased.values())]
        self._sends += len(addresses)
        self._empty += empty
        before = len(self._addresses)
        if self._addresses.isdisjoint(addresses):
            self._addresses.update(addresses)
            if len(self._addresses) == before + len(addresses):
                return
            self._addresses.difference_update(addresses)  # some of them are equal
        for address in addresses:
            if address in self._addresses:
                self._repeats[address] += 1
            else:
                self._addresses.add(address)

    def release(self, freed: Sequence[int]) -> list[int]:
        if not self._repeats:  # the common case, in which sets do the work
            addresses = {*freed}
            if len(addresses) == len(freed) and addresses <= self._addresses:
                self._addresses -= addresses
                self._sends -= len(freed)
                return [*freed]
        released = []
        zeros = 0
        for address in freed:
            if address in self._repeats:
                self._repeats[address] -= 1
                if not self._repeats[address]:
                    del self._repeats[address]
            elif address in self._addresses:
                self._addresses.remove(address)
                released.append(address)
            elif address:
                raise RemoteProtocolError(
                    f"the client freed the address {address:#x}, which it does not hold", rule="free-leased"
                )
            else:  # of a buffer without bytes; some clients free it
                zeros += 1
        self._sends -= len(freed) - zeros
        self._empty = max(0, self._empty - zeros)
        return released

    def withdraw(self, leased: Mapping[int, Sequence[int]]) -> None:
        self.release([*chain.from_iterable(leased.values())])

    def clear(self) -> None:
        self._addresses.clear()
        self._repeats.clear()
        self._sends = self._empty = 0


#: Value that stands for an address that a forked process still maps, for an unknown time. No address or number of a
#: message is negative.
STILL_HELD = -1

#: Seconds until a device that could not tell which memory it reads is asked again. Each query breaks off a capture of a
#: graph on that device, so there must be few.
RETRY_INTERVAL = 5.0

_forks = 0  # counts the beginnings and ends of forks, in the parent and in the child


@once
def _count_forks() -> None:
    def count() -> None:
        global _forks
        _forks += 1

    os.register_at_fork(before=count, after_in_parent=count, after_in_child=count)


class _Lease:
    """The owner of a buffer in leased memory. It keeps the memory mapped, and keeps `owner`."""

    __slots__ = ("__weakref__", "_memory", "_owner")

    def __init__(self, memory: pa.Buffer, owner: object = None) -> None:
        self._memory = memory
        self._owner = owner


class _LeaseEnd(weakref.ref[_Lease]):
    """A weak reference that calls `callback` with itself when its lease has ended. It must be kept until then.

    A `__del__` method would be Python code, in which a signal may be handled: Ctrl-C would be lost there, and the lease
    with it.
    """

    __slots__ = ("_addresses", "_device", "_forks", "_memory")

    def __new__(cls, lease: _Lease, callback: Callable[[_LeaseEnd], object], *_: object) -> Self:
        return super().__new__(cls, lease, callback)

    def __init__(
        self,
        lease: _Lease,
        callback: Callable[[_LeaseEnd], object],
        addresses: Sequence[int],
        memory: pa.Buffer,
        device: Device | None,
    ) -> None:
        self._addresses = addresses
        self._memory = None if device is None else memory  # kept because streams may still read it
        self._device = device
        self._forks = _forks

    def addresses(self) -> Sequence[int]:
        """Return the addresses to free, after waiting for the device to finish reading the memory.

        If the process has forked meanwhile, return STILL_HELD in place of each address.

        Raises:
            DeviceError: The device cannot tell whether it still reads the memory.
        """
        if self._forks != _forks:
            return (STILL_HELD,) * len(self._addresses)
        if self._device is not None and (fence := self._device.fence()) is not None:
            fence.synchronize()
        return self._addresses


class FreeQueue:
    """The leases of a client. A lease that ends only queues its addresses; the thread of a connection takes them.

    A child process holds the leases that existed when it was forked, and does not report their end. The addresses of
    such leases come back as STILL_HELD. The child's leases keep `owner`, and so its copy of the connection. While that
    copy is open, the server reuses none of the memory.
    """

    def __init__(self, owner: object = None) -> None:
        _count_forks()
        # The queue's `put` is implemented in C and reentrant, so it may be called at any point of any thread.
        self._queue: SimpleQueue[Sequence[int] | _LeaseEnd | None] = SimpleQueue()
        self._leases: set[_LeaseEnd] = set()  # leases whose addresses have not been taken
        self._undecided: list[_LeaseEnd] = []  # ended leases whose memory a device may still read
        self._owner = owner

    def lease(self, memory: pa.Buffer, addresses: Sequence[int], device: Device | None = None) -> pa.Buffer:
        """Return `memory` as a leased buffer: when its last array is collected, `addresses` are queued.

        Args:
            memory: The memory of a message's body.
            addresses: The addresses to free.
            device: The device whose memory it is. Its streams may still read the memory when the lease ends, so `take`
                waits for them, and then releases the memory.
        """
        lease = _Lease(memory, self._owner)
        self._leases.add(_LeaseEnd(lease, self._queue.put, addresses, memory, device))
        return pa.foreign_buffer(memory.address, memory.size, lease)

    def put(self, addresses: Sequence[int], /) -> None:
        """Queue addresses that are not leased."""
        self._queue.put(addresses)

    def wake(self) -> None:
        """Make a waiting `take` return what has been queued, even if that is nothing."""
        self._queue.put(None)

    @property
    def empty(self) -> bool:
        """Return whether the queue is empty."""
        return self._queue.empty()

    @property
    def idle(self) -> bool:
        """Return whether no lease exists and the queue is empty."""
        return not self._leases and self._queue.empty()

    def take(self, limit: int) -> list[int]:
        """Wait for leases to end, or for `wake`.

        Args:
            limit: Approximate number of addresses at which to return, even if more are queued.

        Returns:
            The addresses of leases that have ended. Addresses that a device may still read are returned later: `take`
                asks the device again when other leases end, and every RETRY_INTERVAL seconds.
        """
        addresses: list[int] = []
        try:
            item = self._queue.get(timeout=RETRY_INTERVAL if self._undecided else None)
        except Empty:
            item = None
        undecided, self._undecided = self._undecided, []
        for lease_end in undecided:  # once in each call, not for each lease that has ended
            addresses += self._addresses_of(lease_end)
        while True:
            if item is not None:
                addresses += self._addresses_of(item) if isinstance(item, _LeaseEnd) else item
            if len(addresses) >= limit or self._queue.empty():
                return addresses
            item = self._queue.get()

    def _addresses_of(self, lease_end: _LeaseEnd) -> Sequence[int]:
        try:
            addresses = lease_end.addresses()
        except DeviceError:
            self._undecided.append(lease_end)
            return ()
        self._leases.remove(lease_end)
        return addresses


def leased_buffer(memory: pa.Buffer, addresses: Sequence[int], returns: SimpleQueue[Sequence[int]]) -> pa.Buffer:
    """Return `memory` as a buffer that puts `addresses` into `returns` when its last array is collected.

    A process that ends does not return them: its peer learns of the end from the connection.
    """
    lease = _Lease(memory)
    finalize(lease, returns.put, addresses).atexit = False
    return pa.foreign_buffer(memory.address, memory.size, lease)

"""The server's ledger against a model, and the client's leases, which end with the last array."""

from __future__ import annotations

import ctypes
import operator
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dissociated.errors import RemoteProtocolError
from dissociated.memory.device.emulated import EmulatedDevice
from dissociated.memory.leases import AddressLedger, FreeQueue, MessageLedger
from support.helpers import PATIENCE

ADDRESSES = st.integers(1, 6)


class LedgerMachine(RuleBasedStateMachine):
    """A model of both accounts. Each send of an address is freed once, or each message by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.by_address = AddressLedger()
        self.by_message = MessageLedger()
        self.sent: list[int] = []  # addresses, once for each send that was not freed
        self.messages: dict[int, list[int]] = {}
        self.next = 0

    @rule(addresses=st.lists(ADDRESSES, max_size=8), withdrawn=st.booleans())
    def hold(self, addresses: list[int], withdrawn: bool) -> None:
        leased = {self.next: addresses}
        for ledger in (self.by_address, self.by_message):
            ledger.hold(leased)
            if withdrawn:
                ledger.withdraw(leased)
        if not withdrawn:
            self.sent += addresses
            self.messages |= leased
        self.next += 1

    @rule(data=st.data())
    def release_what_is_held(self, data: st.DataObject) -> None:
        freed = data.draw(st.permutations(self.sent))[: data.draw(st.integers(0, len(self.sent)))]
        for address in freed:
            self.sent.remove(address)
        assert Counter(self.by_address.release(freed)) == Counter(set(freed) - set(self.sent))

    @rule(data=st.data())
    def release_messages(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.sampled_from([*self.messages]), unique=True) if self.messages else st.just([]))
        assert self.by_message.release(numbers) == [one for number in numbers for one in self.messages.pop(number)]

    @rule()
    def release_an_empty_buffer(self) -> None:
        assert self.by_address.release([0, 0]) == []

    @rule(address=ADDRESSES)
    def release_what_is_not_held(self, address: int) -> None:
        freed = [address] * (self.sent.count(address) + 1)
        with pytest.raises(RemoteProtocolError, match=f"{address:#x}, which it does not hold"):
            self.by_address.release(freed)
        self.sent = [one for one in self.sent if one != address]

    @rule(again=st.booleans())
    def release_a_message_that_is_not_held(self, again: bool) -> None:
        """A free of a message beyond the last, or a second free in one list, which frees it once."""
        number = next(iter(self.messages)) if again and self.messages else self.next
        with pytest.raises(RemoteProtocolError, match=f"message {number}, which it does not hold") as caught:
            self.by_message.release([number, number])
        assert caught.value.rule == "free-leased"
        self.messages.pop(number, None)

    @rule()
    def clear(self) -> None:
        for ledger in (self.by_address, self.by_message):
            ledger.clear()
        self.sent.clear()
        self.messages.clear()

    @invariant()
    def counts_leases(self) -> None:
        assert len(self.by_address) == len(set(self.sent))
        assert self.by_address.max_freed >= len(self.sent)
        assert len(self.by_message) == self.by_message.max_freed == len(self.messages)


TestLedger = LedgerMachine.TestCase


def memory(size: int = 64) -> pa.Buffer:
    return pa.py_buffer(bytes(range(size)))


def test_a_lease_ends_with_the_last_array() -> None:
    returns = FreeQueue()
    buffer = returns.lease(memory(), (1, 2, 3))
    whole = pa.Array.from_buffers(pa.int8(), 64, [None, buffer])
    column = whole.slice(3, 4)
    del buffer, whole
    returns.wake()
    assert returns.take(10) == []
    assert column.to_pylist() == [3, 4, 5, 6]
    del column
    assert returns.take(10) == [1, 2, 3]


def test_a_lease_keeps_its_memory() -> None:
    buffer = FreeQueue().lease(memory(), (1,))
    assert buffer.to_pybytes() == bytes(range(64))
    assert buffer.size == 64


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, whatever handler a command in this process has installed."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_lease_that_ends_in_the_moment_of_ctrl_c_has_ended(kind: str) -> None:
    returns, device = FreeQueue(), EmulatedDevice(0)
    place = memory() if kind == "host" else device.allocate(64, device.stream()).buffer()
    last = [returns.lease(place, (1, 2, 3), None if kind == "host" else device)]
    del place
    interrupt: Any = partial(ctypes.CDLL(None)["raise"], signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        list(map(operator.call, [interrupt, last.clear]))  # C code only: Python handles the signal in its next line
    returns.wake()
    assert returns.take(10) == [1, 2, 3]


def test_leases_end_in_any_thread() -> None:
    returns = FreeQueue()

    def drop(number: int) -> None:
        del [returns.lease(memory(), (number,))][0]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(drop, range(1000)))
    taken: list[int] = []
    while len(taken) < 1000:
        taken += returns.take(100)
    assert sorted(taken) == list(range(1000))


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1), st.integers(1, 20))
def test_returns_are_coalesced_and_none_is_lost(leases: list[list[int]], limit: int) -> None:
    returns = FreeQueue()
    for addresses in leases:
        returns.put(tuple(addresses))
    every = [address for addresses in leases for address in addresses]
    taken: list[int] = []
    while len(taken) < len(every):
        some = returns.take(limit)
        assert 0 < len(some) < limit + 5
        assert len(some) >= limit or len(taken) + len(some) == len(every)
        taken += some
    assert taken == every


def test_waking_ends_a_wait() -> None:
    returns = FreeQueue()
    begun = threading.Event()

    def wait() -> list[int]:
        begun.set()
        return returns.take(10)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait)
        assert begun.wait(PATIENCE)
        returns.wake()
        assert waiting.result(PATIENCE) == []


def test_addresses_on_a_device_go_back_when_nothing_reads_there_any_more() -> None:
    device = EmulatedDevice(0)
    returns, stream = FreeQueue(), device.stream()
    memory = device.allocate(16, stream)
    stream.clear(memory.address, 16)
    stream.synchronize()
    buffer = returns.lease(memory.buffer(), (1, 2), device)
    target = pa.allocate_buffer(16)
    stream.copy(target.address, buffer.address, 16)
    del memory, buffer
    assert device.allocations == 1, "the queue has it"
    assert returns.take(100) == [1, 2]
    assert target.to_pybytes() == bytes(16), "what was begun there is done"
    assert device.allocations == 0
    buffer = returns.lease(device.allocate(16, stream).buffer(), (1, 2), device)
    device.capturing = True
    del buffer
    returns.wake()
    assert returns.take(100) == [], "nobody can tell"
    device.capturing = False
    returns.wake()
    assert returns.take(100) == [1, 2]
    assert device.allocations == 0


def test_a_device_that_cannot_tell_is_asked_once_for_each_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    returns, device = FreeQueue(), EmulatedDevice(0)
    leased = [returns.lease(memory(), (number,), device) for number in range(50)]
    device.capturing = True
    fence = Mock(wraps=device.fence)
    monkeypatch.setattr(device, "fence", fence)
    leased.clear()
    for times in (1, 2):
        returns.wake()
        assert (returns.take(100), fence.call_count) == ([], times * 50)
    device.capturing = False
    returns.wake()
    assert sorted(returns.take(100)) == [*range(50)]
    assert returns.idle

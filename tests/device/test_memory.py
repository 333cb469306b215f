"""Memory functions of a device, on each available device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import weakref
from contextlib import closing, suppress
from itertools import count

import numpy as np
import pyarrow as pa
import pytest

from dissociated.codec import device as codec
from dissociated.codec.device import Mover
from dissociated.errors import DeviceError, DeviceFull, DeviceNotFound
from dissociated.memory.device import copies
from dissociated.memory.device import emulated as emulation
from dissociated.memory.device.base import Device, DeviceMemory, Event, Stream
from dissociated.memory.device.copies import Copies
from dissociated.memory.device.emulated import EmulatedDevice, EmulatedEvent
from dissociated.memory.device.registry import open_device
from support.helpers import PATIENCE, Child, Interruption, case, rest_of

CONTENT = os.urandom(1 << 16)


def copied_in(device: Device, stream: Stream, exportable: bool = False) -> DeviceMemory:
    source = pa.py_buffer(CONTENT)
    memory = device.allocate(len(CONTENT), stream, exportable)
    stream.copy(memory.address, source.address, source.size)
    return memory


def copied_out(stream: Stream, address: int, length: int) -> bytes:
    target = pa.allocate_buffer(length)
    stream.copy(target.address, address, length)
    stream.synchronize()
    return target.to_pybytes()


def test_what_is_copied_in_is_copied_out_and_from_place_to_place(device: Device) -> None:
    stream = device.stream()
    first = copied_in(device, stream)
    second = device.allocate(len(CONTENT), stream)
    stream.clear(second.address, second.size)
    stream.copy(second.address + 8, first.address, 1000)
    assert copied_out(stream, second.address, 1010) == bytes(8) + CONTENT[:1000] + bytes(2)
    assert copied_out(stream, first.address, first.size) == CONTENT


def test_one_stream_waits_for_an_event_of_another(device: Device) -> None:
    first, second = device.stream(), device.stream()
    memory = copied_in(device, first)
    event = first.record()
    second.wait(event.pointer)
    assert copied_out(second, memory.address, memory.size) == CONTENT
    event.synchronize()


def test_memory_goes_back_with_the_last_buffer_in_it(device: Device) -> None:
    before = device.allocations
    piece = copied_in(device, device.stream()).buffer()[100:200]
    assert (device.allocations, piece.size) == (before + 1, 100)
    del piece
    assert device.allocations == before


OPENS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import pyarrow as pa
from dissociated.memory.device.registry import open_device
name, handle, size = sys.argv[1:]
device = open_device(name)
handle, size = bytes.fromhex(handle), int(size)
sys.setswitchinterval(1e-6)  # so that threads meet
together = Barrier(4)

def opened(_):
    together.wait()
    return device.open(handle, size)

with ThreadPoolExecutor(4) as threads:
    for _ in range(50):
        memory, *others = threads.map(opened, range(4))
        assert all(other is memory for other in others) and device.allocations == 1
        del others
        memory.close()
memory = device.open(handle, size)
stream = device.stream()
for _ in range(2):
    print("opened", flush=True)
    sys.stdin.readline()
    target = pa.allocate_buffer(memory.size)
    stream.copy(target.address, memory.address, memory.size)
    stream.synchronize()
    print(target.to_pybytes().hex(), flush=True)
memory.close()
assert device.allocations == 0
"""


def test_another_process_opens_it_once_and_reads_it(device: Device) -> None:
    stream = device.stream()
    memory = copied_in(device, stream, exportable=True)
    stream.synchronize()
    handle = device.export(memory)
    assert device.open(handle, memory.size) is memory
    arguments = [sys.executable, "-c", OPENS, device.name, handle.hex(), str(memory.size)]
    with Child(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write("\n\n")
        process.stdin.flush()
        said = rest_of(process).split()
    assert said == ["opened", CONTENT.hex()] * 2
    assert process.wait(PATIENCE) == 0


def test_a_handle_that_is_no_good(device: Device) -> None:
    stream = device.stream()
    memory = copied_in(device, stream, exportable=True)
    handle = device.export(memory)
    with pytest.raises(DeviceError, match="announced"):
        device.open(handle, memory.size + 1)
    stream.synchronize()
    memory.close()
    for damaged in (handle, b"", b"1:2:3", bytes(64)):
        with pytest.raises(DeviceError):
            device.open(damaged, 16)


def test_nothing_is_remembered_of_handles_that_were_closed(emulated: EmulatedDevice) -> None:
    memory = copied_in(emulated, emulated.stream(), exportable=True)
    handle, other = emulated.export(memory), EmulatedDevice(emulated.number)
    references = sys.getrefcount(handle)
    opened = other.open(handle, memory.size)
    stream = other.stream()
    copied_out(stream, opened.address, 4)
    other.capturing = True
    opened.close()
    assert other.is_left_open(handle)
    other.capturing = False
    other.retry()
    assert not other.is_left_open(handle)
    del opened
    assert sys.getrefcount(handle) == references
    memory.close()


TOUCHES = """
import ctypes, sys
from dissociated.memory.device.registry import open_device
device = open_device("test:0")
memory = device.allocate(16, device.stream())
print("allocated", flush=True)
if sys.argv[1] == "read":
    ctypes.string_at(memory.address, 1)
else:
    ctypes.memset(memory.address, 1, 1)
"""


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_process_that_touches_memory_of_the_emulated_device_dies(how: str) -> None:
    run = subprocess.run([sys.executable, "-c", TOUCHES, how], capture_output=True, text=True, timeout=PATIENCE)
    assert (run.returncode, run.stdout) == (-signal.SIGSEGV, "allocated\n")


def test_the_emulated_device_does_nothing_before_somebody_waits(emulated: EmulatedDevice) -> None:
    stream, other = emulated.stream(), emulated.stream()
    memory = copied_in(emulated, stream)
    assert copied_out(other, memory.address, 16) == bytes(16)
    stream.record().synchronize()
    assert copied_out(other, memory.address, 16) == CONTENT[:16]


def test_memory_stays_while_nobody_can_tell_what_reads_it(emulated: EmulatedDevice) -> None:
    stream = emulated.stream()
    first, second = copied_in(emulated, stream), copied_in(emulated, stream)
    emulated.capturing = True
    first.close()
    target = pa.allocate_buffer(first.size)
    stream.copy(target.address, first.address, first.size)
    assert emulated.allocations == 2
    emulated.capturing = False
    second.close()
    assert target.to_pybytes() == CONTENT
    assert not emulated.allocations


class Interrupts(EmulatedEvent):
    """An event that raises KeyboardInterrupt in a thread that waits for the copies behind it."""

    def synchronize(self) -> None:
        raise KeyboardInterrupt


def test_what_copies_use_stays_until_they_were_waited_for(emulated: EmulatedDevice) -> None:
    event = Interrupts(emulated, [])
    for name in ("done", "captured", "lost", "interrupted"):
        with case(name), suppress(KeyboardInterrupt), Copies(emulated) as copies:
            memory = emulated.allocate(len(CONTENT), copies.stream)
            source = np.frombuffer(CONTENT, np.uint8).copy()
            left = weakref.ref(source)
            copies.use(source)
            if name == "interrupted":
                copies.stream.wait(event.pointer)
            copies.stream.copy(memory.address, source.ctypes.data, len(CONTENT))
            del source
            emulated.capturing = name == "captured"
            emulated.lose(name == "lost")
        kept = name != "done"
        assert (left() is not None, emulated.pending_release_count) == (kept, kept), name
        emulated.retry()
        assert (left() is not None) == (name in ("captured", "lost")), name
        emulated.capturing = False
        emulated.lose(False)
        emulated.retry()
        assert (left(), emulated.pending_release_count) == (None, 0), name
        assert emulated.read(memory.address, len(CONTENT)) == CONTENT, name
        memory.close()


def test_what_was_registered_when_ctrl_c_came_is_not_registered_for_ever(emulated: EmulatedDevice) -> None:
    memory = pa.allocate_buffer(1 << 20)
    for module in (codec, copies, emulation):
        for at in count():
            with suppress(KeyboardInterrupt), closing(Mover(emulated)) as mover:
                with Interruption(module, "register", "afterwards", at=at) as interruption:
                    mover.register([memory])
                assert emulated.registered == memory.size
            assert (emulated.registered, emulated.pending_release_count) == (0, 0), (
                f"interrupted at {at} in {module.__name__}"
            )
            if not interruption.came:
                break
        assert at, module.__name__


def test_what_ctrl_c_keeps_from_being_given_back_is_given_back_later_and_once(emulated: EmulatedDevice) -> None:
    stream, event = emulated.stream(), Interrupts(emulated, [])
    memory = copied_in(emulated, stream)
    stream.wait(event.pointer)
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    assert (emulated.allocations, emulated.pending_release_count) == (1, 1), "it only waited"
    emulated.retry()
    assert (emulated.allocations, emulated.pending_release_count) == (0, 0)

    def given_back(after: Event | None) -> None:
        assert after is not None
        after.synchronize()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        emulated.give_back(given_back)
    assert not emulated.pending_release_count, "this may have been given back"


def test_a_device_that_is_not_there() -> None:
    for name in ("test:7", "cuda:99", "gpu", "cuda:x", 0, None):
        with pytest.raises(DeviceNotFound):
            open_device(name)


def test_a_device_without_room(device: Device) -> None:
    stream = device.stream()
    with pytest.raises(DeviceFull, match=device.name):
        device.allocate(1 << 45, stream)
    assert copied_out(stream, copied_in(device, stream).address, 4) == CONTENT[:4]


def test_a_lost_context(emulated: EmulatedDevice) -> None:
    stream = emulated.stream()
    memory = copied_in(emulated, stream)
    event = stream.record()
    emulated.lose()
    for use in (stream.synchronize, event.synchronize, stream.record, lambda: emulated.allocate(1, stream)):
        with pytest.raises(DeviceError, match="lost"):
            use()
    memory.close()
    assert (emulated.allocations, emulated.pending_release_count) == (1, 1), "nothing says that nobody uses it"

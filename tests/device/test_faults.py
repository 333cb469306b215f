"""Failures on devices: they raise documented errors, leave nothing behind, and harm no other client."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client import leases as client_leases
from dissociated.codec.device import DeviceBatch, Mover, to_device
from dissociated.datasets.device import DeviceDataset
from dissociated.errors import DeviceError, DeviceFull, RemoteProtocolError
from dissociated.format.message import parse_header
from dissociated.format.record_batch import encode_record_batch
from dissociated.memory import leases as memory_leases
from dissociated.memory.device.base import Device
from dissociated.memory.device.emulated import EmulatedDevice
from support.helpers import PATIENCE, Child, clients_end, rest_of, wait_until

from .cases import NUMBERS

PUBLISHES = """
import sys
import pyarrow as pa
import dissociated as dis
from dissociated.codec.device import to_device
from dissociated.memory.device.registry import open_device
with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    batches = pa.table({"n": range(1000)}).to_reader(max_chunksize=100)
    server.publish("n", to_device(batches, open_device(sys.argv[1])))
    print(server.catalog_uri, flush=True)
    sys.stdin.readline()
"""
#: A server that closes at a line of input, and then prints how many allocations it still has, and how many it had.
CLOSES = """
import gc, sys
import pyarrow as pa
import dissociated as dis
from dissociated.codec.device import to_device
from dissociated.memory.device.registry import open_device
device = open_device(sys.argv[1])
with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    batches = pa.table({"n": range(1000)}).to_reader(max_chunksize=100)
    server.publish("n", to_device(batches, device))
    del batches
    gc.collect()
    print(server.catalog_uri, flush=True)
    sys.stdin.readline()
    had = device.allocations
gc.collect()
print(f"closed with {device.allocations} of {had}", flush=True)
"""
READS = """
import sys
import dissociated as dis
with dis.connect(sys.argv[1]) as client:
    reader = client.read_on_device("numbers", sys.argv[2])
    batches = [reader.read_next_batch() for _ in range(8)]
    print(len(batches), flush=True)
    sys.stdin.readline()
    del batches
    sys.stdin.readline()
"""


@contextmanager
def process(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process and its first line of output."""
    command = [sys.executable, "-c", script, *arguments]
    with Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def published(server: dis.Server, device: Device) -> DeviceDataset:
    server.publish("numbers", to_device(NUMBERS.to_reader(max_chunksize=7_000), device))
    dataset = server.dataset("numbers")
    assert isinstance(dataset, DeviceDataset)
    return dataset


def whole(client: dis.Client, device: Device) -> pa.Table:
    return pa.Table.from_batches([batch.to_host() for batch in client.read_on_device("numbers", device)])


def test_a_server_that_is_killed_while_its_memory_is_open(device: Device) -> None:
    before = device.allocations
    with process(PUBLISHES, device.name) as (killed, uri), dis.connect(uri) as client:
        reader = client.read_on_device("n", device)
        first = reader.read_next_batch()
        assert device.allocations == before + 1, "one handle was opened"
        assert client.read("n").read_next_batch()["n"].to_pylist() == [*range(100)]
        killed.send_signal(signal.SIGKILL)
        killed.wait(PATIENCE)
        with pytest.raises(dis.errors.DissociatedError):
            client.read_on_device("n", device)
        if isinstance(device, EmulatedDevice):  # NVIDIA gives no such promise for GPUs
            assert first.to_host()["n"].to_pylist() == [*range(100)]
        del first, reader
        gc.collect()
        clients_end()


def test_a_client_that_is_killed_while_it_holds_memory(device: Device, server: dis.Server) -> None:
    published(server, device)
    with process(READS, server.catalog_uri, device.name) as (killed, line):
        assert line == "8"
        assert server.connections == 1
        server.drop("numbers")
        gc.collect()
        assert device.allocations, "the client holds it"
        assert killed.stdin is not None
        print(file=killed.stdin, flush=True)
        wait_until(lambda: not server.status().leases, "it has given all of it back")
        gc.collect()
        assert device.allocations, "and has it open"
        killed.send_signal(signal.SIGKILL)
        wait_until(lambda: not server.connections, "its connection ends")
    gc.collect()
    wait_until(lambda: not device.allocations, "what was dropped is freed")


def test_a_server_that_closes_does_not_free_what_a_client_has_open(device: Device) -> None:
    with process(CLOSES, device.name) as (closing, uri), dis.connect(uri) as client:
        reader = client.read_on_device("n", device)
        first = reader.read_next_batch()
        assert closing.stdin is not None
        print(file=closing.stdin, flush=True)
        assert rest_of(closing) == "closed with 1 of 1\n"
        del first, reader
        gc.collect()
        clients_end()


def test_a_device_without_room_for_what_is_published(emulated: EmulatedDevice, server: dis.Server) -> None:
    reader = to_device(NUMBERS.to_reader(), emulated)
    batch = reader.read_next_batch()
    emulated.limit = emulated.nbytes + 1000
    with pytest.raises(DeviceFull, match="has no"):
        server.publish("numbers", batch)
    assert server.names() == []
    emulated.lose()
    with pytest.raises(DeviceError, match="lost"):
        server.publish("numbers", batch)


def test_a_context_that_is_lost(emulated: EmulatedDevice, server: dis.Server, client: dis.Client) -> None:
    published(server, emulated)
    server.publish("host", NUMBERS)
    emulated.lose()
    with pytest.raises(dis.DissociatedError, match="lost"):
        whole(client, emulated)
    with pytest.raises(dis.DissociatedError, match="lost"):
        client.read("numbers").read_all()
    assert client.read("host").read_all() == NUMBERS
    emulated.lose(False)
    assert whole(client, emulated) == NUMBERS


def test_memory_stays_while_a_copy_cannot_be_waited_for(
    emulated: EmulatedDevice, server: dis.Server, client: dis.Client
) -> None:
    """A reader is closed while a graph is captured. Its bodies are in blocks that the next reader takes."""
    for name, value in {"ones": 1, "twos": 2}.items():
        server.publish(name, pa.table({"n": [value] * 10_000}))

    def first(name: str) -> DeviceBatch:
        with client.read_on_device(name, emulated, transport="tcp") as reader:
            batch = reader.read_next_batch()
            emulated.capturing = name == "ones"
        return batch

    ones = first("ones")
    with pytest.raises(DeviceError, match="captured"):
        ones.to_host()
    assert emulated.pending_release_count == 2, "what was copied from, and what would be copied to"
    emulated.capturing = False
    twos = first("twos")
    for batch, value in ((ones, 1), (twos, 2)):
        assert batch.to_host()["n"].to_pylist() == [value] * 10_000


def test_a_servers_memory_is_given_back_when_nothing_can_read_it_any_more(
    emulated: EmulatedDevice, server: dis.Server, client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (memory_leases, client_leases):
        monkeypatch.setattr(module, "RETRY_INTERVAL", 0.01)
    published(server, emulated)
    device = EmulatedDevice(emulated.number)  # the device as seen by another process
    for keep in (True, False):
        with client.read_on_device("numbers", device) as reader:
            batches = [reader.read_next_batch()] if keep else []
            device.capturing = True
        batches.clear()
        gc.collect()
        assert (device.allocations, server.connections) == (1, 1)
        device.capturing = False
        clients_end()
        assert not device.allocations, "it was closed before the connection was"
        wait_until(lambda: not server.connections, "the client hangs up")


def test_a_handle_that_cannot_be_opened_here(device: Device, server: dis.Server, client: dis.Client) -> None:
    segment = published(server, device).segment
    assert segment is not None
    segment.span = segment.span._replace(key=b"1:2:3")
    assert whole(client, device) == NUMBERS, "it came as host bodies"


def test_a_body_that_its_buffers_would_leave_is_copied_nowhere(emulated: EmulatedDevice) -> None:
    values = pa.py_buffer(bytes(80))
    for at, length in ((1 << 40, 80), (-80, 80), (8, 80)):
        header = encode_record_batch(10, [(10, 0)], [(0, 0), (at, length)], (), 80)
        with (
            closing(Mover(emulated)) as mover,
            pytest.raises(RemoteProtocolError, match="extends beyond its body of 80 bytes"),
        ):
            mover.move(header, parse_header(header), [0, values.address], values)


def test_what_libarrow_would_look_into_is_refused(device: Device, server: dis.Server, client: dis.Client) -> None:
    dataset = published(server, device)
    schema, first, *rest = dataset.placed
    assert first.extents is not None
    nodes, buffers = [(7_000, -1), (7_000, 0), (7_000, 0)], [(0, length) for _, length in first.extents]
    unknown = encode_record_batch(7_000, nodes, buffers, (), first.parsed.body_length)
    dataset.placed = [schema, first._replace(header=unknown), *rest]
    with pytest.raises(RemoteProtocolError, match="number of nulls"):
        whole(client, device)
    odd = [(address + 1 if length else 0, length) for address, length in first.extents]
    for extents in (first.extents, odd):  # read in place, and copied to a place that libarrow accepts
        for rows, why in ((7_001, "56000 bytes for 7001 values"), (-7_000, "a batch of -7000 rows")):
            lying = encode_record_batch(rows, [(rows, 0)] * 3, buffers, (), first.parsed.body_length)
            dataset.placed = [schema, first._replace(header=lying, extents=extents), *rest]
            with pytest.raises(RemoteProtocolError, match=why):
                whole(client, device)
    beyond = [(address + (1 << 40), length) for address, length in first.extents]
    dataset.placed = [schema, first._replace(extents=beyond), *rest]
    with pytest.raises(RemoteProtocolError, match="is in no region"):
        whole(client, device)
    dataset.placed = [schema, first._replace(extents=odd)]
    (batch,) = client.read_on_device("numbers", device)
    assert batch.num_rows == 7_000, "it was copied to where libarrow takes it"
    del batch

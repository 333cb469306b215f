"""Reading onto a device, over each transport."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import struct
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.codec.device import LAYOUT, DeviceMessage, Mover, join_on_device, to_device
from dissociated.codec.dlpack import DeviceColumn
from dissociated.codec.join import EncodedMessage, Messages, join
from dissociated.codec.split import Splitter
from dissociated.errors import DeviceError, DeviceFull, DeviceNotFound, OptionError, StoreError
from dissociated.format.message import parse_header
from dissociated.format.record_batch import encode_record_batch
from dissociated.ipc import async_batches
from dissociated.memory.device.base import Device
from dissociated.memory.device.emulated import EmulatedDevice
from support.helpers import case, connections_left

from . import consumer
from .cases import ALL_TYPES, NAMES, NUMBERS, pieces

COMPRESSED = dis.WriteOptions(codec="zstd")


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("types", ALL_TYPES)
        server.publish("numbers", NUMBERS.to_batches(max_chunksize=7_000))
        server.publish("compressed", [*pieces()], options=COMPRESSED)
        server.publish("live", lambda: pa.RecordBatchReader.from_batches(NUMBERS.schema, pieces()))
        yield server
        gc.collect()
        assert not connections_left(server)


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_every_type_arrives_on_the_device(client: dis.Client, device: Device, transport: str) -> None:
    with client.read_on_device("types", transport=transport, device=device.name) as reader:
        assert reader.schema.equals(ALL_TYPES[0].schema, check_metadata=True)
        arrived = [*reader]
    assert [batch.num_rows for batch in arrived] == [batch.num_rows for batch in ALL_TYPES]
    assert [batch.to_host() for batch in arrived] == ALL_TYPES


def test_other_libraries_take_it_where_it_lies_and_wait_for_it(client: dis.Client, device: Device) -> None:
    flat = [name for name, column in zip(NAMES, ALL_TYPES[0].columns, strict=True) if _comparable(column.type)]
    expected = client.read("types", columns=flat).read_next_batch()
    batch = client.read_on_device("types", columns=flat, device=device).read_next_batch()
    taken = consumer.Taken(batch)
    assert taken.schema.equals(expected.schema)
    allocations = device.allocations
    del batch
    gc.collect()
    assert device.allocations == allocations, "who has taken it holds it"
    consumer.same(device, taken.struct, expected)
    taken.release()


def test_a_consumer_of_a_batch_without_memory_gets_no_event(device: Device) -> None:
    """libarrow drops the validity of columns without nulls.

    Here no buffer remains, so nothing would keep an event alive.
    """
    splitter = Splitter(pa.schema([("s", pa.struct([]))]), LAYOUT)
    validity = pa.py_buffer(b"\xff" * 64)
    header = encode_record_batch(8, [(8, 0)], [(0, 1)], [], 64)

    def messages() -> Generator[DeviceMessage, None, None]:
        yield DeviceMessage(splitter.schema_message.header, splitter.schema_message.parsed, None)
        with closing(Mover(device)) as mover:
            yield mover.move(header, parse_header(header), [validity.address], validity)

    taken = consumer.Taken(join_on_device(device, messages()).read_next_batch())
    assert taken.struct.array.length == 8
    assert not taken.struct.sync_event
    taken.release()


def structs() -> int:
    """Return how many C structs this process has."""
    gc.collect()
    return sum(isinstance(thing, ctypes.Structure) for thing in gc.get_objects())


def test_a_tensor_that_was_taken_is_held_until_it_is_deleted(client: dis.Client, device: Device) -> None:
    column = client.read_on_device("numbers", device).read_next_batch()["n"]
    left = structs()
    stream = device.stream()
    taken = consumer.TakenTensor(column, stream)
    del column
    gc.collect()
    assert (np.frombuffer(consumer.fetched(device, taken.data, 80, None, stream), np.int64) == range(10)).all()
    assert device.allocations == 1
    taken.delete()
    gc.collect()
    assert device.allocations == 0
    del taken
    assert structs() == left


HELD_AT_EXIT = """
import ctypes, os
import numpy, pyarrow
from dissociated.codec.cdevice import pointer
from dissociated.codec.device import to_device
from dissociated.memory.device.registry import open_device

def reader():
    return to_device(pyarrow.table({"n": range(1000)}).to_reader(), open_device("test:0"))

class OnHost:
    def __dlpack_device__(self):
        return 1, 0
    def __dlpack__(self, **options):
        capsule = reader().read_next_batch()["n"].__dlpack__()
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 1
        return capsule

column = reader().read_next_batch()["n"]
os.held = [numpy.from_dlpack(OnHost()), column.__dlpack__(), column.__dlpack__(max_version=(1, 0))]
os.held += [reader().read_next_batch().__arrow_c_device_array__(), reader().__arrow_c_device_stream__()]
print(os.held[0].shape)
"""


def test_others_may_give_back_what_they_hold_when_the_interpreter_ends() -> None:
    """The interpreter clears the modules of the standard library after ours."""
    run = subprocess.run([sys.executable, "-c", HELD_AT_EXIT], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout) == (0, "(1000,)\n"), run.stderr
    assert "Traceback" not in run.stderr


def test_nanoarrow_takes_it(client: dis.Client, device: Device) -> None:
    nanoarrow = pytest.importorskip("nanoarrow.device", reason="nanoarrow is not installed")
    taken = nanoarrow.c_device_array(client.read_on_device("numbers", device).read_next_batch())
    assert (taken.device_type_id, taken.device_id) == (device.type, device.number)
    assert (taken.array.length, taken.array.n_children) == (7_000, 3)
    gc.collect()
    values = consumer.fetched(device, taken.array.child(0).buffers[1], 7_000 * 8, None)
    assert (np.frombuffer(values, np.int64) == np.arange(7_000)).all()


def test_what_nobody_takes_out_of_its_capsule_is_released(client: dis.Client, device: Device) -> None:
    batch = client.read_on_device("numbers", device).read_next_batch()
    capsules = batch.__arrow_c_device_array__(), batch["n"].__dlpack__(max_version=(1, 0)), batch["f"].__dlpack__()
    del batch
    gc.collect()
    assert device.allocations
    del capsules


def test_a_library_that_refuses_a_device_raises_its_own_error(client: dis.Client, device: Device) -> None:
    """It deletes what it was given while its error is raised."""
    batch = client.read_on_device("numbers", device).read_next_batch()
    for options in ({}, {"max_version": (1, 0)}):
        with case(options), pytest.raises(RuntimeError, match=r"^Unsupported device in DLTensor"):
            np.from_dlpack(_Exported(batch["n"], options))
    with pytest.raises(KeyError, match=r"^.?Device type .*not registered"):
        pa.record_batch(batch)


class _Exported:
    """A column that is exported with these options, whatever the consumer asks for."""

    def __init__(self, column: DeviceColumn, options: dict[str, Any]) -> None:
        self._column, self._options = column, options

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._column.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self._column.__dlpack__(**self._options)


def test_a_stream_for_other_libraries(client: dis.Client, device: Device) -> None:
    reader = client.read_on_device("numbers", device)
    stream = consumer.TakenStream(reader)
    assert stream.schema().equals(NUMBERS.schema)
    for expected in client.read("numbers"):
        struct = stream.next()
        assert struct is not None
        assert not any(struct.reserved), "the memory that the consumer gave may have held anything"
        consumer.same(device, struct, expected)
        struct.array.release(ctypes.addressof(struct))
    assert stream.next() is None


def test_a_stream_says_what_failed(client: dis.Client, emulated: EmulatedDevice) -> None:
    stream = consumer.TakenStream(client.read_on_device("numbers", emulated))
    struct = stream.next()
    assert struct is not None
    struct.array.release(ctypes.addressof(struct))
    emulated.limit = 1000
    for _ in range(2):  # after a failure the stream does not end as if it were complete
        with pytest.raises(OSError, match=r"DeviceFull: test:1 has no \d+ bytes left"):
            stream.next()
    del stream
    gc.collect()


def tensor_of(column: Any, **options: Any) -> tuple[int, int, tuple[int, ...]]:
    """Return the address, the type code and bits, and the shape of a column, as a library reads them."""
    capsule = column.__dlpack__(**options)
    name = b"dltensor_versioned" if "max_version" in options else b"dltensor"
    at = consumer.pointer(capsule, name)
    fields = ctypes.c_uint64.from_address
    tensor = at + 8 * 4 if "max_version" in options else at
    ndim = ctypes.c_int32.from_address(tensor + 16).value
    code, bits = ctypes.c_uint8.from_address(tensor + 20).value, ctypes.c_uint8.from_address(tensor + 21).value
    shape = ctypes.cast(fields(tensor + 24).value, ctypes.POINTER(ctypes.c_int64))
    return fields(tensor).value, code << 8 | bits, tuple(shape[index] for index in range(ndim))


def test_flat_columns_are_arrays(client: dis.Client, device: Device) -> None:
    batch = client.read_on_device("numbers", device).read_next_batch()
    for options in ({}, {"max_version": (1, 0)}):
        stream = device.stream()
        address, kind, shape = tensor_of(batch["f"], stream=stream.handle or None, **options)
        assert (kind, shape) == (2 << 8 | 64, (7_000,))
        there = np.frombuffer(consumer.fetched(device, address, 8 * 7_000, None, stream), np.float64)
        assert (there == NUMBERS["f"][:7_000].to_numpy()).all(), "and its stream waited"
    assert batch["f"].__dlpack_device__() == (device.type, device.number)
    assert hasattr(batch["f"], "__cuda_array_interface__") is device.name.startswith("cuda")
    types = client.read_on_device("types", device).read_next_batch()
    _, kind, shape = tensor_of(types["decimal128 full"])
    assert (kind, shape) == (64, (19, 2)), "two integers, the lower one first"
    empty = DeviceColumn(device, pa.array([], pa.int64()), None, False)
    assert tensor_of(empty) == tensor_of(empty, copy=True) == tensor_of(empty, max_version=(1, 0)) == (0, 64, (0,))
    with pytest.raises(BufferError, match="is not copied to another device"):
        batch["f"].__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="column of string"):
        batch["s"].__dlpack__()
    with pytest.raises(BufferError, match="nulls"):
        types["int64 holes"].__dlpack__()


def test_a_column_with_fewer_values_than_rows_is_no_array(device: Device) -> None:
    """libarrow trusts the lengths that a peer sends. The memory behind the values belongs to others."""
    schema = Splitter(pa.schema([("n", pa.int64())]), LAYOUT).schema_message.header
    for rows, length in ((9, 64), (1_000_000, 64), (1, 0)):
        header = encode_record_batch(rows, [(rows, 0)], [(0, 0), (0, length)], [], length)
        batch = join(iter_messages((schema, None), (header, pa.py_buffer(bytes(length))))).read_next_batch()
        column = DeviceColumn(device, batch["n"], None, False)
        for options in ({}, {"copy": True}, {"max_version": (1, 0)}):
            with case(f"{rows} rows in {length} bytes"), pytest.raises(BufferError, match=f"its buffer has {length}"):
                column.__dlpack__(**options)
        with pytest.raises(AttributeError, match=f"its buffer has {length}"):
            column.array_interface()


def iter_messages(*messages: EncodedMessage) -> Messages:
    yield from messages


def test_array_interfaces_have_the_values_of_each_flat_type(client: dis.Client, device: Device) -> None:
    batches = [*client.read_on_device("types", device)]
    checked = set()
    for batch, expected in zip(batches, ALL_TYPES, strict=True):
        for name, column in zip(NAMES, expected.columns, strict=True):
            there = batch[name]
            width = None
            if pa.types.is_fixed_size_list(column.type) and not column.null_count:
                width, column = column.type.list_size, column.flatten()
            if isinstance(column, pa.ExtensionArray):
                column = column.storage
            if not _is_flat(column):
                with pytest.raises(AttributeError):
                    there.array_interface()
                continue
            found = there.array_interface()
            words = max(1, column.type.bit_width // 64)
            if width is not None:
                assert found["shape"] == (len(column) // width, width * words)
            else:
                assert found["shape"] == ((len(column),) if words == 1 else (len(column), words))
            assert (found["version"], found["strides"], found["stream"]) == (3, None, None), "it has been waited for"
            address, read_only = found["data"]
            assert not read_only, "the memory is the batch's own"
            content = consumer.fetched(device, address, len(column) * column.type.bit_width // 8, None)
            assert content == _little_endian(column, found["typestr"]), name
            checked.add(str(column.type))
            if device.name.startswith("cuda"):
                assert there.__cuda_array_interface__ == found
    assert len(checked) > 25


def _is_flat(column: pa.Array) -> bool:
    is_ = pa.types
    numbers = is_.is_integer(column.type) or is_.is_floating(column.type) or is_.is_decimal(column.type)
    moments = is_.is_temporal(column.type) and not is_.is_interval(column.type)
    return (numbers or moments) and not column.null_count


def _little_endian(column: pa.Array, typestr: str) -> bytes:
    """Return the values in their memory layout by the specification of Arrow."""
    width, kind = column.type.bit_width // 8, column.type
    assert typestr == f"<{'f' if pa.types.is_floating(kind) else 'u' if 'uint' in str(kind) else 'i'}{min(width, 8)}"
    if pa.types.is_floating(kind):
        return b"".join(struct.pack("<" + {2: "e", 4: "f", 8: "d"}[width], value) for value in column.to_pylist())
    if pa.types.is_decimal(kind):
        numbers = [_unscaled(value, kind.scale) for value in column.to_pylist()]
    else:
        numbers = (column if pa.types.is_integer(kind) else column.view(f"int{width * 8}")).to_pylist()
    return b"".join(number.to_bytes(width, "little", signed=typestr[1] == "i") for number in numbers)


def _unscaled(value: Decimal, scale: int) -> int:
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    return (-1) ** sign * int("".join(map(str, digits))) * 10 ** (exponent + scale)


def test_columns_rows_and_filters_are_chosen_before(client: dis.Client, device: Device) -> None:
    wanted = NUMBERS.filter(pc.field("n") > 40_000).select(["f"]).slice(0, 100)
    reader = client.read_on_device("numbers", columns=["f"], filter=("n", ">", 40_000), limit=100, device=device)
    assert pa.Table.from_batches([batch.to_host() for batch in reader]) == wanted
    some = client.read_on_device("numbers", rows=range(6_990, 7_010), device=device)
    assert pa.Table.from_batches([batch.to_host() for batch in some]) == NUMBERS.slice(6_990, 20)
    handle = client["numbers"]
    scanner = handle.scanner(["s", "n"], filter=pc.field("n") < 3, device=device, batch_size=2)
    there = [batch.to_host() for batch in scanner.to_batches()]
    assert pa.Table.from_batches(there) == NUMBERS.select(["s", "n"]).slice(0, 3)
    assert [batch.num_rows for batch in there] == [2, 1]
    assert scanner.to_table() == NUMBERS.select(["s", "n"]).slice(0, 3)
    whole = handle.scanner(["n", "f"], device=device).to_reader()
    assert pa.Table.from_batches([batch.to_host() for batch in whole]) == NUMBERS.select(["n", "f"])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("name", ["compressed", "live"])
def test_other_kinds_of_datasets(client: dis.Client, device: Device, name: str, transport: str) -> None:
    reader = client.read_on_device(name, transport=transport, device=device)
    assert pa.Table.from_batches([batch.to_host() for batch in reader]) == NUMBERS


def test_compressed_bodies_can_be_refused(client: dis.Client, server: dis.Server, device: Device) -> None:
    for transport in ("shm", "tcp"):
        with pytest.raises(DeviceError, match="publish the dataset without a codec"):
            list(client.read_on_device("compressed", transport=transport, device=device, decompress=False))
        handle = client.dataset("compressed", transport=transport)
        for size in (None, 9):
            with pytest.raises(DeviceError, match="publish the dataset without a codec"):
                list(handle.scanner(batch_size=size, device=device, decompress=False).to_batches())
        reader = client.read_on_device("numbers", transport=transport, device=device, decompress=False)
        assert pa.Table.from_batches([batch.to_host() for batch in reader]) == NUMBERS
    del reader
    with pytest.raises(OptionError, match="Flight always decompresses"):
        client.read_on_device("numbers", transport="grpc", device=device, decompress=False)
    with pytest.raises(OptionError, match="with a device"):
        client["numbers"].scanner(decompress=False)
    gc.collect()
    assert not connections_left(server)


def test_async_for_on_the_device(client: dis.Client, server: dis.Server, device: Device) -> None:
    opened = server.locations("numbers")[0], server.ticket("numbers")

    async def test() -> None:
        for opening in (
            client.read_on_device_async("numbers", device),
            dis.open_stream_on_device_async(*opened, device=device),
        ):
            async with await opening as reader:
                arrived = [batch async for batch in reader]
            assert [batch.to_host() for batch in arrived] == [*pieces()]
            assert all(batch.device is device for batch in arrived)
        assert all(batch.get_total_buffer_size() >= batch.num_rows * 16 for batch in arrived), "reading ahead counts it"
        async with await client.read_on_device_async("numbers", transport="tcp", device=device) as reader:
            assert (await anext(reader.batches(readahead=1))).to_host() == next(pieces())
        async with await client.read_on_device_async("numbers", device) as reader:
            assert await reader.to_table() == NUMBERS
        with client.read_on_device("numbers", transport="tcp", device=device) as blocking:
            assert [batch.to_host() async for batch in async_batches(blocking, readahead=2)] == [*pieces()]

    asyncio.run(test())


def test_a_reader_that_is_dropped_ends_its_stream(client: dis.Client, server: dis.Server, device: Device) -> None:
    for name in ("numbers", "live"):
        client.read_on_device(name, transport="tcp", device=device)  # without reading anything
        client.read_on_device(name, transport="tcp", device=device).read_next_batch()
        with client.read_on_device(name, transport="tcp", device=device) as reader:
            pass
        with pytest.raises(StoreError, match="closed before its end"):
            reader.read_next_batch()
    gc.collect()
    assert not connections_left(server)


class Overwritten:
    """Memory that is overwritten as soon as nothing refers to it."""

    def __init__(self, number: int) -> None:
        self.values = np.full(10_000, number)

    def __del__(self) -> None:
        self.values[:] = -1


def test_what_is_copied_stays_until_it_has_been(device: Device) -> None:
    kept = [Overwritten(number) for number in range(8)]
    addresses = [one.values.ctypes.data for one in kept]
    schema = pa.schema({"n": pa.int64()})

    def batches() -> Iterator[pa.RecordBatch]:
        for address in addresses:
            memory = pa.foreign_buffer(address, 80_000, kept.pop(0))
            yield pa.record_batch([pa.Array.from_buffers(pa.int64(), 10_000, [None, memory])], schema)
            del memory

    arrays = [one.values for one in kept]  # the arrays stay, and only their values change
    arrived = [*to_device(pa.RecordBatchReader.from_batches(schema, batches()), device)]
    gc.collect()
    assert all((array == -1).all() for array in arrays), "nobody refers to it any more"
    for number, batch in enumerate(arrived):
        assert (batch.to_host()["n"].to_numpy() == number).all()


def test_memory_goes_back_batch_by_batch(client: dis.Client, device: Device) -> None:
    most = 0
    for batch in client.read_on_device("live", device):
        assert batch.nbytes >= batch.num_rows * 16
        most = max(most, device.allocations)
        del batch
    assert most == 1


def test_bodies_from_a_network_come_through_a_ring_of_pinned_memory(client: dis.Client, device: Device) -> None:
    ring = device.ring
    before = ring.nbytes
    for _ in range(3):
        assert [batch.to_host() for batch in client.read_on_device("numbers", transport="tcp", device=device)] == [
            *pieces()
        ]
    assert 0 < ring.nbytes <= before + 8 * (1 << 18), "24 bodies, which take a block of 256 KiB each, share some"
    taken = [ring.allocate(1 << 26) for _ in range(5)]
    assert taken[-1] is None, "and there is a limit"
    assert (
        pa.Table.from_batches(
            [batch.to_host() for batch in client.read_on_device("numbers", transport="tcp", device=device)]
        )
        == NUMBERS
    )
    del taken
    assert ring.allocate(1 << 26)


def test_a_segment_is_registered_once_and_whole(
    client: dis.Client, emulated: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []
    register = emulated.register

    def recording(memory: pa.Buffer, afterwards: Callable[[Callable[[], object]], object]) -> None:
        registered.append(memory.size)
        register(memory, afterwards)

    monkeypatch.setattr(emulated, "register", recording)
    with client.read_on_device("numbers", transport="shm", device=emulated) as reader:
        first = reader.read_next_batch()
        assert emulated.registered > 7 * first.nbytes
        assert sum(1 for _ in reader) == 7
    assert (emulated.registered, len(registered)) == (0, 1)


def test_devices_that_cannot_take_it(client: dis.Client, emulated: EmulatedDevice) -> None:
    for wrong in ("test:9", "cuda:99", "gpu"):
        with pytest.raises(DeviceNotFound):
            client.read_on_device("numbers", wrong)
    reader = client.read_on_device("numbers", emulated)
    first = reader.read_next_batch()
    emulated.limit = emulated.nbytes + 1
    with pytest.raises(DeviceFull, match="has no"):
        reader.read_next_batch()
    assert first.to_host() == next(pieces()), "what has arrived stays"
    emulated.limit = 1 << 30
    lost = client.read_on_device("numbers", emulated)
    lost.read_next_batch()
    emulated.lose()
    for _ in range(2):  # after a failure the stream does not end as if it were complete
        with pytest.raises(DeviceError, match="lost"):
            lost.read_next_batch()
    with pytest.raises(DeviceError, match="lost"):
        first.to_host()
    assert client.read("numbers").read_all() == NUMBERS


def _comparable(type_: pa.DataType) -> bool:
    """Return whether pyarrow reports the buffers of a type in the form of the C interface."""
    if isinstance(type_, pa.BaseExtensionType):
        type_ = type_.storage_type
    if any(word in str(type_) for word in ("dictionary", "view", "union", "run_end", "null")):
        return False
    return all(_comparable(type_.field(index).type) for index in range(type_.num_fields))

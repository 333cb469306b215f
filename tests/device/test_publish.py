"""Publishing data that lies on a device, to clients that can open it there, and to others."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import dissociated as dis
from dissociated.client.connection import remember_unresponsive
from dissociated.client.parts import open_part_on_device
from dissociated.client.plan import Route, plan_part
from dissociated.client.request import ReadRequest
from dissociated.codec.cdevice import ArrowArray, ArrowDeviceArray, pointer
from dissociated.codec.device import DeviceBatch, DeviceReader, to_device
from dissociated.datasets.device import DeviceDataset
from dissociated.errors import DeviceError, SourceError, UriError
from dissociated.memory.device.base import Device
from dissociated.memory.device.emulated import EmulatedDevice
from dissociated.memory.device.registry import open_device
from dissociated.uri import Uri
from support.arrow_cases import ROWS
from support.helpers import case, clients_end, connections_left, wait_until

from . import consumer
from .cases import ALL_TYPES, NAMES, NUMBERS, pieces


def on_device(device: Device, batches: list[pa.RecordBatch]) -> DeviceReader:
    return to_device(pa.RecordBatchReader.from_batches(batches[0].schema, batches), device)


def to_host(batches: Iterator[DeviceBatch] | DeviceReader) -> pa.Table:
    return pa.Table.from_batches([batch.to_host() for batch in batches])


def test_every_type_goes_to_every_client(device: Device, server: dis.Server, client: dis.Client) -> None:
    server.publish("types", on_device(device, ALL_TYPES))
    held = device.allocations
    for transport in ("shm", "tcp", "grpc"):
        arrived = [*client.read("types", transport=transport)]
        assert arrived == ALL_TYPES
        assert [
            batch.to_host() for batch in client.read_on_device("types", transport=transport, device=device)
        ] == ALL_TYPES
    names = ALL_TYPES[0].schema.names[::7]
    assert to_host(client.read_on_device("types", columns=names, device=device)) == pa.Table.from_batches(
        ALL_TYPES
    ).select(names)
    assert client.read("types", columns=names).read_all() == pa.Table.from_batches(ALL_TYPES).select(names)
    gc.collect()
    clients_end()
    assert device.allocations == held


def test_streams_are_opened_by_uri(device: Device, server: dis.Server, client: dis.Client) -> None:
    server.publish("there", on_device(device, [*pieces()]))
    server.publish("here", [*pieces()])
    before = device.allocations
    (there,), here = client.describe("there").endpoints, server.ticket("here")
    (at,), ticket = [uri for uri in there.locations if "device=" in uri], there.ticket
    batch = dis.open_stream_on_device(at, ticket, columns=["f"], batches=(2, 3), device=device).read_next_batch()
    assert device.allocations == before, "it lies in the server's memory"
    assert batch.to_host() == [*pieces()][2].select(["f"])
    for wanted in ({"limit": 3}, {"filter": ("n", ">", 5)}):
        with pytest.raises(DeviceError, match="another location"):
            dis.open_stream_on_device(at, ticket, device, **wanted)
    with pytest.raises(UriError, match="another location"):
        dis.open_stream_on_device(at, ticket, "test:1")
    for uri in server.locations("here"):
        reader = dis.open_stream_on_device(uri, here, filter=("n", ">", 20_000), limit=9, device=device)
        assert reader.device is device
        assert to_host(reader) == NUMBERS.slice(20_001, 9), uri
    del batch, reader
    clients_end()


def test_a_device_route_that_was_silent_is_tried_if_no_other_works(
    device: Device, server: dis.Server, client: dis.Client
) -> None:
    server.publish("there", on_device(device, [*pieces()]))
    (there,) = client.describe("there").endpoints
    (at,) = [Uri.parse(uri) for uri in there.locations if "device=" in uri]
    remember_unresponsive(at)
    routes = [Route.of([at]), Route.of([Uri.parse("tcp://127.0.0.1:1?want_data=1")])]  # nobody listens there
    part = plan_part(ReadRequest(device=device), NUMBERS.schema, there, routes)
    assert to_host(open_part_on_device(part, device)) == NUMBERS
    clients_end()


def test_addresses_are_leased_and_nothing_is_copied(device: Device, server: dis.Server, client: dis.Client) -> None:
    server.publish("numbers", on_device(device, [*pieces()]))
    gc.collect()
    (uri,) = [one for one in client.describe("numbers").endpoints[0].locations if "device=" in one]
    assert uri.startswith("shm:")
    assert "remote_handle=" in uri
    before = device.allocations, device.nbytes
    with dis.connect(server.catalog_uri) as other:  # its idle connection ends with it
        expected = [*other.read("numbers", transport="tcp")][2]
    assert connections_left(server) == 0
    reader = client.read_on_device("numbers", device)
    batches = [*reader]
    assert (device.allocations, device.nbytes) == before, "they lie in the server's memory"
    assert server.connections == 1, "which holds them"
    taken = consumer.Taken(batches[2])
    assert not taken.struct.sync_event, "it was there before"
    with pytest.raises(BufferError, match="must not be written to"):
        batches[0]["n"].__dlpack__(copy=False)
    assert batches[0]["n"].__dlpack__(max_version=(1, 0))
    assert batches[0]["n"].array_interface()["data"][1], "only read"
    assert (device.allocations, device.nbytes) == before
    for options in ({}, {"copy": True}):  # data that is writable, or may be, is copied
        stream = device.stream()
        capsule = batches[0]["n"].__dlpack__(stream=stream.handle or None, **options)
        address = ctypes.c_uint64.from_address(pointer(capsule, b"dltensor")).value
        assert device.allocations == before[0] + 1
        assert np.frombuffer(consumer.fetched(device, address, 8 * 7_000, None, stream), np.int64)[-1] == 6_999
        del capsule
    assert to_host(iter(batches)) == NUMBERS
    server.drop("numbers")
    server.publish("numbers", on_device(device, [NUMBERS.slice(0, 5).to_batches()[0]]))
    del batches, reader
    gc.collect()
    consumer.same(device, taken.struct, expected)
    taken.release()
    wait_until(lambda: not server.connections, "the last address comes back")
    wait_until(lambda: device.allocations == 1, "what was replaced is freed")


class Exported:
    """Rows of a batch that a foreign library has on a device.

    The columns, or the `struct` they are in, have offsets; none has a null count. pyarrow would count the nulls of its
    own slices when it exports them, and crash.
    """

    def __init__(self, batch: DeviceBatch, first: int, length: int, struct: bool = False) -> None:
        self.schema, self.array = batch.__arrow_c_device_array__()
        whole = ArrowDeviceArray.from_address(pointer(self.array, b"arrow_device_array")).array
        self._forget(whole)
        whole.length = length
        if struct:
            whole.offset = first
            return
        for child in whole.children[: whole.n_children]:
            child.contents.offset, child.contents.length = first, length

    def _forget(self, array: ArrowArray) -> None:
        if array.n_buffers and array.buffers[0]:
            array.null_count = -1
        for child in array.children[: array.n_children]:
            self._forget(child.contents)
        if array.dictionary:
            self._forget(array.dictionary.contents)

    def __arrow_c_device_array__(self, requested_schema: object = None, **options: object) -> tuple[object, object]:
        return self.schema, self.array


def test_slices_and_nulls_that_nobody_has_counted(device: Device, server: dis.Server, client: dis.Client) -> None:
    runs = [name for name in NAMES if name.startswith("runs")]
    whole = ALL_TYPES[0].drop_columns(runs)
    batch = on_device(device, [whole]).read_next_batch()
    for first, length in ((0, ROWS), (5, 9), (8, 11), (16, 3), (3, 0)):
        with case(f"{length} rows from {first} on"):
            for struct in (False, True):
                server.publish("slice", Exported(batch, first, length, struct))
                assert client.read("slice").read_all() == pa.Table.from_batches([whole.slice(first, length)])
    with_runs = on_device(device, [ALL_TYPES[0].select(runs)]).read_next_batch()
    with pytest.raises(SourceError, match="slice of run-end encoded"):
        server.publish("slice", Exported(with_runs, 5, 9))


def test_what_lies_beside_what_is_published_is_not_sent(device: Device, server: dis.Server) -> None:
    secret = 0x5EC4E7_5EC4E7
    batch = on_device(device, [pa.record_batch({"a": [*range(7), secret], "b": [*range(8)]})]).read_next_batch()
    server.publish("rows", Exported(batch, 0, 7))
    dataset = server.dataset("rows")
    assert isinstance(dataset, DeviceDataset)
    (_, _, body) = [*dataset.messages()][-1]
    assert body is not None
    sent = b"".join(map(bytes, body))
    assert sent[:56] == np.arange(7).tobytes()
    assert secret.to_bytes(8, "little") not in sent


def test_a_reader_that_stops_early_keeps_what_it_was_given(
    device: Device, server: dis.Server, client: dis.Client
) -> None:
    server.publish("numbers", on_device(device, [*pieces()]))
    with client.read_on_device("numbers", device) as reader:
        first = reader.read_next_batch()
    server.drop("numbers")
    gc.collect()
    assert device.allocations == 1
    assert first.to_host() == next(pieces())
    del first, reader
    gc.collect()
    wait_until(lambda: not device.allocations, "what was dropped is freed when the last address has come back")


def test_small_things(device: Device, server: dis.Server, client: dis.Client) -> None:
    no_columns = pa.table({"n": range(5)}).select([])
    for name, table in {"rows": no_columns, "none": NUMBERS.slice(0, 0), "nulls": pa.table({"n": pa.nulls(3)})}.items():
        server.publish(name, to_device(table.to_reader(), device))
        assert client.read(name).read_all() == table
        assert sum(batch.num_rows for batch in client.read_on_device(name, device)) == table.num_rows
    with pytest.raises(SourceError, match="cannot publish"):
        server.publish("array", pa.array([1]))
    broken = pa.RecordBatchReader.from_batches(NUMBERS.schema, map(dict.__getitem__, [{}], ["no more"]))
    with pytest.raises(SourceError, match="failed: KeyError: 'no more'"):
        server.publish("broken", to_device(broken, device))
    with pytest.raises(SourceError, match="with options"):
        server.publish("compressed", _last(device), options=dis.WriteOptions(codec="zstd"))


def test_memory_goes_back_when_streams_of_others_have_read_it(
    device: Device, server: dis.Server, client: dis.Client
) -> None:
    server.publish("host", NUMBERS)
    server.publish("numbers", on_device(device, [NUMBERS.to_batches()[0]]))
    expected = NUMBERS["n"].to_numpy()
    for name in ("host", "numbers"):  # memory of this process, and of the server
        batch = client.read_on_device(name, device).read_next_batch()
        batch.synchronize()
        taken = consumer.Taken(batch)
        stream, target = device.stream(), pa.allocate_buffer(expected.nbytes)
        stream.copy(target.address, taken.struct.array.children[0].contents.buffers[1], target.size)
        del batch
        taken.release()
        if name == "numbers":
            server.drop(name)
        gc.collect()
        clients_end()
        stream.synchronize()
        assert (np.frombuffer(target, np.int64) == expected).all()


def test_an_address_goes_back_when_what_was_begun_there_is_done(
    device: Device, server: dis.Server, client: dis.Client
) -> None:
    server.publish("numbers", on_device(device, [*pieces()]))
    expected = next(pieces())["n"].to_numpy()
    with client.read_on_device("numbers", device) as reader:
        batch, *others = reader  # read to the end: all batches are sent, and stay counted until they come back
    held = server.status().leases
    taken = consumer.Taken(batch)
    address = taken.struct.array.children[0].contents.buffers[1]
    stream, target, writer = device.stream(), pa.allocate_buffer(expected.nbytes), device.stream()
    stream.copy(target.address, address, target.size)
    del batch
    taken.release()
    wait_until(lambda: server.status().leases < held, "the addresses of one batch come back")
    writer.clear(address, target.size)  # the server may reuse the memory now
    writer.synchronize()
    stream.synchronize()
    assert (np.frombuffer(target, np.int64) == expected).all()
    del others


def test_dlpack_columns_and_lists_of_batches(device: Device, server: dis.Server, client: dis.Client) -> None:
    batches = [*on_device(device, [*pieces()])]
    columns = {name: batches[0][name] for name in ("n", "f")}
    server.publish("columns", columns)
    server.publish("list", batches)
    server.publish("batch", batches[1])
    first = batches[0]
    with pytest.raises(SourceError, match="rows: give columns of equal length"):
        server.publish("ragged", {"a": _last(device)["n"], "b": first["n"]})
    with pytest.raises(SourceError, match="differ"):
        server.publish("mixed", [_last(device), on_device(device, ALL_TYPES).read_next_batch()])
    del batches, columns, first
    gc.collect()
    assert client.read_on_device("columns", device).read_next_batch().to_host() == next(pieces()).select(["n", "f"])
    assert client.read("list").read_all() == NUMBERS
    assert to_host(client.read_on_device("batch", device)) == pa.Table.from_batches([[*pieces()][1]])


def _last(device: Device) -> DeviceBatch:
    return [*on_device(device, [*pieces()])][-1]


def test_what_offers_the_device_interface_and_lies_on_the_host(server: dis.Server, client: dis.Client) -> None:
    class Host:
        def __arrow_c_device_array__(self, requested_schema: object = None, **options: object) -> object:
            return ALL_TYPES[0].__arrow_c_device_array__()

    server.publish("host", Host())
    server.publish("columns", {"n": np.arange(5), "f": np.ones(5)})
    assert client.read("host").read_all() == pa.Table.from_batches(ALL_TYPES[:1])
    assert client.read("columns").read_all() == pa.table({"n": range(5), "f": np.ones(5)})


def test_selections_and_filters(device: Device, server: dis.Server, client: dis.Client) -> None:
    server.publish("numbers", on_device(device, [*pieces()]))
    for transport in ("shm", "tcp"):
        wanted = NUMBERS.filter(pc.field("n") > 40_000).select(["f"]).slice(0, 10)
        some: dict[str, Any] = {"columns": ["f"], "filter": ("n", ">", 40_000), "limit": 10}
        assert client.read("numbers", transport=transport, **some).read_all() == wanted
        assert to_host(client.read_on_device("numbers", transport=transport, **some, device=device)) == wanted
    uri = next(one for one in client.describe("numbers").endpoints[0].locations if one.startswith("tcp:"))
    ticket = client.describe("numbers").endpoints[0].ticket
    two = dis.open_stream(uri, ticket, batches=(1, 3)).read_all()
    assert two == NUMBERS.slice(7_000, 14_000)


def test_a_client_that_cannot_use_the_device_gets_bodies_on_the_host(
    emulated: EmulatedDevice, server: dis.Server, client: dis.Client
) -> None:
    server.publish("numbers", on_device(open_device("test:0"), [*pieces()]))
    assert to_host(client.read_on_device("numbers", emulated)) == NUMBERS, "it lies on another device than is wanted"
    (uri,) = [one for one in client.describe("numbers").endpoints[0].locations if "device=" in one]
    with pytest.raises(dis.errors.UriError, match="use another location"):
        dis.open_stream(uri, client.describe("numbers").endpoints[0].ticket, allow_rma=True)
    emulated.exports = False
    server.publish("numbers", on_device(emulated, [*pieces()]))
    assert not any("device=" in one for one in client.describe("numbers").endpoints[0].locations)
    assert to_host(client.read_on_device("numbers", emulated)) == NUMBERS, "a device without handles"
    server.drop("numbers")
    wait_until(lambda: not emulated.allocations, "nobody sends it any more")

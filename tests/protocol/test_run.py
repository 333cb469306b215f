"""A run that is recognized as a whole means the same as its single messages, and doubtful runs are not recognized."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError
from dissociated.protocol.delivery import Delivered, Delivery, PackedBatches, SharedBatches
from dissociated.protocol.message import Run
from dissociated.protocol.receiver import Receiver
from dissociated.protocol.run import recognize

BASE = 1 << 40  # start of the region with shared bodies


def batch_headers(batches: list[pa.RecordBatch]) -> list[bytes]:
    """Return the flatbuffers of these batches, cut by hand from libarrow's output."""
    headers = []
    for batch in batches:
        stream = batch.serialize().to_pybytes()
        (length,) = struct.unpack_from("<i", stream, 4)
        headers.append(stream[8 : 8 + length])
    return headers


def body(batch: pa.RecordBatch) -> bytes:
    stream = batch.serialize().to_pybytes()
    (length,) = struct.unpack_from("<i", stream, 4)
    return stream[8 + length :]


def numbers(rows: int, nulls: bool = False) -> pa.RecordBatch:
    values = [None if nulls and row % 3 == 0 else row for row in range(rows)]
    return pa.record_batch({"a": pa.array(values, pa.int64()), "b": pa.array([float(row) for row in range(rows)])})


def shared_run(rows: list[int], first: int = 1) -> Run:
    """Return a run of batches without nulls, with adjacent bodies and address lists made by hand."""
    batches = [numbers(count) for count in rows]
    untagged, tags, tagged, at = b"", b"", b"", BASE
    for number, (batch, header) in enumerate(zip(batches, batch_headers(batches), strict=True), first):
        a, b = 8 * batch.num_rows, 8 * batch.num_rows  # two columns of 8 bytes, each without a bitmap
        untagged += struct.pack("<BI", 1, number & 0xFFFFFFFF) + header
        tags += struct.pack("<Q", 1 << 56 | number & 0xFFFFFFFF)
        tagged += struct.pack("<10Q", a + b, 4, 0, 0, at, a, 0, 0, at + a, b)
        at += a + b
    return as_run(len(rows), untagged, tags, tagged)


def packed_run(rows: int, count: int, first: int = 1) -> Run:
    batches = [numbers(rows) for _ in range(count)]
    untagged = b"".join(
        struct.pack("<BI", 1, number) + header for number, header in enumerate(batch_headers(batches), first)
    )
    tags = struct.pack(f"<{count}Q", *range(first, first + count))
    return as_run(count, untagged, tags, b"".join(map(body, batches)))


def as_run(count: int, untagged: bytes, tags: bytes, tagged: bytes) -> Run:
    pieces = memoryview(untagged), memoryview(tags), memoryview(tagged)
    return Run(count, pieces[0], len(untagged) // count, pieces[1], pieces[2], len(tagged) // count)


def begun(first: int = 1) -> Receiver:
    """Return a receiver that has delivered a schema and all messages before number `first`."""
    receiver = Receiver()
    receiver.want()
    schema = numbers(1).schema.serialize().to_pybytes()
    receiver.receive_metadata(b"\x01\0\0\0\0" + schema[8:])
    assert receiver.next() is not None
    receiver.sequence = first
    return receiver


def one_by_one(run: Run, first: int = 1) -> list[Delivery]:
    """Return the deliveries of a receiver for the messages of the run. Raise the error that it raises."""
    receiver = begun(first)
    delivered = []
    for message in run.expand():
        if message.tag is None:
            receiver.receive_metadata(message.data)
        else:
            receiver.receive_body(message.tag, bytes(message.data))
        if (delivery := receiver.next()) is not None:
            delivered.append(delivery)
    return delivered


def same(recognized: list[Delivery], received: list[Delivery]) -> bool:
    return [(d.sequence, d.header, _body(d)) for d in recognized] == [
        (d.sequence, d.header, _body(d)) for d in received
    ]


def _body(delivery: Delivery) -> object:
    return delivery.addresses if delivery.body is None else bytes(delivery.body)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.sampled_from([1, 77, 2**32 - 3, 2**32]))
def test_a_run_of_shared_bodies_means_what_its_messages_mean(rows: list[int], first: int) -> None:
    run = shared_run(rows, first)
    batches = recognize(run, first)
    assert isinstance(batches, SharedBatches)
    assert same(list(batches.expand()), one_by_one(run, first))
    # Every sent address is leased, in order: two for each batch.
    assert batches.leased.tolist() == [
        address for at, count in zip(batches.body_at.tolist(), rows, strict=True) for address in (at, at + 8 * count)
    ]


@given(st.integers(1, 40), st.integers(1, 20))
def test_a_run_of_packed_bodies_means_what_its_messages_mean(rows: int, count: int) -> None:
    run = packed_run(rows, count)
    batches = recognize(run, 1)
    assert isinstance(batches, PackedBatches)
    assert same(list(batches.expand()), one_by_one(run))


@given(st.data())
def test_nothing_is_recognised_that_would_be_refused_or_mean_something_else(data: st.DataObject) -> None:
    good = data.draw(st.sampled_from([shared_run([5, 9, 2, 30]), packed_run(7, 4)]))
    pieces = [bytearray(good.untagged), bytearray(good.tags), bytearray(good.tagged)]
    for _ in range(data.draw(st.integers(1, 3))):
        piece = data.draw(st.sampled_from(pieces))
        at = data.draw(st.integers(0, len(piece) - 1))
        piece[at] = data.draw(st.integers(0, 255))
    run = as_run(4, *map(bytes, pieces))
    batches = recognize(run, 1)
    if batches is None:
        return
    try:
        received = one_by_one(run)
    except RemoteProtocolError as error:
        raise AssertionError(f"recognized, but one by one: {error}") from error
    assert same(list(batches.expand()), received)


@pytest.mark.parametrize("run", [shared_run([5, 9, 2]), packed_run(7, 3)], ids=["shared", "packed"])
def test_a_receiver_delivers_a_run_together_or_one_by_one_as_it_is_asked(run: Run) -> None:
    together, single = begun(), begun()
    together.receive(run)
    single.receive(run)
    batches = together.next_together()
    assert batches is not None
    assert together.next_together() is None
    delivered = [*iter(single.next, None)]
    assert same([*batches.expand()], delivered)
    assert same(delivered, one_by_one(run))
    for receiver in (together, single):
        receiver.receive_metadata(struct.pack("<BI", 0, 4))
        assert receiver.complete


def sequence_of(delivered: Delivered | None) -> int:
    """Return the number of the only delivered message."""
    assert delivered is not None
    (one,) = delivered.expand()
    return one.sequence


def test_of_a_doubtful_run_all_is_delivered_that_comes_before_the_doubt() -> None:
    run = packed_run(6, 4)
    tags = struct.pack("<4Q", 1, 2, 2, 4)
    receiver = begun()
    receiver.receive(run._replace(tags=memoryview(tags)))
    assert [sequence_of(receiver.next_together()), sequence_of(receiver.next_together())] == [1, 2]
    with pytest.raises(RemoteProtocolError, match="the body of message 2 twice"):
        receiver.next_together()


def test_a_run_that_is_overtaken_is_still_delivered_together() -> None:
    """Overtake a run with a message, half a message, and the end. Media with messages of their own do that."""
    last, after = packed_run(6, 2, first=4).expand(), begun()
    metadata, packed, half, _ = last
    after.receive(metadata)
    after.receive(packed)
    after.receive(half)
    after.receive_metadata(struct.pack("<BI", 0, 6))
    after.receive(packed_run(6, 3))
    assert isinstance(after.next_together(), PackedBatches)
    assert sequence_of(after.next_together()) == 4
    assert after.next_together() is None
    assert not after.complete

    only = begun()
    only.receive_metadata(struct.pack("<BI", 0, 4))
    only.receive(packed_run(6, 3))
    assert not only.complete
    assert isinstance(only.next_together(), PackedBatches)
    assert only.complete


def test_a_run_of_what_has_come_or_is_beyond_the_end_is_refused() -> None:
    for number, error in ((0, "the metadata of message 2 twice"), (1, "the body of message 2 twice")):
        receiver = begun()
        receiver.receive([*packed_run(6, 3).expand()][2 + number])
        receiver.receive(packed_run(6, 3))
        with pytest.raises(RemoteProtocolError, match=error):
            [*iter(receiver.next_together, None)]
    receiver = begun()
    receiver.receive_metadata(struct.pack("<BI", 0, 3))
    receiver.receive(packed_run(6, 3))
    with pytest.raises(RemoteProtocolError, match="is complete"):
        [*iter(receiver.next_together, None)]


def test_messages_that_come_together_may_come_in_any_order() -> None:
    first, second = packed_run(6, 3), packed_run(6, 2, first=4)
    receiver = begun()
    receiver.receive(second)
    receiver.receive(first)
    assert [delivery.sequence for delivery in iter(receiver.next, None)] == [1, 2, 3, 4, 5]


def test_only_the_number_that_is_due_is_recognised() -> None:
    assert recognize(shared_run([4] * 3, first=5), 4) is None
    assert recognize(packed_run(4, 3, first=5), 6) is None


def test_different_layouts_are_not_alike() -> None:
    plain, nullable = batch_headers([numbers(9)])[0], batch_headers([numbers(9, nulls=True)])[0]
    assert len(plain) == len(nullable)
    shared = shared_run([9, 9])
    # Null counts may differ within one layout, so the address list decides here.
    swapped = bytes(shared.untagged[: shared.untagged_size + 5]) + nullable
    assert recognize(as_run(2, swapped, bytes(shared.tags), bytes(shared.tagged)), 1) is None


@pytest.mark.parametrize("at", [8, 24])  # number of buffers; length of an absent buffer
def test_a_list_that_disagrees_is_not_recognised(at: int) -> None:
    run = shared_run([6, 6])
    tagged = bytearray(run.tagged)
    tagged[at] ^= 1
    assert recognize(as_run(2, bytes(run.untagged), bytes(run.tags), bytes(tagged)), 1) is None


def test_a_scattered_body_is_not_recognised() -> None:
    run = shared_run([6, 6])
    tagged = bytearray(run.tagged)
    struct.pack_into("<Q", tagged, 16 + 3 * 16, BASE + 8 * 6 + 64)  # the last buffer lies 64 bytes further
    assert recognize(as_run(2, bytes(run.untagged), bytes(run.tags), bytes(tagged)), 1) is None


def test_an_address_before_its_offset_does_not_wrap_around() -> None:
    # Both buffers have offsets 64 bytes beyond their addresses, so the body would begin before address 0.
    run = shared_run([6, 6])
    untagged, tagged = bytearray(run.untagged), bytearray(run.tagged)
    extents = struct.pack("<8Q", 0, 0, 0, 48, 48, 0, 48, 48)
    for row in range(2):
        at = untagged.index(extents, row * run.untagged_size)
        struct.pack_into("<8Q", untagged, at, 0, 0, 64, 48, 0, 0, 112, 48)
        length = untagged.index(struct.pack("<Q", 96), row * run.untagged_size)
        struct.pack_into("<Q", untagged, length, 160)
        struct.pack_into("<10Q", tagged, row * run.tagged_size, 96, 4, 0, 0, 8, 48, 0, 0, 56, 48)
    assert recognize(as_run(2, bytes(untagged), bytes(run.tags), bytes(tagged)), 1) is None


def test_what_tells_how_to_read_a_header_must_not_vary() -> None:
    run = packed_run(6, 2)
    untagged = bytearray(run.untagged)
    header = bytes(untagged[5 : run.untagged_size])
    nodes = header.index(struct.pack("<IQQQQ", 2, 6, 0, 6, 0))  # two columns of six rows without nulls
    for row in range(2):
        struct.pack_into("<I", untagged, row * run.untagged_size + 5 + nodes, 200)  # would span everything that follows
    assert recognize(as_run(2, bytes(untagged), bytes(run.tags), bytes(run.tagged)), 1) is None


def test_a_message_that_has_to_wait_does_not_keep_its_run() -> None:
    memory = bytearray(b"".join(map(body, [numbers(5)] * 3)))
    headers = batch_headers([numbers(5)] * 3)
    untagged = b"".join(struct.pack("<BI", 1, number) + head for number, head in zip([1, 2, 9], headers, strict=True))
    tags = struct.pack("<3Q", 1, 2, 9)
    run = Run(3, memoryview(untagged), len(untagged) // 3, memoryview(tags), memoryview(memory), len(memory) // 3)
    receiver = begun()
    receiver.receive(run)
    del run
    assert [delivery.sequence for delivery in iter(receiver.next, None)] == [1, 2]
    expected = bytes(memory[-len(memory) // 3 :])
    memory.clear()  # raises BufferError if a view remains
    receiver.sequence = 9
    last = receiver.next()
    assert last is not None
    assert last.body == expected

"""The decoder of dissociated streams: messages and bodies in any order yield libarrow's result for the stream."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Sequence
from itertools import permutations
from queue import SimpleQueue
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.codec.options import ReadOptions
from dissociated.errors import FormatError, OptionError, RemoteProtocolError
from dissociated.format.message import buffer_extents, parse_header
from dissociated.ipc import CollectListener, DissociatedDecoder
from dissociated.memory.region import AddressSpace, Region
from protocol.wire import Encoded, address_list, encode, end_of_stream, metadata, tag

BASE = 1 << 20

WORDS = [
    pa.record_batch({"d": pa.DictionaryArray.from_arrays(np.arange(len(words), dtype=np.int8), words), "n": numbers})
    for words, numbers in ((["a", "b"], [1, 2]), (["c", "d", "e"], [3, None, 5]))
]
NUMBERS = [pa.record_batch({"n": np.arange(5) + at, "s": ["x", None, "", "yy", "z"]}) for at in (0, 10)]

#: A message for the decoder: its tag, or None, and its content.
Fed = tuple[int | None, bytes | pa.Buffer]


def stats_of(batches: Sequence[pa.RecordBatch]) -> pa.ipc.ReadStats:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    reader = pa.ipc.open_stream(sink.getvalue())
    reader.read_all()
    return reader.stats


class Peer:
    """A peer that sends these batches.

    The bodies of the messages numbered `shared` are sent as the addresses of buffers that lie far apart.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], shared: Collection[int] = (), at: int = 64) -> None:
        self.memory = bytearray(1 << 16)
        self.sent: list[int] = []
        self.counts: list[int] = []  # number of addresses sent with each message
        self.fed: list[Fed] = []
        self._at = at
        messages = encode(*batches)
        for sequence, message in enumerate(messages):
            self.fed.append((None, metadata(sequence, message.header)))
            if sequence in shared:
                self.fed.append((tag(sequence, kind=1), address_list(*self._share(message))))
            elif message.body is not None:
                self.fed.append((tag(sequence), pa.py_buffer(message.body)))
        self.fed.append((None, end_of_stream(len(messages))))
        self.space = AddressSpace()
        self.space.add(Region(BASE, pa.py_buffer(self.memory)))

    def _share(self, message: Encoded) -> list[tuple[int, int]]:
        assert message.body is not None
        extents = []
        offsets, lengths = buffer_extents(message.header, parse_header(message.header))
        for offset, length in zip(offsets, lengths, strict=True):
            self.memory[self._at : self._at + length] = message.body[offset : offset + length]
            extents.append((BASE + self._at, length))
            if length:
                self.sent.append(BASE + self._at)
            self._at += 512
        self.counts.append(sum(length > 0 for length in lengths))
        return [extent if extent[1] else (0, 0) for extent in extents]


def feed(decoder: DissociatedDecoder, messages: Sequence[Fed]) -> None:
    for label, content in messages:
        if label is None:
            decoder.consume_metadata(content)
        else:
            decoder.consume_body(label, content)


def returned(queue: SimpleQueue[Sequence[int]]) -> list[int]:
    found: list[int] = []
    while not queue.empty():
        found += queue.get()
    return found


@pytest.mark.parametrize("shared", [(), (1,), (1, 2)], ids=["packed", "mixed", "by address"])
def test_messages_may_come_in_any_order(shared: Sequence[int]) -> None:
    peer = Peer(NUMBERS, shared)
    expected = stats_of(NUMBERS)
    queue: SimpleQueue[Sequence[int]] = SimpleQueue()
    for order in permutations(peer.fed):
        listener = CollectListener()
        decoder = DissociatedDecoder(listener, address_space=peer.space, returns=queue)
        feed(decoder, order[:-1])
        assert (decoder.complete, listener.complete) == (False, False)
        feed(decoder, order[-1:])
        assert (decoder.complete, listener.complete) == (True, True)
        decoder.finish()
        assert listener.batches == NUMBERS
        assert decoder.schema == listener.schema == NUMBERS[0].schema
        assert decoder.stats == expected
        listener.batches.clear()
        assert sorted(returned(queue)) == sorted(peer.sent)


@given(st.data())
def test_dictionaries_may_come_in_any_order(data: st.DataObject) -> None:
    peer = Peer(WORDS, data.draw(st.sets(st.integers(1, 4))))
    queue: SimpleQueue[Sequence[int]] = SimpleQueue()
    listener = CollectListener()
    decoder = DissociatedDecoder(listener, address_space=peer.space, returns=queue)
    feed(decoder, data.draw(st.permutations(peer.fed)))
    assert listener.batches == WORDS
    assert listener.complete
    assert decoder.stats == stats_of(WORDS) == (5, 2, 2, 0, 1)
    listener.batches.clear()
    assert sorted(returned(queue)) == sorted(peer.sent)


def test_batches_are_decoded_as_soon_as_they_are_whole() -> None:
    metadata_0, metadata_1, body_1, metadata_2, body_2, end = Peer(NUMBERS).fed
    listener = CollectListener()
    decoder = DissociatedDecoder(listener)
    counts = []
    for message in (metadata_0, end, body_2, metadata_1, body_1, metadata_2):
        feed(decoder, [message])
        counts.append((listener.schema is not None, len(listener.batches), listener.complete))
    assert counts == [
        (True, 0, False),
        (True, 0, False),
        (True, 0, False),
        (True, 0, False),
        (True, 1, False),
        (True, 2, True),
    ]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer])
def test_messages_may_be_any_buffer(kind: Callable[[bytes | pa.Buffer], bytes]) -> None:
    peer = Peer(NUMBERS, [1])
    listener = CollectListener()
    decoder = DissociatedDecoder(listener, address_space=peer.space, returns=SimpleQueue())
    feed(decoder, [(label, kind(content)) for label, content in peer.fed])
    assert listener.batches == NUMBERS


def lies_in(batch: pa.RecordBatch, memory: pa.Buffer) -> bool:
    start, end = memory.address, memory.address + memory.size
    found = [buffer for column in batch.columns for buffer in column.buffers() if buffer]
    return bool(found) and all(start <= one.address and one.address + one.size <= end for one in found)


def test_arrays_lie_in_the_bodies_and_in_the_regions() -> None:
    peer = Peer(NUMBERS, [2])
    listener = CollectListener()
    decoder = DissociatedDecoder(listener, address_space=peer.space, returns=SimpleQueue())
    allocated = pa.total_allocated_bytes()
    feed(decoder, peer.fed)
    assert pa.total_allocated_bytes() == allocated
    packed = peer.fed[2][1]
    assert isinstance(packed, pa.Buffer)
    assert lies_in(listener.batches[0], packed)
    assert lies_in(listener.batches[1], peer.space.find(BASE).memory)


def test_a_lease_ends_with_the_last_array_that_lies_in_it() -> None:
    peer = Peer(NUMBERS, [1, 2])
    queue: SimpleQueue[Sequence[int]] = SimpleQueue()
    listener = CollectListener()
    decoder = DissociatedDecoder(listener, address_space=peer.space, returns=queue)
    feed(decoder, peer.fed)
    column = listener.batches[0]["n"]
    listener.batches.clear()
    second = returned(queue)
    assert column.to_pylist() == [0, 1, 2, 3, 4]
    del column
    assert sorted(second + returned(queue)) == sorted(peer.sent)
    assert len(second) == 4  # numbers, nulls, offsets and characters


def test_buffers_that_are_not_aligned_are_copied_and_go_back_at_once() -> None:
    peer = Peer(NUMBERS, [1], at=67)
    queue: SimpleQueue[Sequence[int]] = SimpleQueue()
    listener = CollectListener()
    feed(DissociatedDecoder(listener, address_space=peer.space, returns=queue), peer.fed)
    assert sorted(returned(queue)) == sorted(peer.sent)
    assert listener.batches == NUMBERS


@pytest.mark.parametrize("how", ["reset", "error", "collected"])
def test_dictionaries_that_wait_are_given_back(how: str) -> None:
    peer = Peer(WORDS, [1])
    queue: SimpleQueue[Sequence[int]] = SimpleQueue()
    decoder = DissociatedDecoder(CollectListener(), address_space=peer.space, returns=queue)
    feed(decoder, peer.fed[:3])
    assert returned(queue) == []
    if how == "reset":
        decoder.reset()
    elif how == "error":
        with pytest.raises(RemoteProtocolError):
            decoder.finish()
    else:
        del decoder
    assert returned(queue) == peer.sent


def test_a_decoder_needs_no_garbage_collector() -> None:
    """libarrow owns the memory that it reads from, and no garbage collector tracks that."""
    peer = Peer(WORDS, [1, 2, 3, 4])
    queue: SimpleQueue[Sequence[int]] = SimpleQueue()
    gc.collect()
    gc.disable()
    try:
        for count in range(len(peer.fed) + 1):
            decoder = DissociatedDecoder(CollectListener(), address_space=peer.space, returns=queue)
            feed(decoder, peer.fed[:count])
            del decoder
            assert len(returned(queue)) == sum(peer.counts[: max(count - 1, 0) // 2])
    finally:
        gc.enable()


def test_some_fields() -> None:
    listener = CollectListener()
    feed(DissociatedDecoder(listener, ReadOptions(included_fields=[1])), Peer(NUMBERS).fed)
    assert listener.batches == [batch.select(["s"]) for batch in NUMBERS]
    assert (listener.schema, listener.filtered_schema) == (NUMBERS[0].schema, NUMBERS[0].select(["s"]).schema)


def test_a_decoder_may_be_reset_anywhere() -> None:
    fed = Peer(WORDS).fed
    for count in range(len(fed) + 1):
        listener = CollectListener()
        decoder = DissociatedDecoder(listener)
        feed(decoder, fed[:count])
        decoder.reset()
        assert not decoder.complete
        assert decoder.schema is None
        before = len(listener.batches)
        feed(decoder, fed)
        assert listener.batches[before:] == WORDS


# ---- protocol errors


def test_a_stream_that_is_cut_off_names_the_gap() -> None:
    fed = Peer(NUMBERS).fed
    for missing in range(len(fed)):
        decoder = DissociatedDecoder(CollectListener())
        feed(decoder, fed[:missing] + fed[missing + 1 :])
        with pytest.raises(RemoteProtocolError, match="is missing"):
            decoder.finish()


@pytest.mark.parametrize(
    "messages",
    [
        [(None, b"")],
        [(None, b"\x07\0\0\0\0")],
        [(None, end_of_stream(0))],
        [(tag(0, kind=2), b"")],
        [Peer(NUMBERS).fed[0]] * 2,
        [*Peer(NUMBERS).fed, Peer(NUMBERS).fed[1]],
        [*Peer(NUMBERS).fed[:2], (tag(1), b"too short")],
        [*Peer(NUMBERS).fed[:2], (tag(1, kind=1), address_list((1, 2)))],
        [*Peer(NUMBERS).fed[:1], (None, metadata(1, b"no flatbuffer"))],
    ],
)
def test_a_peer_that_breaks_the_protocol_is_refused(messages: list[Fed]) -> None:
    decoder = DissociatedDecoder(CollectListener())
    with pytest.raises(RemoteProtocolError):
        feed(decoder, messages)
    for refused in (decoder.finish, lambda: decoder.consume_metadata(b""), lambda: decoder.consume_body(0, b"")):
        with pytest.raises(FormatError, match="reset"):
            refused()
    decoder.reset()
    feed(decoder, Peer(NUMBERS).fed)
    assert decoder.complete


def test_addresses_need_a_region() -> None:
    peer = Peer(NUMBERS, [1])
    decoder = DissociatedDecoder(CollectListener())
    with pytest.raises(RemoteProtocolError, match="is in no region that it shared"):
        feed(decoder, peer.fed)


def test_content_that_libarrow_refuses() -> None:
    _, *rest = Peer(NUMBERS).fed
    schema = Peer([NUMBERS[0].append_column("z", pa.nulls(5))]).fed[0]  # a field more, without more buffers
    with pytest.raises(RemoteProtocolError, match="the peer sent what libarrow cannot read"):
        feed(DissociatedDecoder(CollectListener()), [schema, *rest])


def test_buffers_that_the_schema_does_not_have() -> None:
    _, *rest = Peer(NUMBERS).fed
    with pytest.raises(RemoteProtocolError, match="message 1 has 5 buffers; its schema needs 4"):
        feed(DissociatedDecoder(CollectListener()), [Peer(WORDS).fed[0], *rest])


def test_what_a_listener_raises_comes_out_as_it_is() -> None:
    error = StopIteration("mine")

    class Failing(CollectListener):
        def on_eos(self) -> None:
            raise error

    with pytest.raises(StopIteration) as raised:
        feed(DissociatedDecoder(Failing()), Peer(NUMBERS).fed)
    assert raised.value is error


def test_metadata_and_bodies_have_limits() -> None:
    fed = Peer(NUMBERS).fed
    cases: list[dict[str, Any]] = [{"max_metadata": 100}, {"max_body": 30}]
    for limits in cases:
        decoder = DissociatedDecoder(CollectListener(), **limits)
        with pytest.raises(RemoteProtocolError, match=next(iter(limits))):
            feed(decoder, fed)


def test_a_space_needs_somewhere_to_return_addresses_to() -> None:
    with pytest.raises(OptionError, match="or neither"):
        DissociatedDecoder(CollectListener(), address_space=AddressSpace())
    with pytest.raises(OptionError, match="or neither"):
        DissociatedDecoder(CollectListener(), returns=SimpleQueue())

"""The push decoder: content in any pieces and any order yields libarrow's result for the whole content."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dissociated.codec.options import ReadOptions
from dissociated.errors import FormatError, OptionError
from dissociated.ipc import CollectListener, Listener, StreamDecoder
from support.helpers import as_big_endian
from support.machine import ARROW_TEST_DATA

Events = list[tuple[Any, ...]]


class Recorder(Listener):
    """A listener that records every call, in order."""

    def __init__(self) -> None:
        self.events: Events = []

    def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
        self.events.append(("schema", schema, filtered_schema))

    def on_record_batch_with_metadata_decoded(
        self, batch: pa.RecordBatch, custom_metadata: pa.KeyValueMetadata | None
    ) -> None:
        self.events.append(("batch", batch, custom_metadata))

    def on_eos(self) -> None:
        self.events.append(("end",))


class Silent(Listener):
    """A listener that ignores every call."""

    def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None: ...


def read(content: Any, options: pa.ipc.IpcReadOptions | None = None) -> tuple[Events, pa.ipc.ReadStats]:
    """Return the events that a listener should get, by libarrow's own reading, and its statistics."""
    reader = pa.ipc.open_stream(content, options=options)
    events: Events = [("schema", pa.ipc.open_stream(content).schema, reader.schema)]
    while True:
        try:
            events.append(("batch", *reader.read_next_batch_with_custom_metadata()))
        except StopIteration:
            return [*events, ("end",)], reader.stats


def written(*batches: pa.RecordBatch, schema: pa.Schema | None = None, custom: bool = True, **options: Any) -> bytes:
    """Return a stream of these batches; with `custom`, every other batch has metadata of its own."""
    sink = pa.BufferOutputStream()
    told = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, schema or batches[0].schema, options=told) as writer:
        for number, batch in enumerate(batches):
            writer.write_batch(batch, custom_metadata={"number": str(number)} if custom and number % 2 else None)
    return sink.getvalue().to_pybytes()


def of_words(*batches: list[str]) -> list[pa.RecordBatch]:
    return [
        pa.record_batch({"d": pa.DictionaryArray.from_arrays(np.arange(len(words), dtype=np.int8), words)})
        for words in batches
    ]


def nested_dictionaries() -> list[pa.RecordBatch]:
    inner = pa.array(["x", "y", "x"]).dictionary_encode()
    lists = pa.ListArray.from_arrays([0, 2, 3], inner)
    outer = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int16()), lists)
    return [pa.record_batch({"o": outer}), pa.record_batch({"o": outer})]


NUMBERS = [pa.record_batch({"n": pa.array([1, None, 3]), "s": ["a", "bb", None]}) for _ in range(3)]
WORDS = of_words(["a"], ["a", "b"], ["a", "b", "c"])

STREAMS: dict[str, bytes] = {
    "plain, with metadata of batches": written(*NUMBERS),
    "dictionaries that are replaced": written(*WORDS),
    "deltas": written(*WORDS, emit_dictionary_deltas=True),
    "nested dictionaries": written(*nested_dictionaries()),
    "compressed": written(*NUMBERS, compression="zstd"),
    "old prefix": written(*NUMBERS, use_legacy_format=True),
    # libarrow takes any metadata of a batch of version 4 to be about compression
    "version 4": written(*WORDS, custom=False, metadata_version=pa.ipc.MetadataVersion.V4),
    "empty batches": written(NUMBERS[0].slice(0, 0), NUMBERS[1], NUMBERS[2].slice(0, 0)),
    "no batches": written(schema=NUMBERS[0].schema),
    "no batches, but dictionaries in the schema": written(schema=WORDS[0].schema),
    "no columns": written(pa.record_batch([], schema=pa.schema([], {"a": "b"}))),
    "big-endian": as_big_endian(written(pa.record_batch({"n": np.array([1, -2, 2**40], ">i8").view("<i8")}))),
}


def endings(name: str) -> list[bytes]:
    """Return a stream with an 8-byte end marker, with a 4-byte one, and without any."""
    stream = STREAMS[name]
    bare = stream[: -4 if "old" in name else -8]
    return [bare + b"\xff\xff\xff\xff\0\0\0\0", bare + b"\0\0\0\0", bare]


def in_pieces(size: int) -> Callable[[StreamDecoder, bytes], None]:
    def feed(decoder: StreamDecoder, content: bytes) -> None:
        for at in range(0, len(content), size):
            decoder.consume(content[at : at + size])

    return feed


def as_required(decoder: StreamDecoder, content: bytes) -> None:
    at = 0
    while at < len(content) and (size := decoder.next_required_size):
        decoder.consume(content[at : at + size])
        at += size


WAYS = {"whole": in_pieces(1 << 30), "byte by byte": in_pieces(1), "7 bytes": in_pieces(7), "as required": as_required}


def decoded(
    content: bytes, feed: Callable[[StreamDecoder, bytes], None] = WAYS["whole"]
) -> tuple[Events, pa.ipc.ReadStats]:
    recorder = Recorder()
    decoder = StreamDecoder(recorder)
    feed(decoder, content)
    decoder.finish()
    assert decoder.next_required_size == 0
    return recorder.events, decoder.stats


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_decoded_as_libarrow_reads_it(name: str, way: str) -> None:
    expected = read(STREAMS[name])
    for content in (*endings(name), STREAMS[name] + b"what follows the end"):
        assert decoded(content, WAYS[way]) == expected


@pytest.mark.parametrize("name", ["plain, with metadata of batches", "deltas", "old prefix"])
def test_a_stream_may_be_split_anywhere(name: str) -> None:
    content = STREAMS[name]
    expected = read(content)
    for at in range(len(content) + 1):

        def halves(decoder: StreamDecoder, content: bytes, at: int = at) -> None:
            decoder.consume(content[:at])
            decoder.consume(content[at:])

        assert decoded(content, halves) == expected


@given(st.data())
def test_a_stream_may_be_split_in_many_places(data: st.DataObject) -> None:
    content = STREAMS[data.draw(st.sampled_from(sorted(STREAMS)))]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)))))

    def feed(decoder: StreamDecoder, content: bytes) -> None:
        for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
            decoder.consume(memoryview(content)[start:end])

    assert decoded(content, feed) == read(content)


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_cut_off_says_so(name: str) -> None:
    """A stream may end before any message but the first, except between its initial dictionaries."""
    content = endings(name)[2]
    ends = {0}
    messages = pa.BufferReader(content)
    types = []
    while messages.tell() < len(content):
        types.append(pa.ipc.read_message(messages).type)
        ends.add(messages.tell())
    whole = 0
    for at in range(len(content) + 1):
        recorder = Recorder()
        decoder = StreamDecoder(recorder)
        decoder.consume(content[:at])
        try:
            expected = read(content[:at])[0] if at in ends else None
        except pa.ArrowInvalid:
            expected = None
        if expected:
            decoder.finish()
            assert recorder.events == expected
            whole += 1
        else:
            with pytest.raises(FormatError):
                decoder.finish()
            assert ("end",) not in recorder.events
    assert types[0] == "schema"
    assert whole >= 1 + types.count("record batch")


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_walked_as_the_stream_that_it_holds(way: str) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, NUMBERS[0].schema) as writer:
        for batch in NUMBERS:
            writer.write_batch(batch)
    events, _ = decoded(sink.getvalue().to_pybytes(), WAYS[way])
    assert [event[0] for event in events] == ["schema", "batch", "batch", "batch", "end"]
    assert [event[1] for event in events[1:-1]] == NUMBERS


def test_the_listener_is_called_as_soon_as_a_message_is_whole() -> None:
    content = endings("dictionaries that are replaced")[0]
    messages = pa.BufferReader(content)
    due = {}
    while messages.tell() < len(content) - 8:
        type_ = pa.ipc.read_message(messages).type
        due[messages.tell()] = {"schema": "schema", "record batch": "batch"}.get(type_)
    due[len(content)] = "end"
    recorder = Recorder()
    decoder = StreamDecoder(recorder)
    for at in range(len(content)):
        before = len(recorder.events)
        decoder.consume(content[at : at + 1])
        called = recorder.events[before:]
        assert [event[0] for event in called] == [due[at + 1]] if due.get(at + 1) else not called


def test_what_is_required_is_what_the_next_step_lacks() -> None:
    content = STREAMS["plain, with metadata of batches"]
    first = pa.ipc.read_message(content)
    decoder = StreamDecoder(Recorder())
    assert decoder.next_required_size == 4
    decoder.consume(content[:3])
    assert decoder.next_required_size == 1
    decoder.consume(content[3:4])
    assert decoder.next_required_size == 4
    decoder.consume(content[4:8])
    assert decoder.next_required_size == first.metadata.size
    decoder.consume(content[8:18])
    assert decoder.next_required_size == first.metadata.size - 10


# ---- ownership

LARGE = pa.record_batch({f"c{i}": np.arange(1 << 16) + i for i in range(10)})


def addresses(batch: pa.RecordBatch) -> list[tuple[int, int]]:
    return [(buffer.address, buffer.size) for column in batch.columns for buffer in column.buffers() if buffer]


def lies_in(batch: pa.RecordBatch, memory: pa.Buffer) -> bool:
    start, end = memory.address, memory.address + memory.size
    return all(start <= address and address + size <= end for address, size in addresses(batch))


def test_what_is_fed_as_required_is_not_copied() -> None:
    content = written(LARGE, LARGE)
    listener = CollectListener()
    decoder = StreamDecoder(listener)
    fed = []
    at = 0
    while size := decoder.next_required_size:
        fed.append(pa.py_buffer(content[at : at + size]))
        at += size
        allocated = pa.total_allocated_bytes()
        tracemalloc.start()
        decoder.consume(fed[-1])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert pa.total_allocated_bytes() == allocated
        assert peak < 100_000
    assert listener.batches == [LARGE, LARGE]
    bodies = [piece for piece in fed if piece.size > 100_000]
    assert [lies_in(batch, body) for batch, body in zip(listener.batches, bodies, strict=True)] == [True, True]


def test_batches_lie_in_a_larger_piece() -> None:
    content = pa.py_buffer(written(LARGE, LARGE, LARGE))
    middle = content.size // 2  # in the second batch
    listener = CollectListener()
    decoder = StreamDecoder(listener)
    allocated = pa.total_allocated_bytes()
    for piece in (content.slice(0, middle), content.slice(middle)):
        decoder.consume(piece)
    assert 0 < pa.total_allocated_bytes() - allocated < content.size // 3
    assert listener.batches == [LARGE, LARGE, LARGE]
    assert [lies_in(batch, content) for batch in listener.batches] == [True, False, True]


def test_small_pieces_are_joined_once() -> None:
    """Joining them again with each piece would copy a tebibyte."""
    content = written(LARGE)
    listener = CollectListener()
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    decoder = StreamDecoder(listener, ReadOptions(memory_pool=pool))
    for at in range(0, len(content), 16):
        decoder.consume(content[at : at + 16])
    assert listener.batches == [LARGE]
    assert len(content) - 10_000 < pool.bytes_allocated() < len(content)  # the memory of the batch
    assert pool.max_memory() < 2 * len(content)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, pa.py_buffer, lambda data: np.frombuffer(data, "<i4")])
def test_data_may_be_any_buffer(kind: Callable[[bytes], Any]) -> None:
    listener = CollectListener()
    StreamDecoder(listener).consume(kind(STREAMS["plain, with metadata of batches"]))
    assert listener.batches == NUMBERS
    assert listener.custom_metadata == [None, {b"number": b"1"}, None]
    assert listener.complete


def test_what_was_fed_is_let_go_with_the_batches() -> None:
    content = bytearray(STREAMS["dictionaries that are replaced"])
    listener = CollectListener()
    decoder = StreamDecoder(listener)
    decoder.consume(content)
    with pytest.raises(BufferError):
        content.clear()
    del listener.batches[:]
    content.clear()


@pytest.mark.parametrize("ended", ["reset", "an error", "the decoder collected"])
def test_waiting_bytes_are_released(ended: str) -> None:
    content = STREAMS["dictionaries that are replaced"]
    fed = bytearray(content[:-60])  # the last batch is incomplete
    decoder = StreamDecoder(Silent())
    decoder.consume(fed)
    with pytest.raises(BufferError):
        fed.clear()
    if ended == "reset":
        decoder.reset()
    elif ended == "an error":
        with pytest.raises(FormatError):
            decoder.finish()
    else:
        del decoder
    fed.clear()


# ---- options, listeners, reset


def test_some_fields() -> None:
    content = STREAMS["plain, with metadata of batches"]
    recorder = Recorder()
    decoder = StreamDecoder(recorder, ReadOptions(included_fields=[1]))
    decoder.consume(content)
    assert recorder.events == read(content, pa.ipc.IpcReadOptions(included_fields=[1]))[0]
    assert decoder.schema == pa.schema([("s", pa.string())])


def test_a_field_that_is_not_there() -> None:
    decoder = StreamDecoder(Recorder(), ReadOptions(included_fields=[2]))
    with pytest.raises(OptionError, match="field 2 does not exist"):
        decoder.consume(STREAMS["plain, with metadata of batches"])


def test_the_other_byte_order_may_be_kept() -> None:
    listener = CollectListener()
    StreamDecoder(listener, ReadOptions(ensure_native_endian=False)).consume(STREAMS["big-endian"])
    assert listener.batches[0]["n"].to_numpy().view(">i8").tolist() == [1, -2, 2**40]


def test_types_that_nest_too_deep() -> None:
    stream = written(schema=pa.schema([("a", pa.list_(pa.list_(pa.int8())))]))
    StreamDecoder(Recorder(), ReadOptions(max_recursion_depth=3)).consume(stream)
    with pytest.raises(FormatError, match="nested 3 levels deep"):
        StreamDecoder(Recorder(), ReadOptions(max_recursion_depth=2)).consume(stream)


def test_statistics_grow_with_the_batches() -> None:
    content = STREAMS["deltas"]
    reader = pa.ipc.open_stream(content)
    seen = []

    class Watching(Listener):
        def on_schema_decoded(self, schema: pa.Schema, filtered_schema: pa.Schema) -> None:
            seen.append(decoder.stats)

        def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None:
            seen.append(decoder.stats)

    decoder = StreamDecoder(Watching())
    assert decoder.stats == (0, 0, 0, 0, 0)
    assert decoder.schema is None
    decoder.consume(content)
    expected = [reader.stats]
    expected += [reader.stats for _ in reader]
    assert seen == expected
    assert decoder.stats == reader.stats == (7, 3, 3, 2, 0)
    assert decoder.schema == reader.schema


def test_statistics_count_a_dictionary_when_it_has_come() -> None:
    seen = []
    decoder = StreamDecoder(Recorder())
    for message in pa.ipc.MessageReader.open_stream(STREAMS["deltas"]):
        decoder.consume(message.serialize())
        seen.append((message.type, decoder.stats))
    assert seen == [
        ("schema", (1, 0, 0, 0, 0)),
        ("dictionary", (2, 0, 1, 0, 0)),
        ("record batch", (3, 1, 1, 0, 0)),
        ("dictionary", (4, 1, 2, 1, 0)),
        ("record batch", (5, 2, 2, 1, 0)),
        ("dictionary", (6, 2, 3, 2, 0)),
        ("record batch", (7, 3, 3, 2, 0)),
    ]


def test_a_listener_must_want_batches() -> None:
    with pytest.raises(NotImplementedError, match="Listener does not implement on_record_batch_decoded"):
        StreamDecoder(Listener()).consume(STREAMS["no columns"])


def test_a_listener_may_want_nothing_but_the_schema() -> None:
    StreamDecoder(Listener()).consume(STREAMS["no batches"])


@pytest.mark.parametrize("error", [ValueError("mine"), StopIteration("mine"), FormatError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize("method", ["on_schema_decoded", "on_record_batch_decoded", "on_eos"])
def test_what_a_listener_raises_comes_out_as_it_is(method: str, error: BaseException) -> None:
    def fails(*arguments: object) -> None:
        raise error

    listener = Silent()
    setattr(listener, method, fails)
    decoder = StreamDecoder(listener)
    with pytest.raises(type(error)) as raised:
        decoder.consume(STREAMS["plain, with metadata of batches"])
    assert raised.value is error
    with pytest.raises(FormatError, match="reset"):
        decoder.consume(b"")


def test_after_an_error_a_decoder_takes_no_more_until_it_is_reset() -> None:
    listener = CollectListener()
    decoder = StreamDecoder(listener)
    content = STREAMS["plain, with metadata of batches"]
    with pytest.raises(FormatError):
        decoder.consume(content[:-8] + b"nonsense")
    assert listener.batches == NUMBERS
    assert decoder.next_required_size == 0
    assert decoder.stats.num_record_batches == 3
    for refused in (lambda: decoder.consume(content), decoder.finish):
        with pytest.raises(FormatError, match="reset"):
            refused()
    decoder.reset()
    decoder.consume(content)
    assert listener.batches == 2 * NUMBERS


def test_a_decoder_may_be_reset_anywhere() -> None:
    content = STREAMS["deltas"]
    expected = read(content)
    recorder = Recorder()
    decoder = StreamDecoder(recorder)
    for at in range(len(content)):
        decoder.consume(content[:at])
        decoder.reset()
        assert decoder.schema is None
        recorder.events.clear()
        decoder.consume(content)
        assert (recorder.events, decoder.stats) == expected
        decoder.reset()


def test_streams_that_follow_one_another_are_decoded_by_a_listener_that_resets() -> None:
    class Resetting(Recorder):
        def on_eos(self) -> None:
            super().on_eos()
            decoder.reset()

    contents = [STREAMS["deltas"], STREAMS["plain, with metadata of batches"], STREAMS["no batches"]]
    for way in WAYS.values():
        recorder = Resetting()
        decoder = StreamDecoder(recorder)
        way(decoder, b"".join(contents))
        assert recorder.events == [event for content in contents for event in read(content)[0]]


def test_a_listener_cannot_feed_the_decoder() -> None:
    class Feeding(Silent):
        def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None:
            decoder.consume(b"\0")

    decoder = StreamDecoder(Feeding())
    with pytest.raises(FormatError, match="a listener cannot feed"):
        decoder.consume(STREAMS["no columns"])


def test_finishing_twice_ends_once() -> None:
    recorder = Recorder()
    decoder = StreamDecoder(recorder)
    decoder.consume(endings("no batches")[2])
    decoder.finish()
    decoder.finish()
    assert [event[0] for event in recorder.events] == ["schema", "end"]


# ---- invalid streams


@pytest.mark.parametrize("nothing", [b"", b"\0\0\0\0", b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1\0\0"])
def test_a_stream_has_a_schema(nothing: bytes) -> None:
    decoder = StreamDecoder(Recorder())
    with pytest.raises(FormatError, match="ended before its schema"):
        decoder.consume(nothing) or decoder.finish()  # type: ignore[func-returns-value]


def test_metadata_that_is_too_large_is_refused_when_it_is_announced() -> None:
    decoder = StreamDecoder(Recorder(), max_metadata=1000)
    decoder.consume(b"\xff\xff\xff\xff")
    with pytest.raises(FormatError, match="message 0 announces metadata of 1001 bytes; at most 1000 are accepted"):
        decoder.consume(struct.pack("<i", 1001))


def announcing(length: int) -> bytes:
    """Return a stream up to the end of the metadata of its first batch, which announces a body of `length` bytes."""
    content = written(LARGE)
    messages = pa.BufferReader(content)
    pa.ipc.read_message(messages)
    start = messages.tell()
    body = pa.ipc.read_message(messages).body.size
    head = content[: messages.tell() - body]
    at = head.index(struct.pack("<q", body), start)
    return head[:at] + struct.pack("<q", length) + head[at + 8 :]


def test_a_body_that_is_too_large_is_refused_when_it_is_announced() -> None:
    cases: list[tuple[int, dict[str, Any]]] = [(1 << 40, {}), (1001, {"max_body": 1000})]
    for length, limits in cases:
        decoder = StreamDecoder(Recorder(), **limits)
        with pytest.raises(FormatError, match=f"message 1 announces a body of {length} bytes"):
            decoder.consume(announcing(length))


@pytest.mark.parametrize("content", [b"\xff\xff\xff\xff" + struct.pack("<i", 1 << 27), announcing(1 << 33)])
def test_what_is_allocated_follows_what_has_come_not_what_was_announced(content: bytes) -> None:
    decoder = StreamDecoder(Recorder())
    allocated = pa.total_allocated_bytes()
    tracemalloc.start()
    decoder.consume(content)
    for _ in range(100):
        decoder.consume(bytes(1000))
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert pa.total_allocated_bytes() - allocated <= 1 << 20
    assert current < 500_000


def test_dictionaries_that_wait_for_their_batch_have_a_limit() -> None:
    content = written(*of_words(["x" * 1000]))
    messages = pa.BufferReader(content)
    pa.ipc.read_message(messages)
    start = messages.tell()
    pa.ipc.read_message(messages)
    dictionary = content[start : messages.tell()]
    decoder = StreamDecoder(Recorder(), max_metadata=1000, max_body=2000)
    decoder.consume(content[: messages.tell()])
    with pytest.raises(FormatError, match=r"dictionaries of .* bytes wait for a batch; at most 3000 may"):
        decoder.consume(dictionary * 3)


@given(st.binary(max_size=200), st.sampled_from(sorted(WAYS)))
def test_garbage_is_refused(content: bytes, way: str) -> None:
    with pytest.raises(FormatError):
        decoded(content, WAYS[way])


UNCOMPRESSED = sorted(name for name in STREAMS if name != "compressed")


@settings(max_examples=200)
@given(st.data())
def test_damage_is_refused_or_changes_only_what_it_touches(data: st.DataObject) -> None:
    content = bytearray(STREAMS[data.draw(st.sampled_from(UNCOMPRESSED))])
    for at, bit in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 7)), min_size=1)):
        content[at] ^= 1 << bit
    outcomes: set[int | str] = set()
    for way in ("whole", "7 bytes", "as required"):
        try:
            outcomes.add(len(decoded(bytes(content), WAYS[way])[0]))
        except FormatError as error:
            outcomes.add(str(error))
    assert len(outcomes) == 1, "it does not depend on how the bytes come"


# ---- files of the Arrow project


def golden() -> Iterator[Path]:
    if ARROW_TEST_DATA is not None:
        for pattern in ("arrow-ipc-stream/integration/**/*", "arrow-ipc-file/**/*"):
            yield from sorted(
                path for path in ARROW_TEST_DATA.glob(pattern) if path.suffix in (".stream", ".arrow_file")
            )


@pytest.mark.needs("golden files")
@pytest.mark.parametrize("path", list(golden()), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_golden(path: Path) -> None:
    content = path.read_bytes()
    if path.suffix == ".stream":
        expected = read(content)[0]
    else:
        file = pa.ipc.open_file(path)
        batches = [file.get_batch_with_custom_metadata(index) for index in range(file.num_record_batches)]
        expected = [("schema", file.schema, file.schema), *[("batch", *both) for both in batches], ("end",)]
    assert expected[0][1].equals(decoded(content)[0][0][1], check_metadata=True)
    for way in ("7 bytes", "as required"):  # tests/golden feeds them whole and in larger pieces
        assert decoded(content, WAYS[way])[0] == expected


@pytest.mark.needs("golden files")
def test_what_fuzzers_found_is_refused_or_decoded() -> None:
    script = Path(__file__).with_name("decode_damaged.py")
    process = subprocess.run([sys.executable, script, str(ARROW_TEST_DATA)], capture_output=True, text=True, timeout=50)
    assert process.returncode == 0, process.stderr
    outcomes = dict(line.rsplit(" ", 1) for line in process.stdout.splitlines())
    assert len(outcomes) > 60
    assert set(outcomes.values()) <= {"FormatError", "decoded"}, outcomes

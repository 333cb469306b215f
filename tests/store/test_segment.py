"""Segments: written once, mapped once, readable by any Arrow tool."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dissociated as dis
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import FormatError, LocalProtocolError, SourceError, StoreError, StoreFull
from dissociated.memory.shared import Backing
from dissociated.store.segment import Segment, SegmentWriter, SharedSegmentWriter
from support.helpers import Serve

SCHEMA = pa.schema([("n", pa.int64()), ("d", pa.dictionary(pa.int8(), pa.string()))], metadata={"a": "b"})


def batch(*words: str) -> pa.RecordBatch:
    column = pa.array(words).dictionary_encode().cast(SCHEMA.field("d").type)
    return pa.record_batch([pa.array(range(len(words))), column], schema=SCHEMA)


def written(path: Path, *batches: pa.RecordBatch) -> Path:
    with SegmentWriter(path, SCHEMA) as writer:
        for one in batches:
            writer.write(one)
    return path


def test_a_segment_is_an_ipc_stream_that_any_tool_reads(tmp_path: Path) -> None:
    batches = [batch("x", "y"), batch(), batch("x", "z", "x")]
    path = written(tmp_path / "segment", *batches)
    with pa.ipc.open_stream(path) as reader:
        assert reader.schema.equals(SCHEMA, check_metadata=True)
        assert [one.to_pydict() for one in reader] == [one.to_pydict() for one in batches]


def test_a_writer_counts(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "segment", SCHEMA) as writer:
        assert writer.rows == 0
        writer.write(batch("x", "y"))
        writer.write(batch("z"))
    assert writer.rows == 3
    assert writer.nbytes == (tmp_path / "segment").stat().st_size


def test_a_segment_knows_what_is_in_it(tmp_path: Path) -> None:
    segment = Segment.open(written(tmp_path / "segment", batch("x", "y"), batch("x")))
    assert segment.schema.equals(SCHEMA, check_metadata=True)
    assert segment.rows == 3
    messages = list(pa.ipc.MessageReader.open_stream(str(tmp_path / "segment")))
    assert segment.nbytes == sum(message.body.size for message in messages if message.type != "schema")


def test_a_file_appears_when_it_is_whole_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    with SegmentWriter(path, SCHEMA) as writer:
        writer.write(batch("x"))
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FormatError), SegmentWriter(tmp_path / "segment", SCHEMA) as writer:
        writer.write(pa.record_batch({"other": [1]}))
    assert list(tmp_path.iterdir()) == []
    writer.close()
    assert list(tmp_path.iterdir()) == []


def write_through(writer: SharedSegmentWriter, content: bytes) -> int:
    """Write as another process does, by the name that the writer tells. Returns the position of the end."""
    with open(writer.path, "r+b") as file:
        file.seek(writer.nbytes)
        file.write(content)
        return file.tell()


def test_batches_that_another_process_writes_become_a_segment(tmp_path: Path) -> None:
    words = [pa.record_batch({"word": column}) for column in (["x", "y"], ["z"])]
    with SharedSegmentWriter(tmp_path / "segment", words[0].schema) as writer:
        end = write_through(writer, b"".join(bytes(one.serialize()) for one in words))
        assert list(tmp_path.iterdir()) == []
        writer.adopt(end)
    assert (writer.rows, writer.nbytes) == (3, (tmp_path / "segment").stat().st_size)
    with pa.ipc.open_stream(tmp_path / "segment") as reader:
        assert [*reader] == words
    statistics = Segment.open(tmp_path / "segment").statistics
    assert statistics is not None
    assert (statistics.bounds[0].min.to_pylist(), statistics.bounds[0].max.to_pylist()) == (["x", "z"], ["y", "z"])


def test_damaged_batches_of_another_process_leave_nothing(tmp_path: Path) -> None:
    message = bytes(pa.record_batch({"n": [1, 2]}).serialize())
    writer = SharedSegmentWriter(tmp_path / "segment", pa.schema({"n": pa.int64()}))
    with pytest.raises(FormatError), writer:
        writer.adopt(write_through(writer, message[:-8]))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LocalProtocolError):
        writer.adopt(len(message))


def test_batches_after_an_end_that_another_process_wrote_are_not_lost_in_silence(tmp_path: Path) -> None:
    message = bytes(pa.record_batch({"n": [1, 2]}).serialize())
    end_of_stream = b"\xff\xff\xff\xff\0\0\0\0"
    writer = SharedSegmentWriter(tmp_path / "segment", pa.schema({"n": pa.int64()}))
    with pytest.raises(FormatError), writer:
        writer.adopt(write_through(writer, message + end_of_stream + message))
    assert list(tmp_path.iterdir()) == []


def test_another_process_writes_as_far_as_there_is_room(tmp_path: Path) -> None:
    asked = []

    def reserve(_: str, size: int, wish: int) -> int:
        asked.append(size)
        if size > 1 << 20:
            raise StoreFull("there is no room")
        return wish

    (tmp_path / "staging").mkdir()
    with SharedSegmentWriter(tmp_path / "staging" / "segment", pa.schema({"n": pa.int64()}), reserve) as writer:
        assert writer.reserve(writer.nbytes) > writer.nbytes
        assert writer.reserve(1 << 20) >= 1 << 20
        with pytest.raises(StoreFull):
            writer.reserve(1 << 21)
        writer.adopt(write_through(writer, bytes(pa.record_batch({"n": [1, 2]}).serialize())))
    assert asked[-2:] == [1 << 20, 1 << 21]
    assert Segment.open(tmp_path / "staging" / "segment").rows == 2


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "segment").write_text("precious")
    with pytest.raises(StoreError, match=r"creating .*/segment: File exists"):
        SegmentWriter(tmp_path / "segment", SCHEMA)
    assert (tmp_path / "segment").read_text() == "precious"


def test_of_two_writers_of_one_name_one_wins(tmp_path: Path) -> None:
    first, second = (SegmentWriter(tmp_path / "segment", SCHEMA) for _ in range(2))
    first.write(batch("x"))
    first.close()
    with pytest.raises(StoreError, match="File exists"):
        second.close()
    assert Segment.open(tmp_path / "segment").rows == 1


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere/segment: No such file or directory"):
        SegmentWriter(tmp_path / "nowhere" / "segment", SCHEMA)
    with pytest.raises(StoreError, match=r"opening .*nowhere: No such file or directory"):
        Segment.open(tmp_path / "nowhere")


def test_a_segment_in_memory_is_sealed() -> None:
    segment = Segment.in_memory("test", pa.Table.from_batches([batch("x")]).to_reader())
    assert segment.rows == 1
    assert os.readlink(f"/proc/self/fd/{segment.descriptor}") == "/memfd:dissociated:test (deleted)"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(segment.descriptor, b"x")


def test_a_segment_closes_its_descriptor_when_nobody_uses_it(tmp_path: Path) -> None:
    segment = Segment.open(written(tmp_path / "segment", batch("x")))
    descriptor = segment.descriptor
    os.fstat(descriptor)
    del segment
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    "content",
    [b"", b"no", b"a,b\n1,2\n", bytes(1000), b"\xff" * 1000, b"PAR1", b"ARROW1\0\0", b"\xff\xff\xff\xff\0\0\0\0"],
)
def test_an_invalid_ipc_stream_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(StoreError, match=r"/file: "):
        Segment.open(tmp_path / "file")


def stream() -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_batch(batch("x", "y"))
        writer.write_batch(batch("z"))
    return sink.getvalue()


STREAM = stream()


@given(
    st.lists(
        st.tuples(st.integers(0, len(STREAM) - 1), st.one_of(st.just(0), st.just(255), st.integers(0, 255))), max_size=6
    )
)
def test_a_damaged_stream_is_published_or_refused(changes: list[tuple[int, int]]) -> None:
    content = bytearray(STREAM)
    for at, value in changes:
        content[at] = value
    descriptor = os.memfd_create("damaged")
    os.write(descriptor, content)
    try:
        SegmentsDataset("damaged", [Segment(descriptor, "damaged", Backing.FILE)])
    except (StoreError, SourceError):
        pass


# Several segments under one name


def test_segments_follow_each_other(serve: Serve, tmp_path: Path) -> None:
    """Each segment has dictionaries of its own; some have no batches, or only empty ones."""
    parts = [[batch("x", "y"), batch("y")], [], [batch()], [batch("z"), batch("x", "z")]]
    segments = [Segment.open(written(tmp_path / str(number), *some)) for number, some in enumerate(parts)]
    expected = [one.to_pydict() for some in parts for one in some]
    for options in ({}, {"inline_limit": 40}):
        server = serve("shm:", "tcp://127.0.0.1:0", "inproc:", **options)
        server.publish_segments("data", segments)
        assert server.dataset("data").rows == 6
        for bodies in ("any", "packed"):
            for uri in server.locations("data", bodies=bodies):
                for _ in range(2):
                    arrived = list(dis.open_stream(uri, server.ticket("data")))
                    assert [one.to_pydict() for one in arrived] == expected
        some = dis.open_stream(server.locations("data")[0], server.ticket("data"), columns=["d"]).read_all()
        assert some.to_pydict() == {"d": [word for one in expected for word in one["d"]]}


def test_more_segments_than_descriptors_in_one_read(serve: Serve, tmp_path: Path) -> None:
    server = serve("shm:")
    segments = [Segment.open(written(tmp_path / str(number), batch(str(number)))) for number in range(100)]
    server.publish_segments("data", segments)
    arrived = dis.open_stream(server.locations("data")[0], server.ticket("data")).read_all()
    assert arrived["d"].to_pylist() == [str(number) for number in range(100)]


def test_segments_have_one_schema(serve: Serve, tmp_path: Path) -> None:
    server = serve("shm:")
    other = Segment.in_memory("other", pa.table({"n": np.arange(3)}).to_reader())
    with pytest.raises(SourceError, match="must have one schema, and in the added ones there is no column"):
        server.publish_segments("data", [Segment.open(written(tmp_path / "segment", batch("x"))), other])
    assert server.names() == []

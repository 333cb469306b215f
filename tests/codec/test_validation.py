"""Validation of batches before libarrow sends them: it covers offsets and indices at any depth, but no values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.codec.validation import Validator
from dissociated.errors import SourceError
from support.arrow_cases import stream_of
from support.helpers import case

WORDS = pa.array(["abcdefg", "hijklmnopqr", "", "stu"])
OFFSETS = pa.array([0, 1, 2, 3, 4], pa.int32())
IDS = pa.array([0, 0, 0, 0], pa.int8())

#: Positions of strings in an array. The stream of each array contains the offsets and the bytes exactly once.
POSITIONS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "a column": lambda words: words,
    "a list": lambda words: pa.ListArray.from_arrays(OFFSETS, words),
    "a large list": lambda words: pa.LargeListArray.from_arrays(OFFSETS.cast(pa.int64()), words),
    "a list view": lambda words: pa.ListViewArray.from_arrays(OFFSETS[:4], pa.array([1] * 4, pa.int32()), words),
    "a list of a fixed size": lambda words: pa.FixedSizeListArray.from_arrays(words, 2),
    "a struct": lambda words: pa.StructArray.from_arrays([words], ["w"]),
    "the keys of a map": lambda words: pa.MapArray.from_arrays(OFFSETS, words, pa.array([1, 2, 3, 4])),
    "the items of a map": lambda words: pa.MapArray.from_arrays(OFFSETS, pa.array([1, 2, 3, 4]), words),
    "a dense union": lambda words: pa.UnionArray.from_dense(IDS, OFFSETS[:4], [words]),
    "a sparse union": lambda words: pa.UnionArray.from_sparse(IDS, [words]),
    "a dictionary": lambda words: pa.DictionaryArray.from_arrays(pa.array([3, 0, 1], pa.int32()), words),
    "runs": lambda words: pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 6, 7], pa.int32()), words),
    "an extension": lambda words: pa.ExtensionArray.from_storage(pa.json_(pa.string()), words),
    "a list of extensions": lambda words: POSITIONS["a list"](POSITIONS["an extension"](words)),
    "a dictionary of structs in a list": lambda words: POSITIONS["a list"](
        pa.DictionaryArray.from_arrays(pa.array([3, 0, 1, 2], pa.int32()), POSITIONS["a struct"](words))
    ),
}


def changed(array: pa.Array, before: bytes, after: bytes) -> bytes:
    """Return an IPC stream of `array` with other bytes in it, for which pyarrow cannot make an array."""
    content = stream_of(array)
    assert content.count(before) == 1
    assert len(after) == len(before)
    return content.replace(before, after)


def with_offsets(array: pa.Array, *offsets: int) -> bytes:
    good = np.array([0, 7, 18, 18, 21], np.int32)
    return changed(array, good.tobytes(), np.array(offsets, np.int32).tobytes())


def test_offsets_that_lead_elsewhere_are_refused_wherever_they_are() -> None:
    for position, at in POSITIONS.items():
        for offsets in ((0, 1 << 30, 18, 18, 21), (0, -9, 18, 18, 21), (0, 7, 18, 17, 21)):
            with case((position, offsets)):
                batch = pa.ipc.open_stream(with_offsets(at(WORDS), *offsets)).read_next_batch()
                with pytest.raises(SourceError, match="a record batch is not valid"):
                    Validator(batch.schema).check(batch, full=True)


def test_lists_and_indices_within_others_are_looked_at_too() -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 3, 4], pa.int32()), WORDS)
    at = np.array([0, 2, 3, 4], np.int32).tobytes()
    indices = pa.DictionaryArray.from_arrays(pa.array([3, 1, 0, 2], pa.int32()), WORDS)
    there = np.array([3, 1, 0, 2], np.int32).tobytes()
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 6, 7], pa.int32()), WORDS)
    ends = np.array([2, 3, 6, 7], np.int32).tobytes()
    for content in (
        changed(pa.StructArray.from_arrays([lists], ["l"]), at, np.array([0, 1 << 28, 3, 4], np.int32).tobytes()),
        changed(POSITIONS["a list"](indices), there, np.array([3, 1 << 28, 0, 2], np.int32).tobytes()),
        changed(runs, ends, np.array([2, 1 << 28, 6, 7], np.int32).tobytes()),
    ):
        batch = pa.ipc.open_stream(content).read_next_batch()
        with pytest.raises(SourceError, match="a record batch is not valid"):
            Validator(batch.schema).check(batch, full=True)


#: Values that are invalid for their type, at positions that cannot harm a reader.
UNSOUND = {
    **{position: changed(at(WORDS), b"hijklmnopqr", b"\xff" * 11) for position, at in POSITIONS.items()},
    "date64": stream_of(pa.array([1, 86_400_000, None, -7]).view(pa.date64())),
    "time32": stream_of(pa.array([-1, 1 << 30], pa.int32()).view(pa.time32("s"))),
    "time64": stream_of(pa.array([-1, 1 << 60]).view(pa.time64("us"))),
    "decimal32": stream_of(pa.array([b"\x7f" * 4, None], pa.binary(4)).view(pa.decimal32(5, 2))),
    "decimal128": stream_of(pa.array([b"\x7f" * 16, None], pa.binary(16)).view(pa.decimal128(5, 2))),
    "decimal256": stream_of(pa.array([b"\x7f" * 32, None], pa.binary(32)).view(pa.decimal256(5, 2))),
    "a long view": stream_of(pa.array([b"\xff" * 20, b"\xfe"], pa.binary_view()).view(pa.string_view())),
    "a large string": stream_of(pa.array([b"\xff", None], pa.large_binary()).view(pa.large_string())),
}


def test_invalid_values_arrive_unchanged(tmp_path: Path) -> None:
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        for name, content in UNSOUND.items():
            with case(name):
                path = tmp_path / f"{name}.arrows"
                path.write_bytes(content)
                sent = pa.ipc.open_stream(content).read_all()
                with pytest.raises(pa.ArrowInvalid):
                    sent.validate(full=True)
                server.publish(name, path)
                for transport in ("grpc", "tcp"):
                    assert client.read(name, transport=transport).read_all().equals(sent)
                server.publish(name, sent.slice(1))  # columns with children are validated before they are sliced
                for transport in ("grpc", "tcp"):
                    assert client.read(name, transport=transport).read_all().equals(sent.slice(1))


def test_a_batch_of_another_schema_is_validated_as_what_it_is() -> None:
    other = pa.ipc.open_stream(with_offsets(WORDS, 0, 1 << 30, 18, 18, 21)).read_next_batch()
    with pytest.raises(SourceError, match="a record batch is not valid"):
        Validator(pa.schema([("x", pa.date64())])).check(other, full=True)

"""Tensors: we read those of libarrow, libarrow reads ours, and anything else is rejected."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from dissociated.codec.options import WriteOptions
from dissociated.codec.tensor import split_tensor
from dissociated.errors import FormatError, OptionError, StoreError
from dissociated.ipc.tensors import read_tensor, write_tensor
from support.helpers import case
from support.tensor_cases import CUBE, FOLDER, GOLDEN, KINDS, MATRIX, TYPES, arrays, assert_same, dense, expected, some

LEGACY = WriteOptions(write_legacy_ipc_format=True)
V4 = WriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)


def written(tensor: Any, options: WriteOptions | None = None) -> bytes:
    sink = io.BytesIO()
    assert write_tensor(tensor, sink, options) == len(sink.getvalue())
    return sink.getvalue()


# Reading tensors of libarrow


def test_what_libarrow_writes_is_read() -> None:
    for name in GOLDEN:
        values, names = expected(name)
        tensor = read_tensor(GOLDEN[name])
        with case(name):
            assert type(tensor) is KINDS[name.partition("_")[0]]
            assert list(tensor.dim_names) == names
            assert tensor.shape == values.shape
            assert dense(tensor).dtype == values.dtype
            assert (dense(tensor) == values).all()


def test_the_order_of_levels_of_a_csf_tensor_is_kept() -> None:
    tensor = pa.SparseCSFTensor.from_numpy(
        np.array([[1.0], [2.0]]),
        [np.array([0, 1, 2]), np.array([0, 1, 2])],
        [np.array([0, 3]), np.array([1, 0]), np.array([0, 2])],
        (2, 3, 4),
        axis_order=[2, 0, 1],
    )
    values = np.zeros((2, 3, 4))
    values[1, 0, 0], values[0, 2, 3] = 1, 2
    assert (dense(tensor) == values).all()
    assert read_tensor(written(tensor)).equals(tensor)


@pytest.mark.parametrize("options", [None, LEGACY, V4], ids=["current", "legacy", "V4"])
def test_what_is_written_is_read(options: WriteOptions | None) -> None:
    for dtype in TYPES:
        for tensor in some(dtype):
            with case(dtype):
                assert_same(read_tensor(written(tensor, options)), tensor)


@pytest.mark.parametrize("options", [None, LEGACY, V4], ids=["current", "legacy", "V4"])
def test_libarrow_reads_dense_tensors(options: WriteOptions | None) -> None:
    for tensor in some():
        if isinstance(tensor, pa.Tensor):
            found = pa.ipc.read_tensor(pa.BufferReader(written(tensor, options)))
            assert_same(found, tensor)


def test_a_column_major_tensor_stays_so() -> None:
    tensor = pa.Tensor.from_numpy(np.asfortranarray(MATRIX))
    assert read_tensor(written(tensor)).strides == tensor.strides == (8, 32)


def test_not_a_number_is_kept_in_every_kind() -> None:
    values = np.array([[0, np.nan, 0], [1, 0, 2]])
    for kind in KINDS.values():
        tensor = kind.from_numpy(values) if kind is pa.Tensor else kind.from_dense_numpy(values)
        assert_same(read_tensor(written(tensor)), tensor)


# Alignment and copies


@pytest.mark.parametrize("options", [None, LEGACY], ids=["current", "legacy"])
def test_metadata_body_and_every_buffer_are_aligned_to_64(options: WriteOptions | None) -> None:
    sink = io.BytesIO()
    for tensor in some():
        sink.write(b"12345")
        at = sink.tell()
        size = write_tensor(tensor, sink, options)
        start = -(-at // 64) * 64
        content = sink.getvalue()
        assert len(content) == at + size
        assert not any(content[at:start])
        prefix = 4 if options else 8
        body_at = start + prefix + int.from_bytes(content[start + prefix - 4 : start + prefix], "little")
        assert body_at % 64 == 0
        aligned = pa.allocate_buffer(len(content))  # libarrow aligns this buffer to 64 bytes
        np.frombuffer(aligned, np.uint8)[:] = np.frombuffer(content, np.uint8)
        source = pa.BufferReader(aligned)
        source.seek(at)
        for array in arrays(read_tensor(source)):
            assert array.size == 0 or (array.ctypes.data - aligned.address) % 64 == 0
        assert source.tell() == len(content)


def test_arrays_lie_in_the_bytes_that_were_read() -> None:
    for tensor in some():
        content = pa.py_buffer(written(tensor))
        before = pa.total_allocated_bytes()
        found = read_tensor(content)
        assert pa.total_allocated_bytes() == before
        for array in arrays(found):
            first = array.ctypes.data - content.address
            assert array.size == 0 or 0 <= first <= content.size - array.nbytes


def test_arrays_lie_in_the_file_that_a_path_names(tmp_path: Path) -> None:
    path = tmp_path / "tensor"
    tensor = pa.SparseCSRMatrix.from_dense_numpy(MATRIX)
    assert write_tensor(tensor, path) == path.stat().st_size
    found = read_tensor(path)
    assert_same(found, tensor)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ((first, _, last),) = [line[0].partition("-") for line in mapped]
    for array in arrays(found):
        assert int(first, 16) <= array.ctypes.data < int(last, 16)


def body_parts(tensor: Any) -> list[Any]:
    parts = split_tensor(tensor).body
    assert parts is not None
    return parts


def test_a_body_is_borrowed_from_the_tensor() -> None:
    values = np.arange(1000.0)
    before = pa.total_allocated_bytes()
    (body,) = body_parts(pa.Tensor.from_numpy(values))
    assert body.address == values.ctypes.data
    coo = pa.SparseCOOTensor.from_dense_numpy(CUBE)
    lying = {array.ctypes.data for array in arrays(coo)}
    assert lying <= {part.address for part in body_parts(coo) if isinstance(part, pa.Buffer)}
    del coo
    assert pa.total_allocated_bytes() == before


def test_unaligned_values_are_copied_to_where_they_can_be_used() -> None:
    for tensor in some():
        content = memoryview(b"\0" + written(tensor))[1:]
        for array in arrays(read_tensor(content)):
            assert array.flags.aligned


# Sources and sinks


def test_tensors_follow_each_other_in_any_source(tmp_path: Path) -> None:
    path = tmp_path / "tensors"
    with path.open("wb") as file:
        for tensor in some():
            write_tensor(tensor, file)
    with path.open("rb") as file, pa.memory_map(str(path)) as mapped, pa.OSFile(str(path)) as read:
        for source in (file, mapped, read, pa.BufferReader(path.read_bytes())):
            for tensor in some():
                assert_same(read_tensor(source), tensor)
            with pytest.raises(FormatError, match="cut off"):
                read_tensor(source)


def test_a_tensor_of_libarrow_is_found_wherever_it_begins() -> None:
    """libarrow does not align the position at which it writes."""
    sink = pa.BufferOutputStream()
    tensors = [pa.Tensor.from_numpy(np.arange(size, dtype=np.int8)) for size in (5, 0, 64, 7)]
    for tensor in tensors:
        pa.ipc.write_tensor(tensor, sink)
    source = pa.BufferReader(sink.getvalue())
    for tensor in tensors:
        assert_same(read_tensor(source), tensor)


def test_a_pipe_knows_no_position() -> None:
    tensor = pa.Tensor.from_numpy(MATRIX)
    reading, writing = os.pipe()
    with open(reading, "rb") as source:
        with open(writing, "wb", buffering=0) as sink:
            assert write_tensor(tensor, sink) == len(written(tensor))
        assert_same(read_tensor(source), tensor)


@pytest.mark.parametrize("source", [b"", pa.py_buffer(b"\xff\xff\xff\xff\0\0\0\0"), io.BytesIO(bytes(64))], ids=type)
def test_nothing_is_no_tensor(source: Any) -> None:
    with pytest.raises(FormatError):
        read_tensor(source)


def test_a_table_is_no_tensor() -> None:
    sink = pa.BufferOutputStream()
    pa.ipc.new_stream(sink, pa.schema([("n", pa.int8())])).close()
    with pytest.raises(FormatError, match="the message is a SCHEMA"):
        read_tensor(sink.getvalue())
    with pytest.raises(FormatError, match="a Table is not a tensor"):
        write_tensor(pa.table({}), io.BytesIO())


def test_what_libarrow_could_not_expand_is_not_written() -> None:
    far = np.array([[2**40, 2**40]])
    tensor = pa.SparseCOOTensor.from_numpy(np.array([[1.0]]), far, (2**50, 2**50))
    with pytest.raises(FormatError, match="impossible shape"):
        write_tensor(tensor, io.BytesIO())


@pytest.mark.parametrize(
    "tensor",
    [
        pa.SparseCOOTensor.from_numpy(np.array([[1.0]]), np.array([[0, 3]]), (2, 3)),
        pa.SparseCSRMatrix.from_dense_numpy(np.array([[-0.0]])),  # the row has one value, and the matrix has none
    ],
    ids=["coo", "csr"],
)
def test_a_tensor_whose_index_leaves_it_is_not_written(tensor: Any) -> None:
    with pytest.raises(FormatError, match="cannot be written as Arrow IPC: the sparse tensor"):
        write_tensor(tensor, io.BytesIO())


# Round trips of random tensors

shapes = nps.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
dtypes = st.sampled_from(TYPES).map(np.dtype)


@given(st.data())
def test_any_dense_tensor(data: st.DataObject) -> None:
    array = data.draw(nps.arrays(data.draw(dtypes), data.draw(shapes)))
    order = data.draw(st.permutations(range(array.ndim)))
    steps = data.draw(st.tuples(*[st.integers(1, 3)] * array.ndim))
    array = array.transpose(order)[tuple(slice(None, None, step) for step in steps)]
    names = data.draw(st.none() | st.lists(st.text(max_size=5), min_size=array.ndim, max_size=array.ndim))
    tensor = pa.Tensor.from_numpy(np.asarray(array), names)
    found = read_tensor(written(tensor))
    assert_same(found, tensor)
    assert_same(found, pa.ipc.read_tensor(pa.BufferReader(written(tensor))))


@given(st.data())
def test_any_sparse_tensor(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["coo", "csr", "csc", "csf"]))
    least, most = {"coo": (1, 5), "csf": (2, 5)}.get(kind, (2, 2))
    shape = data.draw(nps.array_shapes(min_dims=least, max_dims=most, min_side=1, max_side=5))
    array = data.draw(nps.arrays(data.draw(dtypes), shape, fill=st.just(0)))
    array[array == 0] = 0  # libarrow counts -0 as a value when it makes CSR, and then leaves it out
    tensor = KINDS[kind].from_dense_numpy(array)
    assert_same(read_tensor(written(tensor)), tensor)


# Damage


def survives(content: bytes) -> None:
    """Check the one promise for bytes of any kind: they raise FormatError, or can be used without harm."""
    try:
        tensor = read_tensor(content)
    except FormatError:
        return
    for array in arrays(tensor):
        array.max(initial=array.dtype.type(0))
    if np.prod([float(size) for size in tensor.shape]) < 1 << 20:
        dense(tensor).tobytes()


def test_what_is_cut_off_is_refused() -> None:
    for name, content in GOLDEN.items():
        for end in range(len(content)):
            with case((name, end)), pytest.raises(FormatError):
                read_tensor(content[:end])


EXTREMES = (b"\0", b"\x01", b"\x7f", b"\x80", b"\xff", b"\xff\xff\xff\x7f", b"\xff" * 8, b"\0" * 7 + b"\x40")


def test_what_is_damaged_anywhere_is_refused_or_harmless() -> None:
    """Damage aligned positions that can hold a number of that size: every eighth, beginning at a random one.

    DISSOCIATED_EVERY_CALL in the environment selects all.
    """
    step = 1 if os.environ.get("DISSOCIATED_EVERY_CALL") else 8
    for (name, content), extreme in product(GOLDEN.items(), EXTREMES):
        first = random.randrange(step)
        for at in range(first * len(extreme), len(content) - len(extreme) + 1, step * len(extreme)):
            with case((name, extreme, at)):
                survives(content[:at] + extreme + content[at + len(extreme) :])


@given(st.sampled_from(sorted(GOLDEN)), st.data())
def test_several_changes_at_once(name: str, data: st.DataObject) -> None:
    content = bytearray(GOLDEN[name])
    changes = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for at, value in data.draw(st.lists(changes, min_size=1, max_size=8)):
        content[at] = value
    survives(bytes(content))


@given(st.binary(max_size=200))
def test_anything(content: bytes) -> None:
    survives(content)
    survives(b"\xff\xff\xff\xff" + len(content).to_bytes(4, "little") + content)


def index_of(name: str) -> int:
    """Return the position of the body of a golden message, which begins with the index."""
    return 8 + int.from_bytes(GOLDEN[name][4:8], "little")


@pytest.mark.parametrize(
    ("name", "at", "value"),
    [
        ("coo_int64", 0, 2),  # the first coordinate along the first dimension, of 2
        ("coo_int64", 16, -1),
        ("csr_int64", 0, 1),  # the start of the first row
        ("csr_int64", 8, 6),  # the start of the second row: after the end
        ("csr_int64", 8, -1),
        ("csr_int64", 32, 4),  # the end of the last row: before the last value
        ("csr_int64", 40, 6),  # the first column, of 6
        ("csc_int64", 56, 4),  # the first row, of 4
        ("csf_int64", 8, 5),  # the start of the second fiber: after its end
        ("csf_int64", 64, 2),  # the first index of the first level
        ("csf_int64", 112, 4),  # the first index of the last level
    ],
)
def test_an_index_that_leaves_the_tensor_is_refused(name: str, at: int, value: int) -> None:
    """libarrow would write out of bounds."""
    content = bytearray(GOLDEN[name])
    at += index_of(name)
    content[at : at + 8] = value.to_bytes(8, "little", signed=True)
    with pytest.raises(FormatError, match=r"index outside|not in order"):
        read_tensor(bytes(content))


# libarrow's own reader of sparse tensors, which Python cannot reach


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile tensors/read.cc with")
    (library, *_) = pa.get_library_dirs()
    found = sorted(Path(library).glob("libarrow.so.*"))
    if not found:
        pytest.skip("this pyarrow brings no libarrow.so to link tensors/read.cc with")
    program = tmp_path_factory.mktemp("reader") / "read"
    options = ["-std=c++20", "-w", f"-I{pa.get_include()}", f"-Wl,-rpath,{library}", "-o", str(program)]
    subprocess.run([compiler, FOLDER / "read.cc", found[0], *options], check=True, timeout=100)
    return program


def test_libarrow_reads_every_tensor(reader: Path, tmp_path: Path) -> None:
    tensors = list(some())
    command: list[Path | str] = [reader]
    for number, tensor in enumerate(tensors):
        write_tensor(tensor, tmp_path / f"{number} source")
        kind = "dense" if isinstance(tensor, pa.Tensor) else "sparse"
        command += [tmp_path / f"{number} source", tmp_path / f"{number} target", kind]
    subprocess.run(command, check=True, timeout=60)
    for number, tensor in enumerate(tensors):
        target = (tmp_path / f"{number} target").read_bytes()
        found = pa.ipc.read_tensor(pa.BufferReader(target)).to_numpy()
        assert found.dtype == dense(tensor).dtype
        assert (found == dense(tensor)).all()


@pytest.mark.parametrize("path", ["missing", "."])
def test_a_path_that_cannot_be_read_or_written_is_a_store_error(tmp_path: Path, path: str) -> None:
    with pytest.raises(StoreError, match=r"opening|is a directory"):
        read_tensor(tmp_path / path)
    with pytest.raises(StoreError, match="creating"):
        write_tensor(pa.Tensor.from_numpy(CUBE), tmp_path if path == "." else tmp_path / path / "tensor")


def test_a_closed_file_object_is_a_store_error() -> None:
    file = io.BytesIO(written(pa.Tensor.from_numpy(CUBE)))
    file.close()
    with pytest.raises(StoreError, match="reading"):
        read_tensor(file)
    with pytest.raises(StoreError, match="writing"):
        write_tensor(pa.Tensor.from_numpy(CUBE), file)


def test_a_tensor_is_not_compressed_in_silence() -> None:
    with pytest.raises(OptionError, match="tensors cannot be compressed"):
        write_tensor(pa.Tensor.from_numpy(CUBE), io.BytesIO(), WriteOptions(codec="zstd"))

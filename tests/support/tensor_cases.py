"""Tensors of every kind, and the messages that libarrow's C++ library writes for some (tensors/golden.cc)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

FOLDER = Path(__file__).parent / "tensors"
GOLDEN = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.bin"))}

KINDS = {
    "dense": pa.Tensor,
    "coo": pa.SparseCOOTensor,
    "csr": pa.SparseCSRMatrix,
    "csc": pa.SparseCSCMatrix,
    "csf": pa.SparseCSFTensor,
}
TYPES = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")

_flat = np.zeros(24, np.int64)
_flat[[1, 5, 13, 14, 23]] = 1, 2, 3, 4, 5
CUBE = _flat.reshape(2, 3, 4)
MATRIX = _flat.reshape(4, 6)
BYTES = np.array([[0, 9, 0], [0, 0, 8], [7, 0, 0]], np.int8)


def expected(name: str) -> tuple[np.ndarray, list[str]]:
    """Return the dense content of the golden message `name`, and the names of its dimensions."""
    if name in _DENSE:
        return _DENSE[name]
    kind, _, rest = name.partition("_")
    if rest == "bytes":
        return BYTES, []
    if rest == "none":
        return np.zeros((2, 3)), []
    return (CUBE, ["a", "b", "c"]) if kind in ("coo", "csf") else (MATRIX, ["row", "column"])


_DENSE: dict[str, tuple[np.ndarray, list[str]]] = {
    "dense": (MATRIX, ["row", "column"]),
    "dense_column_major": (np.array([_flat[start::4] for start in range(4)]), []),
    "dense_strided": (np.array([[0, 0, 0], [0, 4, 0]]), []),  # libarrow drops the names
    "dense_0d": (np.array(7), []),
    "dense_empty": (np.zeros((0, 3)), []),
    "dense_half": (np.array([1, -2, 65504], np.float16), []),
}


def dense(tensor: Any) -> np.ndarray:
    """Return the values of a tensor of any kind as a dense array."""
    return (tensor if isinstance(tensor, pa.Tensor) else tensor.to_tensor()).to_numpy()


def arrays(tensor: Any) -> list[np.ndarray]:
    """Return every array of a tensor: those of its index, and then its values."""
    if isinstance(tensor, pa.Tensor):
        return [tensor.to_numpy()]
    values, *index = tensor.to_numpy()
    return [one for part in index for one in (part if isinstance(part, list) else [part])] + [values]


def some(dtype: str = "f8") -> list[Any]:
    """Return a tensor of each kind, among them empty tensors and tensors with unusual strides."""
    cube = CUBE.astype(dtype)
    matrix = cube.reshape(4, 6)
    return [
        pa.Tensor.from_numpy(cube, ["x", "", "größe"]),
        pa.Tensor.from_numpy(np.asfortranarray(matrix)),
        pa.Tensor.from_numpy(cube[:, ::2, 1:]),
        pa.Tensor.from_numpy(np.broadcast_to(cube[1, 0], (3, 4))),
        pa.Tensor.from_numpy(np.array(5, dtype)),
        pa.Tensor.from_numpy(np.zeros((0, 3), dtype)),
        pa.SparseCOOTensor.from_dense_numpy(cube, ["x", "y", "z"]),
        pa.SparseCOOTensor.from_dense_numpy(np.zeros((2, 3), dtype)),
        pa.SparseCSRMatrix.from_dense_numpy(matrix),
        pa.SparseCSCMatrix.from_dense_numpy(matrix, ["row", "column"]),
        pa.SparseCSRMatrix.from_dense_numpy(np.zeros((0, 2), dtype)),
        pa.SparseCSFTensor.from_dense_numpy(cube),
        pa.SparseCSFTensor.from_dense_numpy(matrix.T.copy(), ["row", "column"]),
    ]


def assert_same(one: Any, other: Any) -> None:
    """Fail unless two tensors have the same kind, type and layout, and bit-identical values."""
    assert type(one) is type(other)
    assert (one.type, one.shape) == (other.type, other.shape)
    assert [name for name in one.dim_names if name] == [name for name in other.dim_names if name]
    assert np.ascontiguousarray(dense(one)).tobytes() == np.ascontiguousarray(dense(other)).tobytes()
    for mine, its in zip(arrays(one), arrays(other), strict=True):
        assert mine.dtype == its.dtype
        assert np.ascontiguousarray(mine).tobytes() == np.ascontiguousarray(its).tobytes()

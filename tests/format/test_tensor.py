"""Flatbuffers of tensors as libarrow's C++ library writes them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import FormatError
from dissociated.format.message import buffer_extents, parse_header
from dissociated.format.tensor import TensorFormat, TensorHeader, encode_tensor, parse_tensor
from protocol.wire import BY_HAND, golden_tensor
from support.helpers import case
from support.tensor_cases import GOLDEN

HEADERS = {name: golden_tensor(name).header for name in GOLDEN}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dense", TensorHeader(TensorFormat.DENSE, "<i8", (4, 6), ("row", "column"), (0,), (192,), (48, 8))),
        ("dense_column_major", TensorHeader(TensorFormat.DENSE, "<i8", (4, 6), ("", ""), (0,), (192,), (8, 32))),
        ("dense_half", TensorHeader(TensorFormat.DENSE, "<f2", (3,), ("",), (0,), (6,), (2,))),
        (
            "coo_uint8",
            TensorHeader(
                TensorFormat.COO, "<i8", (2, 3, 4), ("a", "b", "c"), (0, 16), (16, 40), (3, 1), 5,
                indices_type="<u1", canonical=True,
            ),
        ),
        (
            "csc_int32",
            TensorHeader(
                TensorFormat.CSC, "<i8", (4, 6), ("row", "column"), (0, 32, 56), (32, 24, 40), (), 5, "<i4", "<i4"
            ),
        ),
        (
            "csf_bytes",
            TensorHeader(
                TensorFormat.CSF, "<i1", (3, 3), ("", ""), (0, 32, 56, 80), (32, 24, 24, 8), (), 3, axis_order=(0, 1)
            ),
        ),
    ],
)  # fmt: skip
def test_what_libarrow_wrote(name: str, expected: TensorHeader) -> None:
    assert parse_tensor(HEADERS[name]) == expected


@pytest.mark.parametrize("version", [3, 4])
def test_what_is_encoded_is_parsed(version: int) -> None:
    for name, header in HEADERS.items():
        found = parse_tensor(header)
        encoded = encode_tensor(found, 1000, version)
        with case(name):
            assert parse_tensor(encoded) == found
            parsed = parse_header(encoded)
            assert parsed.body_length == 1000
            assert buffer_extents(encoded, parsed) == (found.offsets, found.lengths)


def test_csf_may_give_lengths_in_bytes() -> None:
    """Accept lengths in bytes, which the specification requires of every `Buffer`. libarrow writes elements."""
    header = bytearray(HEADERS["csf_int32"])
    for offset, elements in ((0, 3), (16, 5), (40, 2), (48, 4), (64, 5)):
        pair = offset.to_bytes(8, "little") + elements.to_bytes(8, "little")
        assert header.count(pair) == 1
        at = header.index(pair) + 8
        header[at : at + 8] = (4 * elements).to_bytes(8, "little")
    assert parse_tensor(bytes(header)) == parse_tensor(HEADERS["csf_int32"])


def test_a_record_batch_is_no_tensor() -> None:
    with pytest.raises(FormatError, match="has no tensor"):
        parse_tensor(BY_HAND)


def survives(header: bytes) -> None:
    """Check the only guarantee for arbitrary bytes: they are refused with FormatError, or the result is consistent."""
    try:
        found = parse_tensor(header)
    except FormatError:
        return
    assert len(found.offsets) == len(found.lengths) > 0
    assert min(found.offsets) >= 0
    assert min(found.lengths) >= 0
    assert min(found.shape, default=0) >= 0


EXTREMES = (b"\0", b"\xff", b"\x80", b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 8, b"\xff" * 7 + b"\x7f")


def test_every_extreme_at_every_position() -> None:
    for (name, header), extreme in product(HEADERS.items(), EXTREMES):
        for at in range(len(header) - len(extreme) + 1):
            with case((name, extreme, at)):
                survives(header[:at] + extreme + header[at + len(extreme) :])


@given(st.sampled_from(sorted(HEADERS)), st.data())
def test_several_mutations_at_once(name: str, data: st.DataObject) -> None:
    header = bytearray(HEADERS[name])
    positions = st.integers(0, len(header) - 1)
    for at, value in data.draw(st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1)):
        header[at] = value
    survives(bytes(header[: data.draw(st.integers(0, len(header)))]))

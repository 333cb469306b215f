"""Tensors over every way from a source to a reader."""

from __future__ import annotations

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import StoreError, WrongKind
from support.helpers import case
from support.tensor_cases import TYPES, assert_same, some

from .conftest import Route


def test_tensors_of_every_kind_and_type(quick: Route) -> None:
    for dtype in TYPES:
        sent = some(dtype)
        quick.publish(sent)
        arrived = list(quick.tensors())
        with case(dtype):
            assert len(arrived) == len(sent)
            for one, other in zip(arrived, sent, strict=True):
                assert_same(one, other)


def test_one_tensor(route: Route) -> None:
    for tensor in (some()[0], some()[-1]) if route.is_quick else some()[-1:]:
        route.publish(tensor)
        (arrived,) = route.tensors()
        assert_same(arrived, tensor)


def test_hundreds_of_small_tensors(quick: Route) -> None:
    """Send enough tensors of one size that a transport puts them into runs."""
    sent = [pa.Tensor.from_numpy(values) for values in some()[0].to_numpy().reshape(24, 1).repeat(25, 0)]
    assert len(sent) == 600
    quick.publish(sent)
    arrived = list(quick.tensors())
    assert [one.to_numpy()[0] for one in arrived] == [one.to_numpy()[0] for one in sent]


def test_a_reader_that_stops_or_never_starts(quick: Route) -> None:
    quick.publish(some() * 20)
    reader = quick.tensors()
    kept = next(reader)
    reader.close()
    with pytest.raises(StoreError, match="closed before its end"):
        next(reader)
    assert_same(kept, some()[0])
    quick.tensors()


def test_what_is_of_the_other_kind_is_refused_with_what_to_do(either: Route) -> None:
    either.publish(some(), "tensors")
    either.publish(pa.table({"n": [1, 2, 3]}), "table")
    with pytest.raises(WrongKind, match="read it with open_tensors"):
        either.open("tensors")
    with pytest.raises(WrongKind, match="read it with open_stream"):
        either.tensors("table")


def test_a_tensor_larger_than_is_taken(direct: Route) -> None:
    direct.publish(some())
    with pytest.raises(dis.errors.RemoteProtocolError, match="at most 100 are accepted"):
        direct.tensors(max_body=100)

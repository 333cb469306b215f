"""Tensors, over every way there is."""

from __future__ import annotations

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import WrongKind
from tensor_cases import TYPES, assert_same, some

from .conftest import Route


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_of_every_kind_and_type(quick: Route, dtype: str) -> None:
    sent = some(dtype)
    quick.publish(sent)
    arrived = list(quick.tensors())
    assert len(arrived) == len(sent)
    for one, other in zip(arrived, sent, strict=True):
        assert_same(one, other)


def test_one_tensor(route: Route) -> None:
    for number, tensor in enumerate(some()):
        route.publish(tensor, str(number))
        (arrived,) = route.tensors(str(number))
        assert_same(arrived, tensor)


def test_hundreds_of_small_tensors(direct: Route) -> None:
    """Enough of one size for a transport to put them into runs."""
    sent = [pa.Tensor.from_numpy(values) for values in some()[0].to_numpy().reshape(24, 1).repeat(50, 0)]
    assert len(sent) == 1200
    direct.publish(sent)
    arrived = list(direct.tensors())
    assert [one.to_numpy()[0] for one in arrived] == [one.to_numpy()[0] for one in sent]


def test_a_reader_that_stops_or_never_starts(direct: Route) -> None:
    direct.publish(some() * 50)
    reader = direct.tensors()
    kept = next(reader)
    reader.close()
    assert list(reader) == []
    assert_same(kept, some()[0])
    direct.tensors()


def test_what_is_of_the_other_kind_is_refused_with_what_to_do(direct: Route) -> None:
    direct.publish(some(), "tensors")
    direct.publish(pa.table({"n": [1, 2, 3]}), "table")
    with pytest.raises(WrongKind, match="read it with open_tensors"):
        direct.open("tensors")
    with pytest.raises(WrongKind, match="read it with open_stream"):
        direct.tensors("table")


def test_a_tensor_larger_than_is_taken(direct: Route) -> None:
    direct.publish(some())
    with pytest.raises(dis.errors.RemoteProtocolError, match="at most 100 are taken"):
        direct.tensors(max_body=100)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dissociated.errors import RemoteProtocolError, UriError
from dissociated.memory.remote import RemoteAddressSpace, Span, fetch_ranges, parse_spans, with_spans
from dissociated.uri import Uri

PLACE = Uri.parse("ucx://host:1?want_data=7")


def test_what_a_uri_says_of_two_spans() -> None:
    uri = with_spans(PLACE, [Span(0x1000, 16, b"ab"), Span(0x2000, 32, b"c")])
    assert str(uri) == "ucx://host:1?want_data=7&remote_handle=YWJj&remote_memory=1000-10-2%2C2000-20-1"
    assert parse_spans(Uri.parse(str(uri))) == [(0x1000, 16, b"ab"), (0x2000, 32, b"c")]


def test_a_handle_of_somebody_else_opens_every_address() -> None:
    (span,) = parse_spans(Uri.parse("ucx://host:1?want_data=7&remote_handle=YWJj"))
    assert span == (0, 1 << 64, b"abc")


def test_no_handle_no_spans() -> None:
    assert parse_spans(PLACE) == []


@given(
    st.lists(st.tuples(st.integers(0, 2**48), st.integers(1, 2**40), st.binary(min_size=1, max_size=40)), min_size=1)
)
def test_spans_survive_their_uri(listed: list[tuple[int, int, bytes]]) -> None:
    spans = [Span(*one) for one in listed]
    assert parse_spans(Uri.parse(str(with_spans(PLACE, spans)))) == spans


@pytest.mark.parametrize(
    "text", ["", "1-2", "1-2-3-4", "1-2-2", "1-2-4", "1-0-3", "x-2-3", "-1-2-3", "ffffffffffffffff-2-3", "1-2-3,1-2-1"]
)
def test_extents_that_disagree_with_the_handle(text: str) -> None:
    uri = Uri.parse(f"ucx://host:1?want_data=7&remote_handle=YWJj&remote_memory={text}")
    with pytest.raises(UriError, match="does not match the remote_handle"):
        parse_spans(uri)


@given(st.text())
def test_any_extents_are_read_or_refused(text: str) -> None:
    uri = with_spans(PLACE, [Span(1, 1, b"abc")]).with_parameters(remote_memory=text)
    try:
        assert sum(len(span.key) for span in parse_spans(uri)) == 3
    except UriError:
        pass


@pytest.mark.parametrize(("address", "length"), [(0xFFF, 1), (0x1000, 17), (0x100F, 2), (0x1010, 1), (2**64 - 1, 8)])
def test_what_lies_outside_is_refused(address: int, length: int) -> None:
    space = RemoteAddressSpace([Span(0x2000, 32, b"b"), Span(0x1000, 16, b"a")])
    assert space.find(0x1000, 16).key == b"a"
    assert space.find(0x201F, 1).key == b"b"
    with pytest.raises(RemoteProtocolError, match="is in no memory that its URI names"):
        space.find(address, length)


def test_neighbours_are_fetched_together() -> None:
    # A batch of a segment: padded to 64 bytes, one absent buffer.
    assert fetch_ranges([4096, 0, 4160, 4224], [10, 0, 60, 8], [0, 64, 64, 128]) == [(4096, 136, 0)]
    # Ranges that are far apart, or whose distances differ in source and target.
    assert fetch_ranges([4096, 8192], [8, 8], [0, 8]) == [(4096, 8, 0), (8192, 8, 8)]
    assert fetch_ranges([4096, 4104], [8, 8], [0, 64]) == [(4096, 8, 0), (4104, 8, 64)]

"""Memory of another process that this one can fetch from, one-sided, and how a URI names it.

`remote_handle` holds the key of a span, as the specification has it: "Using UCX, this would be an rkey value". Of
several spans it holds the keys one after the other. Our own parameter `remote_memory` says where the spans lie:

    remote_memory=BASE-SIZE-KEY,...     hexadecimal: the first address, bytes, and how many bytes of the handle

A handle without it, from another implementation, is one key for whatever addresses the server sends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dissociated.errors import RemoteProtocolError, UriError
from dissociated.uri import Uri

_SPANS_PARAMETER = "remote_memory"
_ADDRESS_LIMIT = 1 << 64  # that addresses lie below
_MAX_PADDING = 64  # bytes of padding that libarrow puts between buffers


class Span(NamedTuple):
    """The addresses `base` to `base + size`, and the key that opens them."""

    base: int
    size: int
    key: bytes


def with_spans(uri: Uri, spans: Sequence[Span]) -> Uri:
    """The same location with these spans."""
    extents = ",".join(f"{span.base:x}-{span.size:x}-{len(span.key):x}" for span in spans)
    return replace(
        uri.with_parameters(**{_SPANS_PARAMETER: extents}), remote_handle=b"".join(span.key for span in spans)
    )


def parse_spans(uri: Uri) -> list[Span]:
    """The spans that a location names. Raises UriError where its two parts disagree."""
    handle = uri.remote_handle
    if handle is None:
        return []
    text = uri.parameters.get(_SPANS_PARAMETER)
    if text is None:
        return [Span(0, _ADDRESS_LIMIT, handle)]
    spans, at = [], 0
    try:
        for extent in text.split(","):
            base, size, length = (int(number, 16) for number in extent.split("-"))
            if not (0 <= base < base + size <= _ADDRESS_LIMIT and 0 < length <= len(handle) - at):
                raise ValueError(extent)
            spans.append(Span(base, size, handle[at : at + length]))
            at += length
    except ValueError:
        raise UriError(
            f"{_SPANS_PARAMETER}={text} does not agree with the remote_handle of {len(handle)} bytes"
        ) from None
    if at != len(handle):
        raise UriError(f"{_SPANS_PARAMETER}={text} does not agree with the remote_handle of {len(handle)} bytes")
    return spans


class RemoteAddressSpace:
    """The spans of one server, by address."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans)
        self._bases = [span.base for span in self._spans]

    def find(self, address: int, length: int) -> Span:
        """The span that these bytes lie in. Raises RemoteProtocolError if there is none."""
        at = bisect_right(self._bases, address) - 1
        if at >= 0:
            span = self._spans[at]
            if address + length <= span.base + span.size:
                return span
        raise RemoteProtocolError(
            f"the peer sent the address {address:#x} with {length} bytes, which lies in no memory that its URI names"
        )


def fetch_ranges(addresses: Sequence[int], lengths: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int, int]]:
    """The ranges to fetch, each as address, length and position in the body. Buffers of length 0 have none.

    Buffers that follow one another at the same distance in memory and in the body are fetched together.
    """
    together: list[tuple[int, int, int]] = []
    for address, length, at in zip(addresses, lengths, wanted, strict=True):
        if not length:
            continue
        if together:
            first, size, start = together[-1]
            if 0 <= address - (first + size) < _MAX_PADDING and address - first == at - start:
                together[-1] = first, address + length - first, start
                continue
        together.append((address, length, at))
    return together

"""Memory of another process that this process can fetch from, one-sided, and its description in a URI.

`remote_handle` holds the key of a span, as in the specification: "Using UCX, this would be an rkey value". For several
spans it holds their keys, one after the other. Our own parameter `remote_memory` describes the spans:

    remote_memory=BASE-SIZE-KEY,...     hexadecimal: first address, size in bytes, length of the key in bytes

Other implementations send a handle without it. That is one key for all addresses that the server sends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from dissociated.errors import RemoteProtocolError, UriError
from dissociated.uri import Uri

_SPANS_PARAMETER = "remote_memory"
_ADDRESS_LIMIT = 1 << 64  # exclusive upper bound of addresses
_MAX_PADDING = 64  # upper bound of the bytes of padding that libarrow puts between buffers


class Span(NamedTuple):
    """The addresses `base` to `base + size`, and the key that gives access to them."""

    base: int
    size: int
    key: bytes


def with_spans(uri: Uri, spans: Sequence[Span]) -> Uri:
    """Return `uri` with `spans` added to its parameters."""
    extents = ",".join(f"{span.base:x}-{span.size:x}-{len(span.key):x}" for span in spans)
    return replace(
        uri.with_parameters(**{_SPANS_PARAMETER: extents}), remote_handle=b"".join(span.key for span in spans)
    )


def parse_spans(uri: Uri) -> list[Span]:
    """Return the spans in a URI.

    Raises:
        UriError: `remote_memory` is invalid, or does not fit `remote_handle`.
    """
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
        if at != len(handle):
            raise ValueError(handle)
    except ValueError:
        raise UriError(
            f"the parameter {_SPANS_PARAMETER}={text!r} does not match the remote_handle of {len(handle)} bytes"
        ) from None
    return spans


class RemoteAddressSpace:
    """The spans of one server, by address."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted(spans)
        self._bases = [span.base for span in self._spans]

    def find(self, address: int, length: int) -> Span:
        """Return the span that contains these bytes.

        Raises:
            RemoteProtocolError: No span contains them.
        """
        at = bisect_right(self._bases, address) - 1
        if at >= 0:
            span = self._spans[at]
            if address + length <= span.base + span.size:
                return span
        raise RemoteProtocolError(
            f"the peer sent the address {address:#x} with {length} bytes, which is in no memory that its URI names"
        )


def fetch_ranges(
    addresses: Sequence[int], lengths: Sequence[int], positions: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return the ranges to fetch, each as address, length and position in the body. Empty buffers need none.

    Buffers that are as far apart in memory as in the body, by little padding, are fetched together.
    """
    together: list[tuple[int, int, int]] = []
    for address, length, at in zip(addresses, lengths, positions, strict=True):
        if not length:
            continue
        if together:
            first, size, start = together[-1]
            if 0 <= address - (first + size) < _MAX_PADDING and address - first == at - start:
                together[-1] = first, address + length - first, start
                continue
        together.append((address, length, at))
    return together

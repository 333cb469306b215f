"""Bodies of kind 1 and what comes back for them: lists of little-endian uint64.

An address list ("Data Stream Sequence"): total size of all buffers, number of buffers, then for each buffer of
the message, in order, its address and its length. An absent or empty buffer is (0, 0) as we send it. A peer may send
an address with the length 0: that address is given back like any other. A total may count padding.

A free_data list: one or more addresses that the client no longer needs. 0 in it means nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from dissociated.errors import LocalProtocolError, RemoteProtocolError

#: Bytes of an address on the wire.
ADDRESS_SIZE = 8
_MOST_ALIGNED = 64  # "Buffers [...] should be padded to a multiple of 8 or 64 bytes"
_HEAD = struct.Struct("<QQ")


@lru_cache(maxsize=256)
def _uint64s(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


class AddressList(NamedTuple):
    """Where the buffers of one message lie: `addresses[i]` and `lengths[i]` (bytes) of its i-th buffer."""

    addresses: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def leased(self) -> tuple[int, ...]:
        """The addresses that must be given back: of buffers that have bytes, and of empty ones that have an address."""
        if all(self.lengths):
            return self.addresses
        return tuple(address for address, length in zip(self.addresses, self.lengths, strict=True) if length or address)

    @property
    def is_empty(self) -> bool:
        """Whether no buffer has bytes."""
        return not any(self.lengths)


def encode_addresses(extents: Iterable[tuple[int, int]]) -> bytes:
    """The body of kind 1 for these (address, length) pairs, one for each buffer, in order."""
    flat = [0, 0]
    for address, length in extents:
        flat += (address, length) if length else (0, 0)
    flat[0] = sum(flat[3::2])
    flat[1] = (len(flat) - 2) // 2
    return _uint64s(len(flat)).pack(*flat)


def parse_addresses(body: bytes, body_length: int = 0) -> AddressList:
    """Return the addresses and lengths in a body of kind 1.

    Its total may count padding, up to the `body_length` that the metadata announced, or that of each buffer up to a
    multiple of 64 bytes. Raises RemoteProtocolError where it is neither that nor the sum, or the count disagrees.
    """
    if len(body) < _HEAD.size:
        raise RemoteProtocolError(f"the peer sent an address list of {len(body)} bytes; its two totals alone have 16")
    total, count = _HEAD.unpack_from(body)
    if len(body) != _HEAD.size + count * _HEAD.size:
        raise RemoteProtocolError(f"the peer sent an address list of {len(body)} bytes for {count} buffers")
    flat = _uint64s(2 * count).unpack_from(body, _HEAD.size)
    addresses, lengths = flat[0::2], flat[1::2]
    if total != sum(lengths) and not sum(lengths) < total <= max(body_length, sum(map(_padded, lengths))):
        raise RemoteProtocolError(
            f"the peer sent an address list whose total is {total} bytes, but its buffers have {sum(lengths)}"
        )
    return AddressList(addresses, lengths)


def _padded(length: int) -> int:
    return length + -length % _MOST_ALIGNED


def encode_free(addresses: Sequence[int]) -> bytes:
    """The body of a free_data message: "one or more unsigned, little-endian 64-bit integers".

    Raises LocalProtocolError for no address.
    """
    if not addresses:
        raise LocalProtocolError("a free_data message names at least one address")
    return _uint64s(len(addresses)).pack(*addresses)


def parse_free(body: bytes) -> tuple[int, ...]:
    """The addresses in a free_data message. Raises RemoteProtocolError for an empty or ragged one."""
    if not body or len(body) % ADDRESS_SIZE:
        raise RemoteProtocolError(f"the peer sent a free_data message of {len(body)} bytes, not one or more uint64")
    return _uint64s(len(body) // ADDRESS_SIZE).unpack(body)

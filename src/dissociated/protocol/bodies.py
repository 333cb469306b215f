"""Bodies of kind 1 and the messages that answer them: lists of little-endian uint64.

An address list ("Data Stream Sequence") holds the total size of all buffers, the number of buffers, and then, for each
buffer of the message in order, its address and its length. We send (0, 0) for an absent or empty buffer. A peer may
send an address with the length 0; the client gives it back like any other. A peer's total may include padding.

A free_data list holds one or more addresses that the client no longer needs. A 0 in it has no meaning.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from dissociated.errors import LocalProtocolError, RemoteProtocolError

#: Size of an address on the wire, in bytes.
ADDRESS_SIZE = 8
_MOST_ALIGNED = 64  # "Buffers [...] should be padded to a multiple of 8 or 64 bytes"
_HEAD = struct.Struct("<QQ")


@lru_cache(maxsize=256)
def _uint64s(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")


class AddressList(NamedTuple):
    """Positions of a message's buffers: `addresses[i]` and `lengths[i]` (in bytes) belong to buffer i."""

    addresses: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def leased(self) -> tuple[int, ...]:
        """Return the addresses that must be given back: all but the 0 of an empty buffer."""
        if all(self.lengths):
            return self.addresses
        return tuple(address for address, length in zip(self.addresses, self.lengths, strict=True) if length or address)

    @property
    def is_empty(self) -> bool:
        """Return whether all buffers are empty."""
        return not any(self.lengths)


def encode_addresses(extents: Iterable[tuple[int, int]]) -> bytes:
    """Encode a body of kind 1 from (address, length) pairs, one for each buffer of the message, in order."""
    flat = [0, 0]
    for address, length in extents:
        flat += (address, length) if length else (0, 0)
    flat[0] = sum(flat[3::2])
    flat[1] = (len(flat) - 2) // 2
    return _uint64s(len(flat)).pack(*flat)


def parse_addresses(body: bytes, body_length: int = 0) -> AddressList:
    """Parse a body of kind 1.

    Args:
        body: The body.
        body_length: Length of the packed body that the metadata announced, in bytes.

    Returns:
        The addresses and lengths of the buffers.

    Raises:
        RemoteProtocolError: The number of buffers does not fit the body's size, or the total is wrong. The total must
            be the sum of the lengths; it may include padding, up to `body_length` or up to a multiple of 64 bytes for
            each buffer.
    """
    if len(body) < _HEAD.size:
        raise RemoteProtocolError(
            f"the peer sent an address list of {len(body)} bytes; its two totals alone need 16", rule="list-length"
        )
    total, count = _HEAD.unpack_from(body)
    if len(body) != _HEAD.size + count * _HEAD.size:
        raise RemoteProtocolError(
            f"the peer sent an address list of {len(body)} bytes for {count} buffers", rule="list-length"
        )
    flat = _uint64s(2 * count).unpack_from(body, _HEAD.size)
    addresses, lengths = flat[0::2], flat[1::2]
    if total != sum(lengths) and not sum(lengths) < total <= max(body_length, sum(map(_padded, lengths))):
        raise RemoteProtocolError(
            f"the peer sent an address list whose total is {total} bytes, but its buffers have {sum(lengths)}",
            rule="list-total",
        )
    return AddressList(addresses, lengths)


def _padded(length: int) -> int:
    return length + -length % _MOST_ALIGNED


def encode_free(addresses: Sequence[int]) -> bytes:
    """Encode the body of a free_data message ("one or more unsigned, little-endian 64-bit integers").

    Raises:
        LocalProtocolError: `addresses` is empty.
    """
    if not addresses:
        raise LocalProtocolError("a free_data message needs at least one address")
    return _uint64s(len(addresses)).pack(*addresses)


def parse_free(body: bytes) -> tuple[int, ...]:
    """Parse the addresses in the body of a free_data message.

    Raises:
        RemoteProtocolError: The body is empty, or its length is no multiple of 8.
    """
    if not body or len(body) % ADDRESS_SIZE:
        raise RemoteProtocolError(
            f"the peer sent a free_data message of {len(body)} bytes, which is not one or more uint64",
            rule="free-length",
        )
    return _uint64s(len(body) // ADDRESS_SIZE).unpack(body)

"""Tensors in memory that can be shared: messages as `write_tensor` writes them, one after the other."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

from dissociated.codec.split import SplitMessage
from dissociated.format.encapsulated import encapsulate
from dissociated.format.message import buffer_extents
from dissociated.format.tensor import ALIGNMENT
from dissociated.memory.region import Region
from dissociated.memory.shared import Backing, map_read_only, sealed_memfd, write_parts


class TensorSegment:
    """A copy of these messages in a sealed memfd, every buffer aligned to 64 bytes.

    Its read-only `descriptor` is closed when nobody uses the segment any more. Raises StoreError where there is no
    memory for it.
    """

    backing = Backing.SEALED

    def __init__(self, name: str, messages: Sequence[SplitMessage]) -> None:
        parts, bodies, end = [], [], 0
        for message in messages:
            head = encapsulate(message.header)  # which is a multiple of 64 long
            parts += [bytes(-end % ALIGNMENT), head, *(message.body or ())]
            bodies.append(end + -end % ALIGNMENT + len(head))
            end = bodies[-1] + message.parsed.body_length
        self.descriptor = sealed_memfd(name, lambda writable: write_parts(writable, parts, 0))
        weakref.finalize(self, os.close, self.descriptor)
        memory = map_read_only(self.descriptor, end)
        # Its own addresses, since peers that fetch over a network know no others.
        self.region = Region(memory.address, memory)
        #: Address and length of each buffer of each message.
        self.addresses = [
            [
                (self.region.base + body_at + offset, length)
                for offset, length in zip(*buffer_extents(message.header, message.parsed), strict=True)
            ]
            for message, body_at in zip(messages, bodies, strict=True)
        ]

    def wait(self, until: int) -> None:
        """Nothing is waited for: see `SharedSegment.wait`. All of it is written."""

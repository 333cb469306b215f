"""Counters of messages read and written: the C++ `ReadStats` and `WriteStats`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

#: num_messages, num_record_batches, num_dictionary_batches, num_dictionary_deltas, num_replaced_dictionaries.
ReadStats: TypeAlias = pa.ipc.ReadStats


@dataclass(frozen=True)
class WriteStats:
    """The counters of `ReadStats`, and the size of bodies before and after encoding."""

    num_messages: int = 0
    num_record_batches: int = 0
    num_dictionary_batches: int = 0
    num_dictionary_deltas: int = 0
    num_replaced_dictionaries: int = 0
    #: Bytes of the original buffers.
    total_raw_body_size: int = 0
    #: Bytes of bodies as written, with padding and compression.
    total_serialized_body_size: int = 0

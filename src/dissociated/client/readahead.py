"""Reading ahead: the parts of a dataset are received at the same time, and read in order."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from typing import TypeAlias

import pyarrow as pa

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata
from dissociated.errors import ConnectionClosed, TransportError
from dissociated.transport.mailbox import Mailbox

#: The most bytes of received batches that wait for their turn, of all parts together. `read_all` lifts this limit,
#: because it needs all batches at once.
MAX_BYTES = 1 << 28
Pairs: TypeAlias = Generator[BatchAndMetadata, None, None]

_NO_TIMEOUT = 1e6  # seconds; each part has a timeout of its own


class ReadaheadReader(BatchReader):
    """A reader of all batches of `parts`, in order. While a part is read, up to `max_parallel` - 1 others are received.

    Reading ahead begins when the second batch is requested.
    """

    def __init__(self, schema: pa.Schema, parts: Sequence[Pairs], max_parallel: int) -> None:
        other_parts = min(max_parallel, len(parts)) - 1
        self._parts = [_Part(pairs, MAX_BYTES // max(other_parts, 1)) for pairs in parts]
        super().__init__(schema, _in_order(self._parts, other_parts))

    def read_all(self) -> pa.Table:
        """Return all remaining batches as one table."""
        for part in self._parts:
            part.inbox.lift()
        return super().read_all()

    def close(self) -> None:
        """Stop reading, and close the parts."""
        super().close()
        self._parts = []  # if no batch was requested, nothing else gives the parts back


class _Part(ProcessBound):
    """A part. After `start_receiving`, a thread receives it. Without that, `batches` reads it directly."""

    def __init__(self, pairs: Pairs, max_bytes: int) -> None:
        self.inbox: Mailbox[BatchAndMetadata] = Mailbox(max_bytes)
        self._pairs = pairs
        self._received = False
        self.bind_to_process()

    def start_receiving(self) -> None:
        """Start to receive the part, if the system has a thread for it."""
        if not self._received:
            with suppress(TransportError):
                StreamThread(self, self._receive, (), "read ahead").start()
                self._received = True

    def batches(self) -> Iterator[BatchAndMetadata]:
        """Yield all batches of the part."""
        if not self._received:
            yield from self._pairs
            return
        while True:
            self.check_process()
            pair = self.inbox.get(_NO_TIMEOUT)
            if pair is None:
                return
            yield pair

    def _receive(self) -> None:
        with self.inbox.filled_by("reading ahead"), closing(self._pairs) as pairs:
            for pair in pairs:
                self.inbox.put(pair, pair[0].nbytes, None)

    def stop(self) -> None:
        """Receive no more. A thread that waits for the server ends with its next message or its timeout.

        At exit, this is called while another thread may read the part, which must not look complete.
        """
        self.inbox.close(ConnectionClosed("reading ahead was stopped, or this process is ending"))
        if not self._received:
            self._pairs.close()


def _in_order(parts: list[_Part], other_parts: int) -> Iterator[BatchAndMetadata]:
    try:
        for number, part in enumerate(parts):
            following = parts[number + 1 : number + 1 + other_parts]
            for pair in part.batches():
                yield pair
                while following:
                    following.pop(0).start_receiving()
    finally:
        for part in parts:
            part.stop()

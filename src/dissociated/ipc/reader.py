"""libarrow's reader of IPC streams, whose complaints about what a peer sent come out as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from dissociated.errors import DissociatedError, RemoteProtocolError

_COMPLAINTS = (pa.ArrowException, OSError, UnicodeError)  # libarrow's IOError arrives as an OSError


@contextmanager
def peer_blamed() -> Iterator[None]:
    """Turn what libarrow raises about content into a RemoteProtocolError."""
    try:
        yield
    except _COMPLAINTS as error:
        raise _ours(error) from None


def _ours(error: Exception) -> Exception:
    # Ours pass: they come from below, through libarrow. So do an interruption, and memory that has run out.
    if isinstance(error, (DissociatedError, MemoryError, pa.ArrowCancelled)):
        return error
    return RemoteProtocolError(f"the peer sent what libarrow cannot read: {error}")


class StreamReader(pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]  # pyarrow has no type hints
    """Raises RemoteProtocolError where libarrow finds the content invalid."""

    def __init__(self, source: Any, options: pa.ipc.IpcReadOptions | None = None) -> None:
        with peer_blamed():
            super().__init__(source, options=options)

    def read_next_batch(self) -> pa.RecordBatch:
        try:
            return super().read_next_batch()
        except _COMPLAINTS as error:
            raise _ours(error) from None

    def read_next_batch_with_custom_metadata(self) -> tuple[pa.RecordBatch, pa.KeyValueMetadata | None]:
        try:
            both: tuple[pa.RecordBatch, pa.KeyValueMetadata | None] = super().read_next_batch_with_custom_metadata()
            return both
        except _COMPLAINTS as error:
            raise _ours(error) from None

    def read_all(self) -> pa.Table:
        try:
            return super().read_all()
        except _COMPLAINTS as error:
            raise _ours(error) from None

"""libarrow's reader of IPC streams, whose complaints about what a peer sent come out as ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from dissociated.errors import DissociatedError, RemoteProtocolError, TransportError

_COMPLAINTS = (pa.ArrowException, OSError, UnicodeError)  # libarrow's IOError arrives as an OSError


@contextmanager
def peer_blamed() -> Iterator[None]:
    """Turn what libarrow raises about content into a RemoteProtocolError; into a TransportError, if memory is short."""
    try:
        yield
    except _COMPLAINTS as error:
        raise _ours(error) from None


def _ours(error: Exception) -> Exception:
    if isinstance(error, (DissociatedError, pa.ArrowCancelled)):  # ours come from below, through libarrow
        return error
    if isinstance(error, MemoryError):  # compressed buffers say themselves how long they will be: that may be a lie
        return TransportError(f"there is no memory for what the peer sent: {error}")
    return RemoteProtocolError(f"the peer sent what libarrow cannot read: {error}")


class StreamReader(pa.ipc.RecordBatchStreamReader):  # type: ignore[misc]  # pyarrow has no type hints
    """Raises RemoteProtocolError where libarrow finds the content invalid, TransportError where it has no memory."""

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

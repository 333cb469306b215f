"""Reads datasets of tensors."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.connect import parse_uris, request_stream
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.codec.batches import RaisingAgain
from dissociated.codec.tensor import Tensor


class TensorReader(Iterator[Tensor]):
    """The tensors of a stream, one after the other. `close` ends the stream, and so does dropping the reader."""

    def __init__(self, tensors: Generator[Tensor, None, None]) -> None:
        self._next = [next(tensors)]  # from now on the stream is ended with its generator
        self._rest = RaisingAgain(tensors)

    def __next__(self) -> Tensor:
        return self._next.pop() if self._next else next(self._rest)

    def close(self) -> None:
        """Read no more. The tensors that were read stay."""
        self._next.clear()
        self._rest.close()


def open_tensors(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
) -> TensorReader:
    """Request the tensors `ticket` at `uri`, or at a metadata URI and a data URI, in any order of arrival.

    Each is a pyarrow.Tensor, SparseCOOTensor, SparseCSRMatrix, SparseCSCMatrix or SparseCSFTensor, and is read as it is
    asked for. Where bodies come by address, its arrays lie in the server's memory. That memory is given back when the
    last of them is collected, and the connection stays open until then. Dropping the reader ends the stream.

    - `timeout`: how many seconds the server may be silent.
    - `max_body`: the largest body that is taken, in bytes.
    - `max_metadata`, `allow_rma`: as for `open_stream`.

    Raises what `open_stream` raises; WrongKind where the stream holds record batches.
    """
    request = ReadRequest(timeout=timeout, max_body=max_body, max_metadata=max_metadata, allow_rma=allow_rma)
    return read_tensors(uri, ticket, request)


def read_tensors(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> TensorReader:
    """The tensors `ticket` at `uri`, within the limits of `request`. Raises as `open_tensors` does."""
    return TensorReader(request_stream(parse_uris(uri), ticket, request).tensors())

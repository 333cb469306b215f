"""Reading of tensors."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.connect import parse_uris, request_stream
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.codec.batches import RaisingAgain
from dissociated.codec.tensor import Tensor


class TensorReader(Iterator[Tensor]):
    """The tensors of a stream. The stream ends when the reader is exhausted, closed or dropped."""

    def __init__(self, tensors: Generator[Tensor, None, None]) -> None:
        self._next = [next(tensors)]  # start the generator, so that closing it ends the stream
        self._rest = RaisingAgain(tensors)

    def __next__(self) -> Tensor:
        return self._next.pop() if self._next else next(self._rest)

    def close(self) -> None:
        """Stop reading. Tensors that were read stay valid."""
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
    """Request the tensors `ticket` at `uri`, or at a metadata URI and a data URI. Messages may arrive in any order.

    Each tensor is a pyarrow.Tensor, SparseCOOTensor, SparseCSRMatrix, SparseCSCMatrix or SparseCSFTensor, and is read
    when it is requested. If bodies come by address, its arrays lie in the server's memory. That memory is freed when
    the last array in it is collected, and the connection stays open until then. Dropping the reader ends the stream.

    Args:
        uri: The URI, or one for metadata and one for bodies.
        ticket: The ticket.
        timeout: Seconds for which the server may be silent.
        max_body: Largest body that is accepted, in bytes.
        max_metadata: Largest metadata of a message that is accepted, in bytes. See `open_stream`.
        allow_rma: Allow fetching from the server's memory. See `open_stream`.

    Raises:
        WrongKind: The stream has record batches. Errors of `open_stream` are raised, too.
    """
    request = ReadRequest(timeout=timeout, max_body=max_body, max_metadata=max_metadata, allow_rma=allow_rma)
    return read_tensors(uri, ticket, request)


def read_tensors(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> TensorReader:
    """Read the tensors `ticket` at `uri`, within the limits of `request`. Errors are those of `open_tensors`."""
    return TensorReader(request_stream(parse_uris(uri), ticket, request).tensors())

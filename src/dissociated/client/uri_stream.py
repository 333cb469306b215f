"""Opening of a stream at a URI, without a catalog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.asynchronous import asynchronous
from dissociated.client.connection import parse_uris
from dissociated.client.parts import open_part, open_part_on_device, open_part_tensors
from dissociated.client.plan import PartPlan, Route, plan_part
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.client.stream import TensorReader
from dissociated.codec.device import DeviceReader
from dissociated.codec.options import ReadOptions, check_options
from dissociated.control.locations import Endpoint
from dissociated.memory.device.registry import open_device


def open_stream(
    uri: str | Sequence[str],
    ticket: bytes,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    filter: Any = None,
    limit: int | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
) -> pa.RecordBatchReader:
    """Request the stream `ticket` at `uri`, or at a metadata URI and a data URI. Messages may arrive in any order.

    Batches are read as they are requested. If bodies come by address, arrays lie in the server's memory. That memory is
    freed when the last array in it is collected, and the connection stays open until then. Dropping the reader ends the
    stream.

    If the URI does not offer the selection of columns and batches, the server sends everything, and this process
    discards the rest.

    Args:
        uri: The URI, or one for metadata and one for bodies.
        ticket: The ticket.
        columns: Read only these top-level columns, in the order of the schema. `included_fields` of `options` selects
            columns by position.
        batches: Read the batches from the first number up to the second.
        filter: Read only rows for which this is true: an expression of pyarrow, a condition `[column, operator,
            value]`, a list of conditions, all of which must be true, or a list of such lists. `Client.read` reads only
            the columns that the filter needs. Here the schema is not known in advance, so all columns are read.
        limit: Number of rows to read, from the first on. None: all.
        options: Options of decoding.
        timeout: Seconds for which the server may be silent.
        max_body: Largest body that is accepted, in bytes. Bodies of this total size may wait for their metadata, and of
            at least 4 GiB.
        max_metadata: Largest metadata of a message that is accepted, in bytes. Metadata of this total size may wait for
            bodies, and of at least 256 MiB.
        allow_rma: Allow this process to fetch from the server's memory if a URI has a remote_handle. The server could
            then write to this process's memory.

    Returns:
        A reader of record batches. Reading may raise the errors below, RemoteProtocolError, and FormatError if the
            schema nests deeper than `options` allow.

    Raises:
        UriError: A URI is invalid.
        TransportError, DeadlineExceeded: The server cannot be reached.
        RemoteError: The server refuses.
        WrongKind: The stream has tensors.
        ColumnNotFound: A column does not exist.
        OptionError: An argument is invalid.

    Example:
        ```python
        import dissociated as dis

        uri, ticket = server.locations("flights")[0], server.ticket("flights")
        reader = dis.open_stream(uri, ticket, columns=["dest"], limit=100)
        assert reader.read_all().num_rows == 100
        ```

        In a coroutine:

        ```python
        import dissociated as dis

        uri, ticket = server.locations("flights")[0], server.ticket("flights")
        async for batch in await dis.open_stream_async(uri, ticket):
            print(batch.num_rows)
        ```
    """
    request = ReadRequest(
        columns=columns,
        batches=batches,
        filter=filter,
        limit=limit,
        options=check_options(options, ReadOptions),
        timeout=timeout,
        max_body=max_body,
        max_metadata=max_metadata,
        allow_rma=allow_rma,
    )
    return open_part(_plan(uri, ticket, request))


def open_stream_on_device(
    uri: str | Sequence[str],
    ticket: bytes,
    device: object,
    *,
    columns: Sequence[str] | None = None,
    batches: tuple[int, int] | None = None,
    filter: Any = None,
    limit: int | None = None,
    options: ReadOptions | None = None,
    timeout: float = TIMEOUT,
    max_body: int = MAX_BODY,
    max_metadata: int = MAX_METADATA,
    allow_rma: bool = False,
    decompress: bool = True,
) -> DeviceReader:
    """Request a stream as `open_stream` does, and read its batches onto a device.

    Batches are copied to the device, or stay on it if the URI says that they are there.

    Args:
        uri: See `open_stream`.
        ticket: See `open_stream`.
        device: The device, such as "cuda:0". See docs/device.md.
        columns: See `open_stream`.
        batches: See `open_stream`.
        filter: See `open_stream`.
        limit: See `open_stream`.
        options: See `open_stream`.
        timeout: See `open_stream`.
        max_body: See `open_stream`.
        max_metadata: See `open_stream`.
        allow_rma: See `open_stream`.
        decompress: Decompress compressed bodies on the host. False refuses them.

    Raises:
        DeviceNotFound, DeviceFull, DeviceError: The device does not exist, is full, or fails. Errors of `open_stream`
            are raised, too.

    Example:
        ```python
        import dissociated as dis

        uri, ticket = server.locations("flights")[0], server.ticket("flights")
        with dis.open_stream_on_device(uri, ticket, "test:0") as reader:  # or "cuda:0"
            batch = reader.read_next_batch()
        ```

        In a coroutine:

        ```python
        import dissociated as dis

        uri, ticket = server.locations("flights")[0], server.ticket("flights")
        async for batch in await dis.open_stream_on_device_async(uri, ticket, "test:0"):
            print(batch.num_rows)
        ```
    """
    opened = open_device(device)
    request = ReadRequest(
        columns=columns,
        batches=batches,
        filter=filter,
        limit=limit,
        options=check_options(options, ReadOptions),
        timeout=timeout,
        max_body=max_body,
        max_metadata=max_metadata,
        allow_rma=allow_rma,
        device=opened,
        decompress=decompress,
    )
    return open_part_on_device(_plan(uri, ticket, request), opened)


open_stream_async = asynchronous(open_stream)
"""Open an `AsyncStreamReader` for `async for`. Arguments and errors are those of `open_stream`.

The call blocks a thread in place of the event loop. `open_stream` has an example.
"""

open_stream_on_device_async = asynchronous(open_stream_on_device)
"""Open an `AsyncStreamReader` for `async for`. Arguments and errors are those of `open_stream_on_device`.

The call blocks a thread in place of the event loop. `open_stream_on_device` has an example.
"""


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

    Example:
        ```python
        import dissociated as dis

        server.publish("weights", pa.Tensor.from_numpy(np.eye(3)))
        (weights,) = dis.open_tensors(server.locations("weights")[0], server.ticket("weights"))
        assert weights.shape == (3, 3)
        ```
    """
    request = ReadRequest(timeout=timeout, max_body=max_body, max_metadata=max_metadata, allow_rma=allow_rma)
    return open_part_tensors(_plan(uri, ticket, request))


def _plan(uri: str | Sequence[str], ticket: bytes, request: ReadRequest) -> PartPlan:
    """Plan the reading of a stream whose server announces its capabilities in its URIs."""
    return plan_part(request, None, Endpoint(ticket, ()), [Route.of(parse_uris(uri))])

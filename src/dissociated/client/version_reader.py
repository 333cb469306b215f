"""Reading of one version of a dataset."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextvars import Context, copy_context
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from dissociated.base.exit import StreamThread
from dissociated.base.fork import ProcessBound
from dissociated.client.calls import CatalogClient
from dissociated.client.request import ReadRequest
from dissociated.codec.device import DeviceReader
from dissociated.codec.inplace import MappedReader
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import AccessDenied, CatalogError, RemoteError, TransportError

if TYPE_CHECKING:
    from dissociated.client.mapped import MappedVersion

#: Number of failed attempts to map a version whose memory cannot be kept: its bodies are compressed, or it was still
#: being copied into shared memory.
_MAX_ATTEMPTS = 3
#: Seconds after which the locations in a description are looked up again before a read.
_MAX_DESCRIPTION_AGE = 8.0


class VersionReader(ProcessBound):
    """A reader of one version of a dataset, at its current locations.

    It is internal: handles, scanners and lazy frames read through it.

    Args:
        client: The client.
        info: The description.
        transport: Transport to read through. None: the nearest one.
        described_now: Whether the catalog has just returned `info`.
        mapped: The same version, if it is mapped already.

    Every method that reads raises the errors of `Client.read`, and DatasetNotFound if the version is gone.
    """

    #: Whether statistics that the segments lack are computed for a filter, and kept for the next one.
    computes_statistics = True

    def __init__(
        self,
        client: CatalogClient,
        info: DatasetInfo,
        transport: str | None,
        described_now: bool = False,
        mapped: MappedVersion | None = None,
    ) -> None:
        self.client = client
        self.info = info
        self.transport = transport
        #: The last description by the catalog, and the time of the call; None if there is none, or no catalog of ours.
        self._latest = (info, time.monotonic()) if described_now and info.version else None
        self._mapped = mapped
        self._closings = 0  # the number of calls of `close`
        self._attempts = 0
        self._lock = threading.Lock()  # engines scan from several threads: the version is mapped once
        self.bind_to_process()

    def after_fork_in_child(self) -> None:
        """Replace the lock."""
        self._lock = threading.Lock()  # a thread of the parent may hold the other

    @property
    def mapped_nbytes(self) -> int:
        """Return the size of the shared memory that is kept mapped, in bytes."""
        mapped = self._mapped
        return 0 if mapped is None else mapped.nbytes

    def close(self) -> None:
        """Keep nothing mapped, also by a read in progress. Memory is given back when its last array is collected."""
        self._closings += 1
        self._mapped = None

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """Open a reader over the columns and rows of `request`.

        If the whole version can be mapped, it is, and stays mapped: it never changes, so a later read needs neither the
        catalog nor a server. Its columns are in the order in which they are named.
        """
        mapped = self.map(request)
        return self._request(request) if mapped is None else mapped.select(request)

    def _request(self, request: ReadRequest) -> pa.RecordBatchReader:
        """Open a reader over what servers send for `request`."""
        request = self._at(request)
        reader = self._read_again(request)
        return self.client.endpoints.read(self.describe, request) if reader is None else reader

    def _read_again(self, request: ReadRequest) -> pa.RecordBatchReader | None:
        """Open a reader at the last known locations, while the catalog is asked whether the version still exists.

        Both together take one round trip. The answer of the catalog is needed, because the publisher may have chosen
        one ticket for two versions. A version that is replaced after the catalog's answer goes unnoticed, just as when
        the catalog is asked first.

        Returns:
            The reader; None if the locations have to be looked up first, or the stream may be one that can be read only
            once, which would be lost if the catalog does not answer.
        """
        if self.info.rows is None or self._latest is None:
            return None
        if time.monotonic() - self._latest[1] > _MAX_DESCRIPTION_AGE:
            return None
        info = self._latest[0]
        try:
            confirmation = _Confirmation(self)
            reader = self.client.endpoints.read_at(info, request)
        except (AccessDenied, CatalogError, RemoteError, TransportError):
            return None
        try:
            confirmation.wait()
        except BaseException:
            reader.close()
            raise
        return reader

    def read_table(self, request: ReadRequest) -> pa.Table:
        """Read the columns and rows of `request` as a table. See `read`."""
        mapped = self.map(request)
        return self._request(request).read_all() if mapped is None else mapped.table(request)

    def read_on_device(self, request: ReadRequest) -> DeviceReader:
        """Open a reader over the columns and rows of `request`, whose batches lie on its device."""
        return self.client.endpoints.read_on_device(self.describe, self._at(request))

    def read_part(self, number: int, request: ReadRequest) -> pa.RecordBatchReader:
        """Open a reader over the columns and rows of `request` in one endpoint.

        The catalog is asked only if the endpoint cannot be read as `info` says.
        """
        info, endpoints = self.info, self.client.endpoints
        request = self._at(request)
        try:
            return endpoints.open(info, info.endpoints[number], request)
        except (CatalogError, RemoteError, TransportError):
            current = self.describe()
            if current.endpoints == info.endpoints:
                raise
        if [endpoint.rows for endpoint in current.endpoints] != [endpoint.rows for endpoint in info.endpoints]:
            raise CatalogError(f"{info.name!r} lies in other parts now than when it was looked up: look it up again")
        return endpoints.open(current, current.endpoints[number], request)

    def is_mapped(self, number: int) -> bool:
        """Return whether one endpoint would be read over shared memory, by the last description of the version.

        It would not if no route led there then. The read asks the catalog again.
        """
        info = self.info if self._latest is None else self._latest[0]
        if number >= len(info.endpoints):  # the version lies in other parts now, which `read_part` reports
            return False
        request = self._at(self.client.defaults)
        try:
            return self.client.endpoints.routes(info, info.endpoints[number], request)[0].is_mapped
        except CatalogError:
            return False

    def _at(self, request: ReadRequest) -> ReadRequest:
        return replace(request, transport=self.transport)

    def map(self, request: ReadRequest, described_now: bool = False) -> MappedVersion | None:
        """Return the mapped version, which is mapped first if `request` may need most of it; else None.

        If the catalog has just returned `info`, it is not asked again.
        """
        if request.device is not None:
            return None
        few = request.limit is not None and request.filter is None
        closings, mapped = self._closings, self._mapped
        if mapped is None and not few:
            with self._lock:
                mapped = self._mapped
                if mapped is None and self._attempts < _MAX_ATTEMPTS and self._is_mappable():
                    self._mapped = mapped = self._map(self.info if described_now else None)
                    if mapped is None:
                        self._attempts += 1
                    if self._closings != closings:
                        self._mapped = None
        return mapped

    def _map(self, known_info: DatasetInfo | None) -> MappedVersion | None:
        """Map the version where `known_info` says that it lies, and then where the catalog says."""
        from dissociated.client.mapped import MappedVersion  # on first use: pyarrow.dataset is slow to import

        readers = self.client.endpoints.read_parts(self.describe, self._at(self.client.defaults), known_info)
        in_place = all(isinstance(reader, MappedReader) and reader.is_mapped for reader in readers)
        mapped = MappedVersion.read(readers, self.computes_statistics)
        if mapped is None and in_place:  # it has too many batches, and will always have
            self._attempts = _MAX_ATTEMPTS
        return mapped

    def _is_mappable(self) -> bool:
        info = self.info
        if not info.version or info.rows is None or not info.endpoints:  # a live stream has no number of rows
            return False
        return all(map(self.is_mapped, range(len(info.endpoints))))

    def describe(self) -> DatasetInfo:
        """Ask the catalog for the current locations of the version. Raise DatasetNotFound if it is gone."""
        info = self.info
        if not info.version:  # not a catalog of this library: `info` is all that is known
            return info
        requested = time.monotonic()
        current = self.client.describe_version(info.name, info.version, info.lineage_id)
        self._latest = current, requested
        return current


class _Confirmation:
    """The answer of the catalog whether a version still exists, for which a thread waits.

    Raises:
        TransportError: The system has no more threads.
    """

    def __init__(self, version: VersionReader) -> None:
        self._answer: Future[DatasetInfo] = Future()
        StreamThread(self, self._ask, (version, copy_context()), "look up").start()

    def _ask(self, version: VersionReader, context: Context) -> None:
        try:
            self._answer.set_result(context.run(version.describe))
        except BaseException as error:
            self._answer.set_exception(error)

    def wait(self) -> None:
        """Wait for the answer. Raise the error of `VersionReader.describe`."""
        self._answer.result()

    def stop(self) -> None:
        """Do nothing: the call ends by its deadline."""

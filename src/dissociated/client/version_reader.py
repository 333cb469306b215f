"""Reading of one version of a dataset."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from dissociated.client.calls import CatalogClient
from dissociated.client.request import ReadRequest
from dissociated.codec.device import DeviceReader
from dissociated.control.locations import DatasetInfo
from dissociated.errors import CatalogError, RemoteError, TransportError


class VersionReader:
    """A reader of the version of a dataset that `info` describes, at its current locations, through `transport`.

    Every method that reads raises the errors of `Client.read`, and DatasetNotFound if the version is gone.
    """

    def __init__(self, client: CatalogClient, info: DatasetInfo, transport: str | None) -> None:
        self.client = client
        self.info = info
        self.transport = transport

    def read(self, request: ReadRequest) -> pa.RecordBatchReader:
        """Open a reader over the columns and rows of `request`."""
        return self.client.endpoints.read(self._describe, self._at(request))

    def read_on_device(self, request: ReadRequest) -> DeviceReader:
        """Open a reader over the columns and rows of `request`, whose batches lie on its device."""
        return self.client.endpoints.read_on_device(self._describe, self._at(request))

    def read_part(self, number: int, request: ReadRequest) -> pa.RecordBatchReader:
        """Open a reader over the columns and rows of `request` in one endpoint.

        The catalog is asked only if the endpoint cannot be read as `info` says.
        """
        info, endpoints = self.info, self.client.endpoints
        request = self._at(request)
        try:
            return endpoints.open(info, info.endpoints[number], request)
        except (CatalogError, RemoteError, TransportError):
            current = self._describe()
            if current.endpoints == info.endpoints:
                raise
        if [one.rows for one in current.endpoints] != [one.rows for one in info.endpoints]:
            raise CatalogError(f"{info.name!r} lies in other parts now than when it was looked up: look it up again")
        return endpoints.open(current, current.endpoints[number], request)

    def is_mapped(self, number: int) -> bool:
        """Return whether one endpoint would be read over shared memory."""
        request = self._at(self.client.defaults)
        return self.client.endpoints.routes(self.info, self.info.endpoints[number], request)[0].is_mapped

    def _at(self, request: ReadRequest) -> ReadRequest:
        return replace(request, transport=self.transport)

    def _describe(self) -> DatasetInfo:
        info = self.info
        if not info.version:  # not a catalog of this library: `info` is all that is known
            return info
        return self.client.describe_version(info.name, info.version, info.lineage_id)

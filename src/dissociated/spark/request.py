"""The dataset that Spark is to read, named by the options of `spark.read.format("dissociated")`."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.types import StructType

from dissociated.base.host import host_name
from dissociated.base.tracing import TRACEPARENT
from dissociated.client.client import Client
from dissociated.client.request import ReadRequest
from dissociated.codec.filter.conditions import Conditions
from dissociated.control.dataset_info import DatasetInfo
from dissociated.control.locations import Endpoint
from dissociated.errors import (
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    OptionError,
    TransportError,
    WrongKind,
)
from dissociated.node.local import restart_here
from dissociated.spark.catalog_config import RETRY_DELAY, CatalogConfig, required_name
from dissociated.spark.columns import spark_schema
from dissociated.spark.filters import parse_filters

_ANSWER_TIMEOUT = 5.0  # seconds that a node has to answer a check
_OPTIONS = (
    "path",
    "catalog",
    "token_file",
    "tls_roots",
    "wait",
    "columns",
    "filters",
    "version",
    "transport",
    "partitions",
    "nanoseconds",
    TRACEPARENT,
    "startingOffsets",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "rowsPerPartition",
)
#: The lineage that the version must have. `create_dataframe` gives it; users have no use for it.
LINEAGE = "lineage"


class PlannedVersion(NamedTuple):
    """The version that a query reads even if the dataset changes meanwhile; 0 if the catalog has no versions."""

    version: int
    lineage_id: str


@dataclass(frozen=True)
class DatasetRequest:
    """The dataset to read and the way to read it: the checked options of `spark.read.format("dissociated")`."""

    catalog: CatalogConfig
    name: str
    columns: tuple[str, ...] | None = None
    version: int | None = None
    lineage_id: str | None = None
    transport: str | None = None
    partitions: int | None = None
    nanoseconds: str = "refuse"
    filters: Conditions | None = None

    @classmethod
    def parse(cls, options: Any) -> DatasetRequest:
        """Parse the options of the data source.

        Raises:
            CatalogError: The options name no catalog or no dataset.
            OptionError: An option is unknown or invalid.
        """
        if "owner" in options:
            raise OptionError(
                "a table of Spark's own catalog cannot be a dataset: CREATE TEMPORARY VIEW v USING dissociated OPTIONS "
                "(catalog 'URI', path 'NAME')"
            )
        names = {name.lower() for name in (*_OPTIONS, LINEAGE)}
        unknown = [name for name in options if name.lower() not in names and "." not in name]  # Spark's own have dots
        if unknown:
            raise OptionError(f"there is no option {', '.join(map(repr, unknown))}; there are {', '.join(_OPTIONS)}")
        return cls(
            CatalogConfig.parse(options),
            required_name(options, '.load("NAME")'),
            columns=_columns(options.get("columns")),
            version=parse_number(options, "version", 0),
            lineage_id=options.get(LINEAGE),
            transport=options.get("transport"),
            partitions=parse_number(options, "partitions", 1),
            nanoseconds=options.get("nanoseconds", "refuse"),
            filters=None if options.get("filters") is None else parse_filters(options["filters"]),
        )

    def schema(self) -> StructType:
        """Return Spark's schema of the dataset, with the requested columns only.

        Raises:
            DatasetNotFound: There is no such dataset or version.
            WrongKind: The dataset holds tensors.
            ColumnNotFound: The dataset lacks a requested column.
            SourceError: Spark has no type for a column.
        """
        with self.catalog.connect() as client:
            return spark_schema(self.describe(client).schema, self.columns)

    def describe(self, client: Client, planned: PlannedVersion | None = None) -> DatasetInfo:
        """Describe the dataset: the version that was `planned`, or the version of the options, or the latest.

        Raises:
            DatasetNotFound: There is no such dataset or version.
            WrongKind: The dataset holds tensors.
        """
        if planned is None and self.version and self.lineage_id is not None:
            planned = PlannedVersion(self.version, self.lineage_id)
        if planned is not None and planned.version:
            info = client.describe_version(self.name, planned.version, planned.lineage_id)
        else:
            info = client.describe(self.name, self.version)
        if info.tensors is not None:
            raise WrongKind(
                f"{self.name!r} holds tensors, and Spark has no columns for them: read it with "
                "dissociated.connect(catalog).read_tensors(name)"
            )
        return info

    def open(
        self, client: Client, info: DatasetInfo, endpoint: Endpoint, read_request: ReadRequest
    ) -> pa.RecordBatchReader:
        """Open an endpoint for reading.

        While no node with the endpoint answers, the endpoint is looked up and opened again, for the `wait` of the
        catalog. It may have moved. If it lies on a node of this host that tasks had started and that has ended, the
        node is started again: its store still exists. Nothing waits for a part that is set aside, since a person has to
        repair it first.

        Returns:
            A reader, which the caller closes after use.

        Raises:
            DissociatedError: The endpoint cannot be opened, as `Client.read_endpoint` describes.
        """
        deadline = time.monotonic() + self.catalog.wait
        number = info.endpoints.index(endpoint) if endpoint in info.endpoints else None
        restarted = False
        while True:
            try:
                return client.endpoints.open(info, endpoint, read_request)
            except DatasetNotFound:
                raise
            except (CatalogError, TransportError, DeadlineExceeded):
                if not restarted and host_name() in endpoint.hosts and restart_here(self.catalog.uri):
                    restarted = True
                elif endpoint.set_aside or time.monotonic() >= deadline or not self._is_away(client, endpoint):
                    raise
            time.sleep(RETRY_DELAY)
            if number is not None:
                info = self._describe_again(client, info)
                endpoint = info.endpoints[number]

    def _describe_again(self, client: Client, info: DatasetInfo) -> DatasetInfo:
        planned = PlannedVersion(info.version, info.lineage_id)
        return self.catalog.retry(lambda: self.describe(client, planned))

    def _is_away(self, client: Client, endpoint: Endpoint) -> bool:
        """Return whether none of the nodes with an endpoint answers."""
        flights = [uri for uri in endpoint.locations if uri.startswith("grpc")]
        if not flights and endpoint.locations:
            return not _answers(client)  # the catalog has the endpoint itself
        for uri in flights:
            with self.catalog.connect(uri, _ANSWER_TIMEOUT) as node:
                if _answers(node):
                    return False
        return True

    def check_columns(self, schema: StructType) -> None:
        """Raise OptionError if the names in `schema` contradict the option `columns`."""
        if self.columns is not None and [*self.columns] != schema.fieldNames():
            raise OptionError("say which columns by .schema(...) or by the option columns, not both")


def _answers(client: Client) -> bool:
    try:
        client.nodes()
    except (CatalogUnreachable, DeadlineExceeded):
        return False
    except DissociatedError:
        pass
    return True


def _columns(text: str | None) -> tuple[str, ...] | None:
    """Parse names separated by commas, or a JSON list for names that contain commas."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise OptionError(f"the option columns begins like a JSON list, but is not valid JSON: {error}") from None
    if not names or not all(isinstance(name, str) and name for name in names):
        raise OptionError(f"the option columns is a list of names, separated by commas or in JSON, not {text!r}")
    return tuple(names)


def parse_number(options: Any, key: str, least: int) -> int | None:
    """Return the option `key` as a number; None if it is not given.

    Raises:
        OptionError: It is no number from `least` on.
    """
    text = options.get(key)
    if text is None:
        return None
    with suppress(ValueError):
        if (number := int(text)) >= least:
            return number
    raise OptionError(f"the option {key} is a number from {least} on, not {text!r}")

"""Descriptions of datasets as a client receives them.

The description of a dataset of tensors is an empty schema whose metadata lists the tensors as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import NoneType
from typing import Any, NamedTuple, Self

import pyarrow as pa

from dissociated.base import strict_json
from dissociated.base.display import count, html, html_table, plain_table, shorten, size
from dissociated.control.change_counter import CounterPlace
from dissociated.control.locations import Endpoint
from dissociated.control.messages import FieldTypes, is_moment, parse_app_metadata

_HTML_WIDTH = 4096  # the maximum number of characters of a type in a notebook, which wraps long ones
_NAME_WIDTH = 34  # the maximum number of characters of a name in text
_WIDTH = 60  # the maximum number of characters in a line of a description
_MIN_TYPE_WIDTH = 24  # the number of characters of a type that are shown beside long names
_MAX_LINES = 40  # the maximum number of lines in a table

_TENSORS_KEY = b"dissociated.tensors"
_MAX_TENSORS = 256  # the maximum number of tensors in the list

#: The fields in the `app_metadata` of our catalogs, with their types.
_VERSION_FIELDS: FieldTypes = {
    "host": (str,),
    "boot_id": (str,),
    "version": (int,),
    "created": (int, float),
    "expires": (int, float, NoneType),
    "began": (str, NoneType),
    "tags": (dict, NoneType),
}


class TensorInfo(NamedTuple):
    """The format (dense, COO, CSR, CSC or CSF), type and shape of a tensor, and the names of its dimensions, if any."""

    format: str
    type: str
    shape: tuple[int, ...]
    names: tuple[str, ...]


class TensorsInfo(NamedTuple):
    """The number of tensors in a dataset, and the descriptions of the first of them."""

    number: int
    first: tuple[TensorInfo, ...]


def tensors_schema(tensors: Sequence[TensorInfo]) -> pa.Schema:
    """Return an empty schema whose metadata describes these tensors."""
    listed = {"count": len(tensors), "first": [tensor._asdict() for tensor in tensors[:_MAX_TENSORS]]}
    return pa.schema([], metadata={_TENSORS_KEY: json.dumps(listed)})


def parse_tensors_info(schema: pa.Schema) -> TensorsInfo | None:
    """Return the description of tensors in a schema, or None if the schema describes no tensors."""
    text = (schema.metadata or {}).get(_TENSORS_KEY)
    if text is None:
        return None
    try:
        plain = strict_json.loads(text)
        first = (
            TensorInfo(
                str(tensor["format"]), str(tensor["type"]), (*map(int, tensor["shape"]),), (*map(str, tensor["names"]),)
            )
            for tensor in plain["first"]
        )
        return TensorsInfo(max(0, int(plain["count"])), tuple(first))
    except (ValueError, KeyError, TypeError):
        return TensorsInfo(0, ())  # the metadata has this key, but was written by other software


@dataclass(frozen=True)
class DatasetInfo:
    """The description of a dataset by a catalog.

    Attributes:
        name: The name of the dataset.
        schema: The schema of the dataset.
        rows: The number of rows; None if the catalog does not know it.
        nbytes: The number of bytes; None if the catalog does not know it.
        endpoints: The parts of the dataset, in order.
        version: The number of the version, which changes with every commit, including appends.
        created: The time of the commit, in seconds since the epoch.
        expires: The time of expiry, in seconds since the epoch; None if the dataset does not expire.
        tags: The tags given to `Client.put`.
        lineage_id: An identifier that changes when the dataset is replaced or dropped, but not when rows are appended.
            While it stays equal, rows keep their positions.
        counter: The place of the catalog's counter of changes on this host; None if readers have to ask.

    Example:
        ```python
        info = client.describe("flights")
        print(info.rows, info.nbytes, [endpoint.locations for endpoint in info.endpoints])
        ```
    """

    name: str
    schema: pa.Schema
    rows: int | None
    nbytes: int | None
    endpoints: tuple[Endpoint, ...]
    version: int = 0
    created: float = 0.0
    expires: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    lineage_id: str = ""
    counter: CounterPlace | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, info: Any, schema: pa.Schema, name: str) -> Self:
        """Return the description in a FlightInfo of the dataset `name`."""
        metadata = parse_app_metadata(info.app_metadata, _VERSION_FIELDS)
        if not (is_moment(metadata.get("created")) and is_moment(metadata.get("expires"))):
            metadata = {}
        least = 0 if metadata else 1  # Another implementation may leave a count unset, which reads as 0.
        return cls(
            name=name,
            schema=schema,
            rows=info.total_records if info.total_records >= least else None,
            nbytes=info.total_bytes if info.total_bytes >= least else None,
            endpoints=tuple(map(Endpoint.parse, info.endpoints)),
            version=metadata.get("version", 0),
            created=metadata.get("created", 0.0),
            expires=metadata.get("expires"),
            tags=metadata.get("tags") or {},
            lineage_id=metadata.get("began") or "",
            counter=CounterPlace.parse(metadata.get("counter")),
        )

    def __repr__(self) -> str:
        longest = max(map(len, self.schema.names[:_MAX_LINES]), default=0)
        head, rows = self._columns(_NAME_WIDTH, max(_WIDTH - longest - 2, _MIN_TYPE_WIDTH))
        cut = ["(types that end in … are whole in .schema)"] if any(row[-1].endswith("…") for row in rows) else []
        return "\n".join(
            [
                f"{shorten(self.name, _WIDTH)}{self._version_text}",
                *self._summary(_WIDTH),
                "",
                plain_table(head, rows),
                *self._omitted,
                *cut,
            ]
        )

    def _repr_html_(self) -> str:
        return html(
            self.name,
            [f"{self._version_text.strip(', ')}", *self._summary(_HTML_WIDTH)],
            html_table(*self._columns(_HTML_WIDTH, _HTML_WIDTH)),
            *self._omitted,
        )

    @property
    def schemes(self) -> list[str]:
        """The schemes by which the dataset can be read, such as `shm`, `tcp` and `grpc`."""
        return sorted({uri for endpoint in self.endpoints for uri in endpoint.schemes})

    @property
    def size(self) -> str:
        """The number of rows and bytes, formatted."""
        tensors = self.tensors
        number = self.rows if tensors is None else tensors.number
        unit = "row" if tensors is None else "tensor"
        return (
            f"{'unknown' if number is None else count(number)} {unit}{'' if number == 1 else 's'}, {size(self.nbytes)}"
        )

    @property
    def _version_text(self) -> str:
        if not self.version:
            return ""
        return f", version {self.version} of {datetime.fromtimestamp(self.created, UTC):%Y-%m-%d %H:%M:%S} UTC"

    def _summary(self, width: int) -> list[str]:
        """Return lines of text, in which tags have at most `width` characters."""
        parts = "" if len(self.endpoints) == 1 else f" in {count(len(self.endpoints))} parts"
        lines = [f"{self.size}{parts}, over {', '.join(self.schemes) or 'no transport now'}"]
        if self.expires is not None:
            lines.append(f"until {datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d %H:%M:%S} UTC")
        if self.tags:
            lines.append("tags: " + shorten(", ".join(f"{key}={value}" for key, value in self.tags.items()), width))
        return lines

    def _columns(self, name_width: int, type_width: int) -> tuple[list[str], list[list[str]]]:
        """Return the head and the rows of a table of the columns. Names and types have at most these widths."""
        tensors = self.tensors
        if tensors is not None:
            shapes = [
                [shorten(text, type_width) for text in (tensor.type, " x ".join(map(str, tensor.shape)), tensor.format)]
                for tensor in tensors.first[:_MAX_LINES]
            ]
            return ["type", "shape", "format"], shapes
        fields = (self.schema.field(index) for index in range(min(len(self.schema), _MAX_LINES)))
        return ["column", "type"], [
            [
                shorten(column.name, name_width),
                shorten(f"{column.type}{'' if column.nullable else ' not null'}", type_width),
            ]
            for column in fields
        ]

    @property
    def _omitted(self) -> list[str]:
        tensors = self.tensors
        more = (len(self.schema) if tensors is None else tensors.number) - _MAX_LINES
        return [f"and {count(more)} more"] if more > 0 else []

    @property
    def tensors(self) -> TensorsInfo | None:
        """The description of the tensors in the dataset; None for a dataset of record batches."""
        return parse_tensors_info(self.schema)


class DatasetList(list[DatasetInfo]):
    """A list of datasets that is displayed as a table."""

    _HEAD = ("name", "rows", "size", "columns", "version", "over")
    _RIGHT = (1, 2, 3, 4)

    def __repr__(self) -> str:
        table = plain_table(self._HEAD, self._rows(_WIDTH), self._RIGHT)
        return "\n".join([table, *self._omitted]) if self else "no datasets"

    def _repr_html_(self) -> str:
        # No-break spaces keep the transports on one line, so that long names wrap instead.
        rows = [[*row[:-1], row[-1].replace(" ", "\u00a0")] for row in self._rows(_HTML_WIDTH)]
        table = html_table(self._HEAD, rows, self._RIGHT)
        return table + "".join(self._omitted) if self else "no datasets"

    def _rows(self, width: int) -> list[list[str]]:
        """Return the rows of the table, in which a name has at most `width` characters."""
        return [
            [
                shorten(info.name, width),
                count(info.rows),
                size(info.nbytes),
                count(len(info.schema)),
                count(info.version),
                "cannot be read" if any(endpoint.is_away for endpoint in info.endpoints) else " ".join(info.schemes),
            ]
            for info in self[:_MAX_LINES]
        ]

    @property
    def _omitted(self) -> list[str]:
        more = len(self) - _MAX_LINES
        return [f"and {count(more)} more"] if more > 0 else []

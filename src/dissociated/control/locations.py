"""Descriptions of datasets as a client receives them, with the locations at which each part can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import NoneType
from typing import Any, Self

import pyarrow as pa

from dissociated.base import strict_json
from dissociated.base.display import count, html, html_table, plain_table, plural, shorten, size
from dissociated.control.messages import FieldTypes, has_fields, is_moment
from dissociated.datasets.tensors import TensorsInfo, parse_tensors_info
from dissociated.errors import CatalogError, NodeUnreachable, UriError
from dissociated.transport import registry
from dissociated.uri import DEVICE, Uri

_HTML_WIDTH = 4096  # the same in a notebook, which wraps long types
_NAME_WIDTH = 24  # the maximum number of characters of a name in text
_WIDTH = 60  # the maximum number of characters in a line of a description
_MAX_LINES = 40  # the maximum number of lines in a table

_REUSE_CONNECTION = "arrow-flight-reuse-connection"  # A scheme that stands for the server that described the endpoint

#: The fields in the `app_metadata` of our catalogs, with their types: of a version, a part, and a node with the part.
_VERSION_FIELDS: FieldTypes = {
    "host": (str,),
    "boot_id": (str,),
    "version": (int,),
    "created": (int, float),
    "expires": (int, float, NoneType),
    "began": (str, NoneType),
    "tags": (dict, NoneType),
}
_PART_FIELDS: FieldTypes = {"nodes": (list,), "rows": (int, NoneType)}
_NODE_FIELDS: FieldTypes = {"id": (str,), "host": (str,), "boot_id": (str,)}


@dataclass(frozen=True)
class Endpoint:
    """A part of a dataset.

    Attributes:
        ticket: The identifier to request the part with. It gives access to the part.
        locations: The URIs at which the part can be requested, nearest first. They are empty if its node does not
            respond. An endpoint of another Flight server may also have none, which means that server itself.
        hosts: The hosts of the nodes that have the part; empty for endpoints of other Flight servers.
        rows: The number of rows; None if the catalog does not know it.
        seen: The time of the last heartbeat of these nodes, in seconds since the epoch; 0 if the catalog does not tell.
    """

    ticket: bytes = field(repr=False)  # The ticket gives access to the data, so it is not shown.
    locations: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    rows: int | None = None
    seen: float = field(default=0.0, compare=False)  # differs between two looks at the same version

    @classmethod
    def parse(cls, endpoint: Any) -> Self:
        """Return the endpoint in a FlightEndpoint."""
        metadata = _parse_app_metadata(endpoint.app_metadata, _PART_FIELDS)
        nodes = metadata.get("nodes", ())
        is_complete = all(has_fields(node, _NODE_FIELDS) for node in nodes)
        return cls(
            ticket=endpoint.ticket.ticket,
            locations=tuple(location.uri.decode(errors="replace") for location in endpoint.locations),
            hosts=tuple(node["host"] for node in nodes) if is_complete else (),
            rows=metadata.get("rows") if is_complete else None,
            seen=max((_moment(node.get("seen")) for node in nodes), default=0.0) if is_complete else 0.0,
        )

    @property
    def is_away(self) -> bool:
        """Whether the part cannot be read, because no node with it is alive."""
        return bool(self.hosts and not self.locations)

    @property
    def schemes(self) -> list[str]:
        """The schemes of the locations, such as `shm`, `tcp` and `grpc`."""
        schemes = {uri.partition(":")[0] for uri in self.locations}
        known_schemes = schemes - {_REUSE_CONNECTION}
        return sorted(known_schemes) or (["grpc"] if flight_uris(self) else [])

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f" of {plural(self.rows, 'row')}"
        return f"<Endpoint{rows} on {self._hosts}, at {', '.join(self._places)}>"

    def _repr_html_(self) -> str:
        rows = [] if self.rows is None else [plural(self.rows, "row")]
        return html("Endpoint", [*rows, f"on {self._hosts}"], html_table(["at"], [[place] for place in self._places]))

    @property
    def _hosts(self) -> str:
        return ", ".join(dict.fromkeys(self.hosts)) or "an unknown host"

    @property
    def _places(self) -> list[str]:
        """The locations without their parameters, which only programs need."""
        places = (place.partition("?")[0] for place in self.locations)
        named = [*dict.fromkeys(place for place in places if not place.startswith(_REUSE_CONNECTION))]
        return named or (["the server that told of it"] if flight_uris(self) else ["no place now"])


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

    @classmethod
    def parse(cls, info: Any, schema: pa.Schema, name: str) -> Self:
        """Return the description in a FlightInfo of the dataset `name`."""
        metadata = _parse_app_metadata(info.app_metadata, _VERSION_FIELDS)
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
        )

    def __repr__(self) -> str:
        head, rows = self._columns(_NAME_WIDTH, _WIDTH - _NAME_WIDTH - 2)
        cut = ["(types that end in … are whole in .schema)"] if any(row[-1].endswith("…") for row in rows) else []
        return "\n".join(
            [
                f"{shorten(self.name, _NAME_WIDTH)}{self._version_text}",
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
                [column.type, " x ".join(map(str, column.shape)), column.format]
                for column in tensors.first[:_MAX_LINES]
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
        table = plain_table(self._HEAD, self._rows(_NAME_WIDTH), self._RIGHT)
        return "\n".join([table, *self._omitted]) if self else "no datasets"

    def _repr_html_(self) -> str:
        table = html_table(self._HEAD, self._rows(_HTML_WIDTH), self._RIGHT)
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
                " ".join(info.schemes),
            ]
            for info in self[:_MAX_LINES]
        ]

    @property
    def _omitted(self) -> list[str]:
        more = len(self) - _MAX_LINES
        return [f"and {count(more)} more"] if more > 0 else []


def locations(endpoint: Endpoint) -> list[list[Uri]]:
    """Return the routes to an endpoint that this library supports.

    Each route is one URI, or a pair of URIs for metadata and for bodies. Locations are alternatives, except in such a
    pair. The URIs of a pair have the parameter `stream`. The C++ reference instead gives exactly two URIs of one scheme
    that differ in `want_data`.
    """
    schemes = registry.schemes()
    uris = []
    for text in endpoint.locations:
        try:
            uri = Uri.parse(text)
        except UriError:
            continue
        if uri.scheme in schemes and uri.want_data is not None:
            uris.append(uri)
    on_device = any(DEVICE in uri.parameters for uri in uris)
    if len(uris) == 2 == len(endpoint.locations) and uris[0].scheme == uris[1].scheme and not on_device:
        marked = {uri.parameters.get("stream"): uri for uri in uris}
        if marked.keys() == {"metadata", "bodies"}:
            return [[marked["metadata"], marked["bodies"]]]
        if uris[0].want_data != uris[1].want_data:
            return [uris]
    single = [[uri] for uri in uris if "stream" not in uri.parameters]
    metadata = [uri for uri in uris if uri.parameters.get("stream") == "metadata"]
    bodies = [uri for uri in uris if uri.parameters.get("stream") == "bodies"]
    return single + [[metadata_uri, bodies_uri] for metadata_uri in metadata for bodies_uri in bodies]


def flight_uris(endpoint: Endpoint) -> list[str | None]:
    """Return the URIs at which DoGet serves an endpoint. None stands for the server that described it, and is first."""
    if endpoint.hosts:  # A catalog of ours relays all parts of its nodes.
        return [None] if endpoint.locations else []
    if not endpoint.locations:
        return [None]
    schemes = [(uri.partition(":")[0], uri) for uri in endpoint.locations]
    here = [None] if any(scheme == _REUSE_CONNECTION for scheme, _ in schemes) else []
    return [*here, *(uri for scheme, uri in schemes if scheme.partition("+")[0] == "grpc")]


def descriptor_name(descriptor: Any) -> str:
    """Return the name in a FlightDescriptor."""
    content = b"/".join(descriptor.path or ()) or descriptor.command or b""
    return content.decode(errors="backslashreplace")


def _moment(seconds: object) -> float:
    """Return a time in a catalog's answer; 0 if it is missing or invalid."""
    return float(seconds) if isinstance(seconds, int | float) and is_moment(seconds) else 0.0


def _parse_app_metadata(content: bytes, fields: FieldTypes) -> dict[str, Any]:
    """Return the fields that our catalogs add to Flight messages; an empty dict for another server's metadata."""
    try:
        plain = strict_json.loads(content or b"{}")
    except ValueError:
        return {}
    return plain if has_fields(plain, fields) else {}


def device_routes(endpoint: Endpoint, scheme: str | None, identity: str) -> list[Uri]:
    """Return the URIs at which the device addresses of an endpoint can be requested.

    Args:
        endpoint: The endpoint.
        scheme: The scheme that the URIs must have; None for any.
        identity: The identity of the device that must hold the data.
    """
    return [
        uri
        for route in locations(endpoint)
        for uri in route
        if uri.parameters.get(DEVICE) == identity
        and scheme in (None, uri.scheme)
        and registry.transport(uri.scheme).reachable(uri)
    ]


def describe_away(name: str, hosts: Sequence[str], seen: float) -> str:
    """Return a sentence about a part of the dataset `name` that cannot be read, because no node with it is alive.

    Args:
        name: The name of the dataset.
        hosts: The hosts of the nodes.
        seen: The time of their last heartbeat, in seconds since the epoch; 0 if it is unknown.
    """
    since = f" since {datetime.fromtimestamp(seen, UTC):%Y-%m-%d %H:%M:%S} UTC" if seen else ""
    return (
        f"a part of {name!r} is on {', '.join(hosts)}, and no node there is alive{since}: start the node again. If it "
        f"will not come back, remove it with its datasets: dissociated forget {hosts[0] if hosts else 'NODE'}"
    )


def reachable_routes(name: str, endpoint: Endpoint, scheme: str | None, allow_rma: bool) -> list[list[Uri]]:
    """Return the routes by which this process can reach an endpoint, nearest first.

    Args:
        name: The name of the dataset, for messages.
        endpoint: The endpoint.
        scheme: The scheme that the routes must have; None for any.
        allow_rma: Whether to include routes by remote memory access.

    Returns:
        The routes. They are empty if only Flight reaches the endpoint.

    Raises:
        NodeUnreachable: Its node does not respond.
        CatalogError: No route and no Flight server reaches it.
    """
    if endpoint.is_away:
        raise NodeUnreachable(describe_away(name, endpoint.hosts, endpoint.seen))
    routes = [
        uris
        for uris in locations(endpoint)
        if (scheme is None or uris[0].scheme == scheme)
        and (allow_rma or uris[-1].remote_handle is None)
        and DEVICE not in uris[-1].parameters
        and all(registry.transport(uri.scheme).reachable(uri) for uri in uris)
    ]
    by_flight = flight_uris(endpoint)
    if not routes and (scheme is not None or not by_flight):
        offered = ", ".join(sorted({*endpoint.schemes, *(["grpc"] if by_flight else [])}))
        raise CatalogError(
            f"{name!r} cannot be reached from here by {scheme or 'any transport'}: it is offered by {offered}"
        )
    # The sort is stable, so routes of equal preference keep the order of the server.
    return sorted(routes, key=_preference, reverse=True)


def _preference(uris: Sequence[Uri]) -> tuple[int, bool, bool]:
    medium = registry.transport(uris[-1].scheme)
    return medium.locality, medium.encrypted, uris[-1].remote_handle is not None

"""Where a dataset can be read: endpoints, and what is told of a dataset."""

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
from dissociated.datasets.tensor_info import TensorsInfo, parse_tensors_info
from dissociated.errors import CatalogError, UriError
from dissociated.transport import registry
from dissociated.uri import DEVICE, Uri

_WIDTH = 60  # characters, of what is shown to people
_MAX_LINES = 40  # of a table that is shown

_REUSE_CONNECTION = "arrow-flight-reuse-connection"  # a scheme: the server that has told of the endpoint

#: What our catalogs tell in `app_metadata`, and of which type: of a version, of a part, and of a node that has it.
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

    - `ticket`: the identifier to ask with. Whoever has it can read.
    - `locations`: the URIs that can be asked, the nearest first. None of them where its node says nothing any more; or,
      of a Flight server of somebody else's, where that server itself is to be asked.
    - `hosts`: where that node is. None of them where a server of somebody else's told of it.
    - `rows`: how many it has. None where the catalog does not know.
    """

    ticket: bytes = field(repr=False)  # whoever has it can read
    locations: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    rows: int | None = None

    @classmethod
    def parse(cls, endpoint: Any) -> Self:
        """From a FlightEndpoint."""
        told = _parse_app_metadata(endpoint.app_metadata, _PART_FIELDS)
        nodes = told.get("nodes", ())
        ours = all(has_fields(node, _NODE_FIELDS) for node in nodes)
        return cls(
            ticket=endpoint.ticket.ticket,
            locations=tuple(location.uri.decode(errors="replace") for location in endpoint.locations),
            hosts=tuple(node["host"] for node in nodes) if ours else (),
            rows=told.get("rows") if ours else None,
        )

    @property
    def schemes(self) -> list[str]:
        """How it can be read, as far as its locations say: shm, tcp, grpc."""
        schemes = {one.partition(":")[0] for one in self.locations}
        named = schemes - {_REUSE_CONNECTION}
        return sorted(named) or (["grpc"] if flight_uris(self) else [])

    def __repr__(self) -> str:
        rows = "" if self.rows is None else f" of {plural(self.rows, 'row')}"
        return f"<Endpoint{rows} on {self._hosts}, at {', '.join(self._places)}>"

    def _repr_html_(self) -> str:
        rows = [] if self.rows is None else [plural(self.rows, "row")]
        return html("Endpoint", [*rows, f"on {self._hosts}"], html_table(["at"], [[one] for one in self._places]))

    @property
    def _hosts(self) -> str:
        return ", ".join(dict.fromkeys(self.hosts)) or "an unknown host"

    @property
    def _places(self) -> list[str]:
        """Where it can be asked for, without what only programs need."""
        places = (one.partition("?")[0] for one in self.locations)
        named = [*dict.fromkeys(one for one in places if not one.startswith(_REUSE_CONNECTION))]
        return named or (["the server that told of it"] if flight_uris(self) else ["no place now"])


@dataclass(frozen=True)
class DatasetInfo:
    """What a catalog says of a dataset.

    - `rows`, `nbytes`: how many rows and bytes it has. None where the catalog does not know.
    - `endpoints`: its parts, in order.
    - `version`: changes with every commit, also one that appends.
    - `created`, `expires`: seconds since the epoch. `expires` is None for a dataset without a time to live.
    - `tags`: as they were given to `Client.put`.
    - `lineage_id`: changes when the dataset is replaced or dropped, and not when something is appended. While it stays,
      rows keep their positions.
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
        """From a FlightInfo of the dataset `name`."""
        told = _parse_app_metadata(info.app_metadata, _VERSION_FIELDS)
        if not (is_moment(told.get("created")) and is_moment(told.get("expires"))):
            told = {}
        least = 0 if told else 1  # in a message of others, 0 may be what nobody has set
        return cls(
            name=name,
            schema=schema,
            rows=info.total_records if info.total_records >= least else None,
            nbytes=info.total_bytes if info.total_bytes >= least else None,
            endpoints=tuple(map(Endpoint.parse, info.endpoints)),
            version=told.get("version", 0),
            created=told.get("created", 0.0),
            expires=told.get("expires"),
            tags=told.get("tags") or {},
            lineage_id=told.get("began") or "",
        )

    def __repr__(self) -> str:
        head, rows = self._columns
        return "\n".join(
            [f"{shorten(self.name, 24)}{self._which}", *self._about, "", plain_table(head, rows), *self._rest]
        )

    def _repr_html_(self) -> str:
        return html(self.name, [f"{self._which.strip(', ')}", *self._about], html_table(*self._columns), *self._rest)

    @property
    def schemes(self) -> list[str]:
        """How it can be read: shm, tcp, grpc."""
        return sorted({one for endpoint in self.endpoints for one in endpoint.schemes})

    @property
    def size(self) -> str:
        """Rows and bytes, for people."""
        tensors = self.tensors
        number = self.rows if tensors is None else tensors.number
        what = "row" if tensors is None else "tensor"
        return (
            f"{'unknown' if number is None else count(number)} {what}{'' if number == 1 else 's'}, {size(self.nbytes)}"
        )

    @property
    def _which(self) -> str:
        if not self.version:
            return ""
        return f", version {self.version} of {datetime.fromtimestamp(self.created, UTC):%Y-%m-%d %H:%M:%S} UTC"

    @property
    def _about(self) -> list[str]:
        parts = "" if len(self.endpoints) == 1 else f" in {count(len(self.endpoints))} parts"
        lines = [f"{self.size}{parts}, over {', '.join(self.schemes) or 'no transport now'}"]
        if self.expires is not None:
            lines.append(f"until {datetime.fromtimestamp(self.expires, UTC):%Y-%m-%d %H:%M:%S} UTC")
        if self.tags:
            lines.append("tags: " + shorten(", ".join(f"{key}={value}" for key, value in self.tags.items()), _WIDTH))
        return lines

    @property
    def _columns(self) -> tuple[list[str], list[list[str]]]:
        tensors = self.tensors
        if tensors is not None:
            shapes = [[one.type, " x ".join(map(str, one.shape)), one.format] for one in tensors.first[:_MAX_LINES]]
            return ["type", "shape", "format"], shapes
        shown = (self.schema.field(index) for index in range(min(len(self.schema), _MAX_LINES)))
        return ["column", "type"], [
            [shorten(one.name, 24), shorten(f"{one.type}{'' if one.nullable else ' not null'}", _WIDTH - 26)]
            for one in shown
        ]

    @property
    def _rest(self) -> list[str]:
        tensors = self.tensors
        more = (len(self.schema) if tensors is None else tensors.number) - _MAX_LINES
        return [f"and {count(more)} more"] if more > 0 else []

    @property
    def tensors(self) -> TensorsInfo | None:
        """What tensors it has; None for a dataset of record batches."""
        return parse_tensors_info(self.schema)


class DatasetList(list[DatasetInfo]):
    """Datasets, shown as a table."""

    _HEAD = ("name", "rows", "size", "columns", "version", "over")
    _RIGHT = (1, 2, 3, 4)

    def __repr__(self) -> str:
        return "\n".join([plain_table(self._HEAD, self._rows, self._RIGHT), *self._rest]) if self else "no datasets"

    def _repr_html_(self) -> str:
        return html_table(self._HEAD, self._rows, self._RIGHT) + "".join(self._rest) if self else "no datasets"

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [
                shorten(info.name, 24),
                count(info.rows),
                size(info.nbytes),
                count(len(info.schema)),
                count(info.version),
                " ".join(info.schemes),
            ]
            for info in self[:_MAX_LINES]
        ]

    @property
    def _rest(self) -> list[str]:
        more = len(self) - _MAX_LINES
        return [f"and {count(more)} more"] if more > 0 else []


def locations(endpoint: Endpoint) -> list[list[Uri]]:
    """The ways to reach an endpoint that this library knows: each one URI, or one for metadata and one for bodies.

    Locations are alternatives, but for a pair: marked by a `stream` parameter or, as the C++ reference does it,
    exactly two of one scheme that differ in want_data.
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
    return single + [[one, other] for one in metadata for other in bodies]


def flight_uris(endpoint: Endpoint) -> list[str | None]:
    """Where Flight's DoGet is answered for an endpoint. None is the server that has told of it, and stands first."""
    if endpoint.hosts:  # it is a catalog of ours, which answers for all its parts
        return [None] if endpoint.locations else []
    if not endpoint.locations:
        return [None]
    schemes = [(one.partition(":")[0], one) for one in endpoint.locations]
    here = [None] if any(scheme == _REUSE_CONNECTION for scheme, _ in schemes) else []
    return [*here, *(one for scheme, one in schemes if scheme.partition("+")[0] == "grpc")]


def descriptor_name(descriptor: Any) -> str:
    """The name that a FlightDescriptor stands for."""
    content = b"/".join(descriptor.path or ()) or descriptor.command or b""
    return content.decode(errors="backslashreplace")


def _parse_app_metadata(content: bytes, fields: FieldTypes) -> dict[str, Any]:
    """What a catalog of ours tells beside what Flight says; nothing where that is somebody else's, whatever it is."""
    try:
        plain = strict_json.loads(content or b"{}")
    except ValueError:
        return {}
    return plain if has_fields(plain, fields) else {}


def device_routes(endpoint: Endpoint, scheme: str | None, identity: str) -> list[Uri]:
    """Where an endpoint that lies on the device of that identity can be asked for by its addresses there."""
    return [
        uri
        for route in locations(endpoint)
        for uri in route
        if uri.parameters.get(DEVICE) == identity
        and scheme in (None, uri.scheme)
        and registry.transport(uri.scheme).reachable(uri)
    ]


def reachable(name: str, endpoint: Endpoint, scheme: str | None, allow_rma: bool) -> list[list[Uri]]:
    """The ways by which an endpoint of `name` can be reached from here, the nearest first; none where only Flight does.

    Raises CatalogError where nothing does.
    """
    if not endpoint.locations and endpoint.hosts:
        raise CatalogError(
            f"a part of {name!r} is on {', '.join(endpoint.hosts)}, whose node says nothing any more: is it running?"
        )
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
    return sorted(routes, key=_preference, reverse=True)  # which leaves those that are alike in their order


def _preference(uris: Sequence[Uri]) -> tuple[int, bool, bool]:
    medium = registry.transport(uris[-1].scheme)
    return medium.locality, medium.encrypted, uris[-1].remote_handle is not None

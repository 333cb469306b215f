"""Parts of datasets, and the locations at which they can be requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import NoneType
from typing import Any, Self

from dissociated.base.display import html, html_table, plural, utc
from dissociated.control.messages import FieldTypes, has_fields, moment, parse_app_metadata
from dissociated.errors import CatalogError, NodeUnreachable, UriError
from dissociated.transport import registry
from dissociated.uri import DEVICE, Uri

#: The largest IPC stream that a catalog sends with the description of a dataset, in bytes.
MAX_EMBEDDED = 1 << 16
_BEFORE_EMBEDDED = b"\0"  # between the JSON of an endpoint, which has no such byte, and its IPC stream
_parse_uri = lru_cache(256)(Uri.parse)
_REUSE_CONNECTION = "arrow-flight-reuse-connection"  # A scheme that stands for the server that described the endpoint

#: The fields in the `app_metadata` of our catalogs, with their types: of a part, and of a node with the part.
_PART_FIELDS: FieldTypes = {
    "nodes": (list,),
    "rows": (int, NoneType),
    "part": (str, NoneType),
    "set_aside": (bool, NoneType),
}
_NODE_FIELDS: FieldTypes = {"id": (str,), "host": (str,), "boot_id": (str,)}


@dataclass(frozen=True)
class Endpoint:
    """A part of a dataset.

    Attributes:
        ticket: The identifier to request the part with. It gives access to the part.
        locations: The URIs at which the part can be requested, nearest first. They are empty if its node does not
            respond, or has set the part aside. An endpoint of another Flight server may also have none, which means
            that server itself.
        hosts: The hosts of the nodes that have the part; empty for endpoints of other Flight servers.
        rows: The number of rows; None if the catalog does not know it.
        part: The id of this publication; None if the ticket tells it apart from all others.
        set_aside: Whether the node with the part could not read it at its start.
        seen: The time of the last heartbeat of these nodes, in seconds since the epoch; 0 if the catalog does not tell.
        embedded: All rows of the part as an IPC stream, if the catalog has sent them with the description.
    """

    ticket: bytes = field(repr=False)  # The ticket gives access to the data, so it is not shown.
    locations: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    rows: int | None = None
    part: str | None = None
    set_aside: bool = False
    seen: float = field(default=0.0, compare=False)  # differs between two looks at the same version
    embedded: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def parse(cls, endpoint: Any) -> Self:
        """Return the endpoint in a FlightEndpoint."""
        text, _, embedded = endpoint.app_metadata.partition(_BEFORE_EMBEDDED)
        metadata = parse_app_metadata(text, _PART_FIELDS)
        nodes = metadata.get("nodes", ())
        is_complete = all(has_fields(node, _NODE_FIELDS) for node in nodes)
        return cls(
            ticket=endpoint.ticket.ticket,
            locations=tuple(location.uri.decode(errors="replace") for location in endpoint.locations),
            hosts=tuple(node["host"] for node in nodes) if is_complete else (),
            rows=metadata.get("rows") if is_complete else None,
            part=metadata.get("part") if is_complete else None,
            set_aside=is_complete and bool(metadata.get("set_aside")),
            seen=max((moment(node.get("seen")) for node in nodes), default=0.0) if is_complete else 0.0,
            embedded=embedded if is_complete and nodes and 0 < len(embedded) <= MAX_EMBEDDED else None,
        )

    @property
    def is_away(self) -> bool:
        """Whether the part cannot be read: no node with it is alive, or its node has set it aside."""
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
            uri = _parse_uri(text)
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


def with_embedded(metadata: str, stream: bytes | None) -> bytes:
    """Return the `app_metadata` of an endpoint: its JSON, and all its rows as an IPC stream if they are given."""
    return metadata.encode() if stream is None else _BEFORE_EMBEDDED.join((metadata.encode(), stream))


def has_embedded(metadata: bytes) -> bool:
    """Return whether the `app_metadata` of an endpoint has all its rows."""
    return _BEFORE_EMBEDDED in metadata


def flight_uris(endpoint: Endpoint) -> list[str | None]:
    """Return the URIs at which DoGet serves an endpoint. None stands for the server that described it, and is first."""
    if endpoint.hosts:  # A catalog of ours relays all parts of its nodes.
        return [None] if endpoint.locations else []
    if not endpoint.locations:
        return [None]
    schemes = [(uri.partition(":")[0], uri) for uri in endpoint.locations]
    here = [None] if any(scheme == _REUSE_CONNECTION for scheme, _ in schemes) else []
    return [*here, *(uri for scheme, uri in schemes if scheme.partition("+")[0] == "grpc")]


def unavailable(name: str, hosts: Sequence[str], seen: float, set_aside: bool) -> CatalogError:
    """Return the error about a part of the dataset `name` that no node can serve now.

    Args:
        name: The name of the dataset.
        hosts: The hosts of the nodes.
        seen: The time of their last heartbeat, in seconds since the epoch; 0 if it is unknown.
        set_aside: Whether a node could not read the part at its start. If not, no node with the part is alive, and the
            error is NodeUnreachable.
    """
    if set_aside:
        return CatalogError(
            f"a part of {name!r} is set aside on {', '.join(hosts)}, because the node there could not read it when it "
            "started: repair the entry that the status of that node names, and start the node again; if its rows are "
            "lost, drop the dataset, or put all rows again with the mode overwrite"
        )
    last = f" (last heard {utc(seen)})" if seen else ""
    return NodeUnreachable(
        f"a part of {name!r} is on {', '.join(hosts)}, and no node there is alive{last}: start the node again, or, "
        f"if it will not come back, remove it with its datasets: dissociated forget {hosts[0] if hosts else 'NODE'}"
    )

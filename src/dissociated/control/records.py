"""Records of nodes, the parts that they hold, and versions of datasets, as a catalog keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeRecord:
    """A process that serves parts.

    Attributes:
        id: The id of the node, which is that of its store or stage.
        host: The name of its host.
        boot_id: The boot id of its kernel.
        flight: The URI of the node's own catalog.
        locations: The URIs of its transports.
        seen: The time of its last heartbeat, in seconds since the epoch.
        alive: Whether its heartbeats are on time.
    """

    id: str
    host: str
    boot_id: str
    flight: str
    locations: tuple[str, ...]
    seen: float = 0.0
    alive: bool = True


@dataclass(frozen=True)
class Part:
    """The data that one node holds under one ticket.

    Attributes:
        id: The id of the part.
        node: The id of the node.
        ticket: The identifier of the data.
        rows: The number of rows; None if unknown.
        nbytes: The number of bytes; None if unknown.
        number: The position among the parts of a version.
        serial: A number that grows with every part that the node creates.
    """

    id: str
    node: str
    ticket: bytes
    rows: int | None = None
    nbytes: int | None = None
    number: int = 0
    serial: int = 0


@dataclass(frozen=True)
class AnnouncedVersion:
    """A version in the store of a node, as the node reports it.

    Attributes:
        part: The version as one part.
        name: The name of the dataset.
        key: The key of the commit.
        schema: The schema, serialized; empty if it cannot be read at present.
        created: The time of the commit, in seconds since the epoch.
        prepared: Whether the version is not yet known to be published.
        whole: Whether the part is the whole dataset. If False, a catalog publishes it with the parts of other nodes.
        tags: The tags of the version.
        ttl: The time to live in seconds; None if the version does not expire.
        before: The keys of the earlier commits to which this one appended.
        version: The number that a catalog assigned; 0 if an older library wrote the version.
        catalog: The id of that catalog's database.
    """

    part: Part
    name: str
    key: str
    schema: bytes
    created: float
    prepared: bool = False
    whole: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)
    ttl: float | None = None
    before: Sequence[str] = ()
    version: int = 0
    catalog: int = 0


@dataclass(frozen=True)
class ReplicatedPart:
    """A part, with all nodes that hold it under its ticket."""

    ticket: bytes
    nodes: tuple[NodeRecord, ...]
    rows: int | None = None


@dataclass(frozen=True)
class VersionRecord:
    """A version of a dataset. Times are in seconds since the epoch.

    Attributes:
        version: The number of the version, counted from 1 for each dataset. No number is used twice.
        name: The name of the dataset.
        schema: The schema, serialized.
        rows: The number of rows; None if unknown.
        nbytes: The number of bytes; None if unknown.
        tags: The tags of the version.
        created: The time of the commit.
        expires: The time of expiry; None if the version does not expire.
        lineage_id: The key of the commit that began the lineage. All versions of a lineage begin with the same rows.
        current: Whether no later version has replaced this one.
        parts: The parts of the version, in order.
    """

    version: int
    name: str
    schema: bytes
    rows: int | None
    nbytes: int | None
    tags: Mapping[str, str]
    created: float
    expires: float | None
    lineage_id: str
    current: bool
    parts: tuple[ReplicatedPart, ...]

    def merged_options(self, tags: Mapping[str, str], ttl: float | None) -> tuple[Mapping[str, str], float | None]:
        """Return the tags and time to live of a version that appends to this one. Omitted options keep their values."""
        if ttl is None and self.expires is not None:
            ttl = self.expires - self.created
        return {**self.tags, **tags}, ttl

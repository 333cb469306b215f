"""Nodes, the parts that they hold, and versions of datasets, as a catalog's database has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeRecord:
    """A process that serves parts.

    - `boot_id`: of the kernel that it runs on.
    - `flight`: the URI where its own catalog answers.
    - `locations`: the URIs of its transports.
    - `seen`: its last heartbeat, in seconds since the epoch.
    - `alive`: whether its heartbeats are still in time.
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
    """What one node holds under one ticket.

    `node` is the id of the node, `number` the place among the parts of a version. `serial` grows with every part that
    the node makes.
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
    """A version in the store of a node, as the node tells it. `schema` is empty where it cannot be read now."""

    part: Part
    name: str
    key: str
    schema: bytes
    created: float
    prepared: bool = False
    whole: bool = True
    tags: Mapping[str, str] = field(default_factory=dict)
    ttl: float | None = None
    #: the keys of the commits that this one was appended to
    before: Sequence[str] = ()
    #: the number that a catalog gave it; 0 where an older library wrote it
    version: int = 0
    #: tells the database of that catalog from all others
    catalog: int = 0


@dataclass(frozen=True)
class ReplicatedPart:
    """A part, and all nodes that hold it under its ticket."""

    ticket: bytes
    nodes: tuple[NodeRecord, ...]
    rows: int | None = None


@dataclass(frozen=True)
class VersionRecord:
    """One version of a dataset. Times are seconds since the epoch.

    `version` is its number, counted for each dataset from 1. No number is used twice.

    `lineage_id` is the key of the commit that began the lineage. All versions of a lineage have it, and begin with the
    same rows. `current` says whether no other version has replaced it.
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
        """The tags and the time to live of a version that more is appended to: what is not said stays as it was."""
        if ttl is None and self.expires is not None:
            ttl = self.expires - self.created
        return {**self.tags, **tags}, ttl

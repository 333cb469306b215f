"""A version of a dataset, its parts, and the nodes that hold them."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dissociated.control.commit import Commit


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

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> NodeRecord:
        """Return the node that JSON describes, without the state that only a catalog knows.

        Raises:
            KeyError, TypeError, ValueError: A value is missing or unknown. The other classes here raise the same.
        """
        return cls(
            str(plain["id"]),
            str(plain["host"]),
            str(plain["boot_id"]),
            str(plain["flight"]),
            tuple(str(uri) for uri in plain["locations"]),
        )


@dataclass(frozen=True)
class Part:
    """The data that one node holds under one ticket.

    Attributes:
        id: The id of the part, which is unique among the parts of all nodes.
        node: The id of the node; empty in a store, which does not know its node.
        ticket: The identifier of the data.
        rows: The number of rows; None if unknown.
        nbytes: The number of bytes of all message bodies; None if unknown.
        number: The position among the parts of a version.
        serial: A number that grows with every part that the node creates.
        nodes: The nodes that hold the part, or a copy of it under the same ticket. Only a catalog knows them. A node
            that has set the part aside counts as away.
        set_aside: Whether a node could not read the part at its start, and no other node can serve the part. Only a
            catalog knows this.
    """

    id: str
    node: str
    ticket: bytes
    rows: int | None = None
    nbytes: int | None = None
    number: int = 0
    serial: int = 0
    nodes: tuple[NodeRecord, ...] = ()
    set_aside: bool = False

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Part:
        """Return the part in the result of `to_json`."""
        return cls(**{**plain, "ticket": base64.b64decode(plain["ticket"], validate=True), "nodes": ()})

    def to_json(self) -> dict[str, Any]:
        """Return the part as JSON, without what only a catalog knows."""
        plain = asdict(self)
        del plain["nodes"], plain["set_aside"]
        return {**plain, "ticket": base64.b64encode(self.ticket).decode()}


@dataclass(frozen=True)
class Version:
    """A version of a dataset: the result of a commit. A store holds it as one part, a catalog as one part or more.

    Attributes:
        name: The name of the dataset.
        key: The key of the commit; empty if unknown.
        schema: The schema, serialized.
        created: The time of the commit, in seconds since the epoch.
        parts: The parts, in order.
        tags: The tags.
        ttl: The time to live in seconds; None if the version does not expire.
        before: The keys of the earlier commits to which this one appended, oldest first. If the append began a new
            lineage, its own key comes before them. A catalog keeps only the first key, which is the `lineage_id`.
        number: The number of the version, which the catalog assigned, counted from 1 for each dataset. No number is
            used twice. It is 0 until a catalog has assigned it.
        catalog: The id of that catalog's database.
        prepared: True until the version is known to be published.
        whole: Whether the part in a store is the whole dataset. If False, a catalog publishes it with the parts of
            other nodes.
        current: Whether no later version has replaced this one. Only a catalog knows this.
        segments_digest: A digest of the names of the committed segments, which tells a repeated call from a new
            attempt.
    """

    name: str
    key: str
    schema: bytes
    created: float
    parts: tuple[Part, ...]
    tags: Mapping[str, str] = field(default_factory=dict)
    ttl: float | None = None
    before: tuple[str, ...] = ()
    number: int = 0
    catalog: int = 0
    prepared: bool = False
    whole: bool = True
    current: bool = True
    segments_digest: str = ""

    @classmethod
    def of(cls, commit: Commit, schema: bytes, created: float, parts: Iterable[Part], **state: Any) -> Version:
        """Return the version that a commit makes of `parts`, whose schema is `schema`."""
        return cls(
            commit.name,
            commit.key,
            schema,
            created,
            tuple(parts),
            tags=commit.tags,
            ttl=commit.ttl,
            number=commit.number,
            catalog=commit.catalog,
            **state,
        )

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Version:
        """Return the version in the result of `to_json`."""
        values = {**plain}
        return cls(
            parts=(Part.parse(values.pop("part")),),
            schema=base64.b64decode(values.pop("schema"), validate=True),
            before=tuple(values.pop("before")),
            number=values.pop("version"),
            segments_digest=values.pop("staged", ""),
            **values,
        )

    def to_json(self) -> dict[str, Any]:
        """Return a version in a store as JSON, as a node reports it to a catalog."""
        plain = {**vars(self), "part": self.part.to_json(), "version": self.number}
        for name in ("parts", "number", "current", "segments_digest"):
            del plain[name]
        return {**plain, "schema": base64.b64encode(self.schema).decode()}

    @property
    def part(self) -> Part:
        """The only part of a version in a store."""
        (part,) = self.parts
        return part

    @property
    def id(self) -> str:
        """The id of the only part, which is that of the version in a store."""
        return self.part.id

    @property
    def ticket(self) -> bytes:
        """The ticket of the only part."""
        return self.part.ticket

    @property
    def serial(self) -> int:
        """The serial number of the commit in a store. It grows with every commit, of any dataset."""
        return self.part.serial

    @property
    def rows(self) -> int | None:
        """The number of rows; None if unknown."""
        return sum_known(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int | None:
        """The number of bytes of all message bodies; None if unknown."""
        return sum_known(part.nbytes for part in self.parts)

    @property
    def expires(self) -> float | None:
        """The time of expiry, in seconds since the epoch; None if the version does not expire."""
        return None if self.ttl is None else self.created + self.ttl

    @property
    def lineage_id(self) -> str:
        """The key of the commit that began the lineage. All versions of a lineage begin with the same rows."""
        return (*self.before, self.key)[0]

    def merged_options(self, tags: Mapping[str, str], ttl: float | None) -> tuple[Mapping[str, str], float | None]:
        """Return the tags and time to live of a version that appends to this one. Omitted options keep their values."""
        return {**self.tags, **tags}, self.ttl if ttl is None else ttl


def sum_known(numbers: Iterable[int | None]) -> int | None:
    """Return the sum, or None if one of the numbers is unknown."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total

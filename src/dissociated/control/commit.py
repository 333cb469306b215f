"""A commit: the request to publish staged segments as a version of a dataset.

A commit goes unchanged from the client through Flight, the catalog and the store into the catalog's database. The
sender checks it before any data moves, and the receiver checks it again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

import pyarrow as pa

from dissociated.codec import schemas
from dissociated.errors import OptionError

_MODES = ("overwrite", "append")
_MAX_TTL = 1e10  # seconds; the time of expiry is a date, and dates end with the year 9999


class StagedSegment(NamedTuple):
    """A segment in the stage of a node.

    - `name`: the name of the segment; empty if the node holds no rows.
    - `node`: the id of the node; empty for the node that is asked to commit.
    """

    name: str
    node: str = ""

    @classmethod
    def parse(cls, plain: Any) -> StagedSegment:
        """Return the segment in the result of `to_json`."""
        return cls(str(plain["segment"]), str(plain["node"])) if isinstance(plain, dict) else cls(str(plain))

    def to_json(self) -> str | dict[str, str]:
        """Return the segment as JSON: its name, or an object with its node and its name."""
        return {"node": self.node, "segment": self.name} if self.node else self.name


@dataclass(frozen=True)
class Commit:
    """The request to publish segments, in their order and all at once, as a version of a dataset.

    Example:
        ```python
        import pyarrow as pa
        from dissociated import Commit

        commit = Commit("flights", schema=pa.schema({"distance": pa.int64()}), tags={"year": "2026"})
        ```

    Attributes:
        name: The name of the dataset.
        segments: The segments, in order.
        schema: The schema of all segments, and of the dataset if there is no segment; None as long as it is not known.
        key: An identifier of the commit. A repeated commit has the key of the first, and changes nothing. A commit of
            another dataset with the same key is refused. If the key is empty, the catalog derives it from the names of
            the segments. Staged segments with the key before the last "-" of their names belong to the commit; those
            that are not among `segments` are removed.
        mode: `overwrite` to replace the dataset, or `append` to add rows to it.
        exists: The condition of the commit: whether the dataset must exist, or must not exist; None for no condition.
        tags: The tags of the new version.
        ttl: The time to live in seconds; None if the version does not expire.
        number: The number of the version, which the catalog assigns; 0 before that.
        catalog: The id of that catalog's database.

    Raises:
        OptionError: A value is invalid.
    """

    name: str
    segments: Sequence[StagedSegment] = ()
    schema: pa.Schema | None = None
    _: KW_ONLY
    key: str = ""
    mode: str = "overwrite"
    exists: bool | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    ttl: float | None = None
    number: int = 0
    catalog: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.mode not in _MODES:
            raise OptionError(f"the mode {self.mode!r} is neither overwrite nor append")
        if self.exists is not None and not isinstance(self.exists, bool):
            raise OptionError(f"the condition exists is true, false or null, not {self.exists!r}")
        if not isinstance(self.tags, Mapping) or not all(
            key and is_plain_text(key) and is_plain_text(value) for key, value in self.tags.items()
        ):
            raise OptionError(
                f"the tags {self.tags!r} are not plain texts by name: use texts without NUL characters and surrogates, "
                "and names that are not empty"
            )
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "tags", dict(self.tags))
        ttl = self.ttl
        if ttl is not None and not (_is_number(ttl) and 0 < ttl <= _MAX_TTL):
            raise OptionError(
                f"the ttl {ttl!r} is not a positive number of seconds up to {_MAX_TTL:.0f}: leave it out for a version "
                "that does not expire"
            )

    @property
    def append(self) -> bool:
        """Whether the segments follow those of the current version."""
        return self.mode == "append"

    @property
    def appends_to(self) -> str:
        """The name of the dataset if the segments follow those of its current version, or else an empty string."""
        return self.name if self.append else ""

    @property
    def segment_names(self) -> list[str]:
        """The names of the segments, in order."""
        return [segment.name for segment in self.segments]

    # Serialization

    @classmethod
    def parse_options(cls, plain: Mapping[str, Any], schema: pa.Schema | None = None) -> Commit:
        """Return the commit of a DoPut whose command is `plain` and whose stream has this `schema`."""
        return cls(
            plain["name"],
            schema=schema,
            key=str(plain.get("key") or ""),
            mode=plain.get("mode", "overwrite"),
            exists=plain.get("exists"),
            tags=plain.get("tags") or {},
            ttl=plain.get("ttl"),
        )

    def options(self) -> dict[str, Any]:
        """Return the commit without its segments and schema, as JSON. The command of a DoPut begins with it."""
        condition = {} if self.exists is None else {"exists": self.exists}
        plain = {"name": self.name, "mode": self.mode, "tags": {**self.tags}, "ttl": self.ttl, "key": self.key or None}
        return {**plain, **condition}

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> Commit:
        """Return the commit in the result of `to_json`.

        Raises:
            OptionError: A value is invalid.
            KeyError, TypeError, ValueError: A value is missing or of another type.
        """
        mode = "append" if plain["append"] else "overwrite"
        return replace(
            cls.parse_options({**plain, "mode": mode}, schemas.from_base64(plain["schema"])),
            segments=tuple(StagedSegment.parse(segment) for segment in plain["segments"]),
            number=int(plain.get("version") or 0),
            catalog=int(plain.get("catalog") or 0),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the commit as JSON. Raise OptionError if it has no schema."""
        if self.schema is None:
            raise OptionError(f"the commit of {self.name!r} has no schema: add the schema of its segments")
        return {
            **self.options(),
            "append": self.append,
            "segments": [segment.to_json() for segment in self.segments],
            "schema": schemas.to_base64(self.schema),
            **({"version": self.number, "catalog": self.catalog} if self.number else {}),
        }

    # Nodes

    def resolved(self, node: str) -> Commit:
        """Return this commit with a key, and with the id `node` in all segments that name no node.

        A commit without segments gets one segment without rows, on `node`.
        """
        segments = [StagedSegment(segment.name, segment.node or node) for segment in self.segments]
        key = self.key or _derived_key(self.name, segments)
        return replace(self, key=key, segments=segments or [StagedSegment("", node)])

    def by_node(self) -> dict[str, Commit]:
        """Return the commit of each node's own segments, by the id of the node."""
        segments: dict[str, list[StagedSegment]] = {}
        for segment in self.segments:
            segments.setdefault(segment.node, []).extend([StagedSegment(segment.name)] if segment.name else [])
        return {node: replace(self, segments=own) for node, own in segments.items()}


def check_name(name: object) -> None:
    """Raise OptionError if `name` cannot be the name of a dataset."""
    if not isinstance(name, str | int):  # the representation of a table would be all of its rows
        kind = type(name).__name__
        raise OptionError(f"the dataset name is a {kind}, and is not a non-empty text: give the name before the data")
    if not isinstance(name, str) or not name:
        raise OptionError(f"the dataset name {name!r} is not a non-empty text")
    if not is_plain_text(name):
        raise OptionError(f"the dataset name {name!r} has characters that other programs cannot write: use plain text")


def is_plain_text(value: object) -> bool:
    """Return whether `value` is a string that other programs can write, too: without surrogates and NUL characters."""
    return isinstance(value, str) and not any(char == "\0" or "\ud800" <= char <= "\udfff" for char in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _derived_key(name: str, segments: Sequence[StagedSegment]) -> str:
    """Return a key for a commit whose client sends none.

    The key is derived from the names of the segments, which are unique, so that a repeated call has the same key. A
    commit without segments has a random key.
    """
    if not segments:
        return secrets.token_hex(16)
    pairs = [(segment.node, segment.name) for segment in segments]
    return hashlib.sha256(json.dumps([name, pairs]).encode()).hexdigest()

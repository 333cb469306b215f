"""What nodes and catalogs tell each other, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from types import NoneType
from typing import Any, TypeAlias, TypeGuard

from dissociated.control.records import AnnouncedVersion, NodeRecord, Part

#: The extra information of an error of Flight: the catalog that this one asked has not answered.
NO_ANSWER = b"no answer"
#: Fields of an object in JSON, by name, each with the types that it may have.
FieldTypes: TypeAlias = Mapping[str, tuple[type, ...]]
#: What a catalog answers to `versions` and to `nodes`, for each.
VERSION_FIELDS: FieldTypes = {
    "version": (int,),
    "created": (int, float),
    "rows": (int, NoneType),
    "current": (bool,),
}
NODE_FIELDS: FieldTypes = {
    **dict.fromkeys(("id", "host", "boot_id", "flight"), (str,)),
    "locations": (list,),
    "alive": (bool,),
    "seen": (int, float),
}
_LAST_MOMENT = 253_402_300_800 - 86_400  # the year 9999 in all time zones, where calendars end


def has_fields(plain: object, fields: FieldTypes) -> TypeGuard[dict[str, Any]]:
    """Return whether `plain` is an object that has each of these fields."""
    return isinstance(plain, dict) and all(isinstance(plain.get(name), types) for name, types in fields.items())


def is_moment(seconds: float | None) -> bool:
    """Return whether a calendar has the moment so many seconds after the epoch. None is no moment, and passes."""
    return seconds is None or 0 <= seconds <= _LAST_MOMENT


def node_to_json(node: NodeRecord) -> dict[str, Any]:
    """A node, without what only the catalog knows of it."""
    return {
        "id": node.id,
        "host": node.host,
        "boot_id": node.boot_id,
        "flight": node.flight,
        "locations": [*node.locations],
    }


def node_from_json(plain: Mapping[str, Any]) -> NodeRecord:
    """The opposite of `node_to_json`. Raises KeyError, TypeError or ValueError, as all of these do."""
    return NodeRecord(
        id=str(plain["id"]),
        host=str(plain["host"]),
        boot_id=str(plain["boot_id"]),
        flight=str(plain["flight"]),
        locations=tuple(str(one) for one in plain["locations"]),
    )


def part_to_json(part: Part) -> dict[str, Any]:
    """A part of a dataset."""
    return {**asdict(part), "ticket": base64.b64encode(part.ticket).decode()}


def part_from_json(plain: Mapping[str, Any]) -> Part:
    """The opposite of `part_to_json`."""
    return Part(**{**plain, "ticket": base64.b64decode(plain["ticket"])})


def announced_to_json(one: AnnouncedVersion) -> dict[str, Any]:
    """A version in the store of a node."""
    return {
        **asdict(one),
        "part": part_to_json(one.part),
        "schema": base64.b64encode(one.schema).decode(),
        "tags": dict(one.tags),
    }


def announced_from_json(plain: Mapping[str, Any]) -> AnnouncedVersion:
    """The opposite of `announced_to_json`."""
    return AnnouncedVersion(
        **{**plain, "part": part_from_json(plain["part"]), "schema": base64.b64decode(plain["schema"])}
    )

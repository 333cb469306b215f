"""JSON messages between nodes and catalogs."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from types import NoneType
from typing import Any, TypeAlias, TypeGuard

from dissociated.control.records import AnnouncedVersion, NodeRecord, Part

#: The fields of a JSON object, by name, each with the types that it may have.
FieldTypes: TypeAlias = Mapping[str, tuple[type, ...]]
#: The fields of each entry in a catalog's answers to the actions `versions` and `nodes`.
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
_LAST_MOMENT = 253_402_300_800 - 86_400  # the end of the year 9999, when calendars end, less a day for time zones


def has_fields(plain: object, fields: FieldTypes) -> TypeGuard[dict[str, Any]]:
    """Return whether `plain` is an object that has each of these fields."""
    return isinstance(plain, dict) and all(isinstance(plain.get(name), types) for name, types in fields.items())


def is_moment(seconds: float | None) -> bool:
    """Return whether a calendar can represent the time `seconds` after the epoch. None, for no time, is accepted."""
    return seconds is None or 0 <= seconds <= _LAST_MOMENT


def node_to_json(node: NodeRecord) -> dict[str, Any]:
    """Return a node as JSON, without the state that only the catalog knows."""
    return {
        "id": node.id,
        "host": node.host,
        "boot_id": node.boot_id,
        "flight": node.flight,
        "locations": [*node.locations],
    }


def node_from_json(plain: Mapping[str, Any]) -> NodeRecord:
    """Return the node in the result of `node_to_json`.

    Raises:
        KeyError, TypeError, ValueError: The message is invalid. The other functions here raise the same errors.
    """
    return NodeRecord(
        id=str(plain["id"]),
        host=str(plain["host"]),
        boot_id=str(plain["boot_id"]),
        flight=str(plain["flight"]),
        locations=tuple(str(one) for one in plain["locations"]),
    )


def part_to_json(part: Part) -> dict[str, Any]:
    """Return a part of a dataset as JSON."""
    return {**asdict(part), "ticket": base64.b64encode(part.ticket).decode()}


def part_from_json(plain: Mapping[str, Any]) -> Part:
    """Return the part in the result of `part_to_json`."""
    return Part(**{**plain, "ticket": base64.b64decode(plain["ticket"])})


def announced_to_json(one: AnnouncedVersion) -> dict[str, Any]:
    """Return a version in the store of a node as JSON."""
    return {
        **asdict(one),
        "part": part_to_json(one.part),
        "schema": base64.b64encode(one.schema).decode(),
        "tags": dict(one.tags),
    }


def announced_from_json(plain: Mapping[str, Any]) -> AnnouncedVersion:
    """Return the version in the result of `announced_to_json`."""
    return AnnouncedVersion(
        **{**plain, "part": part_from_json(plain["part"]), "schema": base64.b64decode(plain["schema"])}
    )

"""The form of a catalog's answers: JSON, also in the `app_metadata` of Flight messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeAlias, TypeGuard

from dissociated.base import strict_json

#: The fields of a JSON object, by name, each with the types that it may have.
FieldTypes: TypeAlias = Mapping[str, tuple[type, ...]]
#: Largest number of names in a request for the action `current`.
MAX_CURRENT = 64
#: The fields of each entry in a catalog's answers to the actions `current`, `versions` and `nodes`.
CURRENT_FIELDS: FieldTypes = {"version": (int,), "created": (int, float), "began": (str,)}
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
    return isinstance(plain, dict) and all(map(isinstance, map(plain.get, fields), fields.values()))


def is_moment(seconds: float | None) -> bool:
    """Return whether a calendar can represent the time `seconds` after the epoch. None, for no time, is accepted."""
    return seconds is None or 0 <= seconds <= _LAST_MOMENT


def moment(seconds: object) -> float:
    """Return a time in a catalog's answer; 0 if it is missing or invalid."""
    return float(seconds) if isinstance(seconds, int | float) and is_moment(seconds) else 0.0


def parse_app_metadata(content: bytes, fields: FieldTypes) -> dict[str, Any]:
    """Return the fields that our catalogs add to Flight messages; an empty dict for another server's metadata."""
    try:
        plain = strict_json.loads(content or b"{}")
    except ValueError:
        return {}
    return plain if has_fields(plain, fields) else {}

"""The form of a catalog's answers in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeAlias, TypeGuard

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

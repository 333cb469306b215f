"""Schemas as IPC messages, as base64 for JSON, and the differences of two schemas in words."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pyarrow as pa


def serialize(schema: pa.Schema) -> bytes:
    """Return a schema as an IPC message."""
    return bytes(schema.serialize())


def deserialize(schema: bytes) -> pa.Schema:
    """Return the schema in an IPC message."""
    return pa.ipc.read_schema(pa.py_buffer(schema))


def to_base64(schema: pa.Schema) -> str:
    """Return a schema as an IPC message in base64."""
    return base64.b64encode(serialize(schema)).decode()


def from_base64(text: str) -> pa.Schema:
    """Return the schema in the result of `to_base64`."""
    return deserialize(base64.b64decode(text))


_MAX_NAMED = 5  # differences to list


def schema_difference(before: pa.Schema, after: pa.Schema) -> str:
    """Describe how `after` differs from `before`, such as "column 'n' is string, not int64"."""
    differences = [*_differences(before, after)]
    more = [] if len(differences) <= _MAX_NAMED else [f"and {len(differences) - _MAX_NAMED} more"]
    return "; ".join(differences[:_MAX_NAMED] + more)


def _differences(before: pa.Schema, after: pa.Schema) -> Iterator[str]:
    if len({*before.names}) < len(before) or len({*after.names}) < len(after):
        yield f"the columns are {', '.join(after.names)}, not {', '.join(before.names)}"
        return
    for name in before.names:
        if name not in after.names:
            yield f"there is no column {name!r}"
            continue
        old, new = before.field(name), after.field(name)
        if old.type != new.type:
            yield f"column {name!r} is {new.type}, not {old.type}"
        elif old.nullable != new.nullable:
            yield f"column {name!r} may {'' if new.nullable else 'not '}be null"
        elif not old.equals(new, check_metadata=True):
            yield f"column {name!r} has other metadata"
    yield from (f"there is a new column {name!r}" for name in after.names if name not in before.names)
    if before.names != after.names and {*before.names} == {*after.names}:
        yield f"the columns have another order, {', '.join(after.names)}"
    if before.equals(after) and before.metadata != after.metadata:
        yield f"the columns are the same, and the metadata of the schema are not{_keys(before, after)}"


def _keys(before: pa.Schema, after: pa.Schema) -> str:
    old, new = before.metadata or {}, after.metadata or {}
    changed = sorted(key.decode(errors="replace") for key in old.keys() | new.keys() if old.get(key) != new.get(key))
    return f": {', '.join(changed)}" if changed else ""

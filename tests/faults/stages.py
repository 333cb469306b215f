"""How far peers come before their end: the same stages over every medium, each in the words of its own peer."""

from __future__ import annotations

from typing import Any, TypeAlias

#: One step of a peer: what it does, and with what.
Step: TypeAlias = list[Any]


def server_stages(read: Step, schema: Step, meta: Step, body: Step, end: Step) -> dict[str, list[Step]]:
    """How far a server comes, by the steps of its peer."""
    return {
        "accepted": [],
        "after want_data": [read],
        "after the schema": [read, schema],
        "between metadata and body": [read, schema, meta],
        "before the end of stream": [read, schema, meta, body],
        "before a body that the end of stream overtook": [read, schema, meta, end],
    }

"""Stages at which peers end: the same stages over every medium, each in the steps of its own peer."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A step of a peer: its name and its arguments.
Step: TypeAlias = list[Any]


def server_stages(read: Step, schema: Step, meta: Step, body: Step, end: Step) -> dict[str, list[Step]]:
    """Return the steps of a server's peer up to each stage."""
    return {
        "accepted": [],
        "after want_data": [read],
        "after the schema": [read, schema],
        "between metadata and body": [read, schema, meta],
        "before the end of stream": [read, schema, meta, body],
        "before a body that the end of stream overtook": [read, schema, meta, end],
    }

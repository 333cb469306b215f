"""What nodes and catalogs tell each other, as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dissociated.catalog.records import Announced, Node, Part


def plain_node(node: Node) -> dict[str, Any]:
    """A node, without what only the catalog knows of it."""
    return {
        "id": node.id,
        "host": node.host,
        "boot_id": node.boot_id,
        "flight": node.flight,
        "locations": [*node.locations],
    }


def parse_node(plain: Mapping[str, Any]) -> Node:
    """The opposite of `plain_node`. Raises KeyError, TypeError or ValueError, as all of these do."""
    return Node(
        id=str(plain["id"]),
        host=str(plain["host"]),
        boot_id=str(plain["boot_id"]),
        flight=str(plain["flight"]),
        locations=tuple(str(one) for one in plain["locations"]),
    )


def plain_part(part: Part) -> dict[str, Any]:
    """A part of a dataset."""
    return {**asdict(part), "ticket": base64.b64encode(part.ticket).decode()}


def parse_part(plain: Mapping[str, Any]) -> Part:
    """The opposite of `plain_part`."""
    return Part(**{**plain, "ticket": base64.b64decode(plain["ticket"])})


def plain_announced(one: Announced) -> dict[str, Any]:
    """A version in the store of a node."""
    return {
        **asdict(one),
        "part": plain_part(one.part),
        "schema": base64.b64encode(one.schema).decode(),
        "tags": dict(one.tags),
    }


def parse_announced(plain: Mapping[str, Any]) -> Announced:
    """The opposite of `plain_announced`."""
    return Announced(**{**plain, "part": parse_part(plain["part"]), "schema": base64.b64decode(plain["schema"])})

"""Schemas as catalogs keep and tell them: the bytes of an encapsulated message, in JSON as base64."""

from __future__ import annotations

import base64

import pyarrow as pa


def serialize(schema: pa.Schema) -> bytes:
    """The schema as a message."""
    return bytes(schema.serialize())


def deserialize(schema: bytes) -> pa.Schema:
    """The opposite."""
    return pa.ipc.read_schema(pa.py_buffer(schema))


def to_base64(schema: pa.Schema) -> str:
    """The same for JSON."""
    return base64.b64encode(serialize(schema)).decode()


def from_base64(text: str) -> pa.Schema:
    """The opposite of `to_base64`."""
    return deserialize(base64.b64decode(text))

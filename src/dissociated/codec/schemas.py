"""Conversion of schemas to the bytes of an encapsulated IPC message, and to base64 for JSON."""

from __future__ import annotations

import base64

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

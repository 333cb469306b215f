"""Schemas as catalogs keep and tell them: the bytes of an encapsulated message, in JSON as base64."""

from __future__ import annotations

import base64

import pyarrow as pa


def encoded(schema: pa.Schema) -> bytes:
    """The schema as a message."""
    return bytes(schema.serialize())


def decoded(schema: bytes) -> pa.Schema:
    """The opposite."""
    return pa.ipc.read_schema(pa.py_buffer(schema))


def plain(schema: pa.Schema) -> str:
    """The same for JSON."""
    return base64.b64encode(encoded(schema)).decode()


def parsed(text: str) -> pa.Schema:
    """The opposite of `plain`."""
    return decoded(base64.b64decode(text))

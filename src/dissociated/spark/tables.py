"""The datasets of a catalog as tables, as a catalog plug-in of Spark's asks for them: calls of the sidecar.

`options` are those of the plug-in, and say where the catalog is.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql.types import StructType

from dissociated.control.commit import Publication
from dissociated.errors import DatasetNotFound
from dissociated.spark.catalog import CatalogConfig
from dissociated.spark.reader import Request
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema
from dissociated.spark.writer import commit


def tables(options: Mapping[str, str]) -> Sequence[str]:
    """The names of all tables; tensors are none."""
    with CatalogConfig.parse(options).connect() as client:
        return [info.name for info in client.list() if info.tensors is None]


def table_exists(options: Mapping[str, str], name: str) -> bool:
    """Whether there is a dataset of this name, be it of tensors."""
    with CatalogConfig.parse(options).connect() as client:
        return name in client


def table_schema(options: Mapping[str, str], name: str) -> str:
    """As Spark's JSON."""
    return Request(CatalogConfig.parse(options), name).schema().json()


def create_table(options: Mapping[str, str], name: str, schema: str) -> None:
    """Publish a dataset without rows."""
    target = WriteTarget(CatalogConfig.parse(options), Publication(name))
    commit(target, uuid.uuid4().hex, arrow_schema(StructType.fromJson(json.loads(schema))), ())


def drop_table(options: Mapping[str, str], name: str) -> bool:
    """Returns whether it was there."""
    with CatalogConfig.parse(options).connect() as client:
        try:
            client.drop(name)
        except DatasetNotFound:
            return False
        return True


_CALLS: Sequence[Callable[..., Any]] = (tables, table_exists, table_schema, create_table, drop_table)
CALLS = {call.__name__: call for call in _CALLS}

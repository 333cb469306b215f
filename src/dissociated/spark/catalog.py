"""The datasets of a catalog as tables, for Spark's catalog plug-in in its JVM (`jvm/Catalog.scala`).

The sidecar answers these calls. Their `options` name the catalog of this library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from dissociated.client.client import Client
from dissociated.control.commit import Commit
from dissociated.errors import DatasetNotFound, OptionError
from dissociated.spark.catalog_config import CatalogConfig
from dissociated.spark.columns import spark_schema
from dissociated.spark.request import DatasetRequest
from dissociated.spark.target import WriteTarget, parse_tags
from dissociated.spark.types import schema_from_json
from dissociated.spark.writer import commit

_SETTINGS = ("catalog", "token_file", "tls_roots", "wait")


def _parse_settings(options: Mapping[str, str]) -> CatalogConfig:
    if unknown := [name for name in options if name not in _SETTINGS]:
        raise OptionError(
            f"there is no setting spark.sql.catalog.NAME.{unknown[0]}; after NAME there may be {', '.join(_SETTINGS)}"
        )
    return CatalogConfig.parse(options)


def tables(options: Mapping[str, str]) -> Sequence[str]:
    """Return the names of all tables. Datasets of tensors are not tables."""
    with _parse_settings(options).connect() as client:
        return [info.name for info in client.list() if info.tensors is None]


def table_exists(options: Mapping[str, str], name: str) -> bool:
    """Return whether there is a dataset with this name. It may hold tensors."""
    with _parse_settings(options).connect() as client:
        return name in client


def load_table(
    options: Mapping[str, str], name: str, version: str | None = None, timestamp: int | None = None
) -> Mapping[str, Any] | None:
    """Return the schema of a table in Spark's JSON, its tags, and the number of its version.

    Args:
        options: The options of the catalog.
        name: The name of the dataset.
        version: The number of a version that is kept. Default: the current version.
        timestamp: A moment whose version is wanted, in microseconds since 1970.

    Returns:
        None if there is no such table.

    Raises:
        DatasetNotFound: The table exists, and the version is not kept.
    """
    with _parse_settings(options).connect() as client:
        if name not in client:
            return None
        if timestamp is not None:
            version = str(_version_at(client, name, datetime.fromtimestamp(0, UTC) + timedelta(microseconds=timestamp)))
        request = DatasetRequest.parse({**options, "path": name, **({} if version is None else {"version": version})})
        try:
            info = request.describe(client)
        except DatasetNotFound:
            advice = _kept_versions(client.versions(name))
            raise DatasetNotFound(f"no version {request.version} of {name!r} is kept. {advice}") from None
    return {"schema": spark_schema(info.schema).json(), "tags": dict(info.tags), "version": info.version}


def _version_at(client: Client, name: str, moment: datetime) -> int:
    """Return the number of the version that was current at a moment.

    Raises:
        DatasetNotFound: The version is not kept.
    """
    versions = client.versions(name)
    for version, later in zip(versions, [*versions[1:], None], strict=True):
        # If the next number is missing, that version is gone, and it may have been current at the moment.
        is_known = version["current"] if later is None else later["version"] == version["version"] + 1
        if is_known and version["created"] <= moment and (later is None or moment < later["created"]):
            return int(version["version"])
    raise DatasetNotFound(f"the version of {name!r} at {moment:%F %T} UTC is not kept. {_kept_versions(versions)}")


def _kept_versions(versions: Sequence[Mapping[str, Any]]) -> str:
    lines = (f"{version['version']} of {version['created']:%F %T} UTC" for version in versions)
    return f"Versions that are kept: {', '.join(lines)}. Nodes keep replaced versions for a while (--retain)"


def create_table(
    options: Mapping[str, str], name: str, schema: str, tags: Mapping[str, str], exists: bool | None, key: str
) -> None:
    """Publish a dataset without rows by a commit with this condition and key. `schema` is in Spark's JSON."""
    target = WriteTarget(_parse_settings(options), Commit(name, exists=exists, tags=tags))
    commit(target, key, schema_from_json(schema), ())


def merged_tags(tags: Mapping[str, str], added: str) -> str:
    """Return the option `tags` for `tags` and the tags in the option `added`, which win."""
    return json.dumps({**tags, **parse_tags(added)})


def drop_table(options: Mapping[str, str], name: str) -> bool:
    """Drop a table. Return whether it existed."""
    with _parse_settings(options).connect() as client:
        try:
            client.drop(name)
        except DatasetNotFound:
            return False
        return True


TABLE_CALLS: Sequence[Callable[..., Any]] = (tables, table_exists, load_table, create_table, merged_tags, drop_table)

"""Destination of a DataFrame: the dataset that the options of a write name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dissociated.base.tracing import TRACEPARENT
from dissociated.control.commit import Commit
from dissociated.errors import OptionError
from dissociated.spark.catalog_config import WAIT, CatalogConfig, required_name
from dissociated.spark.types import schema_from_json

_OPTIONS = ("catalog", "mergeSchema", "path", "tags", "token_file", "tls_roots", TRACEPARENT, "ttl", "wait")
_SPARK_OPTIONS = ("checkpointlocation", "queryname")
#: The schema of an existing table in Spark's JSON. `jvm/Catalog.scala` gives it; users have no use for it.
_TABLE_SCHEMA = "tableschema"
#: The condition of a commit that creates or replaces a table, in JSON. `jvm/Catalog.scala` gives it, too.
_TABLE_EXISTS = "tableexists"
_KNOWN_OPTIONS = {*(name.lower() for name in _OPTIONS), *_SPARK_OPTIONS, _TABLE_SCHEMA, _TABLE_EXISTS}


@dataclass(frozen=True)
class WriteTarget:
    """The dataset to write, in its catalog.

    Attributes:
        catalog: The catalog.
        commit: The commit, as far as it is known before the write: without key and segments. It has a schema if rows
            that replace a dataset must take that schema.
        merge_schema: Whether appended rows may lack columns and have narrower numbers.
    """

    catalog: CatalogConfig
    commit: Commit
    merge_schema: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str], mode: str, method: str) -> Self:
        """Parse the options of a data source.

        Args:
            options: The options, whose names may be in any case.
            mode: "overwrite" or "append".
            method: The call of Spark by which the user names the dataset, for the error message.

        Raises:
            CatalogError: The options name no catalog or no dataset.
            OptionError: An option is unknown or invalid.
        """
        values = {name.lower(): value for name, value in options.items()}
        for name in values:
            if name not in _KNOWN_OPTIONS:
                raise OptionError(f"there is no option {name!r} for writing; there are {', '.join(_OPTIONS)}")
        catalog = CatalogConfig.parse(values)
        name = required_name(values, method)
        table_schema = values.get(_TABLE_SCHEMA)
        commit = Commit(
            name,
            schema=None if table_schema is None else schema_from_json(table_schema),
            mode=mode,
            exists=json.loads(values.get(_TABLE_EXISTS, "null")),
            tags=parse_tags(values.get("tags", "")),
            ttl=_seconds(values.get("ttl")),
        )
        return cls(catalog, commit, _flag("mergeSchema", values.get("mergeschema", "false")))

    def options(self) -> dict[str, str]:
        """Return the options that `parse` turns into this target. The name and the mode are not among them."""
        values = {
            "catalog": self.catalog.uri,
            "token_file": self.catalog.token_file,
            "tls_roots": self.catalog.tls_roots,
            "wait": None if self.catalog.wait == WAIT else self.catalog.wait,
            TRACEPARENT: self.catalog.traceparent,
            "tags": json.dumps(self.commit.tags) if self.commit.tags else None,
            "ttl": self.commit.ttl,
            "mergeSchema": "true" if self.merge_schema else None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


def parse_tags(text: str) -> Any:
    """Parse the option `tags`: a JSON object, or `name=value, name=value`.

    Raises:
        OptionError: The text is neither.
    """
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text)
        pairs = [pair.split("=", 1) for pair in text.split(",") if pair.strip()]
        return {name.strip(): value.strip() for name, value in pairs}
    except ValueError:
        raise OptionError(f'the option tags is "name=value, name=value" or a JSON object, not {text!r}') from None


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        raise OptionError(f"the option ttl is a number of seconds, not {text!r}") from None


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise OptionError(f"the option {name} is true or false, not {text!r}")
    return text.lower() == "true"

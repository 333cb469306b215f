"""A dataset as a LazyFrame of Polars, which reads only the columns and rows that its plan needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import polars as pl
from polars.io.plugins import register_io_source

from dissociated.client.conditions import implied_conditions
from dissociated.client.request import Filtering
from dissociated.client.version_reader import VersionReader


def scan(version: VersionReader) -> pl.LazyFrame:
    """Return a LazyFrame over a version of a dataset."""
    stream = _stream(version)
    try:
        from dissociated.client.resolver import Resolver
    except ImportError:  # older releases of Polars have no resolvers
        return stream
    return Resolver(version, stream).lazy()


def _stream(version: VersionReader) -> pl.LazyFrame:
    """Return a LazyFrame that reads the version for each query, and only the columns and rows that the query needs."""
    schema = version.info.schema

    def source(
        columns: list[str] | None, predicate: pl.Expr | None, rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        conditions = None if predicate is None else implied_conditions(predicate, schema) or None
        limit = rows if predicate is None else None
        request = replace(
            version.client.defaults, columns=columns, filter=conditions, limit=limit, filtering=Filtering.AT_SERVER
        )
        remaining = rows
        for frame in map(pl.DataFrame, version.read(request)):
            if predicate is not None:  # rows are left out by then only as far as that costs nothing
                frame = frame.filter(predicate)
            if remaining is not None:
                frame = frame.head(remaining)
                remaining -= frame.height
            yield frame
            if remaining == 0:
                return

    return register_io_source(source, schema=dict(pl.DataFrame(schema.empty_table()).schema), is_pure=True)

"""Assets of Dagster as datasets. Needs `pip install 'dissociated[dagster]'`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.adapters import imported
from dissociated.client.client import Client
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError

if TYPE_CHECKING:
    import dagster


def io_manager(client: Client) -> dagster.IOManager:
    """Return an IO manager that stores each asset as a dataset, named by the parts of its key with "/" between them.

    A partition of an asset is a dataset of its own, whose name ends with "/@" and the key of the partition: see
    `dataset_name`. A function gets an asset in the type of its annotation: `DatasetHandle`,
    `pyarrow.RecordBatchReader`, or else `pyarrow.Table`. The metadata `columns` and `filter` of an `AssetIn` select
    columns and rows at the server: see `Client.read`. Dagster takes no tuples there, so the filter is a list such as
    `["delay", ">", 60]`, or a list of such lists.

    Args:
        client: The client of the catalog.

    Raises:
        OptionError: Dagster is not installed.

    Example:
        ```python
        import dagster as dg
        import pyarrow as pa
        from dissociated.adapters.dagster import io_manager

        @dg.asset
        def trips() -> pa.Table:
            return pa.table({"dest": ["MIA", "ORD"], "delay": [61.5, 92.0]})

        @dg.asset(ins={"trips": dg.AssetIn(metadata={"columns": ["delay"]})})
        def mean_delay(trips: pa.Table) -> pa.Table:
            return trips.group_by([]).aggregate([("delay", "mean")])

        assert dg.materialize([trips, mean_delay], resources={"io_manager": io_manager(client)}).success
        assert client.read("mean_delay").read_all().to_pydict() == {"delay_mean": [76.75]}
        ```
    """
    library = imported("dagster", "dagster")

    class Dissociated(library.IOManager):  # type: ignore[misc, name-defined]
        """An IO manager whose assets are datasets."""

        def handle_output(self, context: Any, obj: Any) -> None:
            # Dagster keeps outputs for long, and a reader keeps its connection until it is closed.
            with closing(obj) if isinstance(obj, pa.RecordBatchReader) else nullcontext():
                context.add_output_metadata({"rows": client.put(_name(context), obj)})

        def load_input(self, context: Any) -> Any:
            return _load(client, context)

    return Dissociated()


def dataset_name(asset: Sequence[str], partition: str | None = None) -> str:
    """Return the name of the dataset for an asset, or for one of its partitions. No two of them have the same name.

    "%", "/" and "@" in parts and partitions become "%25", "%2F" and "%40".

    Args:
        asset: The parts of the asset's key.
        partition: The key of the partition.

    Example:
        ```python
        from dissociated.adapters.dagster import dataset_name

        assert dataset_name(["raw", "trips"]) == "raw/trips"
        assert dataset_name(["raw", "trips"], "2026-11-24") == "raw/trips/@2026-11-24"
        ```
    """
    parts = [*map(_escape, asset)]
    if partition is not None:
        parts.append("@" + _escape(partition))  # No part begins with "@".
    return "/".join(parts)


def _escape(part: str) -> str:
    return part.replace("%", "%25").replace("/", "%2F").replace("@", "%40")


def _load(client: Client, context: Any) -> DatasetHandle | pa.RecordBatchReader | pa.Table:
    annotation, metadata = context.dagster_type.typing_type, context.definition_metadata
    columns, condition = _plain(metadata.get("columns")), _condition(_plain(metadata.get("filter")))
    if annotation is DatasetHandle:
        if columns is not None or condition is not None:
            raise OptionError("a DatasetHandle has all columns and rows: give columns and filter when you read it")
        return client.dataset(_name(context))
    reader = client.read(_name(context), columns=columns, filter=condition)
    return reader if annotation is pa.RecordBatchReader else reader.read_all()


def _plain(value: Any) -> Any:
    """Return a value of an asset's metadata, which Dagster wraps."""
    return getattr(value, "value", value)


def _condition(plain: Any) -> Any:
    """Return the filter for `Client.read`."""
    if not isinstance(plain, list):
        return plain
    return [tuple(item) for item in plain] if all(isinstance(item, list) for item in plain) else tuple(plain)


def _name(context: Any) -> str:
    """Return the name of the dataset for an asset, or for one of its partitions."""
    if not context.has_asset_key:
        raise OptionError("only assets are stored as datasets: the output of an op has no name of its own")
    parts = context.asset_key.path
    if not context.has_asset_partitions:
        return dataset_name(parts)
    if len(context.asset_partition_keys) != 1:
        raise OptionError(f"read one partition of {dataset_name(parts)!r} at a time: each is a dataset of its own")
    return dataset_name(parts, context.asset_partition_key)

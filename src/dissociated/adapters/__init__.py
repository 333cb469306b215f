"""Bridges to other libraries for data. Each is a module, with the name of the library, that imports it on first use.

    from dissociated.adapters.dask import read_dissociated

    frame = read_dissociated(client["flights"], columns=["dest", "distance"], filter=("distance", ">", 1000))

Workers read their partitions by themselves, with the columns and the filter that the server applies.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError


def imported(module: str, extra: str) -> Any:
    """Import a module of another library.

    Args:
        module: The name of the module.
        extra: The extra of this library that installs it.

    Raises:
        OptionError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise OptionError(f"{error.name} is not installed: pip install 'dissociated[{extra}]'") from None


def identity(dataset: DatasetHandle) -> tuple[Any, ...]:
    """Return the values that identify a version. Libraries derive names of tasks and results from them."""
    info = dataset.info
    tickets = [endpoint.ticket for endpoint in info.endpoints]
    return dataset.catalog_uri, info.name, info.version, info.lineage_id, info.created, tickets

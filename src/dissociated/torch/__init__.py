"""Training with PyTorch: batches of tensors, shuffled, over DataLoader workers and ranks, and resumed exactly.

    from dissociated.torch import loader

    for batch in loader(client["flights"], columns=["distance", "dep_delay"], batch_size=4096, shuffle=True):
        batch["distance"]  # a tensor

Needs `pip install 'dissociated[torch]'`. Importing this package does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dissociated.catalog.handle import DatasetHandle
from dissociated.errors import OptionError
from dissociated.once import once

if TYPE_CHECKING:
    from dissociated.torch.dataset import IterableDataset, Loader

__all__ = ["IterableDataset", "Loader", "loader"]


def loader(
    dataset: DatasetHandle,
    *,
    columns: Sequence[str] | None = None,
    batch_size: int = 1024,
    shuffle: bool = False,
    seed: int = 0,
    buffer_size: int | None = None,
    drop_last: bool = False,
    as_arrow: Sequence[str] = (),
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    **options: Any,
) -> Loader:
    """Batches of a dataset: of each column a tensor, by name. Each `for` is an epoch, with an order of its own.

    Tensors are this process's own, and may be written to: each batch is copied once from where the server has it.

    - `columns`: these alone. They must be numbers, without nulls, or lists of one size or tensors of one shape of them.
    - `batch_size`: rows of a batch.
    - `shuffle`: first the record batches, then rows within `buffer_size` of them. As many rows are held in memory. Left
      out: 65,536, or as many as have 64 MiB. With 0, rows keep their order within a record batch.
    - `seed`: tells the orders of all epochs.
    - `drop_last`: batches that are not full are left out.
    - `as_arrow`: columns that are given as pyarrow Arrays: texts, nested ones, those with nulls.
    - `rank`, `world_size`: which part of so many is read. Left out: torch.distributed's, where that is initialised. All
      parts together are every row once, and as many batches each, unless batches have one row or there are fewer rows
      than parts.
    - `num_workers`: processes that read, each by itself. The part of a rank is divided further among them. Over shared
      memory a worker seldom pays: what it reads is copied once more, to this process.
    - `options`: further ones of torch.utils.data.DataLoader. `collate_fn` is called with each batch.

    Raises WrongKind for columns that are no numbers, ColumnNotFound, OptionError, what reading raises, and OptionError
    where PyTorch is not installed.
    """
    _require_torch()
    from dissociated.torch.dataset import IterableDataset, Loader

    dataset_of_batches = IterableDataset(
        dataset,
        columns=columns,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        buffer_size=buffer_size,
        drop_last=drop_last,
        as_arrow=as_arrow,
        rank=rank,
        world_size=world_size,
    )
    return Loader(dataset_of_batches, num_workers=num_workers, **options)


@once
def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise OptionError("PyTorch is not installed: pip install 'dissociated[torch]'") from None


def __getattr__(name: str) -> Any:
    if name not in ("IterableDataset", "Loader"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_torch()
    from dissociated.torch import dataset

    return getattr(dataset, name)

"""Training with PyTorch: batches of tensors, shuffled, over DataLoader workers and ranks, and resumed exactly.

    from dissociated.torch import loader

    for batch in loader(client["flights"], columns=["distance", "dep_delay"], batch_size=4096, shuffle=True):
        batch["distance"]  # a tensor

Needs `pip install 'dissociated[torch]'`. Importing this package does not import PyTorch.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dissociated.base.once import once
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError
from dissociated.training.batches import Sampling

if TYPE_CHECKING:
    from dissociated.torch.dataset import IterableDataset, Loader

__all__ = ["IterableDataset", "Loader", "loader"]


def loader(dataset: DatasetHandle, *, num_workers: int = 0, **options: Any) -> Loader:
    """Batches of a dataset: of each column a tensor, by name. Each `for` is an epoch, with an order of its own.

    Over shared memory tensors lie in the server's memory, where they can, mapped for this process alone: a tensor can
    be written to, which neither the server nor any other tensor sees. With `writable=True` tensors are copies; where
    they are written to anyway, that is faster.

    - `options`: those of `dissociated.training.Sampling`: `columns`, `batch_size`, `shuffle`, `seed`, `buffer_size`,
      `drop_last`, `as_arrow`, `rank`, `world_size` and `writable`; and further ones of torch.utils.data.DataLoader, of
      which `collate_fn` is called with each batch.
    - `num_workers`: processes that read, each by itself. The part of a rank is divided further among them. Over shared
      memory a worker seldom pays: PyTorch copies what it reads once more, to this process.

    Raises WrongKind for columns that are no numbers, ColumnNotFound, OptionError, what reading raises, and OptionError
    where PyTorch is not installed.
    """
    _require_torch()
    from dissociated.torch.dataset import IterableDataset, Loader

    sampling = {name: options.pop(name) for name in _SAMPLING if name in options}
    return Loader(IterableDataset(dataset, **sampling), num_workers=num_workers, **options)


_SAMPLING = inspect.signature(Sampling).parameters
_loader = inspect.signature(loader)
loader.__signature__ = _loader.replace(  # type: ignore[attr-defined]  # for help, and completion in notebooks
    parameters=sorted((*_loader.parameters.values(), *_SAMPLING.values()), key=lambda parameter: parameter.kind)
)


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

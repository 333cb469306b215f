"""Training with PyTorch: batches of tensors, shuffled, divided among DataLoader workers and ranks, and resumable.

    from dissociated.torch import loader

    for batch in loader(client["flights"], columns=["distance", "dep_delay"], batch_size=4096, shuffle=True):
        batch["distance"]  # a tensor

Needs `pip install 'dissociated[torch]'`. Importing this package does not import PyTorch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dissociated.base.display import missing
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError
from dissociated.training.sampling import Sampling

if TYPE_CHECKING:
    from dissociated.torch.dataset import IterableDataset, Loader

__all__ = ["IterableDataset", "Loader", "loader"]


def loader(dataset: DatasetHandle, *, num_workers: int = 0, **options: Any) -> Loader:
    """Create a loader of a dataset. Each batch maps column names to tensors, and each `for` loop is an epoch.

    Over shared memory, tensors lie in the server's memory if possible, in a private mapping of this process: a tensor
    can be written to, and neither the server nor another tensor sees the change. With `writable=True`, tensors are
    copies, which is faster if they are written to anyway.

    Args:
        dataset: The dataset handle.
        num_workers: The number of processes that read. The part of a rank is divided further among them. Over shared
            memory, workers seldom help, since PyTorch copies their batches once more, to this process.
        **options: The fields of `dissociated.training.Sampling`, and further options of
            `torch.utils.data.DataLoader`. Its `collate_fn` is called with each batch.

    Returns:
        The loader.

    Raises:
        WrongKind: A column does not hold numbers, and is not in `as_arrow`.
        ColumnNotFound: The dataset lacks one of the columns.
        OptionError: An option is invalid, or PyTorch is not installed.
        DissociatedError: Further errors of reading.

    Example:
        ```python
        from dissociated.torch import loader

        for batch in loader(client.dataset("flights"), columns=["distance"], batch_size=4096, shuffle=True):
            print(batch["distance"].mean())
        ```
    """
    _require_torch()
    from dissociated.torch.dataset import IterableDataset, Loader

    _check_names(options)
    sampling = {name: options.pop(name) for name in _SAMPLING if name in options}
    return Loader(IterableDataset(dataset, **sampling), num_workers=num_workers, **options)


_SAMPLING = inspect.signature(Sampling).parameters
_loader = inspect.signature(loader)
# The full signature serves `help` and the completion of notebooks.
loader.__signature__ = _loader.replace(  # type: ignore[attr-defined]
    parameters=sorted((*_loader.parameters.values(), *_SAMPLING.values()), key=lambda parameter: parameter.kind)
)


def _check_names(options: Iterable[str]) -> None:
    """Raise OptionError if one of the options is neither ours nor the DataLoader's."""
    from torch.utils.data import DataLoader

    names = sorted({*_SAMPLING, *inspect.signature(DataLoader).parameters} - {"dataset"})
    for name in options:
        if name not in names:
            raise OptionError(missing("option", name, names))


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

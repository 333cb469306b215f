"""An iterable dataset for PyTorch's DataLoader, and a loader that combines both. Importing this needs PyTorch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NoReturn, Self

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterableDataset

from dissociated.client.dataset import DatasetHandle
from dissociated.codec.dlpack import DeviceColumn
from dissociated.errors import OptionError
from dissociated.training.access import Access
from dissociated.training.batches import Position
from dissociated.training.columns import Lists
from dissociated.training.examples import Examples
from dissociated.training.launch import (
    SharedNumbers,
    check_accelerate,
    end_with_parent,
    find_rank,
    processes_of_accelerate,
)
from dissociated.training.plan import LayoutProgress, Order, Shard, turns
from dissociated.training.sampling import Sampling

#: Options of a DataLoader that would change the order of the batches.
_REFUSED_OPTIONS = ("batch_sampler", "in_order", "sampler")
_MAX_LAYOUTS = 21  # numbers of ranks and workers with which one epoch can be read


@dataclass(kw_only=True, eq=False)
class IterableDataset(Sampling, TorchIterableDataset):  # type: ignore[misc]  # where PyTorch is not installed
    """An iterable dataset of batches of tensors, for a DataLoader of your own with `batch_size=None`.

    `dissociated.training.Sampling` documents the arguments, and `loader` the errors. Each worker reads a part of its
    rank's rows, and opens a connection of its own. The dataset can be pickled for spawned processes; the pickle
    **contains the token** of its client.

    Call `set_epoch` before each epoch to give it an order of its own. `state_dict` and `load_state_dict` implement the
    protocol of torchdata's StatefulDataLoader, which calls them on the copy in each worker.

    Example:
        ```python
        from torch.utils.data import DataLoader

        from dissociated.torch import IterableDataset

        dataset = IterableDataset(client.dataset("flights"), columns=["distance"], batch_size=4096)
        for batch in DataLoader(dataset, batch_size=None):
            print(batch["distance"].mean())
        ```
    """

    dataset: DatasetHandle = field(kw_only=False, repr=False)

    def __post_init__(self) -> None:
        # The result of `_launched` in the process that has pickled this copy, and the process that has unpickled it.
        # They are set first, because `__post_init__` of `Sampling` reads `part`.
        self._launched_in_parent: tuple[tuple[int, int], int] | None = None
        self._unpickled_by: int | None = None
        super().__post_init__()
        self._for_loader = False  # whether a `Loader` reads this, which Accelerate leaves as it is
        self._examples = Examples(self.dataset, self, Access.COPIED if self.writable else Access.PRIVATE)
        # The next epoch, and the numbers of its progress. They are shared for persistent workers, which are neither
        # forked nor pickled for each epoch.
        self._begin = SharedNumbers((0,), 1 + 3 * _MAX_LAYOUTS)
        self._read_by: int | None = None  # id of the process in which this copy has read an epoch
        self._state: Mapping[str, Any] | None = None  # a loaded state that was not used yet
        self._position: Position | None = None

    @property
    def part(self) -> tuple[int, int]:
        """The number of the part that is read, and the number of parts. By default, the launcher's ranks are the parts.

        Launchers such as Lightning tell each process its rank only after the dataset was made.
        """
        return self._launched()[0]

    def _launched(self) -> tuple[tuple[int, int], int]:
        """Return the part of the process that trains, and the number of its processes of Accelerate."""
        # A worker that is no fork does not know the ranks that torch.distributed has assigned, nor Accelerate. A fork
        # does, but may have a copy that was unpickled before: launchers send datasets from the driver to their ranks.
        if self._launched_in_parent and self._unpickled_by == os.getpid() and get_worker_info() is not None:
            return self._launched_in_parent
        return find_rank() if self.rank is None else super().part, processes_of_accelerate()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_launched_in_parent": self._launched(), "_read_by": None, "_position": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _unpickled_by=os.getpid())
        if "_begin" in state:  # not yet, when `Examples` copies the options
            self._begin = copy(self._begin)

    def for_loader(self) -> Self:
        """Mark this dataset as read by a `Loader`, and return it."""
        self._for_loader = True
        return self

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is read next."""
        self.begin_at(epoch)

    def begin_at(self, epoch: int, progress: Sequence[LayoutProgress] = ()) -> None:
        """Set the epoch that is read next, and the progress that was made in it already."""
        if len(progress) > _MAX_LAYOUTS:
            raise OptionError(f"an epoch can be read with {_MAX_LAYOUTS} numbers of ranks or workers at most")
        self._begin.numbers = epoch, *chain.from_iterable(progress)
        self._position = None
        if self._state is not None and self._state.get("epoch") != epoch:
            self._state = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._for_loader:
            check_accelerate(self.part[1], self._launched()[1])
        worker = get_worker_info()
        if worker is not None:
            end_with_parent()
            if self.device is not None:
                raise OptionError("workers cannot give memory of a device to their parent: use num_workers=0")
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._position = position = self.position(count, self._next_begin())
        if self._state is not None:
            position.load_state_dict(self._state)
            if (before := position.before) and worker is not None:
                raise OptionError(
                    f"the state is of {before[-1].ranks} ranks with {before[-1].workers} workers each, and here are "
                    f"{self.part[1]} ranks with {count}: a DataLoader with workers has a state for each worker, which "
                    "fits the same numbers alone; use dissociated.torch.loader()"
                )
            shard = self.shard(number, count, position)
            state, self._state = self._state, None
            return self._tensors(position, shard, state)
        # A DataLoader returns a batch of each worker in turn, and always asks its first worker first. So the shard
        # whose turn it is moves to the first worker.
        lengths = [len(self.shard(worker_id, count, position)) for worker_id in range(count)]
        number, position.step = turns(lengths, position.step)[number]
        return self._tensors(position, self.shard(number, count, position))

    def _tensors(
        self, position: Position, shard: Shard, state: Mapping[str, Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the batches from a position. If the first cannot be read, the state that led there is loaded again."""
        first = position.step
        try:
            for step, batch in enumerate(self._examples.deliver(shard, first), first + 1):
                position.step, self._position, state = step, position, None
                yield {name: _tensor(column) for name, column in batch.items()}
        except BaseException:
            if state is not None and self._position is position:
                self._state = state
            raise

    def _next_begin(self) -> tuple[int, ...]:
        """Return the epoch to read next, and the numbers of its progress.

        A new worker begins with the numbers of its copy. In its later epochs, a persistent worker follows its parent,
        which sets the numbers before the DataLoader tells its workers to begin.

        Raises:
            OptionError: This worker cannot know the next epoch.
        """
        is_first_read, self._read_by = self._read_by != os.getpid(), os.getpid()
        worker, own, current = get_worker_info(), self._begin.numbers, self._begin.current
        if worker is None:
            return own
        # Rows that come as they are stored are the same in every epoch, but a `Loader` also sets a progress.
        needs_parent = self._for_loader or self._examples.plan.order is not Order.STORED
        if is_first_read:
            # The DataLoader's own dataset is read from the worker's first epoch on. Another, such as one of a
            # ChainDataset, may be reached in a later epoch only, or in the first after the parent has set the next.
            if needs_parent and worker.dataset is not self and current not in (None, own):
                raise OptionError(
                    "the epoch was set after this worker was started and before it first read this dataset, so it does "
                    "not know which epoch to read: call set_epoch() between epochs only, and leave out "
                    "persistent_workers if an epoch may end before all of its datasets were read"
                )
            return own
        if current is not None:
            return current
        if needs_parent:
            raise OptionError(
                "this worker does not know the next epoch, since its dataset was not made or pickled by the DataLoader "
                "that has started it, or no descriptor was free: call set_epoch() in the worker, or leave out "
                "persistent_workers"
            )
        return own

    def position(self, workers: int, begin: Sequence[int] = (0,)) -> Position:
        """Return a position, for `workers` workers on each rank.

        Args:
            workers: The number of workers.
            begin: The epoch, and the numbers of its progress.
        """
        position = Position(self._examples, workers)
        epoch, *numbers = begin
        position.move_to(epoch, [LayoutProgress(*numbers[at : at + 3]) for at in range(0, len(numbers), 3)])
        return position

    def shard(self, worker: int, workers: int, position: Position) -> Shard:
        """Return the shard that one worker of this rank reads of the rest of an epoch."""
        rank, world_size = self.part
        return self._examples.plan.shard(rank * workers + worker, world_size * workers, position.epoch, position.before)

    @property
    def dictionaries(self) -> dict[str, pa.Array]:
        """The distinct values of the columns in `codes`, of which the batches have the positions."""
        return self._examples.dictionaries

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch in this process, which can be written as JSON."""
        if self._state is not None:
            return {**self._state}
        return (self._position or self.position(1, self._begin.numbers)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position when the next epoch is read.

        Reading then raises OptionError if the state refers to other rows.
        """
        self._state, self._position = {**state}, None


class Loader:
    """A loader of batches of tensors, made by `loader`. Each `for` loop is an epoch.

    Without `set_epoch`, the epoch after the last complete one is read next.
    """

    def __init__(self, dataset: IterableDataset, *, num_workers: int = 0, **options: Any) -> None:
        for name in _REFUSED_OPTIONS:
            if name in options:
                raise OptionError(
                    f"{name} is not for this loader, which sets the order of the rows itself: leave it out"
                )
        self.dataset = dataset.for_loader()
        self._workers = max(1, num_workers)
        self._position = dataset.position(self._workers)
        options.setdefault("collate_fn", _identity)
        self._batches = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, with those that were read before it was resumed."""
        position, workers = self._position, self._workers
        remaining = sum(len(self.dataset.shard(number, workers, position)) for number in range(workers))
        return sum(progress.step for progress in position.before) + remaining

    def __iter__(self) -> Iterator[Any]:
        position = self._position
        first, epoch = position.begin_reading(), position.epoch
        self.dataset.begin_at(epoch, position.progress)
        for step, batch in enumerate(self._batches, first + 1):
            position.step = step
            yield batch
        position.set_epoch(epoch + 1)

    @property
    def dictionaries(self) -> dict[str, pa.Array]:
        """The distinct values of the columns in `codes`, of which the batches have the positions."""
        return self.dataset.dictionaries

    @property
    def sampler(self) -> NoReturn:
        """Raise AttributeError: there is no sampler that a launcher could replace.

        Ray Train's `prepare_data_loader` asks for it. The loader that it returns would read one batch ahead, so
        `state_dict` would skip a batch.
        """
        raise AttributeError(
            "a loader divides its rows among the ranks itself and has no sampler: read it as it is, without "
            "prepare_data_loader() of Ray Train"
        )

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next `for` loop reads."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, which can be written as JSON.

        Ranks that have received the same number of batches return equal states.
        """
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next `for` loop from a saved position, with exactly the batch that was next.

        With another number of ranks or workers than before, the rows that were not read are divided anew. The state is
        then that of all ranks: they must have received the same number of batches.

        Raises:
            OptionError: The state refers to other rows: to another version or other options.
        """
        self._position.load_state_dict(state)


def _tensor(column: Any) -> Any:
    if isinstance(column, Lists):
        return Lists(*map(torch.from_numpy, column))
    if isinstance(column, DeviceColumn):
        return torch.from_dlpack(column)
    return torch.from_numpy(column) if isinstance(column, np.ndarray) else column


def _identity(batch: Any) -> Any:
    return batch

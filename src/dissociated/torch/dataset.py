"""A dataset for PyTorch's DataLoader, and one with its DataLoader. Only who has PyTorch imports this module."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchIterableDataset

from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError
from dissociated.training.batches import Examples, Position, Sampling
from dissociated.training.columns import Access
from dissociated.training.plan import Shard, turns

#: Options of a DataLoader that would undo what is promised here.
_NOT_OURS = ("batch_sampler", "in_order", "sampler")


@dataclass(kw_only=True, eq=False)
class IterableDataset(Sampling, TorchIterableDataset):  # type: ignore[misc]  # where PyTorch is not installed
    """Batches of tensors for a DataLoader of your own, which must have `batch_size=None`.

    What its parameters mean says `Sampling`, and `loader` what is raised. Each worker reads a part of its rank's rows,
    and opens a connection of its own. It can be sent to processes that are spawned, **with the token** of its client.

    `set_epoch` before each epoch gives that its own order. `state_dict` and `load_state_dict` are the protocol of
    torchdata's StatefulDataLoader, which asks the copy in each worker.
    """

    dataset: DatasetHandle = field(kw_only=False, repr=False)

    def __post_init__(self) -> None:
        if self.rank is None and self.world_size is None:
            self.rank, self.world_size = _place()
        super().__post_init__()
        self._examples = Examples(self.dataset, self, Access.COPIED if self.writable else Access.PRIVATE)
        self._begin = (0, 0)  # an epoch, and how many of its batches this rank was given already
        self._begin_again = torch.zeros(2, dtype=torch.int64).share_memory_()  # the same, for workers that persist
        self._read_in: int | None = None  # the process that has read an epoch
        self._state: Mapping[str, Any] | None = None  # that was loaded
        self._position: Position | None = None

    def set_epoch(self, epoch: int) -> None:
        """The epoch that is read next."""
        self.begin_at(epoch, 0)

    def begin_at(self, epoch: int, given: int) -> None:
        """The same, after the first `given` batches, as a DataLoader gives them: from each worker in turn."""
        self._begin = epoch, given
        self._begin_again.copy_(torch.tensor(self._begin))
        if self._state is not None and self._state.get("epoch") != epoch:
            self._state = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        # What began a worker was sent along. It is told of the next epoch, and has answered, before that begins.
        epoch, given = self._begin_again.tolist() if worker and self._read_in == os.getpid() else self._begin
        self._read_in = os.getpid()
        # So that the DataLoader, which asks the first first, goes on in turn.
        number, step = turns([len(self.shard(one, count, epoch)) for one in range(count)], given)[number]
        self._position = position = self.position(count)
        if self._state is not None:
            position.load_state_dict(self._state)
            self._state = None
        else:
            position.epoch, position.step = epoch, step
        return self._tensors(position, self.shard(number, count, position.epoch))

    def _tensors(self, position: Position, shard: Shard) -> Iterator[dict[str, Any]]:
        first = position.step
        for step, batch in enumerate(self._examples.read(shard, first), first + 1):
            position.step = step
            yield {
                name: torch.from_numpy(column) if isinstance(column, np.ndarray) else column
                for name, column in batch.items()
            }

    def position(self, workers: int) -> Position:
        """The beginning, for so many workers on each rank."""
        return Position(self._examples, self.part[1] * workers)

    def shard(self, worker: int, workers: int, epoch: int) -> Shard:
        """What one worker reads."""
        rank, world_size = self.part
        return self._examples.plan.shard(rank * workers + worker, world_size * workers, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next, in this process."""
        if self._state is not None:
            return {**self._state}
        return (self._position or self.position(1)).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with the next epoch that is read. Then OptionError is raised where it was of other rows."""
        self._state = state


class Loader:
    """What `loader` gives. Each `for` is an epoch.

    `set_epoch` tells which; else it is the one after the last that was read to its end.
    """

    def __init__(self, dataset: IterableDataset, *, num_workers: int = 0, **options: Any) -> None:
        for name in _NOT_OURS:
            if name in options:
                raise OptionError(f"{name} is not for this loader: it knows which rows come when")
        self.dataset = dataset
        self._workers = max(1, num_workers)
        self._position = dataset.position(self._workers)
        options.setdefault("collate_fn", _as_it_is)
        self._batches = DataLoader(dataset, batch_size=None, num_workers=num_workers, **options)

    def __len__(self) -> int:
        """How many batches an epoch has."""
        epoch = self._position.epoch
        return sum(len(self.dataset.shard(number, self._workers, epoch)) for number in range(self._workers))

    def __iter__(self) -> Iterator[Any]:
        position = self._position
        first, epoch = position.begin(), position.epoch
        self.dataset.begin_at(epoch, first)
        for given, batch in enumerate(self._batches, first + 1):
            position.step = given
            yield batch
        position.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next `for` reads."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Which batch comes next, as JSON has it. The same on all ranks that were given as many."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `for` goes on there, exactly, with as many workers and ranks.

        Raises OptionError where the state is of other rows.
        """
        self._position.load_state_dict(state)


def _place() -> tuple[int, int]:
    """Which part of how many this process is to torch.distributed."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _as_it_is(batch: Any) -> Any:
    return batch

"""Batches for training, and the position in an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from dissociated.client.dataset import DatasetHandle
from dissociated.errors import OptionError
from dissociated.training.access import Access
from dissociated.training.columns import Column
from dissociated.training.examples import Examples
from dissociated.training.plan import LayoutProgress, Shard
from dissociated.training.sampling import Sampling, is_count


class Position:
    """The next batch to read in an epoch, by `workers` workers on each rank. It can be saved, and resumed elsewhere."""

    def __init__(self, examples: Examples, workers: int = 1) -> None:
        self.examples = examples
        self.epoch = 0
        self._workers = workers
        self._progress: list[LayoutProgress] = []  # of this epoch, in each layout that has read a part of it
        self._resumed = False  # whether a state was loaded, and no batch was received since

    @property
    def step(self) -> int:
        """The number of batches that each rank has received in the current layout."""
        return self._split_progress()[1]

    @step.setter
    def step(self, step: int) -> None:
        self._progress, self._resumed = [*self.before, LayoutProgress(*self._layout(), step)], False

    @property
    def progress(self) -> list[LayoutProgress]:
        """The progress of this epoch in each layout that has read a part of it. The last may be the current layout."""
        return self._progress

    @property
    def before(self) -> list[LayoutProgress]:
        """The progress of this epoch in earlier layouts."""
        return self._split_progress()[0]

    def _layout(self) -> tuple[int, int]:
        return self.examples.ranks, self._workers

    def _split_progress(self) -> tuple[list[LayoutProgress], int]:
        """Return the progress in earlier layouts, and the step in the current layout."""
        *before, last = self._progress or [LayoutProgress(*self._layout(), 0)]
        if last[:2] == self._layout():
            return before, last.step
        return ([*before, last] if last.step else before), 0

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch. It is read from its beginning, unless a state of this epoch was loaded just before."""
        if not is_count(epoch):
            raise OptionError(f"an epoch is a number, 0 or more, not {epoch!r}")
        if not (self._resumed and epoch == self.epoch):
            self.epoch, self._progress, self._resumed = epoch, [], False

    def move_to(self, epoch: int, progress: Sequence[LayoutProgress]) -> None:
        """Move to the rest of an epoch."""
        self.epoch, self._progress = epoch, [*progress]

    def begin_reading(self) -> int:
        """Begin to read the epoch, at the loaded state or at its start. Return the number of the first batch."""
        if not self._resumed:
            self._progress = []
        return self.step

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a dict of strings, numbers, booleans and lists, which can be written as JSON."""
        progress = self._progress or [LayoutProgress(*self._layout(), 0)]
        return {"epoch": self.epoch, "progress": [[*each] for each in progress], **self.examples.describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raise OptionError if the state is invalid or refers to other rows."""
        for name, expected in self.state_dict().items():
            if name not in state:
                raise OptionError(f"{name!r} is missing in the state: give a result of state_dict()")
            if name not in ("epoch", "progress") and state[name] != expected:
                raise OptionError(
                    f"the state has {name} {state[name]!r}, and these batches have {name} {expected!r}: they would not "
                    "be the same rows"
                )
        epoch, progress = state["epoch"], state["progress"]
        if not is_count(epoch) or not isinstance(progress, list) or not all(map(_is_progress, progress)):
            raise OptionError(f"the state has an invalid position: epoch {epoch!r}, progress {progress!r}")
        self.epoch, self._progress, self._resumed = epoch, [LayoutProgress(*each) for each in progress], True


@dataclass(kw_only=True, eq=False)
class Batches(Sampling):
    """Batches of a dataset for training. Each batch maps column names to NumPy arrays; each `for` loop is an epoch.

    `dataset`, a dataset handle, is the only positional argument. The other arguments are the fields of `Sampling`. All
    epochs read the version of the dataset that the handle refers to. Without `set_epoch`, the epoch after the last
    complete one is read next.

    Raises:
        WrongKind: A column does not hold numbers, and is not in `as_arrow`.
        ColumnNotFound: The dataset lacks one of the columns.
        OptionError: An option is invalid.
        DissociatedError: Further errors of reading.

    Example:
        ```python
        from dissociated.training import Batches

        batches = Batches(client.dataset("flights"), columns=["distance", "air_time"], batch_size=4096, shuffle=True)
        for batch in batches:
            print(batch["distance"].mean())
        ```
    """

    dataset: DatasetHandle = field(kw_only=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._examples = Examples(self.dataset, self, Access.COPIED if self.writable else Access.READ_ONLY)
        self._position = Position(self._examples)

    def __len__(self) -> int:
        """Return the number of batches of the current epoch, with those that were read before it was resumed."""
        return sum(each.step for each in self._position.before) + len(self._shard())

    def __iter__(self) -> Iterator[dict[str, Column]]:
        position = self._position
        first, epoch = position.begin_reading(), position.epoch
        for step, batch in enumerate(self._examples.deliver(self._shard(), first), first + 1):
            position.step = step
            yield batch
        position.set_epoch(epoch + 1)

    def _shard(self) -> Shard:
        position = self._position
        return self._examples.plan.shard(*self.part, position.epoch, position.before)

    @property
    def dictionaries(self) -> dict[str, pa.Array]:
        """The distinct values of the columns in `codes`, of which the batches have the positions."""
        return self._examples.dictionaries

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next `for` loop reads. With `shuffle`, each epoch has an order of its own."""
        self._position.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next batch, which can be written as JSON. See `load_state_dict`."""
        return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the next `for` loop from a saved position, with exactly the batch that was next.

        With another `world_size` than before, the rows that were not read are divided anew.

        Raises:
            OptionError: The state refers to other rows: to another version or other options.
        """
        self._position.load_state_dict(state)


def _is_progress(progress: object) -> bool:
    if not isinstance(progress, list | tuple) or len(progress) != 3 or not all(map(is_count, progress)):
        return False
    return all(progress[:2])

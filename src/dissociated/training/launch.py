"""The processes that train together: the rank of this process among them, and what a worker shares with its parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import weakref
from array import array
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import get_spawning_popen
from multiprocessing.heap import BufferWrapper
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from dissociated.base.fork import hold_over_forks
from dissociated.base.once import once
from dissociated.errors import OptionError

#: Variables that torchrun sets, and after it Accelerate, Ray Train and Kubeflow.
_RANK, _WORLD_SIZE, _ADDRESS = "RANK", "WORLD_SIZE", "MASTER_ADDR"


class ProcessRank(NamedTuple):
    """The number of this process, and the number of processes that train together."""

    rank: int
    world_size: int


def find_rank() -> ProcessRank:
    """Return the rank of this process: that of `torch.distributed` if it is initialized, or that of `torchrun`.

    PyTorch is not imported for this. Lightning and Ray Train initialize `torch.distributed` before they read batches.

    Raises:
        OptionError: The variables of `torchrun` contradict each other.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return ProcessRank(distributed.get_rank(), distributed.get_world_size())
    if not all(name in os.environ for name in (_RANK, _WORLD_SIZE, _ADDRESS)):
        return ProcessRank(0, 1)
    rank, world_size = os.environ[_RANK], os.environ[_WORLD_SIZE]
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise OptionError(
            f"the environment has {_RANK}={rank!r} and {_WORLD_SIZE}={world_size!r}, not a rank below a number of "
            "processes: give rank= and world_size="
        )
    return ProcessRank(int(rank), int(world_size))


def processes_of_accelerate() -> int:
    """Return the number of processes among which Accelerate divides batches; 1 if Accelerate is not in use."""
    state = sys.modules.get("accelerate.state")
    shared = {} if state is None else state.PartialState._shared_state
    return int(shared.get("num_processes", 1))


def check_accelerate(world_size: int, processes: int) -> None:
    """Raise OptionError if Accelerate would divide batches among `processes` that were already divided.

    A dataset cannot know whether Accelerate has prepared the DataLoader that reads it. So this is also raised for a
    DataLoader that was not prepared.
    """
    if world_size > 1 and processes > 1:
        raise OptionError(
            f"this dataset gives each of {world_size} processes its own rows, and Accelerate would divide the batches "
            f"of its DataLoader among {processes} once more, so that rows are lost: use dissociated.torch.loader(), "
            "which accelerator.prepare() leaves as it is, or give rank=0 and world_size=1, and Accelerate divides alone"
        )


@once
def end_with_parent() -> None:
    """End this process as soon as the process that has started it ends, in whatever way.

    PyTorch's own workers compare the id of their parent now and then. This is not enough: under `forkserver` it is the
    id of the server of forks, and a worker that is blocked does not compare. Here, a thread waits for a descriptor of
    the parent, and for the pipe from it, which also shows the end of a parent that ended before the thread started.
    """
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return
    sentinels: list[int] = [parent.sentinel]
    try:
        sentinels.append(os.pidfd_open(parent.pid))
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # no descriptor is free, or the kernel has no such call
        pass

    def watch() -> None:
        wait(sentinels)
        os._exit(1)

    threading.Thread(target=watch, name="dissociated-parent", daemon=True).start()


class SharedNumbers:
    """Numbers that a process can change for the workers that it has started.

    Each process has numbers of its own. They begin as those of the object that was pickled, or inherited through
    `fork`, and changes in other processes leave them as they are. Only `current` follows the changes of the process
    that has started this one, until this process sets the numbers itself.
    """

    def __init__(self, numbers: tuple[int, ...], max_count: int) -> None:
        self._numbers = numbers
        self._max_count = max_count
        # The numbers in shared memory, after their count: of this process, made before it starts a child that can read
        # them, and of the process that has started this one.
        self._memory: BufferWrapper | None = None
        self._parent_memory: BufferWrapper | None = None
        self._follows_parent = False
        self._register()

    def _register(self) -> None:
        with _lock:
            _shared_numbers.add(self)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of this process."""
        return self._numbers

    @numbers.setter
    def numbers(self, numbers: tuple[int, ...]) -> None:
        with _lock:
            self._numbers, self._follows_parent = numbers, False
            self._write()

    @property
    def current(self) -> tuple[int, ...] | None:
        """The numbers of this process or, if this is a copy and they were not set here, of the parent process.

        They are None if the parent's are not known: this copy was not made when the parent started this process, or the
        parent had no memory or descriptor to share them.
        """
        if not self._follows_parent:
            return self._numbers
        if self._parent_memory is None:
            return None
        count, *numbers = _view(self._parent_memory).tolist()
        return tuple(numbers[:count])

    def _write(self) -> None:
        if self._memory is not None:
            _view(self._memory)[: 1 + len(self._numbers)] = array("q", (len(self._numbers), *self._numbers))

    def share(self) -> None:
        """Make shared memory, which the children of this process inherit or receive. The caller holds the lock."""
        if self._memory is None:
            self._memory = BufferWrapper((1 + self._max_count) * array("q").itemsize)
            self._write()

    def after_fork_in_child(self) -> None:
        """Follow the process that has forked this one."""
        self._follow(self._memory)

    def _follow(self, parent_memory: BufferWrapper | None) -> None:
        self._memory, self._parent_memory, self._follows_parent = None, parent_memory, True

    def __copy__(self) -> SharedNumbers:
        copied = SharedNumbers(self._numbers, self._max_count)
        copied._parent_memory, copied._follows_parent = self._parent_memory, self._follows_parent
        return copied

    def __deepcopy__(self, memo: object) -> SharedNumbers:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        # The result may be unpickled anywhere, and any number of times, so it has no memory of this process.
        return self._copy, (self._numbers, self._max_count, None)

    def reduce_for_child(self) -> tuple[Any, ...]:
        """Return how to copy this object in a process that this one starts, and no other."""
        if get_spawning_popen() is None:  # such as for a queue
            return self.__reduce__()
        with _lock:
            self.share()
        return self._copy, (self._numbers, self._max_count, self._memory)

    @classmethod
    def _copy(cls, numbers: tuple[int, ...], max_count: int, parent_memory: BufferWrapper | None) -> SharedNumbers:
        copied = cls(numbers, max_count)
        copied._follow(parent_memory)
        return copied


def _view(memory: BufferWrapper) -> memoryview[int]:
    return memory.create_memoryview().cast("q")


_shared_numbers: weakref.WeakSet[SharedNumbers] = weakref.WeakSet()
_lock = threading.Lock()  # guards the set and its members; held throughout a fork


def _before_fork() -> None:
    for shared in _shared_numbers:
        with suppress(OSError):  # the child finds that it shares no memory, if it needs any
            shared.share()


def _after_fork_in_child() -> None:
    for shared in _shared_numbers:
        shared.after_fork_in_child()


ForkingPickler.register(SharedNumbers, SharedNumbers.reduce_for_child)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
hold_over_forks(_lock)  # Python runs the hooks before a fork in reverse order, so this one encloses the others

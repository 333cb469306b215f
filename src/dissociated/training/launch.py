"""The processes that train together: the rank of this process among them, and the end of a worker with its parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from multiprocessing.connection import wait
from typing import NamedTuple

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

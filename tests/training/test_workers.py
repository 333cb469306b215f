"""Worker processes follow the process that has started them, and end with it."""

from __future__ import annotations

import copy
import json
import os
import pickle
import select
import signal
import subprocess
from pathlib import Path

import pytest

from dissociated.training.launch import SharedNumbers
from support.processes import Fork, run_script

#: Starts a worker that never ends by itself, and a fork that outlives this process with copies of its pipes.
SCRIPT = """
import multiprocessing, os, signal, sys, time
from dissociated.training.launch import end_with_parent


def work(ready):
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.send(os.getpid())
    while True:
        time.sleep(60)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    receiving, sending = context.Pipe()
    context.Process(target=work, args=(sending,)).start()
    worker = receiving.recv()
    if (holder := os.fork()) == 0:
        signal.pause()
    print(worker, holder, flush=True)
    end = sys.stdin.readline().strip()
    os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else os._exit(0)
"""


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("method", "end"), [("fork", "killed"), ("spawn", "exit"), ("forkserver", "killed"), ("forkserver", "exit")]
)
def test_a_worker_ends_when_its_parent_has_gone(tmp_path: Path, method: str, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Fork(script, method, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        ended: list[int] = []
        worker, holder = map(int, parent.stdout.readline().split())
        descriptor = os.pidfd_open(worker)
        try:
            parent.stdin.write(f"{end}\n")
            parent.stdin.close()
            parent.wait(30)
            ended, _, _ = select.select([descriptor], [], [], 30)
            assert ended, "the worker lives on"
        finally:
            os.kill(holder, signal.SIGKILL)
            if not ended:
                os.kill(worker, signal.SIGKILL)
            os.close(descriptor)


#: Prints the numbers that the processes of a training read, while each of them sets other ones.
NUMBERS = """
import json, multiprocessing, pickle, sys
from dissociated.training.launch import SharedNumbers


def answer(shared, pipe):
    while pipe.recv():
        pipe.send(shared.current)


class Worker:
    def __init__(self, shared):
        context = multiprocessing.get_context("fork")
        self.pipe, pipe = context.Pipe()
        context.Process(target=answer, args=(shared, pipe), daemon=True).start()

    def read(self):
        self.pipe.send(True)
        return self.pipe.recv()


def train(shared, pipe):
    pipe.recv()
    found = [shared.current]
    shared.numbers = 6,
    worker = Worker(shared)
    pipe.send("started")
    pipe.recv()
    found += [shared.current, worker.read()]
    shared.numbers = 8, 9
    pipe.send([*found, worker.read()])


if __name__ == "__main__":
    shared = SharedNumbers((0,), 3)
    copied = pickle.loads(pickle.dumps(shared))
    context = multiprocessing.get_context(sys.argv[1])
    rank, pipe = context.Pipe()
    context.Process(target=train, args=(shared, pipe)).start()
    worker = Worker(copied)
    found = [worker.read()]
    shared.numbers, copied.numbers = (1, 2, 3), (4, 5)
    rank.send("set")
    rank.recv()
    shared.numbers = 7,
    rank.send("set")
    print(json.dumps([*found, worker.read(), *rank.recv(), shared.current]))
"""


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_follows_its_parent_until_it_sets_numbers_itself(tmp_path: Path, method: str) -> None:
    """Ranks have copies of one dataset, and each tells its own workers the next epoch."""
    script = tmp_path / "script.py"
    script.write_text(NUMBERS)
    with Fork(script, method, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
        process.wait(30)
    assert found == [[0], [4, 5], [1, 2, 3], [6], [6], [8, 9], [7]]


def test_a_copy_has_numbers_of_its_own_and_may_not_know_those_of_its_parent() -> None:
    original = SharedNumbers((1, 2), 3)
    unpickled = pickle.loads(pickle.dumps(original))
    assert (unpickled.numbers, unpickled.current) == ((1, 2), None)
    unpickled.numbers = (3,)
    assert unpickled.current == (3,)
    for copied in (copy.copy(original), copy.deepcopy(original)):
        copied.numbers = (4,)
        assert (copied.current, original.current) == ((4,), (1, 2))


#: Forks a process while no descriptor is free. It prints the numbers that it knows, and those that it reads.
EXHAUSTED = """
import os, resource
from dissociated.training.launch import SharedNumbers

numbers = SharedNumbers((1,), 3), SharedNumbers((2,), 3)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
if (child := os.fork()) == 0:
    print(*((each.numbers, each.current) for each in numbers), flush=True)
    os._exit(0)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
os.waitpid(child, 0)
"""


@pytest.mark.usefixtures("forks")
def test_a_process_may_be_forked_without_free_descriptors() -> None:
    process = run_script(EXHAUSTED)
    assert (process.stdout, process.stderr) == ("((1,), None) ((2,), None)\n", "")

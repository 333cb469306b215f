"""Worker processes end with the process that has started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

from support.processes import Fork

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

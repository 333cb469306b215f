"""Readers that tests kill and stop, in processes and in threads."""

from __future__ import annotations

import signal
import subprocess
import threading
from pathlib import Path

import dissociated as dis
from support.helpers import wait_until

from .conftest import Good
from .peer import PATIENCE

#: A script that reads the stream TICKET at URI, and holds its first BATCHES until its input is closed.
CLIENT = """
import os, sys
import dissociated as dis

uri, ticket, batches = sys.argv[1:]
reader = dis.open_stream(uri, bytes.fromhex(ticket))
held = [reader.read_next_batch() for _ in range(int(batches))]
print("reached", flush=True)
sys.stdin.read()
"""
#: A script that continues instead, and prints the number of the remaining rows; and a script that ends.
COUNTING = CLIENT.replace("sys.stdin.read()", "print(sum(b.num_rows for b in reader), flush=True)")
ENDING = CLIENT.replace("sys.stdin.read()", "")


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    assert said, "the process ended"
    return said


class Reading:
    """A thread that reads a whole stream."""

    def __init__(self, uri: str, timeout: float) -> None:
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(uri, timeout))
        self._thread.start()

    def _run(self, uri: str, timeout: float) -> None:
        try:
            dis.open_stream(uri, b"ticket", timeout=timeout).read_all()
        except BaseException as error:
            self._failure = error.with_traceback(None)

    def failure(self) -> BaseException | None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self._failure


def end_by(process: subprocess.Popen[str], sign: signal.Signals) -> None:
    """Kill or stop a process, and wait until it has ended, or all of its threads have stopped."""
    process.send_signal(sign)
    if sign is signal.SIGKILL:
        process.wait(PATIENCE)
    else:
        wait_until(lambda: _is_stopped(process.pid), "it has stopped")


def _is_stopped(pid: int) -> bool:
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {*states} == {"T"}


def failure_by(process: subprocess.Popen[str], uri: str, sign: signal.Signals, timeout: float) -> BaseException | None:
    """Send `sign` to a server that has sent everything, and return the exception of a reader at `uri`."""
    reading = Reading(uri, timeout)
    assert line(process) == "reached"
    end_by(process, sign)
    return reading.failure()


def stop_and_go_on(good: Good, process: subprocess.Popen[str], rows: int) -> None:
    """Stop a client that counts rows, check that others are served, and let the client read its remaining `rows`."""
    assert line(process) == "reached"
    process.send_signal(signal.SIGSTOP)
    good.check()
    process.send_signal(signal.SIGCONT)
    assert line(process) == str(rows)
    assert process.wait(PATIENCE) == 0

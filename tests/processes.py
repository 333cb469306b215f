"""Commands of this library as processes of their own, to be killed."""

from __future__ import annotations

import fcntl
import os
import pty
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import dissociated as dis
from helpers import PATIENCE, Child, files_below


class Process:
    """A `dissociated` command that says where its catalog answers."""

    def __init__(self, *arguments: str | Path, prefix: Sequence[str] = (), cwd: Path | None = None) -> None:
        with tempfile.TemporaryFile("w+") as log:  # a pipe that nobody reads would be full, and it would wait
            self._process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "dissociated", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=cwd,
            )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("catalog"):
                    break
            else:
                log.seek(0)
                raise AssertionError(f"it ended: {log.read()}")
        self.uri = line.split()[-1]
        self.pid = self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=PATIENCE)

    def terminate(self) -> int:
        self._process.terminate()
        return self.wait()

    def wait(self) -> int:
        self._process.communicate(timeout=PATIENCE)
        return self._process.returncode

    def leases(self) -> int:
        """How many addresses its clients hold."""
        with dis.connect(self.uri) as client:
            return client.status().leases

    def open_files(self, below: Path) -> set[str]:
        """What it has open or mapped below a directory, but for directories."""
        return files_below(below, self.pid)


#: Starts one, which is killed after the test.
Start = Callable[..., Process]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def in_terminal(columns: int, arguments: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> str:
    """What a terminal of so many columns is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    around = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    with Child(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=around, cwd=cwd) as process:
        os.close(theirs)
        written = b""
        with suppress(OSError):  # EIO, at the end
            while some := os.read(ours, 1 << 16):
                written += some
        process.wait(PATIENCE)
    os.close(ours)
    return written.decode()

"""Commands of this library in their own processes, which tests can kill."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import SystemRandom
from threading import Thread
from typing import Any

import dissociated as dis
from support.forks import MAX_DESCRIPTORS, parent
from support.helpers import PATIENCE, Child, files_below

#: Seconds between two heartbeats of a node that stays alive during its test. A busy machine may delay three of 1 s.
HEARTBEAT = "3"
_PYTHON = sys.executable  # The fixture `forked_nodes` replaces the attribute.


class Fork(Child):
    """A Python process that is forked from a process with the library already loaded. See forks.py.

    It is used like a child of this process, although the forking process is its parent. With `host`, the process id of
    another process, it is on that host (`cluster/hosts.py`); with `mounts`, it has the mounts of another process.
    `descriptors` maps further descriptors of the fork to ours. With `session` it leads a session of its own.
    """

    def __init__(self, *arguments: str | Path, **options: Any) -> None:
        names = ("host", "mounts", "descriptors", "session", "umask")
        self._options = {name: options.pop(name) for name in names if name in options}
        super().__init__([*map(str, arguments)], text=True, bufsize=1, **options)

    # Popen calls the methods below to start a child and to poll its status.

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more):
        pipes = more[3:9]
        theirs = (pipes[0], pipes[3], pipes[5])
        streams = {number: number if stream == -1 else stream for number, stream in enumerate(theirs)}
        environment = dict(os.environ if env is None else env)
        self.pid = parent().start(args, cwd, environment, streams, **self._options)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, flags: int) -> tuple[int, int]:
        pidfd = os.pidfd_open(self.pid)  # This also works for a zombie that its parent has not reaped.
        try:
            ended, _, _ = select.select([pidfd], [], [], 0 if flags & os.WNOHANG else None)
        finally:
            os.close(pidfd)
        return (self.pid, parent().status(self.pid)) if ended else (0, 0)

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and (status := self._try_wait(os.WNOHANG)) != (0, 0):
                self._handle_exitstatus(status[1])  # type: ignore[attr-defined]
        return self.returncode


def run_script(script: str, *arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork to its end. The options are those of `Fork`. The test must use the fixture `forks`."""
    with Fork("-c", script, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        stdout, stderr = process.communicate(timeout=3 * PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


#: The variable by which a fork of a script knows the process that called the script.
CALLER = "DISSOCIATED_TEST_CALLER"
#: A script that sends its arguments, directory, environment and descriptors to the forking process, and exits as the
#: fork does. If Python is to run a module that is not in `forked`, it becomes that Python.
_COMMAND = """#!{python} -IS
import json, os, socket, sys

arguments = [*{before!r}, *sys.argv[1:]]
if arguments[0] != "-m" or arguments[1] not in {forked!r}:
    os.execv({python!r}, [{python!r}, *arguments])
listed = sorted(map(int, os.listdir("/proc/self/fd")))
descriptors = [one for one in listed if os.path.lexists(f"/proc/self/fd/{{one}}")][:{most}]  # without that of the list
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect({place!r})
    environment = {{**os.environ, {caller!r}: str(os.getppid())}}
    others = {{"session": os.getsid(0) == os.getpid(), "umask": os.umask(0)}}
    asked = json.dumps([arguments, os.getcwd(), environment, descriptors, others])
    socket.send_fds(connection, [asked.encode()], descriptors)
    for descriptor in descriptors[3:]:
        os.close(descriptor)
    sys.exit(int(connection.recv(16)))
"""


def forking_command(path: Path) -> AbstractContextManager[None]:
    """Provide an executable at `path` that acts as the command `dissociated`. Each call is a fork."""
    return _forking_script(path, ("-m", "dissociated"), ["dissociated"])


def forking_python(path: Path, *modules: str) -> AbstractContextManager[None]:
    """Provide an executable at `path` that acts as this Python. Each call with `-m` and one of `modules` is a fork."""
    return _forking_script(path, (), modules)


@contextmanager
def _forking_script(path: Path, before: Sequence[str], forked: Sequence[str]) -> Iterator[None]:
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        place = f"{directory}/forks.sock"
        listener.bind(place)
        listener.listen()
        path.write_text(
            _COMMAND.format(
                python=_PYTHON, place=place, before=before, forked=forked, caller=CALLER, most=MAX_DESCRIPTORS
            )
        )
        path.chmod(0o700)
        thread = Thread(target=_fork_on_request, args=(listener,))
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE)


def _fork_on_request(listener: socket.socket) -> None:
    """Fork on each connection until the listener is shut down, and then kill the forks that still run."""
    forks: list[tuple[Fork, Thread]] = []
    while True:
        try:
            connection = listener.accept()[0]
        except OSError:
            break
        with suppress(OSError):  # The script was killed before it sent its request.
            process = _fork_for(connection)
            thread = Thread(target=_answer, args=(connection, process))
            thread.start()
            forks.append((process, thread))
    for process, thread in forks:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        thread.join(PATIENCE)


def _fork_for(connection: socket.socket) -> Fork:
    asked, received, *_ = socket.recv_fds(connection, 1 << 17, MAX_DESCRIPTORS)
    if not asked:
        connection.close()
        raise ConnectionResetError
    with ExitStack() as ends:
        for descriptor in received:
            ends.callback(os.close, descriptor)
        arguments, directory, environment, numbers, others = json.loads(asked)
        descriptors = dict(zip(numbers, received, strict=True))
        named = {name: descriptors.pop(number) for number, name in enumerate(("stdin", "stdout", "stderr"))}
        return Fork(*arguments, cwd=directory, env=environment, descriptors=descriptors, **others, **named)


def _answer(connection: socket.socket, process: Fork) -> None:
    """Send the exit status of a process once it ends. It may run as long as Spark's Java process."""
    with connection, suppress(OSError):
        connection.send(str(process.wait() % 256).encode())


class Process:
    """A `dissociated` command that prints the address of its catalog. With `forked` it starts as a fork; see `Fork`."""

    def __init__(
        self,
        *arguments: str | Path,
        prefix: Sequence[str] = (),
        cwd: Path | None = None,
        forked: bool = False,
        host: int | None = None,
        umask: int = -1,
        mounts: int | None = None,
        log: Path | None = None,
    ) -> None:
        command = ["-m", "dissociated", *map(str, arguments)]
        # A pipe that nobody reads could fill up and block the command.
        with tempfile.TemporaryFile("w+") if log is None else log.open("w+") as stderr:
            if forked and not prefix:
                self._process: subprocess.Popen[str] = Fork(
                    *command, stdout=subprocess.PIPE, stderr=stderr, cwd=cwd, host=host, umask=umask, mounts=mounts
                )
            else:
                whole = [*prefix, _PYTHON, *command]
                self._process = subprocess.Popen(
                    whole, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=cwd, umask=umask
                )
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.startswith("catalog"):
                    break
            else:
                stderr.seek(0)
                raise AssertionError(f"it ended: {stderr.read()}")
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

    def line(self) -> str:
        """Return the next line that the command prints."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def leases(self) -> int:
        """Return how many leases its clients hold."""
        with dis.connect(self.uri) as client:
            return client.status().leases

    def open_files(self, below: Path) -> set[str]:
        """Return the files below a directory that the command has open or mapped."""
        return files_below(below, self.pid)


#: A function that starts a `Process`, which is killed after the test.
Start = Callable[..., Process]


def free_port() -> int:
    """Return a port without a listener, for a later bind.

    The port lies outside the kernel's ephemeral range, so that the kernel does not assign it meanwhile.
    """
    chosen_from = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = SystemRandom().randrange(10_000, max(chosen_from, 20_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def in_terminal(
    columns: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path | None = None,
    *,
    given: bytes = b"",
) -> str:
    """Run a command in a terminal of `columns` columns, in which somebody types `given`, and return its output.

    If the command is this Python, it is a fork.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    around = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    program, *rest = arguments
    start = partial(Fork, *rest) if program in (_PYTHON, sys.executable) else partial(Child, arguments)
    with start(stdin=theirs, stdout=theirs, stderr=theirs, env=around, cwd=cwd) as process:
        os.close(theirs)
        os.write(ours, given)
        written = b""
        with suppress(OSError):  # The terminal's end is reported as EIO.
            while some := os.read(ours, 1 << 16):
                written += some
        process.wait(PATIENCE)
    os.close(ours)
    return written.decode()


def kill_group(process: Fork) -> None:
    """Kill a process that leads a group, with its children. One that has not come to that yet is killed alone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()

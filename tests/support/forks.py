"""Python processes that are forked from a process with the library already loaded, at a tenth of the usual CPU time.

A fork differs from a fresh process only in how it starts. It has its own arguments, environment, directory and streams;
it can be killed and stopped; and it ends like any interpreter, except that most forks keep their modules: see `_end`.
The parent has loaded the modules that a fork might need and has used none of them, so that there are no threads,
sockets or contexts to share. Tests of how the library loads start fresh processes instead.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from support.injection import arm_from_environment

#: Modules that most tests of processes need.
_LOADED = (
    "dissociated.catalog.flight",
    "dissociated.client.client",
    "dissociated.cli.condition",
    "dissociated.cli.datasets",
    "dissociated.cli.inputs",
    "dissociated.cli.local",
    "dissociated.cli.put",
    "dissociated.cli.reading",
    "dissociated.cli.serving",
    "dissociated.cli.status",
    "dissociated.client.dataset",
    "dissociated.client.sql",
    "dissociated.client.uri_stream",
    "dissociated.ipc",
    "dissociated.node.client",
    "dissociated.node.node",
    "dissociated.server",
    "dissociated.store.segment",
    "dissociated.transport.framed.shm",
    "dissociated.transport.framed.tcp",
    "dissociated.transport.native.fabric.transport",
    "dissociated.transport.native.ucx.transport",
    "encodings.idna",
    "pyarrow.compute",
    "pyarrow.csv",
    "pyarrow.dataset",
    "pyarrow.flight",
    "pyarrow.json",
    "pyarrow.parquet",
)
#: Libraries that not every machine has. pyarrow imports pandas in the first `pa.array`, which takes 200 ms.
_OPTIONAL = ("duckdb", "pandas")
#: Settings that keep NumPy and libarrow from starting threads, which a fork would lack.
_ALONE = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
#: A variable that forks have from their start. Other processes get it from a test that has to find them all. Its value
#: is the process id of the tests.
MARK = "DISSOCIATED_TEST_PROCESS"
#: A variable with the `sys.executable` of a fork, which starts other processes with it.
EXECUTABLE = "DISSOCIATED_TEST_EXECUTABLE"
_TESTS = Path(__file__).parents[1]
_MAX_REQUEST = 1 << 17  # bytes: a script and the environment
MAX_DESCRIPTORS = 16  # that a fork has from its start
_HIGH = 1000  # larger than the number of any descriptor of a fork


class Parent:
    """The process that others are forked from. A message with the three streams starts a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "support.forks", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=_TESTS, pass_fds=(theirs.fileno(),), env={**os.environ, **_ALONE, MARK: str(os.getpid())}
            )

    def close(self) -> None:
        """Stop the parent. Its forks continue."""
        self._control.close()
        self._process.wait()

    def start(
        self,
        arguments: Sequence[str],
        cwd: str | Path | None,
        environment: Mapping[str, str],
        streams: Mapping[int, int],
        descriptors: Mapping[int, int] | None = None,
        host: int | None = None,
        mounts: int | None = None,
        session: bool = False,
        umask: int = -1,
    ) -> int:
        """Fork a process with the arguments of a Python command line, and return its process id.

        Its descriptors are the keys of `streams` and of `descriptors`, which map them to ours. With `host`, the process
        id of another process, the fork is on that host: see `enter`. With `mounts`, it has the mounts of that process,
        and its user namespace, in which mounts are allowed. With `session` it leads a session of its own. A `umask` of
        -1 is that of the parent.
        """
        whole = {**streams, **(descriptors or {})}
        asked = {
            "arguments": arguments,
            "cwd": str(cwd or os.getcwd()),
            "environment": environment,
            "host": host,
            "mounts": mounts,
            "session": session,
            "umask": umask,
            "numbers": [*whole],
        }
        return self._ask(asked, [*whole.values()])

    def load(self, module: str) -> None:
        """Import a module, which must start no thread, for all forks that start from now on."""
        assert self._ask({"load": module}, ()) == 1, "threads are not forked"

    def status(self, pid: int) -> int:
        """Return the exit status of a process that has ended, and reap it."""
        return self._ask({"ended": pid}, ())

    def _ask(self, asked: dict[str, Any], descriptors: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(asked).encode()], descriptors)
            return int(self._control.recv(_MAX_REQUEST))


_parent: Parent | None = None


@contextmanager
def forking() -> Iterator[None]:
    """Provide the parent process within the context."""
    global _parent
    with closing(Parent()) as _parent:
        yield
    _parent = None


def parent() -> Parent:
    """Return the parent of this process's forks. The test must use the fixture `forks`."""
    assert _parent is not None, "the test needs the fixture `forks`"
    return _parent


def _serve(control: socket.socket) -> Callable[[], object] | None:
    """Fork on each request until the peer closes the socket. In a fork, return the function that it has to run."""
    while True:
        message, streams, *_ = socket.recv_fds(control, _MAX_REQUEST, MAX_DESCRIPTORS)
        if not message:
            return None
        asked = json.loads(message)
        if "ended" in asked:
            control.send(str(os.waitpid(asked["ended"], 0)[1]).encode())
            continue
        if "load" in asked:
            import_module(asked["load"])
            control.send(str(len(os.listdir("/proc/self/task"))).encode())
            continue
        if not (pid := os.fork()):
            control.close()
            return _become(streams, **asked)
        for stream in streams:
            os.close(stream)
        control.send(str(pid).encode())


def enter(pid: int, *namespaces: str) -> None:
    """Enter namespaces of another process: its network ("net"), its name ("uts"), or its file system ("mnt")."""
    libc = ctypes.CDLL(None, use_errno=True)
    for name in namespaces:
        with open(f"/proc/{pid}/ns/{name}") as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns: {name}")


def _become(
    streams: Sequence[int],
    arguments: Sequence[str],
    cwd: str,
    environment: dict[str, str],
    host: int | None,
    mounts: int | None,
    session: bool,
    umask: int,
    numbers: Sequence[int],
) -> Callable[[], object]:
    """Set the process up as `python` would with `arguments`, and return the function that runs its program."""
    if host is not None:
        enter(host, "net", "uts", "mnt")
    if mounts is not None:
        enter(mounts, "user", "mnt")
    if session:
        os.setsid()
    if umask != -1:
        os.umask(umask)
    moved = [fcntl.fcntl(stream, fcntl.F_DUPFD_CLOEXEC, _HIGH) for stream in streams]  # out of the way of `numbers`
    for stream in streams:
        os.close(stream)
    for number, stream in zip(numbers, moved, strict=True):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.executable = environment.get(EXECUTABLE, sys.executable)
    arm_from_environment()
    option, *rest = arguments
    first = {"-c": "", "-m": cwd}.get(option, str(Path(option).parent))
    sys.path[0:1] = [first, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if option == "-c":
        script, *sys.argv[1:] = rest
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = ModuleType("__main__")
        return lambda: exec(compile(script, "<string>", "exec"), main.__dict__)
    if option == "-m":
        module, *sys.argv[1:] = rest
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.argv[:] = arguments
    return lambda: runpy.run_path(option, run_name="__main__")


def _end(run: Callable[[], object]) -> None:
    """Run a program to its end, and exit without destroying the modules, which takes 50 of 60 ms.

    As at the end of any interpreter, exit handlers run, those of C libraries as well, and the program's objects are
    destroyed. A program that raises, or whose output cannot be flushed, ends in the usual way, and so does the program
    of `python -c` if it has threads, of Python or of C libraries. Any other program with threads skips the exit
    handlers of C libraries.
    """
    status = 0
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    # gRPC's threads go on until its objects in the modules are destroyed. C libraries must not be destroyed before.
    alone = len(os.listdir("/proc/self/task")) == 1
    main = vars(sys.modules["__main__"])
    if alone or main is globals():  # `python -c` has a module of its own.
        threading._shutdown()  # type: ignore[attr-defined]  # Wait for the threads of Python.
        atexit._run_exitfuncs()
        if main is not globals():
            main.clear()
        gc.collect()
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
            if not alone:
                os._exit(status & 0xFF)
            ctypes.PyDLL(None).exit(status & 0xFF)
    # Destroying pandas takes 30 ms. Modules that are still referenced, and not in `sys.modules`, are left alone.
    for name in [name for name in sys.modules if name.startswith("pandas.") or name == "pandas"]:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules.pop(name)))
    sys.exit(status)


def _load() -> None:
    for name in _LOADED:
        import_module(name)
    from dissociated.errors import TransportError
    from dissociated.transport.native.fabric.libfabric import ofi
    from dissociated.transport.native.ucx.libucp import ucp

    for library in (ucp, ofi):
        with suppress(TransportError):
            library()
    for name in _OPTIONAL:
        with suppress(ImportError):
            import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "threads are not forked"
    gc.collect()
    gc.freeze()  # Keep the collector from touching, and so copying, inherited pages.


if __name__ == "__main__":
    _load()
    with socket.socket(fileno=int(sys.argv[1])) as control:
        run = _serve(control)
    if run is not None:
        _end(run)

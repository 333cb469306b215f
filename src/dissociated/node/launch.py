"""The node of a store on this host: finding the running node, starting one, and stopping it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from dissociated.base.descriptors import owned, try_locked, unlocking
from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory, open_private_file, read_private_file
from dissociated.client.calls import CatalogClient
from dissociated.errors import AccessDenied, DissociatedError, ForkedError, StoreError
from dissociated.store.layout import NODE_LOG, START_LOCK, known_id, store_id

#: The environment variable with the directory of this user's default store.
STORE_VARIABLE = "DISSOCIATED_STORE"
#: The file in a store that contains the address of its node.
ADDRESS_FILE = "node.json"
#: The name of that file while the node stops and waits for streams in progress, so that no client finds the node.
STOPPING_FILE = "stopping.json"
_ANSWER_TIMEOUT = 5.0  # seconds in which a running node must answer
#: Seconds in which a process that owns a store must have written an address, if it is a node.
ADDRESS_TIMEOUT = 15.0


@dataclass(frozen=True)
class NodeAddress:
    """The URI of a node's catalog, and the id of the node's process."""

    uri: str
    pid: int

    @classmethod
    def read(cls, store: int, file: str = ADDRESS_FILE) -> Self:
        """Read the address from a file in the open directory of a store.

        Raises:
            OSError: The file cannot be read, for example because no node ever ran.
            ValueError, TypeError: The file is damaged.
        """
        return cls(**json.loads(read_private_file(file, within=store)))


def default_store() -> Path:
    """Return the directory of the default store: $DISSOCIATED_STORE, or one in memory, private to this user.

    Any user can create that directory in /dev/shm first. Therefore it is always opened by `open_private_directory`,
    which refuses a directory of another user. $XDG_RUNTIME_DIR is private but unsuitable for data: systemd limits it to
    a tenth of the memory, shares that with the sockets of the session, and empties it when the user logs out.
    """
    named = os.environ.get(STORE_VARIABLE)
    return Path(named).absolute() if named else Path("/dev/shm") / f"dissociated-store-{os.geteuid()}"


def running(directory: str | os.PathLike[str], timeout: float = _ANSWER_TIMEOUT) -> NodeAddress | None:
    """Return the node that owns the store in `directory`, or None if no node answers within `timeout` seconds.

    Raises:
        NotPrivate: Other users can access the directory.
        ForkedError: The process that forked this one has used gRPC.
    """
    try:
        store = open_private_directory(directory)
    except OSError:
        return None
    with owned(store):
        return _running(store, Path(directory), timeout)


def _running(store: int, directory: Path, timeout: float = _ANSWER_TIMEOUT) -> NodeAddress | None:
    try:
        address = NodeAddress.read(store)
        id = store_id(store, directory)
    except (OSError, ValueError, TypeError):
        return None
    try:
        with contextlib.closing(CatalogClient(address.uri, timeout)) as client:
            if client.stage().node != id:
                return None  # The node of this store was killed, and another node has its port now.
    except ForkedError:
        raise  # This process cannot ask any node.
    except AccessDenied:
        pass  # A node answers, but it requires a token, or its certificate is not trusted yet.
    except DissociatedError:
        return None
    return address


def ensure(
    directory: str | os.PathLike[str] | None = None,
    *,
    idle_exit: float | None = None,
    empty_exit: float | None = None,
    options: Sequence[str] = (),
    starter: int | None = None,
    timeout: float = 30.0,
) -> NodeAddress:
    """Return the node of the store in `directory`, and start one if none is running.

    A started node is a separate process, which continues when this process ends. If several processes call this at
    once, they start one node. If the node of the store is stopping, or a service is starting it, this call waits until
    the node has ended, or answers. All arguments except `directory` and `timeout` apply only to a node that is started.

    Args:
        directory: The directory of the store; by default `default_store()`.
        idle_exit: The number of seconds without readers or writers after which the node ends. Committed data stay.
        empty_exit: The number of seconds without readers, writers and data after which the node ends.
        options: Further options of the command `dissociated node`, such as `["--limit=8GiB", "--policy=evict"]`.
        starter: The read end of a pipe, which the caller keeps. When the write end is closed in all processes, the node
            ends if no version was committed and no client is connected to its catalog.
        timeout: The number of seconds in which the node must answer.

    Returns:
        The address of the node.

    Raises:
        StoreError: No node answered in time, or a process that is no node owns the store, such as `dissociated clean`.
            The message has the last line of the node's log, or names the process that owns the store.

    Example:
        ```python
        import dissociated as dis
        from dissociated.node.launch import ensure

        with dis.connect(ensure().uri) as client:
            client.put("flights", table)
        ```
    """
    store = Path(directory or default_store()).absolute()
    arguments = [f"--store={store}"]
    if idle_exit is not None:
        arguments.append(f"--idle-exit={idle_exit}")
    if empty_exit is not None:
        arguments.append(f"--empty-exit={empty_exit}")
    arguments += options
    deadline = time.monotonic() + timeout
    with store_errors(f"the store {store}"):
        opened = open_private_directory(store, create=True)
    with owned(opened):
        with store_errors(f"the store {store}"):
            known_id(opened, store)  # Raise for a directory that is not a store before anything is created there.
        with _start_lock(opened, store, deadline):
            known_at: float | None = None  # when the store's owner, if any, was last known as a node
            while (address := _running(opened, store)) is None:
                if (log := _open_log(opened, store)) is not None:
                    with os.fdopen(log, "w") as output:
                        address = _start(opened, store, arguments, output, deadline, starter)
                    if address is not None:
                        break
                node, now = _silent_node(store), time.monotonic()
                if known_at is None or log is not None or node is not None:
                    known_at = now
                if now >= min(deadline, known_at + ADDRESS_TIMEOUT):
                    why = node or "the store belongs to another process, which is still running"
                    raise StoreError(f"no node could be started for {str(store)!r}: {why}")
                time.sleep(0.05)  # A lock of the kernel has no timeout, so poll.
            return address


def _open_log(opened: int, store: Path) -> int | None:
    """Open an empty log for a node of a store that no process owns. Return None if another process owns the store."""
    with store_errors(f"starting a node for {store}"), try_locked(opened) as is_locked:
        if not is_locked:
            return None  # The log belongs to that process, or, if a service has started it, must not exist.
        return open_private_file(NODE_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, within=opened)


def _is_owned(opened: int) -> bool:
    """Return whether a process owns the store in an open directory."""
    with try_locked(opened) as is_locked:
        return not is_locked


def _silent_node(store: Path) -> str | None:
    """Describe the node that owns a store and does not answer. Return None if the owner is not known as a node."""
    try:
        with NodeProcess(store) as process:
            pid = process.address.pid
            if process.is_stopping:
                return f"its node, process {pid}, is stopping, and waits for streams in progress"
            return f"its node, process {pid}, does not answer: dissociated stop --store {store}"
    except (OSError, StoreError):
        return None


def stopping(directory: str | os.PathLike[str]) -> int | None:
    """Return the process id of the store's node while it stops and waits for streams in progress, or None."""
    try:
        with NodeProcess(Path(directory)) as process:
            return process.address.pid if process.is_stopping else None
    except (OSError, StoreError):
        return None


@contextlib.contextmanager
def _start_lock(opened: int, store: Path, deadline: float) -> Iterator[None]:
    """Hold the lock that lets one process at a time start a node. Raise StoreError at the `deadline`."""
    with (
        store_errors(f"starting a node for {store}"),
        os.fdopen(open_private_file(START_LOCK, os.O_WRONLY | os.O_CREAT, within=opened), "w") as lock,
    ):
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreError(
                        f"another process has been starting a node for {str(store)!r} for too long"
                    ) from None
                time.sleep(0.05)  # A lock of the kernel has no timeout, so poll.
        with unlocking(lock.fileno()):
            yield


def _start(
    opened: int, store: Path, arguments: Sequence[str], output: IO[str], deadline: float, starter: int | None
) -> NodeAddress | None:
    """Start a node. Return None if another process, such as the node of a service, owned the store before it did."""
    if starter is not None:
        arguments = [*arguments, "--starter-fd", str(starter)]
    read, write = os.pipe()
    with os.fdopen(read) as pipe:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "dissociated", "node", *arguments, "--ready-fd", str(write)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(write,) if starter is None else (write, starter),
                start_new_session=True,
                cwd="/",
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        finally:
            os.close(write)
        # The node may end long before this process, of which it would then be a zombie.
        threading.Thread(target=process.wait, name="node", daemon=True).start()
        line = _line(pipe, deadline)
    address = _running(opened, store) if line else None
    if address is not None:
        return address
    if time.monotonic() >= deadline:
        why = f"it did not answer in time. Process {process.pid} may still start; its log is {store / NODE_LOG}"
    elif line:
        why = "it has started, and does not answer"
    elif _is_owned(opened):
        return None
    else:
        try:
            log = read_private_file(NODE_LOG, within=opened).decode(errors="replace")
        except FileNotFoundError:
            return None  # The node of a service has owned the store in the meantime, and removed the log.
        why = log.strip().rpartition("\n")[2] or "its process ended without a message"
    raise StoreError(f"no node could be started for {str(store)!r}: {why}")


def _line(pipe: IO[str], deadline: float) -> str:
    return pipe.readline() if _is_readable(pipe.fileno(), deadline - time.monotonic()) else ""


def _is_readable(descriptor: int, timeout: float) -> bool:
    """Return whether the descriptor becomes readable within `timeout` seconds."""
    poll = select.poll()  # `select.select` refuses descriptors above 1,023.
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout) * 1000))


class NodeProcess:
    """The process of the node that owns the store in `directory`, also if it is stopping, for a `with` block.

    Raises:
        ProcessLookupError: No such process can be seen from here.
        NotPrivate: Other users can access the directory.
        OSError: The directory cannot be read, for example because it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.store = directory.absolute()
        with owned(open_private_directory(directory)) as opened:
            #: Whether the node accepts no new connections, and waits for streams in progress.
            self.is_stopping = False
            try:
                self.address = _address(opened, ADDRESS_FILE)
            except ProcessLookupError:
                self.address, self.is_stopping = _address(opened, STOPPING_FILE), True
            # The process cannot be replaced by another one with the same id once it is open.
            self._descriptor = os.pidfd_open(self.address.pid)
            try:
                # The id may be that of another process: after a node was killed, or in another container.
                if not _has_open(self.address.pid, os.fstat(opened)):
                    raise ProcessLookupError
            except BaseException:
                os.close(self._descriptor)
                raise

    def stop(self, timeout: float) -> bool:
        """Tell the process to stop: it ends when its streams have ended. Return whether it ended within `timeout`."""
        signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float) -> bool:
        """Return whether the process ends within `timeout` seconds."""
        return _is_readable(self._descriptor, timeout)

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def log_file(store: Path) -> Path | None:
    """Return the log of a node that was started in the background; None if it was started otherwise."""
    log = store.absolute() / NODE_LOG
    return log if log.exists() else None


def _address(store: int, file: str) -> NodeAddress:
    try:
        return NodeAddress.read(store, file)
    except FileNotFoundError:
        raise ProcessLookupError from None
    except (ValueError, TypeError):
        raise StoreError(f"the file {file!r} in the store is damaged, and gives no address") from None


def _has_open(pid: int, directory: os.stat_result) -> bool:
    """Return whether the process `pid` has this directory open, as the owner of a store does."""
    try:
        descriptors = [*Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False  # The process has ended, or belongs to another user.
    for descriptor in descriptors:
        try:
            status = descriptor.stat()
        except OSError:
            continue  # It was closed in the meantime.
        if (status.st_dev, status.st_ino) == (directory.st_dev, directory.st_ino):
            return True
    return False

"""Start a node on this host, or find the one that runs there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dissociated.base.oserrors import store_errors
from dissociated.base.private import open_private_directory, open_private_file, read_private_file
from dissociated.client.calls import CatalogClient
from dissociated.errors import AccessDenied, DissociatedError, StoreError
from dissociated.store.eviction import Policy
from dissociated.store.layout import NODE_LOG, START_LOCK, known_id, store_id

#: The file in a store that says where its node answers.
ADDRESS_FILE = "node.json"
_ANSWER_TIMEOUT = 5.0  # seconds, for a node that is there to say so


@dataclass(frozen=True)
class NodeAddress:
    """Where the catalog of a node answers, and its process."""

    uri: str
    pid: int


def default_store() -> Path:
    """Return the directory of the default store: in memory, private to this user.

    Anybody may create that directory in /dev/shm first, so it is always opened by `open_private_directory`, which then
    refuses it. $XDG_RUNTIME_DIR would be nobody else's, but is no place for data: systemd gives it a tenth of the
    memory, shares that with the sockets of the session, and empties it when the user logs out.
    """
    return Path("/dev/shm") / f"dissociated-store-{os.geteuid()}"


def running(directory: str | os.PathLike[str], timeout: float = _ANSWER_TIMEOUT) -> NodeAddress | None:
    """The node that owns the store in `directory` and answers within so many seconds, if there is one.

    Raises NotPrivate if the directory is not this user's alone.
    """
    try:
        store = open_private_directory(directory)
    except OSError:
        return None
    try:
        return _running(store, Path(directory), timeout)
    finally:
        os.close(store)


def _running(store: int, directory: Path, timeout: float = _ANSWER_TIMEOUT) -> NodeAddress | None:
    try:
        address = NodeAddress(**json.loads(read_private_file(ADDRESS_FILE, within=store)))
        id = store_id(store, directory)
    except (OSError, ValueError, TypeError):
        return None
    try:
        client = CatalogClient(address.uri, timeout)
        try:
            if client.stage().node != id:
                return None  # ours was killed, and another has its port now
        finally:
            client.close()
    except AccessDenied:
        pass  # it answers, though not us: it asks for a token, or its certificate must be trusted first
    except DissociatedError:
        return None
    return address


def ensure(
    directory: str | os.PathLike[str] | None = None,
    *,
    catalog: str | None = None,
    limit: int | None = None,
    policy: Policy = Policy.REFUSE,
    spill: str | os.PathLike[str] | None = None,
    listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0"),
    flight: str | None = None,
    idle_exit: float | None = None,
    options: Sequence[str] = (),
    starter: int | None = None,
    timeout: float = 30.0,
) -> NodeAddress:
    """The node of the store in `directory`, which is started where there is none.

    The node is a process of its own, that goes on when this one ends. However many processes ask at once, one node is
    started. All options but `directory` and `timeout` are for a node that is started.

    - `catalog`: the upstream that it is a node of, if any.
    - `limit`, `policy`, `spill`: what the store may take, in bytes, and what happens at the limit.
    - `listen`, `flight`: where it serves, and where its own catalog answers. Without `flight`, the catalog answers this
      user alone: see `Node`.
    - `idle_exit`: end when nobody has read or written for so many seconds. What is committed stays.
    - `options`: further options of the command `dissociated node`, as those for access.
    - `starter`: the end of a pipe that is read from, and stays yours. When its other end has been closed everywhere,
      the node ends, too, if nothing has been committed and nobody is there.
    - `timeout`: seconds in which it must answer.

    Raises StoreError where none answers in time, with what it said.
    """
    store = Path(directory or default_store()).absolute()
    arguments = ["--store", str(store), "--policy", policy.value]
    for uri in listen:
        arguments += ["--listen", uri]
    for option, value in (
        ("flight", flight),
        ("catalog", catalog),
        ("limit", limit),
        ("spill", spill),
        ("idle-exit", idle_exit),
    ):
        if value is not None:
            arguments += [f"--{option}", os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
    arguments += options
    deadline = time.monotonic() + timeout
    with store_errors(f"the store {store}"):
        opened = open_private_directory(store, create=True)
    try:
        with store_errors(f"the store {store}"):
            known_id(opened, store)  # raises for a directory that is no store, before anything is made there
        with _start_lock(opened, store, deadline):
            found = _running(opened, store)
            return found if found is not None else _start(opened, store, arguments, deadline, starter)
    finally:
        os.close(opened)


@contextlib.contextmanager
def _start_lock(opened: int, store: Path, deadline: float) -> Iterator[None]:
    """Let one process at a time start a node."""
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
                    raise StoreError(f"another process is starting a node for {store}, and it does not end") from None
                time.sleep(0.05)  # the kernel waits for a lock without a deadline, or not at all
        yield


def _start(opened: int, store: Path, arguments: Sequence[str], deadline: float, starter: int | None) -> NodeAddress:
    if starter is not None:
        arguments = [*arguments, "--starter-fd", str(starter)]
    read, write = os.pipe()
    with os.fdopen(read) as pipe:
        try:
            log = open_private_file(NODE_LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, within=opened)
            with os.fdopen(log, "w") as output:
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
        process.returncode = 0  # it is on its own from here: nobody waits for it
        line = _line(pipe, deadline)
    found = _running(opened, store) if line else None
    if found is None:
        log_lines = read_private_file(NODE_LOG, within=opened).decode(errors="replace").strip().splitlines()
        raise StoreError(
            f"no node could be started for {store}: {log_lines[-1] if log_lines else 'it did not answer in time'}"
        )
    return found


def _line(pipe: IO[str], deadline: float) -> str:
    readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
    return pipe.readline() if readable else ""

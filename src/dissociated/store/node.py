"""A node: serves whatever is committed in one store, and a writer that needs one starts it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from dissociated.access import Authorize, security
from dissociated.catalog.client import CatalogClient
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.errors import AccessDenied, DissociatedError, StoreError
from dissociated.fork import belongs, disown
from dissociated.memory.shared import explained
from dissociated.message import MAX_METADATA
from dissociated.server import Server
from dissociated.store.handover import HandOver
from dissociated.store.stock import StoreStock
from dissociated.store.store import Policy, Store
from dissociated.transport.shm import runtime_directory

#: For how many seconds a ticket stays good after its version has been replaced.
RETAIN = 300.0
_ADDRESS = "node.json"
_SOCKET = "shm.sock"
_MEMFDS = "memfd.sock"
_LOG = "node.log"
_PATH_MAX = 107  # bytes, of a Unix socket
_ANSWER = 5.0  # seconds, for a node that is there to say so


class Node:
    """Serves the versions in `store`, which it then owns, at `listen`, with a catalog of its own at `flight`.

    With `catalog` it is a node of that catalog and publishes what that says. `retain` and `beat` are in seconds: see
    CatalogService. The others are those of Server; a node and its `catalog` have the same `secret`, and trust each
    other's certificates where these are in `tls_roots`. Raises StoreError, TransportError, CatalogError, AccessDenied
    and OptionError where it cannot.

    Use it as a context manager, or `close` it. Whoever finds the store finds the node: its address lies there.
    """

    def __init__(
        self,
        store: Store,
        listen: Sequence[str] = ("shm:", "tcp://127.0.0.1:0"),
        *,
        flight: str = "grpc://127.0.0.1:0",
        catalog: str | None = None,
        database: str = ":memory:",
        retain: float = RETAIN,
        beat: float = 5.0,
        advertise: str | None = None,
        ticket_lifetime: float | None = None,
        secret: bytes | None = None,
        authorize: Authorize | Iterable[str] | Mapping[str, str] | None = None,
        tls_cert: str | os.PathLike[str] | None = None,
        tls_key: str | os.PathLike[str] | None = None,
        tls_roots: str | os.PathLike[str] | None = None,
        metrics: str | None = None,
        max_metadata: int = MAX_METADATA,
    ) -> None:
        self.store = store
        with ExitStack() as undo:
            stock = StoreStock(store)
            undo.callback(stock.close)
            self._handover = undo.enter_context(closing(HandOver(self._socket(_MEMFDS), stock.hand_over)))
            stock.handover = str(self._handover.path)
            guarded = security(
                ticket_lifetime=ticket_lifetime,
                secret=secret,
                authorize=authorize,
                tls_cert=tls_cert,
                tls_key=tls_key,
                tls_roots=tls_roots,
                peers=True,
            )
            kept = Database(database)
            undo.callback(kept.close)
            self.server = undo.enter_context(
                Server(
                    [self._placed(uri) for uri in listen],
                    catalog=None,
                    advertise=advertise,
                    ticket_lifetime=ticket_lifetime,
                    secret=secret if ticket_lifetime is not None else None,
                    tls_cert=tls_cert,
                    tls_key=tls_key,
                    metrics=metrics,
                    max_metadata=max_metadata,
                )
            )
            self.service = CatalogService(
                self.server,
                flight,
                stock=stock,
                database=kept,
                outer=catalog,
                retain=retain,
                beat=beat,
                advertise=advertise,
                security=guarded,
            )
            self.server.use_catalog(self.service)
            undo.pop_all()
        place = Address(self.service.uri, os.getpid())
        address = store.directory / _ADDRESS
        draft = address.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(place)))
        draft.rename(address)
        belongs(self)

    def forked(self) -> None:
        disown(self)

    def _placed(self, uri: str) -> str:
        return f"shm://{self._socket(_SOCKET)}" if uri == "shm:" else uri

    def _socket(self, name: str) -> Path:
        """The same path after each start, in the store, if that is short enough: so whoever mounts that has both."""
        path = self.store.directory / "run" / name
        if len(os.fsencode(path)) > _PATH_MAX:
            return runtime_directory() / f"{self.store.id}.{name}"
        path.parent.mkdir(mode=0o700, exist_ok=True)  # of its own: who listens there locks it for a moment
        return path

    @property
    def uri(self) -> str:
        """Where its catalog answers: grpc://HOST:PORT."""
        return self.service.uri

    @property
    def idle(self) -> bool:
        """Whether nobody reads and nothing waits to be committed."""
        return not self.server.connections and not any(self.store.staging.iterdir())

    def drain(self, timeout: float) -> bool:
        """Take nothing new, and wait up to `timeout` seconds for those who read. Returns whether all have ended."""
        (self.store.directory / _ADDRESS).unlink(missing_ok=True)
        return self.server.drain(timeout)

    def close(self) -> None:
        """End every stream. What is committed stays in the store."""
        (self.store.directory / _ADDRESS).unlink(missing_ok=True)
        self._handover.close()
        self.server.close()

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Address:
    """Where the catalog of a node answers, and its process."""

    uri: str
    pid: int


def default_store() -> Path:
    """Where a node that nobody told otherwise keeps its segments: in memory, private to this user."""
    return Path("/dev/shm") / f"dissociated-store-{os.geteuid()}"


def running(directory: str | os.PathLike[str]) -> Address | None:
    """The node that owns the store in `directory` and answers, if there is one."""
    try:
        address = Address(**json.loads((Path(directory) / _ADDRESS).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    try:
        client = CatalogClient(address.uri, _ANSWER)
        try:
            client.stage()
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
    flight: str = "grpc://127.0.0.1:0",
    idle_exit: float | None = None,
    options: Sequence[str] = (),
    starter: int | None = None,
    timeout: float = 30.0,
) -> Address:
    """The node of the store in `directory`, which is started where there is none.

    The node is a process of its own, that goes on when this one ends; all options but `directory` and `timeout` are
    for one that is started. `starter` is the end of a pipe that is read from, and stays yours: when its other end has
    been closed everywhere, a node that was started ends, too, if nothing has been committed and nobody is there. With
    `idle_exit` it ends when nobody has read or written for so many seconds; what is
    committed stays. `options` are further ones of the command `dissociated node`, as those for access. However many
    processes ask at once, one node is started. Raises StoreError where none answers
    within `timeout` seconds, with what it said.
    """
    store = Path(directory or default_store()).absolute()
    arguments = ["--store", str(store), "--flight", flight, "--policy", policy.value]
    for uri in listen:
        arguments += ["--listen", uri]
    for option, value in (("catalog", catalog), ("limit", limit), ("spill", spill), ("idle-exit", idle_exit)):
        if value is not None:
            arguments += [f"--{option}", os.fspath(value) if isinstance(value, os.PathLike) else str(value)]
    arguments += options
    deadline = time.monotonic() + timeout
    with explained(f"the store {store}"):
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(store, deadline):
        found = running(store)
        return found if found is not None else _start(store, arguments, deadline, starter)


@contextlib.contextmanager
def _alone(store: Path, deadline: float) -> Iterator[None]:
    """One process at a time starts a node."""
    with explained(f"starting a node for {store}"), (store / "starting").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreError(f"another process is starting a node for {store}, and it does not end") from None
                time.sleep(0.05)  # the kernel waits for a lock without a deadline, or not at all
        yield


def _start(store: Path, arguments: Sequence[str], deadline: float, starter: int | None) -> Address:
    log = store / _LOG
    if starter is not None:
        arguments = [*arguments, "--starter-fd", str(starter)]
    read, write = os.pipe()
    with os.fdopen(read) as told:
        try:
            with log.open("w") as output:
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
        line = _line(told, deadline)
    found = running(store) if line else None
    if found is None:
        said = log.read_text(errors="replace").strip().splitlines()
        raise StoreError(f"no node could be started for {store}: {said[-1] if said else 'it did not answer in time'}")
    return found


def _line(told: IO[str], deadline: float) -> str:
    readable, _, _ = select.select([told], [], [], max(0.0, deadline - time.monotonic()))
    return told.readline() if readable else ""

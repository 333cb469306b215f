from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

import dissociated as dis
from support import helpers
from support.arrow_cases import table_of
from support.certificates import Certificates
from support.helpers import wait_until
from support.processes import Fork

from . import peer
from .peer import PATIENCE, RawServer, Script

ROWS = 1000

#: The types of the fixtures `serve`, `spawn` and `scripted`.
Serve: TypeAlias = "Callable[..., Good]"
Spawn: TypeAlias = Callable[..., subprocess.Popen[str]]
Scripted: TypeAlias = Callable[[str, Script], RawServer]


# Leaks


def descriptors() -> Counter[str]:
    """Count the open descriptors of this process by their targets."""
    found: Counter[str] = Counter()
    for name, target in helpers.descriptors().items():
        if not target.startswith("anon_inode:"):  # gRPC and libarrow open and close these themselves
            found[f"{name} {target}" if target.startswith(("socket:", "pipe:")) else target] += 1
    return found


def mappings() -> Counter[str]:
    """Count the shared memory mappings of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(
        line.split(None, 5)[5] for line in lines if "memfd:" in line or "/dev/shm/" in line or "dissociated" in line
    )


def files(runtime: str) -> set[str]:
    """Return the sockets and segments of this process. Other processes may use the same directories."""
    stages = Path("/dev/shm", f"dissociated-{os.geteuid()}")
    staged = {str(path) for path in stages.glob(f"{os.getpid()}-*")}
    return staged | {str(path) for path in Path(runtime).rglob("*") if not path.is_dir()}


def _missing(now: Counter[str], before: Counter[str]) -> list[str]:
    return sorted((now - before).elements())


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a runtime directory for this test, with a path short enough for sockets."""
    directory = tempfile.mkdtemp(prefix="dis-", dir="/dev/shm")
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def no_leaks(runtime: str) -> Iterator[None]:
    """Fail if a descriptor, thread, mapping or file is left after the test, without running the garbage collector."""
    open_before, mapped_before = descriptors(), mappings()
    threads_before, files_before = set(threading.enumerate()), files(runtime)
    yield

    def left() -> dict[str, object]:
        found: dict[str, object] = {
            "descriptors": _missing(descriptors(), open_before),
            "mappings": _missing(mappings(), mapped_before),
            "threads": [thread for thread in threading.enumerate() if thread not in threads_before],
            "files": files(runtime) - files_before,
        }
        return {what: some for what, some in found.items() if some}

    deadline = time.monotonic() + PATIENCE
    while (remains := left()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not remains, f"left behind: {remains}"


# Datasets and servers


@pytest.fixture(scope="module", autouse=True)
def _peers_show_a_certificate(trusted: Certificates) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(peer.CERTIFICATE, trusted.cert)
        patch.setenv(peer.KEY, trusted.key)
        yield


@pytest.fixture(scope="session")
def table() -> pa.Table:
    """Return a table of three batches."""
    return table_of(ROWS)


class Good:
    """A well-behaved client that must be served whatever other clients do."""

    def __init__(self, server: dis.Server, table: pa.Table) -> None:
        self.server = server
        self._table = table

    def check(self) -> None:
        """Read the whole table over every transport, by address and inline."""
        for bodies in ("any", "packed"):
            for uri in self.server.locations("good", bodies=bodies):
                read = dis.open_stream(uri, self.server.ticket("good"), timeout=PATIENCE, allow_rma=True).read_all()
                assert read.equals(self._table)
        # The server receives the freed addresses now or soon.

    @property
    def leases(self) -> int:
        """Return how many leases clients hold."""
        return self.server.status().leases

    def alone(self) -> bool:
        """Return whether the server has no connection, and nobody holds any memory of its datasets."""
        idle = not self.server.connections and not self.leases
        return idle and all(self.server.dataset(name).readers == 0 for name in self.server.names())


@pytest.fixture
def serve(table: pa.Table, trusted: Certificates) -> Iterator[Serve]:
    """Return a function that starts servers of `table` as "good". At the end no server may have connections."""
    servers: list[Good] = []

    def start(*listen: str, **options: object) -> Good:
        # The server has no deadlines: it must notice by itself, within the patience of a test, that a client is gone.
        defaults = {"catalog": None, "handshake_timeout": 3 * PATIENCE, **trusted.options}
        server = dis.Server(listen or ("shm:", "tcp://127.0.0.1:0"), **{**defaults, **options})
        server.publish("good", table)
        servers.append(Good(server, table))
        return servers[-1]

    yield start
    for good in servers:
        good.check()
        wait_until(good.alone, f"{good.server.connections} connections are still open")
        good.server.close()


@pytest.fixture
def scripted(runtime: str) -> Iterator[Scripted]:
    """Return a function that starts raw servers."""
    servers: list[RawServer] = []

    def start(scheme: str, script: Script) -> RawServer:
        servers.append(RawServer(scheme, f"{runtime}/raw{len(servers)}.sock", script))
        return servers[-1]

    yield start
    for server in servers:
        with server:
            pass


# Processes


@pytest.fixture
def spawn(forks: None) -> Iterator[Spawn]:
    """Return a function that starts Python processes that read and print lines. They are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, say: str = "", prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process: subprocess.Popen[str]
        if prefix:
            process = subprocess.Popen([*prefix, sys.executable, *arguments], text=True, bufsize=1, **streams)
        else:
            process = Fork(*arguments, **streams)
        started.append(process)
        if say:
            assert process.stdin is not None
            process.stdin.write(say + "\n")
        return process

    yield start
    for process in started:
        process.kill()
        with process:  # The test may have read it to its end.
            pass


PEER = str(Path(peer.__file__))

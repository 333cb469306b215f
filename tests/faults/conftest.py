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
import helpers
from arrow_cases import table_of
from certificates import Certificates
from helpers import wait_until
from processes import Fork

from . import peer
from .peer import PATIENCE, RawServer, Script

ROWS = 1000

#: What the fixtures `serve`, `spawn` and `scripted` give.
Serve: TypeAlias = "Callable[..., Good]"
Spawn: TypeAlias = Callable[..., subprocess.Popen[str]]
Scripted: TypeAlias = Callable[[str, Script], RawServer]


# What is left behind


def descriptors() -> Counter[str]:
    """What this process has open, by what it refers to."""
    found: Counter[str] = Counter()
    for name, target in helpers.descriptors().items():
        if not target.startswith("anon_inode:"):  # those of gRPC and libarrow come and go
            found[f"{name} {target}" if target.startswith(("socket:", "pipe:")) else target] += 1
    return found


def mappings() -> Counter[str]:
    """The shared memory that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(
        line.split(None, 5)[5] for line in lines if "memfd:" in line or "/dev/shm/" in line or "dissociated" in line
    )


def files(runtime: str) -> set[str]:
    """Sockets and segments of this process. Others may use the same directories."""
    stages = Path("/dev/shm", f"dissociated-{os.geteuid()}")
    staged = {str(path) for path in stages.glob(f"{os.getpid()}-*")}
    return staged | {str(path) for path in Path(runtime).rglob("*") if not path.is_dir()}


def _missing(now: Counter[str], before: Counter[str]) -> list[str]:
    return sorted((now - before).elements())


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A runtime directory of this test's own, with a name short enough for sockets."""
    directory = tempfile.mkdtemp(prefix="dis-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def no_leaks(runtime: str) -> Iterator[None]:
    """No descriptor, thread, mapping or file is left when the test is over, without the garbage collector's help."""
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


# What is served


@pytest.fixture(scope="module", autouse=True)
def _peers_show_a_certificate(trusted: Certificates) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(peer.CERTIFICATE, trusted.cert)
        patch.setenv(peer.KEY, trusted.key)
        yield


@pytest.fixture(scope="session")
def table() -> pa.Table:
    """Of three batches."""
    return table_of(ROWS)


class Good:
    """A client that does nothing wrong, and expects to be served whatever others do."""

    def __init__(self, server: dis.Server, table: pa.Table) -> None:
        self.server = server
        self._table = table

    def check(self) -> None:
        """Read the whole table, over every transport, by the address and inline."""
        for bodies in ("any", "packed"):
            for uri in self.server.locations("good", bodies=bodies):
                read = dis.open_stream(uri, self.server.ticket("good"), timeout=PATIENCE, allow_rma=True).read_all()
                assert read.equals(self._table)
        # What it held is given back by now, or soon.

    @property
    def leases(self) -> int:
        """How many addresses clients hold."""
        return self.server.status().leases

    def alone(self) -> bool:
        """Whether the server has no connection any more, and nobody holds anything of what it publishes."""
        idle = not self.server.connections and not self.leases
        return idle and all(self.server.dataset(name).readers == 0 for name in self.server.names())


@pytest.fixture
def serve(table: pa.Table, trusted: Certificates) -> Iterator[Serve]:
    """Start servers that publish `table` as "good"; at the end each must be without connections."""
    servers: list[Good] = []

    def start(*listen: str, **options: object) -> Good:
        # No deadline of the server's own: that a client is gone has to be noticed, within the patience of a test.
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
    """Start raw servers."""
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
    """Start Python processes, that read lines and print lines, and are killed at the end of the test."""
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
        with process:  # which may have been read to its end already
            pass


PEER = str(Path(peer.__file__))

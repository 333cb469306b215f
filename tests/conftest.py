from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import dissociated as dis
from dissociated.node.launch import running
from spark.archive import OPTIONS, OPTIONS_FOR_PLANS
from support.arrow_cases import Celsius
from support.certificates import Certificates, certificates
from support.forks import EXECUTABLE, forking
from support.helpers import Serve, leaving_nothing
from support.machine import need, report
from support.processes import Process, Start, forking_python

TESTS = Path(__file__).parent

# A loaded machine with two cores exceeds any deadline of Hypothesis. pytest-timeout stops tests that hang. Each run has
# new examples, so half of the usual number is enough for a single one.
settings.register_profile("dissociated", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=1_000)
settings.load_profile("dissociated")

# A shell script that starts the run with `&` makes it ignore SIGINT. The commands that tests interrupt would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# `nohup` makes the run ignore SIGHUP, and the commands would inherit that, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Report what the machine provides if several workers run. A single worker skips this because it takes seconds."""
    return report() if config.getoption("numprocesses", None) else []


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Do not collect garbage while modules are imported: there is little, and looking for it takes a third."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude the objects of the imported modules from garbage collection, which runs after many tests.

    Looking for garbage among them now would take a third of a second in each worker, and find little.
    """
    gc.freeze()


#: Paths of the slowest tests. They start first, so that no worker runs one alone at the end.
LONGEST = (
    "spark/test_cluster",
    "spark",
    "store/test_faults.py",
    "catalog/test_faults.py",
    "node/test_node.py",
    "faults/test_ucx",
    "transport/test_connections",
    "test_docs",
    "test_deploy",
    "test_pages",
    "golden/test_damaged",
    "contract",
    "store/test_store",
    "store/test_many_datasets",
    "catalog/test_flat_commits",
    "reference",
    "transport/native",
    "device/test_benchmark",
    "fabric",
    "faults",
    "ipc/test_tensors",
    "base",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    @cache
    def rank(path: Path) -> int:
        place = path.relative_to(TESTS).as_posix()
        return next((at for at, one in enumerate(LONGEST) if place.startswith(one)), len(LONGEST))

    items.sort(key=lambda item: rank(item.path))


#: Tests of Spark that start no session, or one of their own.
_WITHOUT_SESSION = (
    "test_cluster.py",
    "test_faults.py",
    "test_jar.py",
    "test_java.py",
    "test_plain_session.py",
    "test_programs.py",
    "test_quickstart.py",
    "test_sidecar.py",
    "test_unreachable.py",
)


#: Tests of Spark in a second session, which take two fifths of the time: one worker would run all of them to the end.
_SECOND_SESSION = (
    "test_functions.py",
    "test_functions_limits.py",
    "test_killed_writer.py",
    "test_local.py",
    "test_tpch.py",
)


#: Tests that read the sources: one worker parses them for all.
_OF_SOURCES = tuple(f"tests/test_{name}.py" for name in ("messages", "names", "prose", "rooms", "tests", "wire"))


class _Groups(LoadFileScheduling):  # type: ignore[misc]
    """A scheduler that keeps each file, and all files that share a Spark session or the sources, on one worker."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        if file in _OF_SOURCES:
            return "sources"
        if "/spark/" not in file or file.endswith(_WITHOUT_SESSION):
            return file
        return "second spark" if file.endswith(_SECOND_SESSION) else "spark"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return _Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests with unmet needs before any fixture counts open resources, and let Ctrl-C raise KeyboardInterrupt."""
    if threading.current_thread() is threading.main_thread():  # Spark's context installs a handler of its own for good
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for marker in item.iter_markers("needs"):
        need(*marker.args)


def _sockets() -> Iterator[None]:
    # In memory: removing a directory from a disk takes milliseconds, for each of thousands of tests.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


@pytest.fixture(scope="session", autouse=True)
def _sockets_of_the_run() -> Iterator[None]:
    """Give the resources that many tests share a runtime directory for their sockets."""
    yield from _sockets()


@pytest.fixture(autouse=True)
def _sockets_of_the_test(_sockets_of_the_run: None) -> Iterator[None]:
    """Give each test its own runtime directory, because a new server probes all sockets there for dead owners."""
    yield from _sockets()


@pytest.fixture(autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Restore logging and the handling of signals, which commands change when a test calls them in this process."""
    logger = logging.getLogger("dissociated")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    ending = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    if logger.level != level:
        logger.setLevel(level)
    if {number: signal.getsignal(number) for number in ending} != ending:
        signal.set_wakeup_fd(-1)  # `serve` ignores them for good, and wakes by a pipe
        for number, handler in ending.items():
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _java_for_minutes() -> Iterator[None]:
    """Start Java without its optimizing compiler and parallel collector, and Spark without code for each query.

    None of them pays off in short runs.
    """
    archive = Path(sys.prefix, "spark.jsa")  # made by tests/spark/archive.py
    with pytest.MonkeyPatch.context() as patch:
        options = f"{OPTIONS} -XX:SharedArchiveFile={archive}" if archive.exists() else OPTIONS
        patch.setenv("JDK_JAVA_OPTIONS", f"{options} {OPTIONS_FOR_PLANS}")
        yield


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Return a certificate for this host."""
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def trusted(certified: Certificates) -> Iterator[Certificates]:
    """Make every client of the module trust the certificate, as if a system administrator had installed it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certified.roots)
        yield certified


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return a function that starts servers. They are closed after the test and must release every resource."""
    with leaving_nothing(), ExitStack() as servers:

        def make(*listen: str, **options: Any) -> dis.Server:
            options.setdefault("catalog", None)
            return servers.enter_context(dis.Server(listen or ("shm:", "tcp://127.0.0.1:0"), **options))

        yield make


@pytest.fixture(scope="module")
def client(server: dis.Server) -> Iterator[dis.Client]:
    """Return a client of the module's fixture `server`."""
    with dis.connect(server.catalog_uri) as connected:
        yield connected


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """Start the process that other processes are forked from before any test counts open resources."""
    with forking():
        yield


@pytest.fixture
def forked_nodes(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork the nodes that the library starts in the background, in this process and in forks.

    The nodes that still run in the end are killed.
    """
    path = tmp_path_factory.mktemp("python") / "python"
    with forking_python(path, "dissociated"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(path))
        patch.setenv(EXECUTABLE, str(path))
        yield


@pytest.fixture
def start(forks: None) -> Iterator[Start]:
    """Return a function that starts `dissociated` commands, each in a process that is killed after the test."""
    started: list[Process] = []

    def make(*arguments: str | Path, forked: bool = True, **options: Any) -> Process:
        started.append(Process(*arguments, forked=forked, **options))
        return started[-1]

    yield make
    for process in started:
        process.kill()


@pytest.fixture(scope="session", autouse=True)
def _extension_type() -> Iterator[None]:
    pa.register_extension_type(Celsius())
    yield
    pa.unregister_extension_type(Celsius().extension_name)


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def own_store(memory: Path, forked_nodes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the path of this user's store, whose node is killed in the end."""
    path = memory / "own"
    monkeypatch.setenv("DISSOCIATED_STORE", str(path))
    monkeypatch.delenv("DISSOCIATED_CATALOG", raising=False)
    yield path
    if (node := running(path)) is not None:
        os.kill(node.pid, signal.SIGKILL)

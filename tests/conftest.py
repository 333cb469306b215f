from __future__ import annotations

import gc
import logging
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

import dissociated as dis
from arrow_cases import Celsius
from certificates import Certificates, certificates
from forks import forking
from helpers import Serve, leaving_nothing
from machine import need, report
from processes import Process, Start
from spark.archive import OPTIONS

TESTS = Path(__file__).parent

# Two loaded cores stretch an example past any deadline; pytest-timeout catches what hangs.
settings.register_profile("dissociated", deadline=None)
settings.load_profile("dissociated")

# A run that a script starts with `&` ignores Ctrl-C, and so would the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# And one that `nohup` starts ignores the end of its terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what the machine has, where several workers run: finding out takes seconds."""
    return report() if config.getoption("numprocesses", None) else []


def pytest_collection_finish() -> None:
    """Whatever the modules brought along stays: looking through it for garbage after each test would take long."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


#: What takes longest begins first, so that no worker is left alone with it; the rest follows in its order.
LONGEST = (
    "spark/test_cluster",
    "spark",
    "store/test_faults.py",
    "catalog/test_faults.py",
    "node/test_node.py",
    "faults/test_ucx",
    "test_examples",
    "test_pages",
    "golden/test_damaged",
    "contract",
    "store/test_store",
    "fabric",
    "faults",
    "ipc/test_tensors",
    "base",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(TESTS).as_posix()
        return next((at for at, one in enumerate(LONGEST) if place.startswith(one)), len(LONGEST))

    items.sort(key=rank)


class _Groups(LoadFileScheduling):  # type: ignore[misc]
    """One worker runs all of a file, and one all files that share a Spark session."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        alone = ("test_cluster.py", "test_connect.py", "test_java.py", "test_writer.py")
        return "spark" if "/spark/" in file and not file.endswith(alone) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return _Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture counts what is open."""
    for marker in item.iter_markers("needs"):
        need(*marker.args)


def _sockets() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", directory)
        yield


@pytest.fixture(scope="session", autouse=True)
def _sockets_of_the_run() -> Iterator[None]:
    """For what is shared by many tests."""
    yield from _sockets()


@pytest.fixture(autouse=True)
def _sockets_of_the_test(_sockets_of_the_run: None) -> Iterator[None]:
    """A place of its own: a server that makes a socket knocks at those beside it, to see who still lives."""
    yield from _sockets()


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    """Commands that a test calls in this process set the log up."""
    logger = logging.getLogger("dissociated")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate
    if logger.level != level:
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def _java_for_minutes() -> Iterator[None]:
    """No Java of these tests lives long enough to gain from its best compiler, or from a collector with threads."""
    archive = Path(sys.prefix, "spark.jsa")  # see tests/spark/archive.py
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", f"{OPTIONS} -XX:SharedArchiveFile={archive}" if archive.exists() else OPTIONS)
        yield


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate for this host, made in this run."""
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def trusted(certified: Certificates) -> Iterator[Certificates]:
    """The same, trusted by everybody as if the system's administrator did: not only by who is told so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certified.roots)
        yield certified


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Servers that are closed after the test and must have left nothing."""
    with leaving_nothing(), ExitStack() as servers:

        def make(*listen: str, **options: Any) -> dis.Server:
            options.setdefault("catalog", None)
            return servers.enter_context(dis.Server(listen or ("shm:", "tcp://127.0.0.1:0"), **options))

        yield make


@pytest.fixture(scope="module")
def client(server: dis.Server) -> Iterator[dis.Client]:
    """Of the `server` that a module of tests has."""
    with dis.connect(server.catalog_uri) as connected:
        yield connected


@pytest.fixture(scope="session")
def forks() -> Iterator[None]:
    """What processes are forked from: begun before any test counts what is open."""
    with forking():
        yield


@pytest.fixture
def start(forks: None) -> Iterator[Start]:
    """Commands of this library, each a process of its own, until the test is over."""
    started: list[Process] = []

    def make(*arguments: str | Path, prefix: Sequence[str] = (), forked: bool = True) -> Process:
        started.append(Process(*arguments, prefix=prefix, forked=forked))
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

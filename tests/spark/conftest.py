"""Fixtures of the Spark tests: a single Spark session for the whole run, and a fresh server for every test."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import dissociated as dis
from dissociated.errors import JavaNotFound
from dissociated.spark import java_home, session
from spark.archive import PLANS
from support.forks import parent
from support.processes import forking_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed")

#: Whether Spark reads and writes in its JVM, which is the default, or by the Python data source.
IN_JVM = os.environ.get("DISSOCIATED_TEST_JVM", "true")

#: Spark's package with the classes that write the checkpoints of streams.
CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing"

_numbers = itertools.count()

#: PySpark 4.1 leaves the sockets of `collect` and similar calls to the garbage collector, and cannot stream with us.
SPARK_4_1 = pyspark.__version__.startswith("4.1.")

#: Warnings that PySpark itself raises.
OF_PYSPARK = ["ignore:PySpark does not yet fully support pandas:FutureWarning"]
if SPARK_4_1:
    OF_PYSPARK.append("ignore:unclosed <socket.socket:ResourceWarning")

collect_ignore = ["test_direct.py", "test_jvm.py", "test_jvm_writer.py"] if IN_JVM == "false" else []
if SPARK_4_1:
    collect_ignore += ["test_killed.py", "test_streaming.py", "test_to_table.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Raise the timeout of Spark tests.

    The first one starts Spark and may compile the jar, which takes minutes on a busy machine.
    """
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(400))
            item.add_marker(pytest.mark.filterwarnings(*OF_PYSPARK))


@pytest.fixture(scope="session")
def java() -> str:
    """Return the home of the Java for Spark. Without one, skip the test."""
    try:
        return java_home()
    except JavaNotFound as error:
        pytest.skip(str(error))


#: Modules that the forks of Spark's Python run: the sources of streams, which must answer within ten seconds, the calls
#: of a data source by the driver, the daemons of workers, and the sidecar. The parts of the demo are forks as well.
FORKED = (
    "examples.tpch.consumers",
    "examples.tpch.pipeline",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.daemon",
    "warm",
    "dissociated.spark.sidecar",
)


@pytest.fixture(scope="session")
def python(forks: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a Python that forks workers. Without it, each worker loads all modules, in a second of processor time."""
    parent().load("spark.warm")
    path = tmp_path_factory.mktemp("python") / "python"
    with forking_python(path, *FORKED):
        yield path


@pytest.fixture(scope="package")
def spark(java: str, python: Path) -> Iterator[SparkSession]:
    """Yield a session with two cores and two attempts per task, whose Python workers are forks of warm.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", str(python))
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        settings: dict[str, Any] = {
            # By default each sort, each aggregate and each join clears 64 MB of memory for a few rows.
            "spark.buffer.pageSize": "1m",
            "spark.dissociated.jvm": IN_JVM,
            "spark.log.level": "OFF",
            "spark.python.daemon.module": "warm",
            "spark.sql.session.timeZone": "America/New_York",
            "spark.sql.shuffle.partitions": 1,
            # By default each file of a checkpoint has another with its checksum, and `readlink` runs for each rename.
            "spark.sql.streaming.checkpoint.fileChecksum.enabled": False,
            "spark.sql.streaming.checkpointFileManagerClass": f"{CHECKPOINTS}.FileSystemBasedCheckpointFileManager",
            # Without code for each query, this costs more than it saves.
            "spark.sql.subexpressionElimination.enabled": False,
            "spark.sql.timeType.enabled": True,
            "spark.sql.ui.explainMode": "simple",
        }
        running = session("tests", "local[2,2]", **settings)
    yield running
    running.stop()


@pytest.fixture
def plans(spark: SparkSession) -> Iterator[None]:
    """Make Spark plan and compile queries by its defaults. The other tests use the faster settings of `PLANS`."""
    for key, (default, _) in PLANS.items():
        spark.conf.set(key, default)
    yield
    for key, (_, of_tests) in PLANS.items():
        spark.conf.set(key, of_tests)


@pytest.fixture
def use_jvm(spark: SparkSession) -> Iterator[Callable[[bool], None]]:
    """Yield a function that sets whether Spark reads and writes in its JVM or by the Python data source."""
    yield lambda wanted: spark.conf.set("spark.dissociated.jvm", str(wanted).lower())
    spark.conf.set("spark.dissociated.jvm", IN_JVM)


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:"]) as server:
        yield server


@pytest.fixture
def catalog(server: dis.Server) -> str:
    """Return the URI of an empty catalog."""
    return server.catalog_uri


@pytest.fixture
def client(catalog: str) -> Iterator[dis.Client]:
    with dis.connect(catalog) as client:
        yield client


def plug_in(spark: SparkSession, uri: str | None = None) -> str:
    """Return the name of a new catalog of Spark's with the datasets at `uri`, or else at the session's catalog."""
    name = f"catalog{next(_numbers)}"  # Spark opens a catalog once for each name
    spark.conf.set(f"spark.sql.catalog.{name}", "org.apache.spark.sql.dissociated.DatasetCatalog")
    if uri is not None:
        spark.conf.set(f"spark.sql.catalog.{name}.catalog", uri)
    return name


@pytest.fixture
def ours(spark: SparkSession, catalog: str) -> str:
    """Return the name of a catalog of Spark's with the tables of a new server."""
    return plug_in(spark, catalog)


@pytest.fixture
def stage(catalog: str) -> Path:
    """Return the directory of segments that are not published yet."""
    with dis.connect(catalog) as client:
        return Path(client.stage().directory)


@pytest.fixture(scope="session")
def path_without_java(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a PATH with all the tools of this machine except Java."""
    tools = tmp_path_factory.mktemp("tools")
    for directory in os.environ["PATH"].split(os.pathsep):
        for tool in Path(directory).glob("*"):
            if tool.name != "java" and not (tools / tool.name).is_symlink():
                (tools / tool.name).symlink_to(tool)
    return tools


#: Another Python on PATH, which has no dissociated, and no Python workers of Spark.
_OTHER = """#!/bin/sh
case "$*" in *dissociated* | *pyspark.daemon*) echo 'No module named dissociated' >&2; exit 1;; esac
exec {python} "$@"
"""


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for PATH whose `python3`, which is Spark's own default, has no dissociated."""
    directory = tmp_path_factory.mktemp("other")
    other = directory / "python3"
    other.write_text(_OTHER.format(python=sys.executable))
    other.chmod(0o700)
    return directory

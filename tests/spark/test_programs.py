"""Programs that start Spark, one after the other in one Java: cells of a notebook, the demo, and Spark Connect.

Each test also runs alone. Starting the Java and loading its classes takes most of the processor time.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

import dissociated as dis
from dissociated.node.launch import running
from dissociated.spark.jar import jar
from support.forks import EXECUTABLE
from support.pages import ROOT
from support.processes import Fork

from .test_quickstart import PROGRAM, RESULT

manager = pytest.importorskip("jupyter_client.manager", reason="ipykernel is not installed")

#: A program without `dissociated.spark.session`. Java reads and computes, and calls the notebook's interpreter.
PLAIN = """
from pyspark.sql import SparkSession
from dissociated.spark import map_in_arrow

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.jars", {jar!r}).getOrCreate()
spark.range(5).write.format("dissociated").mode("overwrite").save("numbers")
found = spark.read.format("dissociated").load("numbers").selectExpr("id + 1 AS id")
print(sum(row.id for row in map_in_arrow(found, lambda batches: batches, "id long").collect()))
spark.stop()
"""

#: Starts the Java of all programs. By these variables, PySpark takes it in place of another.
JAVA = """
import os
from pyspark.java_gateway import launch_gateway

gateway = launch_gateway()
port, secret = str(gateway.gateway_parameters.port), gateway.gateway_parameters.auth_token
os.environ.update(PYSPARK_GATEWAY_PORT=port, PYSPARK_GATEWAY_SECRET=secret)
"""

#: SPARK_TESTING makes Spark choose a free port.
BEFORE_CONNECT = """
os.environ.update({{
    "DISSOCIATED_CATALOG": {uri!r}, "PYSPARK_PYTHON": {python!r}, "SPARK_REMOTE": "local[2]", "SPARK_TESTING": "1"
}})
"""

CONNECT = """
from contextlib import redirect_stdout
from io import StringIO
from pyspark.sql.connect.dataframe import DataFrame
from dissociated.spark import map_in_arrow, publish, read, session

uri = os.environ.pop("DISSOCIATED_CATALOG")  # Spark itself forgets SPARK_REMOTE
spark.stop()
spark = session("connect", remote="local[1]")
df = spark.range(0, 1000, numPartitions=2).selectExpr("id", "concat('text ', id) AS text")
assert isinstance(df, DataFrame), "this is not Spark Connect"
publish(df, "numbers", uri)
there = read(spark, "numbers", uri, columns=["id"], filters=[("id", ">=", 990)], partitions=2)
assert [row.id for row in there.collect()] == [*range(990, 1000)]
with redirect_stdout(StringIO()) as plan:
    there.explain()
assert "BatchScan dissociated" in plan.getvalue() and "Python" not in plan.getvalue()
mapped = map_in_arrow(there, lambda batches: batches, "id long")
assert [row.id for row in mapped.collect()] == [*range(990, 1000)]
with redirect_stdout(StringIO()) as plan:
    mapped.explain()
assert "MapInMemory" in plan.getvalue()
by_name = spark.read.format("dissociated").option("catalog", uri).schema("text string").load("numbers")
assert by_name.limit(1).collect() == [("text 0",)]
assert spark.conf.get("spark.sql.execution.arrow.maxBytesPerBatch") == "2147483647"
assert spark.conf.get("spark.sql.timeType.enabled") == "true"
spark.stop()
"""


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """Give this user another store for the module. Its node is killed in the end."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, pytest.MonkeyPatch.context() as patch:
        path = Path(memory) / "own"
        patch.setenv("DISSOCIATED_STORE", str(path))
        patch.delenv("DISSOCIATED_CATALOG", raising=False)
        yield
        if (node := running(path)) is not None:
            os.kill(node.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def run(java: str, other_python: Path, store: None) -> Iterator[Callable[[str], str]]:
    """Yield a function that runs the code of a cell, and returns its output."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYSPARK")},
        "JAVA_HOME": java,
        "PATH": os.pathsep.join([str(other_python), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYSPARK_SUBMIT_ARGS": f"--master local[1] --jars {jar()} pyspark-shell",
        "PYTHONWARNINGS": "ignore",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    process, kernel = manager.start_new_kernel(startup_timeout=300, env=environment, cwd=str(other_python))

    def run(cell: str) -> str:
        messages: list[dict[str, Any]] = []
        reply = kernel.execute_interactive(cell, timeout=300, output_hook=messages.append)
        assert reply["content"]["status"] == "ok", messages
        streams = [message["content"] for message in messages if message["msg_type"] == "stream"]
        return "".join(stream["text"] for stream in streams if stream["name"] == "stdout")

    try:
        run(JAVA)
        yield run
    finally:
        kernel.stop_channels()
        process.shutdown_kernel(now=True)


def test_a_session_without_our_function_finds_the_interpreter(run: Callable[[str], str]) -> None:
    """The kernel was called by its path, which in a virtual environment is a link to another directory."""
    assert run(PLAIN.format(jar=str(jar()))).strip() == "15"
    with dis.connect() as client:
        assert client["numbers"].count_rows() == 5


def test_the_quickstart_runs_in_a_cell(run: Callable[[str], str]) -> None:
    assert RESULT in run(PROGRAM)
    run("spark.stop()")
    with dis.connect() as client:
        assert client["squares"].count_rows() == 200_000


@pytest.mark.needs("ucx", "libfabric")
def test_the_demo_runs_over_ucx_and_libfabric(run: Callable[[str], str], python: Path, tmp_path: Path) -> None:
    for package in ("duckdb", "polars", "matplotlib"):
        pytest.importorskip(package, reason="the demo's packages are not installed")
    data = pytest.importorskip("examples.tpch.data")
    if data.generator() is None:
        pytest.skip("tpchgen-cli is not installed")
    port, secret = run("print(port, secret)").split()
    spark = {"PYSPARK_GATEWAY_PORT": port, "PYSPARK_GATEWAY_SECRET": secret}
    options = ["--scale", "0.001", "--query", "q3", "--device", "test:0", "--plot", str(tmp_path / "tpch.png")]
    transports = ["--transport", "ucx", "--transport", "fabric"]
    environment = {**os.environ, **spark, EXECUTABLE: str(python)}
    command = ["-m", "examples.tpch", *options, *transports]
    with Fork(*command, cwd=ROOT, env=environment, stdout=PIPE, stderr=PIPE) as demo:
        output, errors = demo.communicate(timeout=380)
    assert demo.returncode == 0, output[-4000:] + errors[-4000:]
    for transport in ("ucx", "fabric"):
        assert f"copy over {transport}" in output or f"  {transport} " in output


def test_the_quickstart_runs_and_datasets_are_written_and_read_by_spark_connect(
    run: Callable[[str], str], python: Path
) -> None:
    """This test comes last, because a process that has used Spark Connect has no other sessions."""
    pytest.importorskip("grpc", reason="Spark Connect needs grpcio: pip install 'pyspark[connect]'")
    with dis.Server(["shm:"]) as server:
        run(BEFORE_CONNECT.format(uri=server.catalog_uri, python=str(python)))
        assert RESULT in run(PROGRAM)
        run(CONNECT)
        with dis.connect(server.catalog_uri) as client:
            assert client.read("numbers").read_all()["id"].to_pylist() == [*range(1000)]

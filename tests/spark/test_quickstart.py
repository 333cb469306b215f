"""The program of docs/spark-quickstart.md as it is printed, by spark-submit, and before an example.

test_programs.py runs the program in a notebook and over Spark Connect, and test_session.py where a session runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home

import dissociated as dis
from support.pages import ROOT, blocks

(PROGRAM,) = [block.code for block in blocks(ROOT / "docs" / "spark-quickstart.md") if block.language == "python"]
RESULT = "20 rows, and their squares add up to 570"


#: The example runs after the program, in the same session. Starting another would cost most of this test.
EXAMPLE = """
import runpy
runpy.run_module("examples.basics.with_spark")
"""


@pytest.fixture
def environment(java: str, python: Path, own_store: Path) -> dict[str, str]:
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return {
        **os.environ,
        "JAVA_HOME": java,
        "PATH": os.pathsep.join(path),
        "PYSPARK_PYTHON": str(python),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),  # the warm daemon, and the examples
        "PYTHONWARNINGS": "ignore",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def test_the_program_and_the_example_run_as_they_are_printed(environment: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "quick.py"
    program.write_text(PROGRAM + EXAMPLE)
    submit = [str(Path(_find_spark_home()) / "bin" / "spark-submit"), "--master", "local[2]"]
    settings = ["--conf", "spark.python.daemon.module=warm"]
    run = subprocess.run(
        [*submit, *settings, str(program)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.stdout.splitlines() == [RESULT, "[(0, 334), (1, 333), (2, 333)]", "333"], run.stderr
    with dis.connect() as client:
        assert sorted(info.name for info in client.list()) == ["numbers", "squares"]

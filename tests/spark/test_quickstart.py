"""The program of docs/spark-quickstart.md, as it is printed, started by spark-submit.

test_connect.py starts it over Spark Connect, and test_session.py where a session runs already.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pyspark.find_spark_home import _find_spark_home

from support.pages import ROOT, blocks

(PROGRAM,) = [block.code for block in blocks(ROOT / "docs" / "spark-quickstart.md") if block.language == "python"]
RESULT = "20 rows, and their squares add up to 570"


def test_the_program_runs_as_it_is_printed(java: str, catalog: str, tmp_path: Path) -> None:
    program = tmp_path / "quick.py"
    program.write_text(PROGRAM)
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {
        **os.environ,
        "DISSOCIATED_CATALOG": catalog,
        "JAVA_HOME": java,
        "PATH": os.pathsep.join(path),
        "PYTHONPATH": str(Path(__file__).parent),  # has the warm daemon
        "PYTHONWARNINGS": "ignore",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    submit = [str(Path(_find_spark_home()) / "bin" / "spark-submit"), "--master", "local[2]"]
    settings = ["--conf", "spark.python.daemon.module=warm"]
    run = subprocess.run(
        [*submit, *settings, str(program)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert RESULT in run.stdout, run.stderr

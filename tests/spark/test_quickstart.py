"""The program of docs/spark-quickstart.md, as it is printed, started in the ways that the page names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.find_spark_home import _find_spark_home

from dissociated.spark import java_home
from support.pages import ROOT, blocks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

(PROGRAM,) = [block.code for block in blocks(ROOT / "docs" / "spark-quickstart.md") if block.language == "python"]
RESULT = "20 rows, and their squares add up to 570"


@pytest.mark.parametrize("way", ["spark-submit", "spark connect"])
def test_the_program_runs_as_it_is_printed(catalog: str, tmp_path: Path, way: str) -> None:
    program = tmp_path / "quick.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "DISSOCIATED_CATALOG": catalog,
        "JAVA_HOME": java_home(),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONWARNINGS": "ignore",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_TESTING": "1",  # makes Spark Connect choose a free port
    }
    if way == "spark connect":
        pytest.importorskip("grpc", reason="Spark Connect needs grpcio: pip install 'pyspark[connect]'")
        environment["SPARK_REMOTE"] = "local[2]"
        command = [sys.executable]
    else:
        command = [str(Path(_find_spark_home()) / "bin" / "spark-submit"), "--master", "local[2]"]
    run = subprocess.run([*command, str(program)], capture_output=True, text=True, env=environment, timeout=300)
    assert RESULT in run.stdout, run.stderr


def test_the_program_runs_where_a_session_runs_already(
    spark: SparkSession, catalog: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook is such a place."""
    monkeypatch.setenv("DISSOCIATED_CATALOG", catalog)
    try:
        exec(PROGRAM, {})
    finally:
        spark.conf.unset("spark.dissociated.catalog")
    assert RESULT in capsys.readouterr().out

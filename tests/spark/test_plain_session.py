"""A session that was started without `dissociated.spark.session`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.spark.jar import jar

SCRIPT = """
import sys
from pyspark.sql import SparkSession

uri, jar = sys.argv[1:]
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = builder.config("spark.jars", jar).getOrCreate()
spark.range(5).write.format("dissociated").option("catalog", uri).mode("overwrite").save("numbers")
found = spark.read.format("dissociated").option("catalog", uri).load("numbers")
print(sum(row.id for row in found.collect()))
spark.stop()
"""

#: Another Python on PATH, which has no dissociated.
OTHER = """#!/bin/sh
case "$*" in *dissociated*) echo 'No module named dissociated' >&2; exit 1;; esac
exec {python} "$@"
"""


@pytest.mark.parametrize("called", ["by its path", "by its name"])
def test_the_interpreter_of_the_driver_is_found(java: str, catalog: str, tmp_path: Path, called: str) -> None:
    """Spark's own default is the `python3` of PATH, whichever that is."""
    other = tmp_path / "python3"
    other.write_text(OTHER.format(python=sys.executable))
    other.chmod(0o700)
    name = Path(sys.executable).name if Path(sys.executable).name != "python3" else "python"
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYSPARK")},
        "JAVA_HOME": java,
        "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    run = subprocess.run(
        [sys.executable if called == "by its path" else name, "-c", SCRIPT, catalog, str(jar())],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert run.stdout.split() == ["10"], run.stderr
    with dis.connect(catalog) as client:
        assert client["numbers"].count_rows() == 5

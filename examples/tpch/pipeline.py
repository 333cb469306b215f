"""The pipeline: Spark reads Parquet, answers queries, and publishes the answers and lineitem.

python -m examples.tpch.pipeline --data DIRECTORY --catalog URI
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkContext
from pyspark.errors import PySparkException

from dissociated import DissociatedError
from dissociated.spark import publish, session
from examples.tpch.data import TABLES
from examples.tpch.queries import QUERIES
from examples.tpch.steps import fail, step, tell

_INTERVAL = 0.25  # seconds between two polls of the progress of Spark's tasks


@contextmanager
def watched(context: SparkContext) -> Iterator[None]:
    """Report the fraction of Spark's tasks that are complete, while the context is open."""
    over = threading.Event()

    def watch() -> None:
        tracker = context.statusTracker()
        while not over.wait(_INTERVAL):
            jobs = filter(None, map(tracker.getJobInfo, tracker.getActiveJobsIds()))
            stages = [*filter(None, (tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds))]
            if tasks := sum(stage.numTasks for stage in stages):
                tell(share=sum(stage.numCompletedTasks for stage in stages) / tasks)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def run(data: Path, catalog: str, queries: Sequence[str]) -> None:
    """Answer the queries, publish each answer under the name of its query, and publish the whole of lineitem."""
    with step("start") as current:
        spark = session("tpch", **{"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "8"})
        for table in TABLES:
            spark.read.parquet(str(data / table)).createOrReplaceTempView(table)
        current.says = f"Spark {spark.version}, {spark.sparkContext.defaultParallelism} cores"
    statements = {name: QUERIES[name] for name in queries}
    for name, sql in {**statements, "lineitem": "SELECT * FROM lineitem"}.items():
        with step(name) as current, watched(spark.sparkContext):
            publish(spark.sql(sql), name, catalog)
            current.says = "published"
    spark.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer queries of TPC-H in Spark and publish the answers.")
    parser.add_argument("--data", type=Path, required=True, help="the directory of the tables")
    parser.add_argument("--catalog", required=True, help="URI of the catalog to publish in")
    parser.add_argument("--queries", nargs="+", default=[*QUERIES], help="the queries to answer")
    arguments = parser.parse_args()
    try:
        run(arguments.data, arguments.catalog, arguments.queries)
    except (DissociatedError, PySparkException, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()

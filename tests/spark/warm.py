"""Spark's daemon of Python workers, which has imported what every one of them needs: a fork of it begins at once.

Spark's own imports nothing, so that each worker of each query takes half a second. What else starts a Spark of its own,
but for the clusters, runs with that one.
"""

import gc
from contextlib import suppress
from importlib import import_module

import pyspark.daemon

for name in (
    "dissociated.spark.datasource",
    "dissociated.spark.reader",
    "dissociated.spark.streaming",
    "dissociated.spark.writer",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.worker.commit_data_source_write",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark.worker",
):
    with suppress(ImportError):  # Spark 4.1 lacks some
        import_module(name)
gc.collect()
gc.freeze()  # a worker looks for garbage after each task, and all of this is none

if __name__ == "__main__":
    pyspark.daemon.manager()

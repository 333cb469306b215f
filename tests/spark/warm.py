"""Spark's daemon of Python workers with all common modules imported, so that its forks start at once.

Spark's own daemon imports nothing, so that each worker of each query takes half a second, and with pandas, which Spark
imports for its own `mapInArrow`, a second. The processes of FORKED in conftest.py are forks with these modules, too.
"""

import gc
from contextlib import suppress
from importlib import import_module

for name in (
    "dissociated.spark.datasource",
    "dissociated.spark.functions",
    "dissociated.spark.reader",
    "dissociated.spark.staging",
    "dissociated.spark.streaming",
    "dissociated.spark.writer",
    "pandas",
    "pyarrow.pandas_compat",
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
gc.freeze()  # Workers collect garbage after each task, and none of these objects is garbage.

if __name__ == "__main__":
    import pyspark.daemon

    pyspark.daemon.manager()

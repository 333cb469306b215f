"""Where Spark looks for data sources by itself: top-level modules called `pyspark_*`."""

from dissociated.spark.datasource import DissociatedDataSource as DefaultSource

__all__ = ["DefaultSource"]

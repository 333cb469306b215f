"""Spark: publish a DataFrame straight from its partitions, and read a dataset straight into them.

    from dissociated.spark import publish, read, session

    spark = session("my pipeline")
    publish(spark.range(1_000_000), "numbers", "grpc://127.0.0.1:8815")
    read(spark, "numbers", "grpc://127.0.0.1:8815").count()

Both are one line over the data source, which any Spark session finds by itself:

    df.write.format("dissociated").option("catalog", uri).mode("overwrite").save("numbers")
    spark.read.format("dissociated").option("catalog", uri).load("numbers")

Needs `pip install 'dissociated[spark]'`. Importing this package does not import pyspark.
"""

from dissociated.spark.functions import map_in_arrow
from dissociated.spark.java import java_home
from dissociated.spark.local import create_dataframe, to_arrow, to_pandas, to_polars
from dissociated.spark.session import publish, read, session

__all__ = [
    "create_dataframe",
    "java_home",
    "map_in_arrow",
    "publish",
    "read",
    "session",
    "to_arrow",
    "to_pandas",
    "to_polars",
]

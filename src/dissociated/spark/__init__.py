"""Spark: publish a DataFrame straight from its partitions.

    from dissociated.spark import publish, session

    spark = session("my pipeline")
    publish(spark.range(1_000_000), "numbers", "grpc://127.0.0.1:8815")

`publish` is one line over the data source, which any Spark session finds by itself:

    df.write.format("dissociated").option("catalog", uri).mode("overwrite").save("numbers")

Needs `pip install 'dissociated[spark]'`. Importing this package does not import pyspark.
"""

from dissociated.spark.java import java_home
from dissociated.spark.session import publish, session

__all__ = ["java_home", "publish", "session"]

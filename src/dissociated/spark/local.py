"""Data between Spark and this process, in shared memory: it passes neither through a socket nor through the JVM's heap.

Both directions need Spark in local mode, because memory is shared on one host, and the data source for Spark's JVM.
Otherwise Spark's own `toArrow` and `createDataFrame` stand in.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from dissociated.base.descriptors import owned
from dissociated.base.once import once
from dissociated.errors import SourceError
from dissociated.memory.shared import Backing, map_received
from dissociated.spark.columns import spark_schema
from dissociated.spark.session import has_jvm_source, read
from dissociated.spark.types import TIMEZONE, function_schema

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    from pyspark.sql import DataFrame, SparkSession

    from dissociated.server.server import Server


def to_arrow(df: DataFrame) -> pa.Table:
    """Return the rows of `df` as a Table, in the order of the partitions.

    Spark's tasks write their rows into shared memory, and the Table maps it. The memory is freed when the last array in
    it is collected. The schema is that of `df.toArrow()`, which is called for types that the data source for Spark's
    JVM does not have.
    """
    spark = df.sparkSession
    has_large_types = spark.conf.get("spark.sql.execution.arrow.useLargeVarTypes", "false") == "true"
    if not _is_local(spark) or not has_jvm_source(spark) or has_large_types:
        return df.toArrow()
    try:
        schema = function_schema(df.schema, TIMEZONE)
    except SourceError:
        return df.toArrow()  # Spark itself knows whether it takes these types
    jvm: Any = spark._jvm
    export, name = jvm.org.apache.spark.sql.dissociated.Export, secrets.token_hex(8)
    if not export.supports(df._jdf):
        return df.toArrow()
    try:
        files = [_map(**partition) for partition in json.loads(export.write(df._jdf, name))]
    finally:
        export.close(name)
    return pa.Table.from_batches([batch for file in files for batch in _read_batches(file, schema)], schema)


def _map(path: str, size: int) -> pa.Buffer:
    """Map the batches of a partition, which a task has written into a sealed memfd of Spark's sidecar."""
    with owned(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as descriptor:
        return map_received(descriptor, size, Backing.SEALED)


def _read_batches(file: pa.Buffer, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    source = pa.BufferReader(file)
    while source.tell() < file.size:
        yield pa.ipc.read_record_batch(pa.ipc.read_message(source), schema)


def to_polars(df: DataFrame) -> pl.DataFrame:
    """Return the rows of `df` as a DataFrame of Polars. See `to_arrow`."""
    import polars as pl

    frame = pl.from_arrow(to_arrow(df), rechunk=False)
    assert isinstance(frame, pl.DataFrame), "a Table becomes a DataFrame"
    return frame


def to_pandas(df: DataFrame) -> pd.DataFrame:
    """Return the rows of `df` as a DataFrame of pandas: that of pyarrow's `Table.to_pandas`. See `to_arrow`."""
    return to_arrow(df).to_pandas()


def create_dataframe(spark: SparkSession, data: Any) -> DataFrame:
    """Return a DataFrame of Spark with the rows of `data`, which Spark's tasks read in shared memory.

    The rows are copied into shared memory once. It is freed some time after the last plan or RDD with this DataFrame is
    gone, when Java collects its garbage, and when this process ends. A dataset has columns by name, so
    `createDataFrame` is called if two columns have the same name.

        create_dataframe(spark, pl.read_parquet("flights.parquet")).groupBy("dest").count()

    Args:
        spark: The session.
        data: A Table, RecordBatch or RecordBatchReader; a DataFrame of Polars or pandas; another object with
            `__arrow_c_stream__`; or a handle on a dataset, which is read where it lies, in its version.

    Raises:
        SourceError: `data` is of another kind, or Spark has no type for a column.
        StoreError: There is no shared memory for the data.
    """
    from dissociated.client.dataset import DatasetHandle  # imports pyarrow.dataset

    if isinstance(data, DatasetHandle):
        from dissociated.spark.request import LINEAGE  # imports pyspark

        info = data.info
        version: dict[str, Any] = {"version": info.version, LINEAGE: info.lineage_id} if info.version else {}
        return read(spark, data.name, data.catalog_uri, **version)
    table = _table(data)
    has_repeated_names = len({*table.column_names}) < table.num_columns
    if not _is_local(spark) or not has_jvm_source(spark) or has_repeated_names:
        return spark.createDataFrame(table)
    spark_schema(table.schema)  # raises an error before the rows are copied
    server, name = _server(), f"dataframe-{secrets.token_hex(8)}"
    server.publish(name, table, wait=True)
    try:
        df = read(spark, name, server.catalog_uri)
        jvm: Any = spark._jvm
        jvm.org.apache.spark.sql.dissociated.Temporary.watch(df._jdf, server.catalog_uri, name)
    except BaseException:
        server.drop(name)
        raise
    return df


def _table(data: Any) -> pa.Table:
    if isinstance(data, pa.Table):
        return data
    if isinstance(data, pa.RecordBatch):
        return pa.Table.from_batches([data])
    if type(data).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(data, preserve_index=False)
    if hasattr(data, "__arrow_c_stream__"):
        return pa.RecordBatchReader.from_stream(data).read_all()
    raise SourceError(
        f"data of the type {type(data).__name__} is not a table: "
        "give a Table, a reader, or a DataFrame of Polars or pandas"
    )


def _is_local(spark: SparkSession) -> bool:
    """Return whether Spark's tasks run in the JVM of the driver."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and str(spark.sparkContext.master).partition("[")[0] == "local"


@once
def _server() -> Server:
    """Return the server of this process for `create_dataframe`, which only this user can reach."""
    from dissociated.server.server import Server

    directory = tempfile.mkdtemp(prefix="dissociated-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    server = Server(["shm:"], catalog=f"grpc+unix://{directory}/flight.sock")
    atexit.register(server.close)
    return server

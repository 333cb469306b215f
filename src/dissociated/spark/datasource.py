"""The `dissociated` data source. Only Spark imports this module: by name, through `pyspark_dissociated`."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType

from dissociated.spark.reader import DatasetReader
from dissociated.spark.request import DatasetRequest
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema, function_schema
from dissociated.spark.writer import DatasetWriter


class DissociatedDataSource(DataSource):
    """The data source `dissociated` of Spark, for reading and writing, in batches and in streams.

        df.write.format("dissociated").option("catalog", uri).mode("overwrite").save("flights")

    For a catalog with access control, the option `token_file` names the file of the token and `tls_roots` the file of
    the trusted certificates.
    """

    @classmethod
    def name(cls) -> str:
        return "dissociated"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        function_schema(schema)  # raises for types that only the data source for Spark's JVM has
        return DatasetWriter(
            WriteTarget.parse(self.options, "overwrite" if overwrite else "append", '.save("NAME")'),
            arrow_schema(schema),
        )

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        function_schema(schema)
        # Only streaming needs Spark 4.2; this module also loads on Spark 4.1.
        from dissociated.spark.streaming import DatasetStreamWriter

        return DatasetStreamWriter(
            WriteTarget.parse(self.options, "overwrite" if overwrite else "append", '.start("NAME")'),
            arrow_schema(schema),
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from dissociated.spark.streaming import DatasetStreamReader, StreamOptions

        return DatasetStreamReader(DatasetRequest.parse(self.options), schema, StreamOptions.parse(self.options))

    def schema(self) -> StructType:
        return DatasetRequest.parse(self.options).schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        request = DatasetRequest.parse(self.options)
        request.check_columns(schema)
        function_schema(schema)
        return DatasetReader(request, schema)

package org.apache.spark.sql.dissociated

import java.util.OptionalLong

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** Takes what Spark tells of a query before it is planned. */
class DatasetScanBuilder(dataset: Dataset, options: CaseInsensitiveStringMap)
    extends ScanBuilder with SupportsPushDownRequiredColumns {
  private var columns = dataset.schema

  override def pruneColumns(required: StructType): Unit = columns = required

  override def build(): Scan = new DatasetScan(dataset, options, columns)
}

/** Some columns of a dataset. */
class DatasetScan(dataset: Dataset, options: CaseInsensitiveStringMap, columns: StructType) extends Scan with Batch {
  private var streams = false

  override def readSchema(): StructType = columns

  override def description(): String = s"dissociated ${options.get("path")}"

  override def toBatch: Batch = this

  override def toMicroBatchStream(checkpoint: String): MicroBatchStream = {
    streams = true
    dataset.inPython.newScanBuilder(options).build().toMicroBatchStream(checkpoint)
  }

  override def columnarSupportMode(): Scan.ColumnarSupportMode =
    if (streams) Scan.ColumnarSupportMode.PARTITION_DEFINED else Scan.ColumnarSupportMode.SUPPORTED

  private val python = Python.ofDriver()
  private lazy val plan = Sidecar.of(python).call("plan",
    "options" -> options, "schema" -> dataset.schema.json, "columns" -> columns.json)

  override def planInputPartitions(): Array[InputPartition] = plan.get("partitions").elements.asScala.map { one =>
    DatasetPartition(one.get("what").asText, one.get("hosts").elements.asScala.map(_.asText).toArray)
  }.toArray

  override def createReaderFactory(): PartitionReaderFactory =
    new DatasetReaderFactory(python, plan.get("reader").asText, columns)
}

/** What one task reads; `what` says so to the sidecar, and `hosts` where it lies. */
case class DatasetPartition(what: String, hosts: Array[String]) extends InputPartition {
  override def preferredLocations(): Array[String] = hosts
}

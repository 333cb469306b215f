package org.apache.spark.sql.dissociated

import java.util.{Locale, OptionalLong}

import scala.jdk.CollectionConverters._
import scala.util.Try

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.SparkContext
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.expressions.{FieldReference, NamedReference}
import org.apache.spark.sql.connector.expressions.aggregate.{Aggregation, CountStar}
import org.apache.spark.sql.connector.expressions.filter.Predicate
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream
import org.apache.spark.sql.types.{LongType, StructField, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** Takes what Spark tells of a query before it is planned. */
class DatasetScanBuilder(dataset: Dataset, options: CaseInsensitiveStringMap)
    extends ScanBuilder with SupportsPushDownRequiredColumns with SupportsPushDownV2Filters with SupportsPushDownLimit
    with SupportsPushDownAggregates {
  private var columns = dataset.schema
  private var limit = Long.MaxValue
  private var counts = 0
  private var pushed = Array.empty[Predicate]

  /** Of structs, too, only the fields that are needed. */
  override def pruneColumns(required: StructType): Unit = columns = required

  /** Batches without such rows may be left out. Spark filters, all the same. */
  override def pushPredicates(predicates: Array[Predicate]): Array[Predicate] = {
    pushed = predicates.filter(Conditions.of(_, dataset.schema).isDefined)
    predicates
  }

  override def pushedPredicates(): Array[Predicate] = pushed

  /** The first partitions that have so many rows; Spark takes the rows. */
  override def pushLimit(limit: Int): Boolean = {
    this.limit = limit
    true
  }

  override def isPartiallyPushed(): Boolean = true

  /** Of all rows, how many there are. Spark asks where it has no filter of its own. */
  override def supportCompletePushDown(aggregation: Aggregation): Boolean =
    aggregation.groupByExpressions.isEmpty && aggregation.aggregateExpressions.nonEmpty &&
      aggregation.aggregateExpressions.forall(_.isInstanceOf[CountStar]) && dataset.description(options).has("rows")

  override def pushAggregation(aggregation: Aggregation): Boolean = {
    val can = supportCompletePushDown(aggregation)
    if (can) counts = aggregation.aggregateExpressions.length
    can
  }

  override def build(): Scan =
    if (counts == 0)
      new DatasetScan(dataset, options, columns, limit, pushed.toSeq.flatMap(Conditions.of(_, dataset.schema)))
    else new CountScan(dataset.description(options).get("rows").asLong, counts)
}

/** The number of rows, as often as it was asked for. */
class CountScan(rows: Long, counts: Int) extends LocalScan {
  override def readSchema(): StructType =
    StructType(Seq.tabulate(counts)(number => StructField(s"count_$number", LongType, nullable = false)))

  override def rows(): Array[InternalRow] = Array(InternalRow.fromSeq(Seq.fill(counts)(rows)))
}

/** Some columns of a dataset. Two that are equal are read once. */
case class DatasetScan(dataset: Dataset, options: CaseInsensitiveStringMap, columns: StructType, limit: Long,
    conditions: Seq[Seq[Any]])
    extends Scan with Batch with SupportsReportStatistics with SupportsRuntimeV2Filtering {
  private val python = Python.ofDriver()
  private var streams = false
  private var joined = Seq.empty[Seq[Any]]
  private var planned: Option[JsonNode] = None

  override def readSchema(): StructType = columns

  /** For EXPLAIN. Batches and partitions are left out by pushed filters, and rows by Spark's own filter. */
  override def description(): String = if (streams) s"dissociated ${options.get("path")}" else {
    val filters = (conditions ++ joined).map {
      case Seq(column, "IN", values: Seq[_]) => s"$column IN (${values.mkString(", ")})"
      case Seq(column, operator, values: Seq[_]) => (Seq(column, operator) ++ values).mkString(" ")
    }
    val rows = if (limit == Long.MaxValue) "" else s", limit $limit"
    // A text of a plan, which Spark also makes for its logs, does not fail where the query will.
    val plan = Try(s"version ${dataset.description(options).get("version").asText}, partitions ${planInputPartitions().length}")
    s"dissociated ${options.get("path")}, ${plan.getOrElse("not planned")}, " +
      s"columns [${columns.fieldNames.mkString(", ")}], pushed filters [${filters.mkString(", ")}]$rows"
  }

  override def toBatch: Batch = this

  override def toMicroBatchStream(checkpoint: String): MicroBatchStream = {
    streams = true
    dataset.inPython.newScanBuilder(options).build().toMicroBatchStream(checkpoint)
  }

  override def columnarSupportMode(): Scan.ColumnarSupportMode =
    if (streams) Scan.ColumnarSupportMode.PARTITION_DEFINED else Scan.ColumnarSupportMode.SUPPORTED

  override def estimateStatistics(): Statistics = {
    val description = dataset.description(options)
    new Statistics {
      override def numRows(): OptionalLong = number("rows", 1)
      override def sizeInBytes(): OptionalLong =
        number("nbytes", share)

      private def number(name: String, part: Double) =
        if (description.has(name)) OptionalLong.of((description.get(name).asLong * part).toLong) else OptionalLong.empty
    }
  }

  /** How much of a row the columns are. */
  private def share = (columns.defaultSize + 8.0) / (dataset.schema.defaultSize + 8.0)

  /** Without names that differ only in case: Spark fails if it cannot tell these apart. */
  override def filterAttributes(): Array[NamedReference] =
    columns.fieldNames.groupBy(_.toLowerCase(Locale.ROOT)).values.filter(_.length == 1).flatten
      .map(FieldReference.column).toArray[NamedReference]

  /** By the keys that are there to be joined with, which Spark knows when it has run that part of the query. */
  override def filter(predicates: Array[Predicate]): Unit = if (limit == Long.MaxValue) {
    joined = predicates.toSeq.flatMap(Conditions.of(_, dataset.schema))
    planned = None
  }

  private def plan: JsonNode = planned.getOrElse {
    planned = Some(Sidecar.of(python).call("plan", "options" -> options, "schema" -> dataset.schema.json,
      "columns" -> columns.json, "version" -> dataset.description(options).get("version").asLong,
      "lineage" -> dataset.description(options).get("lineage").asText,
      "conditions" -> (conditions ++ joined), "share" -> share,
      "tasks" -> SparkContext.getOrCreate().defaultParallelism))
    planned.get
  }

  override def planInputPartitions(): Array[InputPartition] = {
    var rows = 0L
    plan.get("partitions").elements.asScala.takeWhile { _ => rows < limit }.map { partition =>
      rows += partition.get("rows").asLong
      DatasetPartition(partition.get("partition").asText, partition.get("hosts").elements.asScala.map(_.asText).toArray)
    }.toArray[InputPartition]
  }

  override def createReaderFactory(): PartitionReaderFactory = new DatasetReaderFactory(python, reader, columns)

  /** What is read, as the sidecar says it, and any process of Python with dissociated understands it. */
  private[dissociated] def reader: String = plan.get("reader").asText
}

/** The part of a dataset that one task reads: `pickled` is for the sidecar, and `hosts` hold the rows. */
case class DatasetPartition(pickled: String, hosts: Array[String]) extends InputPartition {
  override def preferredLocations(): Array[String] = hosts
  override def toString: String = s"DatasetPartition(${hosts.mkString(", ")})" // `pickled` may have a ticket
}

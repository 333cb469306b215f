package org.apache.spark.sql.dissociated

import java.util.{Locale, OptionalLong}

import scala.jdk.CollectionConverters._
import scala.util.Try

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.SparkContext
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Least, Literal}
import org.apache.spark.sql.catalyst.expressions.aggregate.{AggregateExpression, Count}
import org.apache.spark.sql.catalyst.plans.logical.LogicalPlan
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.catalyst.trees.TreePattern
import org.apache.spark.sql.connector.expressions.{FieldReference, NamedReference}
import org.apache.spark.sql.connector.expressions.aggregate.{Aggregation, CountStar}
import org.apache.spark.sql.connector.expressions.filter.Predicate
import org.apache.spark.sql.connector.read._
import org.apache.spark.sql.connector.read.streaming.MicroBatchStream
import org.apache.spark.sql.types.{LongType, StructField, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** A builder of a scan. It records which columns, filters, limit and counts Spark pushes down. */
class DatasetScanBuilder(dataset: Dataset, options: CaseInsensitiveStringMap)
    extends ScanBuilder with SupportsPushDownRequiredColumns with SupportsPushDownV2Filters with SupportsPushDownLimit
    with SupportsPushDownAggregates {
  private var columns = dataset.schema
  private var limit = Long.MaxValue
  private var countColumns = 0
  private var pushed = Array.empty[Predicate]

  /**
   * Read only these columns, and only these fields of structs. Spark confuses the types of columns whose names differ
   * only in case, so those are read whole.
   */
  override def pruneColumns(required: StructType): Unit = {
    val count = dataset.schema.fieldNames.groupMapReduce(_.toLowerCase(Locale.ROOT))(_ => 1)(_ + _)
    columns = StructType(required.map(field =>
      if (count(field.name.toLowerCase(Locale.ROOT)) == 1) field else dataset.schema(field.name)))
  }

  /** Push the predicates that the server may use to skip batches. Spark evaluates all of them again. */
  override def pushPredicates(predicates: Array[Predicate]): Array[Predicate] = {
    pushed = predicates.filter(Conditions.of(_, dataset.schema).isDefined)
    predicates
  }

  override def pushedPredicates(): Array[Predicate] = pushed

  /** Plan only as many partitions as `limit` rows need. Spark limits the rows of those. */
  override def pushLimit(limit: Int): Boolean = {
    this.limit = limit
    true
  }

  override def isPartiallyPushed(): Boolean = true

  /**
   * Return whether the aggregation counts all rows, whose number the catalog knows. Spark asks only if no filter
   * remains.
   */
  override def supportCompletePushDown(aggregation: Aggregation): Boolean =
    aggregation.groupByExpressions.isEmpty && aggregation.aggregateExpressions.nonEmpty &&
      aggregation.aggregateExpressions.forall(_.isInstanceOf[CountStar]) && dataset.description(options).has("rows")

  override def pushAggregation(aggregation: Aggregation): Boolean = {
    val canPush = supportCompletePushDown(aggregation)
    if (canPush) countColumns = aggregation.aggregateExpressions.length
    canPush
  }

  override def build(): Scan =
    if (countColumns == 0)
      new DatasetScan(dataset, options, columns, limit, pushed.toSeq.flatMap(Conditions.of(_, dataset.schema)))
    else new CountScan(dataset.description(options).get("rows").asLong, countColumns)
}

/**
 * A rule that replaces `count(DISTINCT constant)` by `least(count(constant), 1)`. Spark pushes down the count of a
 * constant as `count(*)`, without its DISTINCT.
 */
object ConstantCounts extends Rule[LogicalPlan] {
  override def apply(plan: LogicalPlan): LogicalPlan =
    plan.transformAllExpressionsWithPruning(_.containsPattern(TreePattern.COUNT)) {
      case count @ AggregateExpression(Count(Seq(_: Literal)), _, true, _, _) =>
        Least(Seq(count.copy(isDistinct = false), Literal(1L)))
    }
}

/** A scan of one row that has the number of rows in each of its columns. */
class CountScan(rows: Long, counts: Int) extends LocalScan {
  override def readSchema(): StructType =
    StructType(Seq.tabulate(counts)(number => StructField(s"count_$number", LongType, nullable = false)))

  override def rows(): Array[InternalRow] = Array(InternalRow.fromSeq(Seq.fill(counts)(rows)))
}

/** A scan of some columns of a dataset. Spark runs equal scans once. */
case class DatasetScan(dataset: Dataset, options: CaseInsensitiveStringMap, columns: StructType, limit: Long,
    conditions: Seq[Seq[Any]])
    extends Scan with Batch with SupportsReportStatistics with SupportsRuntimeV2Filtering {
  private val python = Python.ofDriver()
  private lazy val tableDescription = dataset.description(options)
  private var isStreaming = false
  private var joinConditions = Seq.empty[Seq[Any]]
  private var cachedPlan: Option[JsonNode] = None

  override def readSchema(): StructType = columns

  /** Describe the scan for EXPLAIN. Pushed filters skip batches and partitions; Spark's own filter selects rows. */
  override def description(): String = if (isStreaming) s"dissociated ${options.get("path")}" else {
    val filters = (conditions ++ joinConditions).map {
      case Seq(column, "IN", values: Seq[_]) => s"$column IN (${values.mkString(", ")})"
      case Seq(column, operator, values: Seq[_]) => (Seq(column, operator) ++ values).mkString(" ")
    }
    val rows = if (limit == Long.MaxValue) "" else s", limit $limit"
    // Spark also describes plans for its logs, so an error of planning must not appear before the query runs.
    val plan =
      Try(s"version ${tableDescription.get("version").asText}, partitions ${planInputPartitions().length}")
    s"dissociated ${options.get("path")}, ${plan.getOrElse("not planned")}, " +
      s"columns [${columns.fieldNames.mkString(", ")}], pushed filters [${filters.mkString(", ")}]$rows"
  }

  override def toBatch: Batch = this

  override def toMicroBatchStream(checkpoint: String): MicroBatchStream = {
    isStreaming = true
    dataset.pythonTable.newScanBuilder(options).build().toMicroBatchStream(checkpoint)
  }

  override def columnarSupportMode(): Scan.ColumnarSupportMode =
    if (isStreaming) Scan.ColumnarSupportMode.PARTITION_DEFINED else Scan.ColumnarSupportMode.SUPPORTED

  override def estimateStatistics(): Statistics = {
    new Statistics {
      override def numRows(): OptionalLong = number("rows", 1)
      override def sizeInBytes(): OptionalLong = number("nbytes", columnShare)

      private def number(name: String, fraction: Double) =
        if (tableDescription.has(name)) OptionalLong.of((tableDescription.get(name).asLong * fraction).toLong)
        else OptionalLong.empty
    }
  }

  /** The estimated share of a row's bytes that is in the columns. */
  private def columnShare = (columns.defaultSize + 8.0) / (dataset.schema.defaultSize + 8.0)

  /** Return the columns by which a join may filter, without names that differ only in case: for those, Spark fails. */
  override def filterAttributes(): Array[NamedReference] =
    columns.fieldNames.groupBy(_.toLowerCase(Locale.ROOT)).values.filter(_.length == 1).flatten
      .map(FieldReference.column).toArray[NamedReference]

  /** Filter by the keys of a join, which Spark knows after it has run the other side. */
  override def filter(predicates: Array[Predicate]): Unit = if (limit == Long.MaxValue) {
    joinConditions = predicates.toSeq.flatMap(Conditions.of(_, dataset.schema))
    cachedPlan = None
  }

  private def plan: JsonNode = cachedPlan.getOrElse {
    cachedPlan = Some(Sidecar.of(python).call("plan", "options" -> options, "schema" -> dataset.schema.json,
      "columns" -> columns.json, "version" -> tableDescription.get("version").asLong,
      "lineage" -> tableDescription.get("lineage").asText,
      "conditions" -> (conditions ++ joinConditions), "share" -> columnShare,
      "tasks" -> SparkContext.getOrCreate().defaultParallelism))
    cachedPlan.get
  }

  override def planInputPartitions(): Array[InputPartition] = {
    var rows = 0L
    plan.get("partitions").elements.asScala.takeWhile { _ => rows < limit }.map { partition =>
      rows += partition.get("rows").asLong
      DatasetPartition(partition.get("partition").asText, partition.get("hosts").elements.asScala.map(_.asText).toArray)
    }.toArray[InputPartition]
  }

  override def createReaderFactory(): PartitionReaderFactory =
    new DatasetReaderFactory(dataset, python, reader, columns)

  /** Return the description of the scan, which the sidecar made and any Python process with dissociated understands. */
  private[dissociated] def reader: String = plan.get("reader").asText
}

/** A partition that one task reads. `pickled` describes it to the sidecar, and `hosts` hold its rows. */
case class DatasetPartition(pickled: String, hosts: Array[String]) extends InputPartition {
  override def preferredLocations(): Array[String] = hosts
  override def toString: String = s"DatasetPartition(${hosts.mkString(", ")})" // `pickled` may contain a ticket
}

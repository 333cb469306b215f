package org.apache.spark.sql.dissociated

import java.io.IOException
import java.lang.ref.Cleaner
import java.nio.channels.FileChannel
import java.nio.file.{Paths, StandardOpenOption}

import scala.util.Try

import org.apache.spark.rdd.RDD
import org.apache.spark.sql.classic.{Dataset => Frame}
import org.apache.spark.sql.execution.{ColumnarToRowExec, InputAdapter, SparkPlan, SQLExecution, WholeStageCodegenExec}
import org.apache.spark.sql.execution.adaptive.AdaptiveSparkPlanExec
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation
import org.apache.spark.sql.types.StructType

/** Datasets that last as long as the plans and RDDs that read them. */
object Temporary {
  private val cleaner = Cleaner.create()

  /** Drop a dataset of a catalog when Java has collected all plans and RDDs with the table that `frame` reads. */
  def watch(frame: Frame[_], catalog: String, name: String): Unit = {
    val python = Python.ofDriver()
    frame.queryExecution.analyzed.foreach {
      case relation: DataSourceV2Relation => cleaner.register(relation.table, () => drop(python, catalog, name))
      case _ =>
    }
  }

  private def drop(python: Python, catalog: String, name: String): Unit =
    Try(Sidecar.of(python).call("drop_table", "options" -> Map("catalog" -> catalog), "name" -> name))
}

/** The record batches of one partition, in a file of `size` bytes. */
case class ExportedPartition(path: String, size: Long)

/** The export of DataFrames to memfds of the sidecar, which the driver's Python maps: see `dissociated.spark.local`. */
object Export {
  /** Return whether `write` supports all types of `frame`. */
  def supports(frame: Frame[_]): Boolean = Column.supports(frame.schema)

  /**
   * Run the plan of `frame`, whose tasks write their rows to memory. Returns the `ExportedPartition`s in order, as
   * JSON. The caller maps them and then calls `close`, which frees the memory.
   */
  def write(frame: Frame[_], name: String): String = {
    val (python, schema) = (Python.ofDriver(), frame.schema)
    Sidecar.of(python).call("begin_export", "name" -> name)
    SQLExecution.withNewExecutionId(frame.queryExecution, Some("to_arrow")) {
      val plan = frame.queryExecution.executedPlan
      plan.resetMetrics()
      val input = columnsOrRows(plan).asInstanceOf[RDD[Any]]
      val partitions = input.sparkContext.runJob(input, (input: Iterator[Any]) => write(input, schema, python, name))
      Sidecar.json.writeValueAsString(partitions.toSeq.flatten)
    }
  }

  /** Free the memory of an export, except for mappings of it. */
  def close(name: String): Unit = Sidecar.of(Python.ofDriver()).call("end_export", "name" -> name)

  /** Returns the columns of `plan` if its last step converts columns to rows, and otherwise its rows. */
  private def columnsOrRows(plan: SparkPlan): RDD[_] = plan match {
    case adaptive: AdaptiveSparkPlanExec => columnsOrRows(adaptive.finalPhysicalPlan)
    case WholeStageCodegenExec(ColumnarToRowExec(InputAdapter(columns))) => columns.executeColumnar()
    case ColumnarToRowExec(columns) => columns.executeColumnar()
    case _ => CachedBatches.of(plan).getOrElse(plan.execute())
  }

  /** Write the rows or columns of a partition, in its task. Returns None if there are none. */
  private def write(
      input: Iterator[Any], schema: StructType, python: Python, name: String): Option[ExportedPartition] =
    if (input.isEmpty) None else {
      val sidecar = Sidecar.of(python)
      val path = sidecar.call("export_file", "name" -> name).asText
      val channel = FileChannel.open(Paths.get(path), StandardOpenOption.WRITE)
      val batches = new BatchStream(input, schema)
      var size = 0L
      try {
        while (batches.writeNext((count, layout) =>
          size += SegmentFile.write(channel, layout.encodeMessage(count, size)))) {}
      } catch {
        case error: Throwable =>
          // This fails if an interrupt has closed the channel.
          Try(channel.truncate(0))
          throw (error match {
            case failed: IOException => Failure(s"the rows of a partition cannot be written to memory: $failed")
            case _ => error
          })
      } finally {
        channel.close()
        batches.free()
      }
      // A batch of columns may have no rows.
      Option.when(size > 0) {
        sidecar.call("seal_export", "name" -> name, "path" -> path)
        ExportedPartition(path, size)
      }
    }
}

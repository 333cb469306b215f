package org.apache.spark.sql.dissociated

import java.io.IOException
import java.nio.{ByteBuffer, ByteOrder}
import java.nio.channels.FileChannel
import java.nio.file.{Paths, StandardOpenOption}
import java.util.UUID

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.arrow.memory.{ArrowBuf, ReferenceManager}
import org.apache.arrow.memory.util.MemoryUtil
import org.apache.arrow.vector.ipc.message.{ArrowFieldNode, ArrowRecordBatch, MessageSerializer}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.connector.write._
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.vectorized.ColumnarBatch

/**
 * Takes whether Spark wants to replace what there is, or to add to it. It is written in Python where rows must be made to
 * fit that.
 */
class DatasetWrite(info: LogicalWriteInfo, python: => WriteBuilder)
    extends WriteBuilder with SupportsTruncate with SupportsDynamicOverwrite with Write {
  private var mode = "append"

  override def truncate(): WriteBuilder = {
    mode = "overwrite"
    this
  }

  /** A dataset has no partitions by columns, so rows of all partitions are replaced. */
  override def overwriteDynamicPartitions(): WriteBuilder = truncate()

  override def build(): Write = this

  override def description(): String = s"dissociated ${info.options.get("path")}"

  private def inPython: Write =
    (if (mode == "append") python else python.asInstanceOf[SupportsTruncate].truncate()).build()

  override def toBatch: BatchWrite = plan(None).getOrElse(inPython.toBatch)

  override def toStreaming: StreamingWrite =
    plan(Some(info.queryId.replace("-", ""))).getOrElse(inPython.toStreaming)

  private def plan(query: Option[String]): Option[SegmentsWrite] = if (!Column.supports(info.schema)) None else {
    val python = Python.ofDriver()
    val answer = Sidecar.of(python).call("write", "options" -> info.options, "schema" -> info.schema.json, "mode" -> mode,
      "streaming" -> query.isDefined)
    Option.when(answer.get("fits").asBoolean)(new SegmentsWrite(
      WritePlan(python, answer.get("writer").asText, query.getOrElse(answer.get("key").asText), info.schema)))
  }
}

/** What the driver and every task know of a write: `writer` says it to the sidecar. Names of segments have its key. */
case class WritePlan(python: Python, writer: String, key: String, columns: StructType)

/** What a task tells the driver of its partition: where its rows are, or that it has none. */
case class SegmentWritten(partition: Int, node: String, segment: String, rows: Long, nbytes: Long)
    extends WriterCommitMessage

/** A commit; or of a stream one for each micro-batch, whose key is made of the query and the batch. */
class SegmentsWrite(plan: WritePlan) extends BatchWrite with StreamingWrite {
  override def createBatchWriterFactory(info: PhysicalWriteInfo): DataWriterFactory = new SegmentWriterFactory(plan)

  override def createStreamingWriterFactory(info: PhysicalWriteInfo): StreamingDataWriterFactory =
    new SegmentWriterFactory(plan)

  override def useCommitCoordinator(): Boolean = true

  override def commit(messages: Array[WriterCommitMessage]): Unit = end("commit", None, messages)
  override def abort(messages: Array[WriterCommitMessage]): Unit = end("abort", None, messages)

  override def commit(epoch: Long, messages: Array[WriterCommitMessage]): Unit =
    if (messages.nonEmpty) end("commit", Some(s"${plan.key}.$epoch"), messages) // else the batch had no partitions

  override def abort(epoch: Long, messages: Array[WriterCommitMessage]): Unit =
    end("abort", Some(s"${plan.key}.$epoch"), messages)

  private def end(call: String, key: Option[String], messages: Array[WriterCommitMessage]): Unit =
    Sidecar.of(plan.python).call(call, "writer" -> plan.writer, "key" -> key,
      "written" -> messages.collect { case segment: SegmentWritten => segment })
}

class SegmentWriterFactory(plan: WritePlan) extends DataWriterFactory with StreamingDataWriterFactory {
  // An earlier run of a batch, by a driver that was killed, may have left segments of like-numbered tasks.
  private val run = UUID.randomUUID.toString.take(8)

  override def createWriter(partition: Int, task: Long): DataWriter[InternalRow] =
    new SegmentWriter(plan, partition, f"${plan.key}-$partition%06d-$task.arrows", None)

  override def createWriter(partition: Int, task: Long, epoch: Long): DataWriter[InternalRow] = {
    val key = s"${plan.key}.$epoch"
    new SegmentWriter(plan, partition, f"$key-$run-$partition%06d-$task.arrows", Some(key))
  }
}

/**
 * In a task: writes its partition into a segment of this name, in the stage of the node of its host, where the sidecar
 * makes it. Nothing is made where there are no rows, or where there was a commit with the `key` before.
 */
class SegmentWriter(plan: WritePlan, partition: Int, segment: String, key: Option[String])
    extends DataWriter[InternalRow] {
  private val sidecar = Sidecar.of(plan.python)
  private val batch = new BatchBuilder(plan.columns)
  private var isStaged = false
  private var file: SegmentFile = _ // null where nothing is to be written
  private var written = 0L // rows

  override def write(row: InternalRow): Unit = if (file != null || begin()) {
    if (!batch.add(row)) {
      flush()
      batch.add(row)
    }
  }

  private def begin(): Boolean = {
    if (!isStaged) {
      isStaged = true // from now on there may be something to discard
      val place = sidecar.call("stage", "writer" -> plan.writer, "segment" -> segment, "key" -> key)
      if (!place.isNull) file = new SegmentFile(sidecar, segment, place)
    }
    file != null
  }

  private def flush(): Unit = batch.take { (rows, layout) =>
    file.write(layout.message(rows, file.position))
    written += rows
  }

  override def commit(): WriterCommitMessage =
    if (file == null) SegmentWritten(partition, null, null, 0, 0)
    else {
      flush()
      file.close()
      val nbytes = sidecar.call("finish", "segment" -> segment, "size" -> file.position).asLong
      SegmentWritten(partition, file.node, segment, written, nbytes)
    }

  override def abort(): Unit = if (isStaged) {
    if (file != null) file.close()
    sidecar.call("discard", "segment" -> segment)
  }

  override def close(): Unit = {
    if (file != null) file.close()
    batch.free()
  }
}

/** Rows, or columns, that become record batches of some size. */
final class BatchBuilder(schema: StructType, maxRows: Int = BatchBuilder.MaxRows) extends Native {
  private val columns = schema.fields.map(field => own(Column.of(field.dataType)))
  private val fixed = columns.zipWithIndex.collect { case (column: FixedColumn, ordinal) => (column, ordinal) }
  private val width = fixed.map(_._1.width.toLong).sum // bytes of a row in these
  private val (varying, ordinals) = columns.zipWithIndex.filterNot(_._1.isInstanceOf[FixedColumn]).unzip
  private val waiting = own(new RowBuffer(columns.length))
  private var rows = 0 // in the columns
  private var size = 0L // bytes of these
  private lazy val project = UnsafeProjection.create(schema)

  /** Adds a row. False, and it is not added, if the batch is full: take the batch first. */
  def add(row: InternalRow): Boolean = {
    val unsafe = row match {
      case unsafeRow: UnsafeRow => unsafeRow
      case anyRow => project(anyRow)
    }
    (rows + waiting.count < maxRows || rows + waiting.count == 0) && (waiting.add(unsafe) || {
      gather()
      val fits = rows < BatchBuilder.MaxRows && size + unsafe.getSizeInBytes <= BatchBuilder.MaxBytes
      if (fits) waiting.add(unsafe)
      fits
    })
  }

  /**
   * Adds the rows of `batch` from `first` on until this batch is full, and returns their number. The size is checked
   * after each row, because a few rows can have values of several MB. Columns of fixed width then take all rows at once.
   */
  def add(batch: ColumnarBatch, first: Int): Int = {
    var next = first
    while (next < batch.numRows && rows < maxRows && size <= BatchBuilder.MaxBytes) {
      val row = batch.getRow(next)
      Loop.over(varying.length)(index => varying(index).put(row, ordinals(index)))
      rows += 1
      next += 1
      size = rows * width + Column.nbytes(varying)
    }
    fixed.foreach { case (column, ordinal) => column.take(batch.column(ordinal), first, next - first) }
    next - first
  }

  /** The rows that wait go into the columns. */
  private def gather(): Unit = {
    rows += waiting.count
    size += waiting.size
    Loop.over(columns.length)(index => columns(index).take(waiting, index))
    waiting.clear()
  }

  /** Gives what there is to `write` as a record batch, and begins anew. False if there are no rows. */
  def take(write: (Int, Layout) => Unit): Boolean = {
    gather()
    val any = rows > 0
    if (any) {
      val layout = new Layout
      columns.foreach(_.describe(layout))
      write(rows, layout)
      columns.foreach(_.clear())
      rows = 0
      size = 0
    }
    any
  }
}

object BatchBuilder {
  val MaxRows: Int = 1 << 18
  private val MaxBytes = 1L << 23
}

/** The record batches of rows or columns. */
final class BatchesOf(input: Iterator[Any], schema: StructType, maxRows: Int = BatchBuilder.MaxRows) {
  private val builder = new BatchBuilder(schema, maxRows)
  private var next: Any = _ // a row or columns, of which not all rows have been added to a batch
  private var from = 0 // the first row of `next` that has not been added

  /** Gives the next batch to `write`. False if there is none. */
  def take(write: (Int, Layout) => Unit): Boolean = {
    while ((next != null || input.hasNext) && add()) {}
    builder.take(write)
  }

  /** False if the batch is full. */
  private def add(): Boolean = {
    if (next == null) {
      next = input.next()
      from = 0
    }
    val added = next match {
      case row: InternalRow => if (builder.add(row)) 1 else 0
      case batch: ColumnarBatch => builder.add(batch, from)
    }
    from += added
    val whole = next match {
      case batch: ColumnarBatch => from == batch.numRows
      case _ => from == 1
    }
    if (whole) next = null
    whole || added > 0
  }

  def free(): Unit = builder.free()
}

/** Where arrays lie that become a record batch. All is aligned in the file, and filled up with zeros. */
final class Layout {
  private val arrays = new java.util.ArrayList[ArrowFieldNode]
  private val buffers = new java.util.ArrayList[ArrowBuf]

  def array(length: Int, nulls: Int): Unit = arrays.add(new ArrowFieldNode(length, nulls))

  def buffer(memory: Memory, size: Long): Unit = {
    val whole = memory.fill(size, Layout.aligned(size))
    buffers.add(new ArrowBuf(ReferenceManager.NO_OP, null, whole, memory.address).writerIndex(whole))
  }

  /** The message with its body, to be written at `position`. */
  def message(rows: Int, position: Long): Seq[ByteBuffer] = {
    val header = MessageSerializer.serializeMetadata(new ArrowRecordBatch(rows, arrays, buffers))
    val from = position + 8 + header.remaining
    val padding = (Layout.aligned(from) - from).toInt
    val prefix = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putInt(-1).putInt(header.remaining + padding)
    Seq(prefix.flip(), header, ByteBuffer.allocate(padding)) ++ buffers.asScala.filter(_.capacity > 0).map { buffer =>
      MemoryUtil.directBuffer(buffer.memoryAddress, buffer.capacity.toInt)
    }
  }
}

object Layout {
  private def aligned(size: Long): Long = (size + 63) & ~63L
}

/** A file that the sidecar has created, with the beginning of a segment. The sidecar also reserves space in it. */
final class SegmentFile(sidecar: Sidecar, segment: String, place: JsonNode) extends AutoCloseable {
  private val channel = FileChannel.open(Paths.get(place.get("path").asText), StandardOpenOption.WRITE)
  private var room = place.get("room").asLong
  val node: String = place.get("node").asText
  var position: Long = place.get("position").asLong
  channel.position(position)

  def write(parts: Seq[ByteBuffer]): Unit = {
    val end = position + parts.iterator.map(_.remaining.toLong).sum
    if (end > room) room = sidecar.call("reserve", "segment" -> segment, "size" -> end).asLong
    try position += SegmentFile.write(channel, parts)
    catch { case error: IOException => throw Failure(s"writing $segment: $error") }
  }

  override def close(): Unit = channel.close()
}

object SegmentFile {
  /** Writes all of these, and returns how many bytes that are. */
  def write(channel: FileChannel, parts: Seq[ByteBuffer]): Long = {
    val all = parts.toArray
    val size = all.iterator.map(_.remaining.toLong).sum
    var written = 0L
    while (written < size) written += channel.write(all)
    size
  }
}

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
import org.apache.spark.sql.catalyst.expressions.{GenericInternalRow, UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.connector.write._
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.execution.vectorized.WritableColumnVector
import org.apache.spark.sql.types.{StringType, StructType}
import org.apache.spark.sql.vectorized.{ColumnarBatch, ColumnVector}
import org.apache.spark.unsafe.types.UTF8String

/**
 * A builder of a write, which appends to a dataset or replaces it. Python writes if the rows must be converted to fit
 * the dataset.
 */
class DatasetWrite(batch: LogicalWriteInfo, stream: LogicalWriteInfo, pythonBuilder: LogicalWriteInfo => WriteBuilder)
    extends WriteBuilder with SupportsTruncate with SupportsDynamicOverwrite with Write {
  private var mode = "append"

  override def truncate(): WriteBuilder = {
    mode = "overwrite"
    this
  }

  /** Replace the whole dataset, because it has no partitions by columns. */
  override def overwriteDynamicPartitions(): WriteBuilder = truncate()

  override def build(): Write = this

  override def description(): String = s"dissociated ${batch.options.get("path")}"

  private def pythonWrite(info: LogicalWriteInfo): Write = {
    val builder = pythonBuilder(info)
    (if (mode == "append") builder else builder.asInstanceOf[SupportsTruncate].truncate()).build()
  }

  override def toBatch: BatchWrite = plan(batch, None).getOrElse(pythonWrite(batch).toBatch)

  override def toStreaming: StreamingWrite =
    plan(stream, Some(stream.queryId.replace("-", ""))).getOrElse(pythonWrite(stream).toStreaming)

  /** Return the write by this JVM, or None if Python must write. */
  private def plan(info: LogicalWriteInfo, query: Option[String]): Option[SegmentsWrite] =
    if (!Column.supports(info.schema)) None else {
      val python = Python.ofDriver()
      val answer = Sidecar.of(python).call("write", "options" -> info.options, "schema" -> info.schema.json,
        "mode" -> mode, "streaming" -> query.isDefined)
      Option.when(answer.get("fits").asBoolean)(new SegmentsWrite(
        WritePlan(python, answer.get("writer").asText, query.getOrElse(answer.get("key").asText), info.schema)))
    }
}

/**
 * The plan of a write, for the driver and all tasks. `writer` describes it to the sidecar, and names of segments
 * begin with `key`.
 */
case class WritePlan(python: Python, writer: String, key: String, columns: StructType)

/** The message of a task to the driver: the segment with the rows of its partition, or null if it has no rows. */
case class SegmentWritten(partition: Int, node: String, segment: String, rows: Long, nbytes: Long)
    extends WriterCommitMessage

/** A write of one commit, or of one commit for each micro-batch, whose key consists of the query and the batch. */
class SegmentsWrite(plan: WritePlan) extends BatchWrite with StreamingWrite {
  override def createBatchWriterFactory(info: PhysicalWriteInfo): DataWriterFactory = new SegmentWriterFactory(plan)

  override def createStreamingWriterFactory(info: PhysicalWriteInfo): StreamingDataWriterFactory =
    new SegmentWriterFactory(plan)

  override def useCommitCoordinator(): Boolean = true

  override def commit(messages: Array[WriterCommitMessage]): Unit = finish("commit", None, messages)
  override def abort(messages: Array[WriterCommitMessage]): Unit = finish("abort", None, messages)

  override def commit(epoch: Long, messages: Array[WriterCommitMessage]): Unit =
    // A micro-batch without partitions has nothing to commit.
    if (messages.nonEmpty) finish("commit", Some(s"${plan.key}.$epoch"), messages)

  override def abort(epoch: Long, messages: Array[WriterCommitMessage]): Unit =
    finish("abort", Some(s"${plan.key}.$epoch"), messages)

  private def finish(call: String, key: Option[String], messages: Array[WriterCommitMessage]): Unit =
    Sidecar.callRepeatable(plan.python, call, "writer" -> plan.writer, "key" -> key,
      "written" -> messages.collect { case segment: SegmentWritten => segment })
}

class SegmentWriterFactory(plan: WritePlan) extends DataWriterFactory with StreamingDataWriterFactory {
  // If the driver was killed, its run of the same micro-batch may have left segments of tasks with the same numbers.
  private val run = UUID.randomUUID.toString.take(8)

  override def createWriter(partition: Int, task: Long): DataWriter[InternalRow] =
    new SegmentWriter(plan, partition, f"${plan.key}-$partition%06d.$task.arrows", None)

  override def createWriter(partition: Int, task: Long, epoch: Long): DataWriter[InternalRow] = {
    val key = s"${plan.key}.$epoch"
    new SegmentWriter(plan, partition, f"$key-$run.$partition%06d.$task.arrows", Some(key))
  }
}

/**
 * A writer of one partition, into a segment that the sidecar creates in the stage of a node on the host of the task.
 * It creates none if there are no rows, or if `key` has been committed before.
 */
class SegmentWriter(plan: WritePlan, partition: Int, segment: String, key: Option[String])
    extends DataWriter[InternalRow] {
  private val sidecar = Sidecar.of(plan.python)
  private val batch = new BatchBuilder(plan.columns)
  private var isStaged = false
  // Null until there is a row, and if nothing is to be written.
  private var file: SegmentFile = _
  private var writtenRows = 0L

  override def write(row: InternalRow): Unit = if (file != null || stageFile()) {
    if (!batch.add(row)) {
      flush()
      batch.add(row)
    }
  }

  /** Create the segment at the first call, and return whether rows are to be written. */
  private def stageFile(): Boolean = {
    if (!isStaged) {
      // From now on, `abort` must discard the segment.
      isStaged = true
      val answer = sidecar.call("stage", "writer" -> plan.writer, "segment" -> segment, "key" -> key)
      if (!answer.isNull) file = new SegmentFile(sidecar, segment, answer)
    }
    file != null
  }

  private def flush(): Unit = batch.flush { (rows, layout) =>
    file.write(layout.encodeMessage(rows, file.position))
    writtenRows += rows
  }

  override def commit(): WriterCommitMessage =
    if (file == null) SegmentWritten(partition, null, null, 0, 0)
    else {
      flush()
      file.close()
      val nbytes = sidecar.call("finish", "segment" -> segment, "size" -> file.position).asLong
      SegmentWritten(partition, file.node, segment, writtenRows, nbytes)
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

/** A builder of record batches from rows or columns. */
final class BatchBuilder(schema: StructType, maxRows: Int = BatchBuilder.MaxRows) extends NativeOwner {
  private val columns = schema.fields.map(field => own(Column.of(field.dataType)))
  private val fixed = columns.zipWithIndex.collect { case (column: FixedColumn, ordinal) => (column, ordinal) }
  // The bytes of a row in the columns of fixed width.
  private val fixedWidth = fixed.map(_._1.width.toLong).sum
  private val (variable, variableOrdinals) = columns.zipWithIndex.filterNot(_._1.isInstanceOf[FixedColumn]).unzip
  private val pending = own(new RowBuffer(columns.length))
  // The rows and bytes in `columns`, without those in `pending`.
  private var rows = 0
  private var size = 0L
  private lazy val project = UnsafeProjection.create(schema)

  /** Add a row. Returns false, without adding it, if the batch is full: call `flush` first. */
  def add(row: InternalRow): Boolean = {
    val unsafe = row match {
      case unsafeRow: UnsafeRow => unsafeRow
      case anyRow => project(anyRow)
    }
    (rows + pending.count < maxRows || rows + pending.count == 0) && (pending.add(unsafe) || {
      appendPending()
      val hasRoom = rows < BatchBuilder.MaxRows && size + unsafe.getSizeInBytes <= BatchBuilder.MaxBytes
      if (hasRoom) pending.add(unsafe)
      hasRoom
    })
  }

  /**
   * Add rows of `batch` from `first` on until this batch is full, and return their number. The size is checked after
   * each row, because a few rows can have values of several MB. Columns of fixed width then append all rows at once.
   */
  def add(batch: ColumnarBatch, first: Int): Int = {
    val decoded = variableOrdinals.map(ordinal => DecodedStrings.of(batch.column(ordinal), first, batch.numRows))
    var next = first
    while (next < batch.numRows && rows < maxRows && size <= BatchBuilder.MaxBytes) {
      val row = batch.getRow(next)
      Loop.over(variable.length) { index =>
        if (decoded(index) == null) variable(index).append(row, variableOrdinals(index))
        else variable(index).append(decoded(index), next - first)
      }
      rows += 1
      next += 1
      size = rows * fixedWidth + Column.nbytes(variable)
    }
    fixed.foreach { case (column, ordinal) => column.appendRange(batch.column(ordinal), first, next - first) }
    next - first
  }

  /** Add rows of `batch` from `first` on until this batch is full, and return their number. */
  def add(batch: CachedRows, first: Int): Int = {
    var next = first
    while (next < batch.count && rows < maxRows && size <= BatchBuilder.MaxBytes) {
      size += batch.size(next)
      rows += 1
      next += 1
    }
    Loop.over(columns.length)(index => batch.columns(index).appendTo(columns(index), first, next - first))
    next - first
  }

  /** Append the pending rows to the columns. */
  private def appendPending(): Unit = {
    rows += pending.count
    size += pending.size
    Loop.over(columns.length)(index => columns(index).appendRows(pending, index))
    pending.clear()
  }

  /**
   * Pass the rows to `write` as a record batch, and clear the builder. Returns false if there are no rows. The
   * buffers are valid until `write` returns.
   */
  def flush(write: (Int, Layout) => Unit): Boolean = {
    appendPending()
    val hasRows = rows > 0
    if (hasRows) {
      val layout = new Layout
      columns.foreach(_.describe(layout))
      write(rows, layout)
      columns.foreach(_.clear())
      rows = 0
      size = 0
    }
    hasRows
  }
}

object BatchBuilder {
  val MaxRows: Int = 1 << 18
  private val MaxBytes = 1L << 23
}

/** Strings of a column that Parquet has encoded by a dictionary. Each entry is decoded once, and not for each row. */
object DecodedStrings {
  /** Return the strings of the rows from `first` to `end` as the fields of a row, or null for another column. */
  def of(column: ColumnVector, first: Int, end: Int): InternalRow = column match {
    case encoded: WritableColumnVector if encoded.hasDictionary && encoded.dataType.isInstanceOf[StringType] =>
      val fields = new Array[Any](end - first)
      // The strings by their ids. A large dictionary has more ids, whose strings are decoded for each row.
      val strings = new Array[UTF8String](fields.length)
      Loop.over(fields.length) { index =>
        val row = first + index
        if (!encoded.isNullAt(row)) {
          val id = encoded.getDictionaryIds.getDictId(row)
          if (id >= strings.length) fields(index) = encoded.getUTF8String(row)
          else {
            if (strings(id) == null) strings(id) = encoded.getUTF8String(row)
            fields(index) = strings(id)
          }
        }
      }
      new GenericInternalRow(fields)
    case _ => null
  }
}

/** The record batches of an iterator of rows, columns or cached batches. The caller calls `free` at the end. */
final class BatchStream(input: Iterator[Any], schema: StructType, maxRows: Int = BatchBuilder.MaxRows) {
  private val builder = new BatchBuilder(schema, maxRows)
  // A row, or columns, of which some rows have not been added to a batch.
  private var next: Any = _
  // The first row of `next` that has not been added.
  private var from = 0

  /** Pass the next batch to `write`. Returns false if there is none. */
  def writeNext(write: (Int, Layout) => Unit): Boolean = {
    while ((next != null || input.hasNext) && addNext()) {}
    builder.flush(write)
  }

  /** Add rows of the next item. Returns false if the batch is full. */
  private def addNext(): Boolean = {
    if (next == null) {
      next = input.next()
      from = 0
    }
    val added = next match {
      case row: InternalRow => if (builder.add(row)) 1 else 0
      case batch: ColumnarBatch => builder.add(batch, from)
      case batch: CachedRows => builder.add(batch, from)
    }
    from += added
    val isConsumed = next match {
      case batch: ColumnarBatch => from == batch.numRows
      case batch: CachedRows => from == batch.count
      case _ => from == 1
    }
    if (isConsumed) next = null
    isConsumed || added > 0
  }

  def free(): Unit = builder.free()
}

/**
 * The field nodes and buffers of a record batch. Each buffer is padded with zeros to 64 bytes, and aligned to them in
 * the file.
 */
final class Layout {
  private val arrays = new java.util.ArrayList[ArrowFieldNode]
  private val buffers = new java.util.ArrayList[ArrowBuf]

  /** Add the field node of an array. */
  def addNode(length: Int, nulls: Int): Unit = arrays.add(new ArrowFieldNode(length, nulls))

  /** Add a buffer. Its memory must not change until the message has been written. */
  def addBuffer(memory: Memory, size: Long): Unit = {
    val paddedSize = memory.padWithZeros(size, Layout.align(size))
    buffers.add(new ArrowBuf(ReferenceManager.NO_OP, null, paddedSize, memory.address).writerIndex(paddedSize))
  }

  /** Return the message and its body as buffers, to be written at `position` of the file. */
  def encodeMessage(rows: Int, position: Long): Seq[ByteBuffer] = {
    val header = MessageSerializer.serializeMetadata(new ArrowRecordBatch(rows, arrays, buffers))
    val from = position + 8 + header.remaining
    val padding = (Layout.align(from) - from).toInt
    val prefix = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN).putInt(-1).putInt(header.remaining + padding)
    Seq(prefix.flip(), header, ByteBuffer.allocate(padding)) ++ buffers.asScala.filter(_.capacity > 0).map { buffer =>
      MemoryUtil.directBuffer(buffer.memoryAddress, buffer.capacity.toInt)
    }
  }
}

object Layout {
  private def align(size: Long): Long = (size + 63) & ~63L
}

/** A segment file that the sidecar has created and begun, and in which it reserves space. */
final class SegmentFile(sidecar: Sidecar, segment: String, answer: JsonNode) extends AutoCloseable {
  private val channel = FileChannel.open(Paths.get(answer.get("path").asText), StandardOpenOption.WRITE)
  private var reservedSize = answer.get("room").asLong
  val node: String = answer.get("node").asText
  var position: Long = answer.get("position").asLong
  channel.position(position)

  /** Append `buffers`. Throws if the store has no space for them. */
  def write(buffers: Seq[ByteBuffer]): Unit = {
    val end = position + buffers.iterator.map(_.remaining.toLong).sum
    if (end > reservedSize) reservedSize = sidecar.call("reserve", "segment" -> segment, "size" -> end).asLong
    try position += SegmentFile.write(channel, buffers)
    catch { case error: IOException => throw Failure(s"the segment $segment cannot be written: $error") }
  }

  override def close(): Unit = channel.close()
}

object SegmentFile {
  /** Write all buffers at the position of `channel`, and return their size in bytes. */
  def write(channel: FileChannel, content: Seq[ByteBuffer]): Long = {
    val buffers = content.toArray
    val size = buffers.iterator.map(_.remaining.toLong).sum
    var written = 0L
    while (written < size) written += channel.write(buffers)
    size
  }
}

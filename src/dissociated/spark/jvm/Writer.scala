package org.apache.spark.sql.dissociated

import java.io.IOException
import java.nio.ByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.{Paths, StandardOpenOption}
import java.util.{Base64, UUID}

import scala.collection.mutable
import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import com.google.flatbuffers.FlatBufferBuilder
import org.apache.arrow.flatbuf.{Buffer, FieldNode, Message, MessageHeader, MetadataVersion, RecordBatch}
import org.apache.arrow.memory.util.MemoryUtil
import org.apache.spark.SparkRuntimeException
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{UnsafeProjection, UnsafeRow}
import org.apache.spark.sql.connector.write._
import org.apache.spark.sql.connector.write.streaming.{StreamingDataWriterFactory, StreamingWrite}
import org.apache.spark.sql.types.StructType

/** Takes whether Spark wants to replace what there is, or to add to it. */
class DatasetWriteBuilder(info: LogicalWriteInfo, inPython: => WriteBuilder) extends WriteBuilder with SupportsTruncate {
  private var mode = "append"

  override def truncate(): WriteBuilder = {
    mode = "overwrite"
    this
  }

  override def build(): Write = new DatasetWrite(info, mode,
    if (mode == "append") inPython else inPython.asInstanceOf[SupportsTruncate].truncate())
}

/** In Python where rows must be made to fit the dataset that they are added to. */
class DatasetWrite(info: LogicalWriteInfo, mode: String, inPython: => WriteBuilder) extends Write {
  override def description(): String = s"dissociated ${info.options.get("path")}"

  override def toBatch: BatchWrite =
    plan("write").map(new DatasetBatchWrite(_)).getOrElse(inPython.build().toBatch)

  override def toStreaming: StreamingWrite =
    plan("write_stream").map(new DatasetStreamingWrite(_, info.queryId.replace("-", "")))
      .getOrElse(inPython.build().toStreaming)

  private def plan(call: String): Option[WritePlan] = {
    val python = Python.ofDriver()
    val told = Sidecar.of(python).call(call,
      "options" -> info.options, "schema" -> info.schema.json, "mode" -> mode)
    def bytes(name: String) = Base64.getDecoder.decode(told.get(name).asText)
    if (!told.get("fits").asBoolean) None
    else Some(WritePlan(python, told.get("writer").asText, told.get("key").asText, info.schema, bytes("schema"),
      bytes("statistics_schema"), told.get("statistics").elements.asScala.map(_.asInt).toArray))
  }
}

/**
 * What the driver and every task know of a write: `writer` says it to the sidecar. The schemas are those of a segment
 * and of its statistics, as messages; `statistics` the numbers of the columns that have any.
 */
case class WritePlan(python: Python, writer: String, key: String, columns: StructType, schema: Array[Byte],
    statisticsSchema: Array[Byte], statistics: Array[Int])

/** What a task tells the driver of its partition: where its rows are, or that it has none. */
case class SegmentWritten(partition: Int, node: String, segment: String, rows: Long, nbytes: Long)
    extends WriterCommitMessage {
  def told: java.util.Map[String, Any] = Map[String, Any]("partition" -> partition, "node" -> node,
    "segment" -> segment, "rows" -> rows, "nbytes" -> nbytes).asJava
}

object SegmentWritten {
  def told(messages: Array[WriterCommitMessage]): java.util.List[java.util.Map[String, Any]] =
    messages.collect { case one: SegmentWritten => one.told }.toSeq.asJava
}

class DatasetBatchWrite(plan: WritePlan) extends BatchWrite {
  override def createBatchWriterFactory(info: PhysicalWriteInfo): DataWriterFactory = new SegmentWriterFactory(plan)

  override def commit(messages: Array[WriterCommitMessage]): Unit =
    Sidecar.of(plan.python).call("commit", "writer" -> plan.writer, "written" -> SegmentWritten.told(messages))

  override def abort(messages: Array[WriterCommitMessage]): Unit =
    Sidecar.of(plan.python).call("abort", "writer" -> plan.writer)
}

/** Each micro-batch is one commit, whose key is made of the query and the batch. */
class DatasetStreamingWrite(plan: WritePlan, query: String) extends StreamingWrite {
  override def createStreamingWriterFactory(info: PhysicalWriteInfo): StreamingDataWriterFactory =
    new StreamedSegmentWriterFactory(plan, query)

  override def commit(epoch: Long, messages: Array[WriterCommitMessage]): Unit =
    if (messages.nonEmpty) // else the batch had no partitions
      Sidecar.of(plan.python).call("commit_stream", "writer" -> plan.writer, "key" -> s"$query.$epoch",
        "written" -> SegmentWritten.told(messages))

  override def abort(epoch: Long, messages: Array[WriterCommitMessage]): Unit =
    Sidecar.of(plan.python).call("abort_stream", "writer" -> plan.writer, "key" -> s"$query.$epoch",
      "written" -> SegmentWritten.told(messages))
}

class SegmentWriterFactory(plan: WritePlan) extends DataWriterFactory {
  override def createWriter(partition: Int, task: Long): DataWriter[InternalRow] =
    new SegmentWriter(plan, partition, f"${plan.key}-$partition%06d-$task.arrows", None)
}

class StreamedSegmentWriterFactory(plan: WritePlan, query: String) extends StreamingDataWriterFactory {
  // An earlier run of a batch, by a driver that was killed, may have left segments of like-numbered tasks.
  private val run = UUID.randomUUID.toString.take(8)

  override def createWriter(partition: Int, task: Long, epoch: Long): DataWriter[InternalRow] = {
    val key = s"$query.$epoch"
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
  private val batch = new Batch(plan.columns.fields.map(field => Column.of(field.dataType)))
  private val statistics = new Statistics(plan)
  private var begun = false
  private var committed = false
  private var node: String = _
  private var file: SegmentFile = _
  private var rows = 0L
  private var pending = 0L // bytes that are not written yet, about
  private lazy val project = UnsafeProjection.create(plan.columns)

  override def write(row: InternalRow): Unit = {
    if (!begun) begin()
    if (file != null) {
      val unsafe = row match {
        case one: UnsafeRow => one
        case other => project(other)
      }
      val size = unsafe.getSizeInBytes
      if (batch.rows == SegmentWriter.MaxRows || pending + size > SegmentWriter.MaxBytes) flush()
      batch.put(unsafe)
      pending += size
    }
  }

  private def begin(): Unit = {
    committed = key.exists(key => sidecar.call("committed", "writer" -> plan.writer, "key" -> key).asBoolean)
    begun = true // from now on there may be something to discard
    if (!committed) {
      val place = sidecar.call("stage", "writer" -> plan.writer, "segment" -> segment)
      node = place.get("node").asText
      file = new SegmentFile(sidecar, segment, place)
      file.write(ByteBuffer.wrap(plan.schema))
    }
  }

  private def flush(): Unit = {
    if (batch.rows > 0) {
      batch.fill()
      statistics.add(batch)
      batch.writeTo(file)
      rows += batch.rows
      batch.clear()
    }
    pending = 0
  }

  override def commit(): WriterCommitMessage =
    if (file == null) SegmentWritten(partition, null, null, 0, 0)
    else {
      flush()
      file.write(SegmentFile.endOfStream)
      val nbytes = file.position
      val size = try {
        statistics.writeTo(file)
        file.position
      } catch { case _: SparkRuntimeException => nbytes } // there is no room: then without
      file.close()
      sidecar.call("finish", "segment" -> segment, "size" -> size)
      SegmentWritten(partition, node, segment, rows, nbytes)
    }

  override def abort(): Unit = {
    if (file != null) file.close()
    if (begun && !committed) sidecar.call("discard", "segment" -> segment)
  }

  override def close(): Unit = {
    if (file != null) file.close()
    batch.free()
    statistics.free()
  }
}

object SegmentWriter {
  private val MaxRows = 1 << 16
  private val MaxBytes = 1L << 25
}

/** Rows as columns. */
final class Batch(val columns: Array[Column]) extends Native {
  private val waiting = new RowBuffer(columns.length)
  var rows = 0

  def put(row: UnsafeRow): Unit = {
    if (waiting.isFull) fill()
    waiting.add(row)
    rows += 1
  }

  /** All rows that were put are in the columns. */
  def fill(): Unit = {
    for (index <- columns.indices) columns(index).take(waiting, index)
    waiting.clear()
  }

  def writeTo(file: SegmentFile): Unit = {
    val layout = new Layout
    columns.foreach(_.describe(layout))
    file.write(layout.message(rows, file.position): _*)
  }

  override def clear(): Unit = {
    rows = 0
    waiting.clear()
    columns.foreach(_.clear())
  }

  override def free(): Unit = {
    waiting.free()
    columns.foreach(_.free())
  }
}

/** What follows the end of a segment: of each of its batches, how many rows and nulls it has, and its bounds. */
final class Statistics(plan: WritePlan) extends Native {
  private val counts = new IntegerColumn(8)
  private val known = plan.statistics.map { number =>
    (number, new IntegerColumn(8), Column.of(plan.columns(number).dataType), Column.of(plan.columns(number).dataType))
  }
  private val all = new Batch(counts +: known.flatMap { case (_, nulls, least, most) => Seq(nulls, least, most) })

  def add(batch: Batch): Unit = {
    all.rows += 1
    counts.put(batch.rows)
    for ((number, nulls, least, most) <- known) {
      val column = batch.columns(number)
      nulls.put(column.nullCount)
      column.extremes() match {
        case Some((smallest, largest)) =>
          least.copy(column, smallest)
          most.copy(column, largest)
        case None =>
          least.putNull()
          most.putNull()
      }
    }
  }

  def writeTo(file: SegmentFile): Unit = {
    val start = file.position
    file.write(ByteBuffer.wrap(plan.statisticsSchema))
    all.writeTo(file)
    file.write(SegmentFile.endOfStream)
    val tail = SegmentFile.littleEndian(16).putLong(file.position - start).put(Statistics.Magic)
    file.write(tail.flip())
  }

  override def clear(): Unit = all.clear()
  override def free(): Unit = all.free()
}

object Statistics {
  private val Magic = "DISSTATS".getBytes
}

/** Where arrays lie that become a record batch. */
final class Layout {
  private val arrays = mutable.ArrayBuffer.empty[(Int, Int)]
  private val buffers = mutable.ArrayBuffer.empty[(Long, Long)]

  def array(length: Int, nulls: Int): Unit = arrays += ((length, nulls))
  def buffer(address: Long, size: Long): Unit = buffers += ((address, size))

  /** The message with its body. It is written at `position`, so that all buffers are aligned in the file. */
  def message(rows: Int, position: Long): Seq[ByteBuffer] = {
    val starts = buffers.scanLeft(0L) { case (start, (_, size)) => start + Layout.aligned(size) }
    val header = metadata(rows, starts)
    val padding = Layout.padding(position + 8 + header.remaining)
    val prefix = SegmentFile.littleEndian(8).putInt(-1).putInt(header.remaining + padding).flip()
    val body = buffers.flatMap { case (address, size) =>
      if (size == 0) Nil
      else Seq(MemoryUtil.directBuffer(address, size.toInt), Layout.zeros(Layout.padding(size)))
    }
    Seq(prefix, header, Layout.zeros(padding)) ++ body
  }

  private def metadata(rows: Int, starts: collection.Seq[Long]): ByteBuffer = {
    val builder = new FlatBufferBuilder(1 << 10)
    RecordBatch.startNodesVector(builder, arrays.length)
    for ((length, nulls) <- arrays.reverseIterator) FieldNode.createFieldNode(builder, length, nulls)
    val nodes = builder.endVector()
    RecordBatch.startBuffersVector(builder, buffers.length)
    for (index <- buffers.indices.reverse) Buffer.createBuffer(builder, starts(index), buffers(index)._2)
    val extents = builder.endVector()
    RecordBatch.startRecordBatch(builder)
    RecordBatch.addLength(builder, rows)
    RecordBatch.addNodes(builder, nodes)
    RecordBatch.addBuffers(builder, extents)
    val batch = RecordBatch.endRecordBatch(builder)
    Message.startMessage(builder)
    Message.addVersion(builder, MetadataVersion.V5)
    Message.addHeaderType(builder, MessageHeader.RecordBatch)
    Message.addHeader(builder, batch)
    Message.addBodyLength(builder, starts.last)
    builder.finish(Message.endMessage(builder))
    builder.dataBuffer()
  }
}

object Layout {
  private val Alignment = 64

  private def padding(size: Long): Int = (-size & (Alignment - 1)).toInt
  private def aligned(size: Long): Long = size + padding(size)
  private def zeros(size: Int) = ByteBuffer.allocate(size)
}

/** A file that the sidecar has made. It also makes room in it. */
final class SegmentFile(sidecar: Sidecar, segment: String, place: JsonNode) extends AutoCloseable {
  private val channel = FileChannel.open(Paths.get(place.get("path").asText), StandardOpenOption.WRITE)
  private var room = place.get("room").asLong
  var position = 0L

  def write(parts: ByteBuffer*): Unit = {
    val end = position + parts.iterator.map(_.remaining.toLong).sum
    if (end > room) room = sidecar.call("reserve", "segment" -> segment, "size" -> end).asLong
    val all = parts.toArray
    try while (position < end) position += channel.write(all)
    catch { case error: IOException => throw Failure(s"writing $segment: $error") }
  }

  override def close(): Unit = channel.close()
}

object SegmentFile {
  def littleEndian(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(java.nio.ByteOrder.LITTLE_ENDIAN)
  def endOfStream: ByteBuffer = littleEndian(8).putInt(-1).putInt(0).flip()
}

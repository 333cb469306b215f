package org.apache.spark.sql.dissociated

import java.nio.MappedByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.{Paths, StandardOpenOption}

import scala.collection.mutable
import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.arrow.memory.util.MemoryUtil
import org.apache.spark.TaskContext
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.read.{InputPartition, PartitionReader, PartitionReaderFactory}
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.vectorized.ColumnarBatch

/** Reads partitions in tasks; `reader` says to the sidecar what of. */
class DatasetReaderFactory(python: Python, reader: String, columns: StructType) extends PartitionReaderFactory {
  override def supportColumnarReads(partition: InputPartition): Boolean = true

  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    throw new UnsupportedOperationException("it is read by columns")

  override def createColumnarReader(partition: InputPartition): PartitionReader[ColumnarBatch] =
    new DatasetPartitionReader(Sidecar.of(python), reader, partition.asInstanceOf[DatasetPartition].what, columns)
}

/**
 * The batches of a partition, whose columns lie where the sidecar says. It opens them, and holds them until the task has
 * ended; so does this its mappings, since strings that point into them may be looked at until then.
 */
class DatasetPartitionReader(sidecar: Sidecar, reader: String, partition: String, columns: StructType)
    extends PartitionReader[ColumnarBatch] {
  private val stream = sidecar.call("open", "reader" -> reader, "partition" -> partition).asLong
  private val regions = new Regions
  private var batches: Iterator[JsonNode] = Iterator.empty
  private var ended = false
  private var released = false
  private var current: ColumnarBatch = _
  Option(TaskContext.get()).foreach(_.addTaskCompletionListener[Unit](_ => release()))

  override def next(): Boolean = {
    while (!batches.hasNext && !ended) {
      val answer = sidecar.await("next", "stream" -> stream)
      answer.get("regions").elements.asScala.foreach(path => regions.add(path.asText))
      batches = answer.get("batches").elements.asScala
      ended = answer.get("ended").asBoolean
    }
    batches.hasNext && {
      val found = batches.next()
      val rows = found.get("rows").asInt
      val arrays = found.get("columns")
      current = new ColumnarBatch(columns.fields.zipWithIndex.map { case (field, index) =>
        Vectors.of(field.dataType, new ArrayPlace(arrays.get(index), regions, field.name, 0, rows))
      }, rows)
      true
    }
  }

  override def get(): ColumnarBatch = current

  override def close(): Unit = if (TaskContext.get() == null) release()

  private def release(): Unit = if (!released) {
    released = true
    regions.close()
    if (sidecar.runs) sidecar.call("close", "stream" -> stream) // or it has given back everything
  }
}

/** Files that are shared with the sidecar, by number, mapped where they are looked at. */
final class Regions extends AutoCloseable {
  private val channels = mutable.ArrayBuffer.empty[FileChannel]
  private val windows = mutable.Map.empty[(Int, Long), MappedByteBuffer]
  private val replaced = mutable.ArrayBuffer.empty[MappedByteBuffer]

  def add(path: String): Unit = channels += FileChannel.open(Paths.get(path), StandardOpenOption.READ)

  /** The address of these bytes of a region. Java maps at most 2 GiB at once, and so `length` is at most 1 GiB. */
  def address(region: Int, at: Long, length: Long): Long = {
    if (region < 0 || region >= channels.length || at < 0 || length < 0 || length > Regions.Step)
      throw Failure(s"a buffer of $length bytes at $at of region $region cannot be mapped")
    val number = at / Regions.Step
    val start = number * Regions.Step
    def fits(window: MappedByteBuffer) = at - start + length <= window.capacity
    val window = windows.get((region, number)).filter(fits).getOrElse {
      val size = math.min(channels(region).size - start, 2 * Regions.Step - Regions.Page)
      if (at - start + length > size) throw Failure(s"a buffer of $length bytes at $at leaves its file")
      windows.remove((region, number)).foreach(replaced += _) // the file has grown; what lies there may still be read
      val made = channels(region).map(FileChannel.MapMode.READ_ONLY, start, size)
      windows((region, number)) = made
      made
    }
    MemoryUtil.getByteBufferAddress(window) + (at - start)
  }

  override def close(): Unit = {
    channels.foreach(_.close())
    (windows.values ++ replaced).foreach(Regions.unmap)
    windows.clear()
    replaced.clear()
  }
}

object Regions {
  private val Step = 1L << 30
  private val Page = 1L << 16 // of any processor

  private val unsafe = {
    val field = classOf[sun.misc.Unsafe].getDeclaredField("theUnsafe")
    field.setAccessible(true)
    field.get(null).asInstanceOf[sun.misc.Unsafe]
  }

  /** Nothing may look at it any more. Left to the garbage collector, it would count against the store for long. */
  private def unmap(window: MappedByteBuffer): Unit = unsafe.invokeCleaner(window)
}

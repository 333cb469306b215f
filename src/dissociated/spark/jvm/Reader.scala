package org.apache.spark.sql.dissociated

import java.nio.MappedByteBuffer
import java.nio.channels.FileChannel
import java.nio.file.{Paths, StandardOpenOption}
import java.util.concurrent.{Callable, ExecutionException}

import scala.collection.mutable
import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.arrow.memory.util.MemoryUtil
import org.apache.spark.TaskContext
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.connector.read.{InputPartition, PartitionReader, PartitionReaderFactory}
import org.apache.spark.sql.execution.BaseScriptTransformationWriterThread
import org.apache.spark.sql.types.StructType
import org.apache.spark.sql.vectorized.ColumnarBatch
import org.apache.spark.storage.StorageUtils
import org.apache.spark.util.{ThreadUtils, Utils}

/**
 * A factory of readers for the partitions of a scan. `reader` describes the scan to the sidecar. An RDD on the driver
 * refers to the factory, and so to `dataset`: see `Temporary`.
 */
class DatasetReaderFactory(@transient val dataset: Dataset, python: Python, reader: String, columns: StructType)
    extends PartitionReaderFactory {
  // A task may read many partitions, one after the other.
  @transient private var lastReader: DatasetPartitionReader = _

  override def supportColumnarReads(partition: InputPartition): Boolean = true

  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    throw new UnsupportedOperationException("a dataset is read by columns, not by rows")

  override def createColumnarReader(partition: InputPartition): PartitionReader[ColumnarBatch] =
    new DatasetPartitionReader(Sidecar.of(python), reader, partition.asInstanceOf[DatasetPartition].pickled, columns,
      releasePrevious)

  /** Release the previous reader of this task, and keep `reader`: Spark may still use its last batch. */
  private def releasePrevious(reader: DatasetPartitionReader): Unit = synchronized {
    if (lastReader != null && (lastReader.task eq reader.task) && (lastReader ne reader)) lastReader.release()
    lastReader = reader
  }
}

/** `count` rows of some arrays, from the row `from` on. */
case class Rows(columns: Seq[ArrayData], regions: RegionAddresses, from: Int, count: Int) {
  /** Return the rows as a batch of Spark. Throws if an array is damaged. */
  def batch(schema: StructType): ColumnarBatch =
    new ColumnarBatch(schema.fields.zip(columns).map { case (field, data) =>
      Vectors.of(field.dataType, field.nullable, new ArraySlice(data, regions, field.name, from, count))
    }, count)
}

/** The batches of a partition. A batch is valid until the next one is requested. */
trait Batches extends AutoCloseable {
  /** Return the next batch, or None at the end. */
  def next(): Option[Rows]

  def iterator: Iterator[Rows] = Iterator.continually(next()).takeWhile(_.isDefined).flatten
}

/**
 * A reader of one partition: directly from the server if this JVM can do so, and otherwise from memory that it shares
 * with the sidecar.
 */
class DatasetPartitionReader(sidecar: Sidecar, reader: String, partition: String, columns: StructType,
    onEnd: DatasetPartitionReader => Unit) extends PartitionReader[ColumnarBatch] {
  private var batches: Batches = _
  private var current: ColumnarBatch = _
  private[dissociated] val task = TaskContext.get()
  // The thread that called `next` last.
  @volatile private var consumer: Thread = _
  Option(task).foreach(_.addTaskCompletionListener[Unit](_ => Feeders.whenEnded(task, consumer)(release())))
  batches = open(direct = true)

  private def open(direct: Boolean): Batches = {
    val answer = sidecar.call("open", "reader" -> reader, "partition" -> partition, "direct" -> direct)
    if (!answer.has("server")) SharedBatches.of(sidecar, answer.get("stream").asLong)
    else ServerBatches.open(sidecar, reader, answer.get("server")).getOrElse(open(direct = false))
  }

  override def next(): Boolean = {
    consumer = Thread.currentThread
    val rows = Option(batches).flatMap(_.next())
    rows.foreach(some => current = some.batch(columns))
    if (rows.isEmpty) onEnd(this)
    rows.isDefined
  }

  override def get(): ColumnarBatch = current

  override def close(): Unit = if (task == null) release()

  /**
   * Release the memory, when the task or its next partition has ended. Until then, Spark may use strings of the last
   * batch.
   */
  private[dissociated] def release(): Unit = if (batches != null) {
    batches.close()
    batches = null
  }
}

/** Threads that feed the rows of a task to other programs. The task does not wait for them, and may end first. */
object Feeders {
  /**
   * Call `release` as soon as no such thread of `task` reads its rows. `consumer` is the thread that requested rows
   * last. Scripts of TRANSFORM are terminated here, since Spark does not do so. No thread is interrupted, because an
   * executor exits if the interrupt reaches it as an uncaught error.
   */
  def whenEnded(task: TaskContext, consumer: Thread)(release: => Unit): Unit = {
    val threads = new Array[Thread](2 * Thread.activeCount + 64)
    Thread.enumerate(threads)
    val feeders = threads.toSeq.collect {
      case script: BaseScriptTransformationWriterThread if script.taskContext eq task =>
        script.proc.destroy() // breaks its pipe
        script
      // The thread that RDD.pipe starts has no class of its own.
      case writer if writer != null && (writer eq consumer) && writer.getName.startsWith("stdin writer for ") => writer
    }
    if (feeders.isEmpty) release
    else {
      val waiter = new Thread(() => Utils.tryLogNonFatalError { feeders.foreach(_.join()); release })
      waiter.setDaemon(true)
      waiter.start()
    }
  }
}

/**
 * Batches in files that a Python process shares and holds. `requestNext` requests more of them from it, and `onClose`
 * tells it that they are released.
 */
final class SharedBatches(requestNext: () => JsonNode, onClose: () => Unit) extends Batches {
  private val regions = new Regions
  private var batches: Iterator[JsonNode] = Iterator.empty
  private var hasEnded = false

  override def next(): Option[Rows] = {
    while (!batches.hasNext && !hasEnded) {
      val answer = requestNext()
      answer.get("regions").elements.asScala.foreach(path => regions.add(path.asText))
      batches = answer.get("batches").elements.asScala
      hasEnded = answer.get("ended").asBoolean
    }
    batches.nextOption().map { batch =>
      Rows(batch.get("columns").elements.asScala.map(ArrayData.fromJson).toSeq, regions, 0, batch.get("rows").asInt)
    }
  }

  override def close(): Unit = {
    regions.close()
    // If the sidecar has ended, this throws: the memory of the last batches may have been reused before they were
    // read.
    onClose()
  }
}

object SharedBatches {
  /** Return the batches of a stream of the sidecar. */
  def of(sidecar: Sidecar, stream: Long): SharedBatches = new SharedBatches(
    () => sidecar.await("next", "stream" -> stream), () => sidecar.call("close", "stream" -> stream))
}

/**
 * Files that are shared with the sidecar, by number. Windows of them are mapped when they are first used, until
 * `close`.
 */
final class Regions extends RegionAddresses with AutoCloseable {
  private val channels = mutable.ArrayBuffer.empty[FileChannel]
  private val mapped = mutable.ArrayBuffer.empty[MappedByteBuffer]
  // The latest mapping of each window.
  private val windows = mutable.Map.empty[(Int, Long), MappedByteBuffer]

  def add(path: String): Unit = channels += FileChannel.open(Paths.get(path), StandardOpenOption.READ)

  /**
   * Return the address of a buffer of at most 1 GiB, because Java maps at most 2 GiB at once. Throws if the file does
   * not contain it.
   */
  override def address(region: Int, position: Long, length: Long): Long = {
    if (region < 0 || region >= channels.length || position < 0 || length < 0 || length > Regions.WindowStep)
      throw Failure(s"a buffer of $length bytes at $position of region $region cannot be mapped")
    val (step, offset) = (position / Regions.WindowStep, position % Regions.WindowStep)
    // If the file has grown, it is mapped again. The old mapping stays, since its buffers may still be in use.
    val window = windows.get((region, step)).filter(offset + length <= _.capacity)
      .getOrElse(map(region, step, offset + length))
    MemoryUtil.getByteBufferAddress(window) + offset
  }

  private def map(region: Int, step: Long, end: Long): MappedByteBuffer = {
    val start = step * Regions.WindowStep
    mapped += Regions.uninterrupted { () =>
      val size = math.min(channels(region).size - start, 2 * Regions.WindowStep - Regions.MaxPageSize)
      if (end > size) throw Failure(s"a buffer ends at ${start + end}, beyond its file")
      channels(region).map(FileChannel.MapMode.READ_ONLY, start, size)
    }
    windows((region, step)) = mapped.last
    mapped.last
  }

  override def close(): Unit = {
    channels.foreach(_.close())
    // The mappings are unmapped now: until the garbage collector did so, they would count against the store.
    mapped.foreach(StorageUtils.dispose)
    mapped.clear()
  }
}

object Regions {
  private val WindowStep = 1L << 30
  // The largest page size of any processor, in bytes.
  private val MaxPageSize = 1L << 16

  /** A thread that is never interrupted. */
  private lazy val mapper = ThreadUtils.newDaemonSingleThreadExecutor("dissociated map")

  /**
   * Return the mapping that `call` makes in another thread. If the calling thread is interrupted, it stays
   * interrupted.
   *
   * Spark interrupts the threads of tasks that it cancels. In such a thread, FileChannel.map may throw after it has
   * mapped, and the mapping would stay until this JVM exits.
   */
  private def uninterrupted(call: Callable[MappedByteBuffer]): MappedByteBuffer = {
    val mapping = mapper.submit(call)
    var wasInterrupted = false
    var result: Option[MappedByteBuffer] = None
    try while (result.isEmpty) {
      try result = Some(mapping.get())
      catch {
        case _: InterruptedException => wasInterrupted = true
        case failure: ExecutionException => throw failure.getCause
      }
    } finally if (wasInterrupted) Thread.currentThread.interrupt()
    result.get
  }
}

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

/** Reads partitions in tasks; `reader` says to the sidecar what of. */
class DatasetReaderFactory(python: Python, reader: String, columns: StructType) extends PartitionReaderFactory {
  @transient private var last: DatasetPartitionReader = _ // the last in this task, which may read many partitions

  override def supportColumnarReads(partition: InputPartition): Boolean = true

  override def createReader(partition: InputPartition): PartitionReader[InternalRow] =
    throw new UnsupportedOperationException("it is read by columns")

  override def createColumnarReader(partition: InputPartition): PartitionReader[ColumnarBatch] =
    new DatasetPartitionReader(Sidecar.of(python), reader, partition.asInstanceOf[DatasetPartition].pickled, columns, end)

  /** What the last batch of a partition holds stays until the end of the next one. */
  private def end(reader: DatasetPartitionReader): Unit = synchronized {
    if (last != null && (last.task eq reader.task) && (last ne reader)) last.release()
    last = reader
  }
}

/** Some rows of arrays, from one on. */
case class Rows(columns: Seq[ArrayData], places: Places, from: Int, count: Int) {
  /** The same for Spark. */
  def batch(schema: StructType): ColumnarBatch =
    new ColumnarBatch(schema.fields.zip(columns).map { case (field, data) =>
      Vectors.of(field.dataType, field.nullable, new ArrayPlace(data, places, field.name, from, count))
    }, count)
}

/** The batches of a partition. What they hold may be looked at until the next one is asked for. */
trait Batches extends AutoCloseable {
  def next(): Option[Rows]

  def all: Iterator[Rows] = Iterator.continually(next()).takeWhile(_.isDefined).flatten
}

/** Reads from where the sidecar says: the server, where this JVM can ask it, or memory that both share. */
class DatasetPartitionReader(sidecar: Sidecar, reader: String, partition: String, columns: StructType,
    end: DatasetPartitionReader => Unit) extends PartitionReader[ColumnarBatch] {
  private var batches: Batches = _
  private var current: ColumnarBatch = _
  private[dissociated] val task = TaskContext.get()
  @volatile private var consumer: Thread = _ // the thread that asked last
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
    if (rows.isEmpty) end(this)
    rows.isDefined
  }

  override def get(): ColumnarBatch = current

  override def close(): Unit = if (task == null) release()

  /** When the task has ended, or the next of its partitions: strings of the last batch may be looked at until then. */
  private[dissociated] def release(): Unit = if (batches != null) {
    batches.close()
    batches = null
  }
}

/** Threads that feed the rows of a task to other programs. The task may end before them, and does not wait. */
object Feeders {
  /**
   * Calls `release` when none of this task reads any more; `consumer` has asked for rows last. Scripts of TRANSFORM are
   * ended, which Spark does not do. Nobody is interrupted: an executor ends where that leaves a thread as an error.
   */
  def whenEnded(task: TaskContext, consumer: Thread)(release: => Unit): Unit = {
    val threads = new Array[Thread](2 * Thread.activeCount + 64)
    Thread.enumerate(threads)
    val feeders = threads.toSeq.collect {
      case script: BaseScriptTransformationWriterThread if script.taskContext eq task =>
        script.proc.destroy() // and so its pipe breaks
        script
      case pipe if pipe != null && (pipe eq consumer) && pipe.getName.startsWith("stdin writer for ") => pipe // RDD.pipe
    }
    if (feeders.isEmpty) release
    else {
      val waiting = new Thread(() => Utils.tryLogNonFatalError { feeders.foreach(_.join()); release })
      waiting.setDaemon(true)
      waiting.start()
    }
  }
}

/** Batches in files that are shared with a process of Python, which holds them: `ask` asks it for the next. */
final class SharedBatches(ask: () => JsonNode, end: () => Unit) extends Batches {
  private val regions = new Regions
  private var batches: Iterator[JsonNode] = Iterator.empty
  private var hasEnded = false

  override def next(): Option[Rows] = {
    while (!batches.hasNext && !hasEnded) {
      val answer = ask()
      answer.get("regions").elements.asScala.foreach(path => regions.add(path.asText))
      batches = answer.get("batches").elements.asScala
      hasEnded = answer.get("ended").asBoolean
    }
    batches.nextOption().map { batch =>
      Rows(batch.get("columns").elements.asScala.map(ArrayData.of).toSeq, regions, 0, batch.get("rows").asInt)
    }
  }

  override def close(): Unit = {
    regions.close()
    end() // if that process has ended, what was read last may have been used again before
  }
}

object SharedBatches {
  /** A stream of the sidecar. */
  def of(sidecar: Sidecar, stream: Long): SharedBatches = new SharedBatches(
    () => sidecar.await("next", "stream" -> stream), () => sidecar.call("close", "stream" -> stream))
}

/** Files that are shared with the sidecar, by number, mapped where they are looked at. */
final class Regions extends Places with AutoCloseable {
  private val channels = mutable.ArrayBuffer.empty[FileChannel]
  private val mapped = mutable.ArrayBuffer.empty[MappedByteBuffer]
  private val windows = mutable.Map.empty[(Int, Long), MappedByteBuffer] // the last of each

  def add(path: String): Unit = channels += FileChannel.open(Paths.get(path), StandardOpenOption.READ)

  /** Java maps at most 2 GiB at once, and so `length` is at most 1 GiB. */
  override def address(region: Int, at: Long, length: Long): Long = {
    if (region < 0 || region >= channels.length || at < 0 || length < 0 || length > Regions.Step)
      throw Failure(s"a buffer of $length bytes at $at of region $region cannot be mapped")
    val (number, from) = (at / Regions.Step, at % Regions.Step)
    // The file may have grown. What lies there may still be read, so that mapping stays.
    val window = windows.get((region, number)).filter(from + length <= _.capacity)
      .getOrElse(map(region, number, from + length))
    MemoryUtil.getByteBufferAddress(window) + from
  }

  private def map(region: Int, number: Long, needed: Long): MappedByteBuffer = {
    val start = number * Regions.Step
    mapped += Regions.uninterrupted { () =>
      val size = math.min(channels(region).size - start, 2 * Regions.Step - Regions.Page)
      if (needed > size) throw Failure(s"a buffer that ends at ${start + needed} leaves its file")
      channels(region).map(FileChannel.MapMode.READ_ONLY, start, size)
    }
    windows((region, number)) = mapped.last
    mapped.last
  }

  override def close(): Unit = {
    channels.foreach(_.close())
    // Nothing may look at them any more. Left to the garbage collector, they would count against the store for long.
    mapped.foreach(StorageUtils.dispose)
    mapped.clear()
  }
}

object Regions {
  private val Step = 1L << 30
  private val Page = 1L << 16 // of any processor

  /** A thread that nobody interrupts. */
  private lazy val mapper = ThreadUtils.newDaemonSingleThreadExecutor("dissociated map")

  /** Returns what `call` maps in another thread. If the calling thread is interrupted, it stays interrupted.
   *
   *  Spark interrupts the threads of tasks that it cancels. In such a thread, FileChannel.map may throw after it has
   *  mapped, and then nothing can give the mapping back while this Java runs.
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

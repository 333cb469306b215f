package org.apache.spark.sql.dissociated

import java.io.{BufferedReader, IOException, InputStreamReader}
import java.net.{StandardProtocolFamily, UnixDomainSocketAddress}
import java.nio.ByteBuffer
import java.nio.channels.{Channels, FileChannel, ServerSocketChannel, SocketChannel}
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, Path, Paths, StandardOpenOption}
import java.util.concurrent.{CompletableFuture, ExecutionException}

import scala.reflect.ClassTag
import scala.util.Using

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.{Partition, SparkContext, TaskContext}
import org.apache.spark.api.python.SimplePythonFunction
import org.apache.spark.rdd.{RDD, ZippedPartitionsBaseRDD, ZippedPartitionsPartition}
import org.apache.spark.sql.{SparkSessionExtensions, SparkSessionExtensionsProvider}
import org.apache.spark.sql.catalyst.InternalRow
import org.apache.spark.sql.catalyst.expressions.{Attribute, AttributeReference, AttributeSet, Expression, PythonUDF}
import org.apache.spark.sql.catalyst.plans.physical.Partitioning
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.execution._
import org.apache.spark.sql.execution.datasources.v2.BatchScanExec
import org.apache.spark.sql.execution.metric.{SQLMetric, SQLMetrics}
import org.apache.spark.sql.execution.python.MapInArrowExec
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.{StringType, StructType}
import org.apache.spark.sql.vectorized.ColumnarBatch
import org.apache.spark.unsafe.types.UTF8String

/** The rules of this jar, for which Spark asks when a session starts. */
class Extensions extends SparkSessionExtensionsProvider {
  override def apply(extensions: SparkSessionExtensions): Unit =
    if (Source.fits) {
      extensions.injectColumnar(_ => FunctionRule)
      extensions.injectHintResolutionRule(new UsingRule(_))
      extensions.injectCheckRule(_ => ChangeCheck)
      extensions.injectOptimizerRule(_ => ConstantCounts)
    }
}

/** A rule that runs functions of `dissociated.spark.map_in_arrow` in shared memory, instead of Spark's socket. */
object FunctionRule extends ColumnarRule {
  // The name that `dissociated.spark.functions` gives to the function.
  private val functionName = "dissociated_map_in_arrow"

  override def preColumnarTransitions: Rule[SparkPlan] = _.transformUp {
    case map: MapInArrowExec if !map.isBarrier && map.profile.isEmpty && isDissociated(map.func) &&
        Column.supports(map.child.schema) && Column.supports(map.schema) && !SQLConf.get.arrowUseLargeVarTypes =>
      MapInMemoryExec(withDriversPython(map.func), map.output, map.child)
  }

  /** Remove the conversion of rows to columns below the operator, which accepts rows. */
  override def postColumnarTransitions: Rule[SparkPlan] = _.transformUp {
    case map @ MapInMemoryExec(_, _, RowToColumnarExec(rows)) => map.copy(child = rows)
  }

  private def isDissociated(function: Expression): Boolean = function match {
    case udf: PythonUDF => udf.name == functionName && Source.enabled
    case _ => false
  }

  /**
   * Replace the `python3` of PATH, which Spark chooses if no setting names a Python, by the driver's Python, which
   * has dissociated.
   */
  private def withDriversPython(function: Expression): Expression = function match {
    case udf @ PythonUDF(_, simple: SimplePythonFunction, _, _, _, _, _) =>
      udf.copy(func = simple.copy(pythonExec = Python.ofDriver().executable))
    case _ => function
  }
}

/**
 * An operator that runs a Python function for each partition. Its batches lie in memory that this JVM and the Python
 * worker share.
 */
case class MapInMemoryExec(func: Expression, output: Seq[Attribute], child: SparkPlan) extends UnaryExecNode {
  override def producedAttributes: AttributeSet = AttributeSet(output)
  override def outputPartitioning: Partitioning = child.outputPartitioning
  override def supportsColumnar: Boolean = true
  override lazy val metrics: Map[String, SQLMetric] =
    Map("numOutputRows" -> SQLMetrics.createMetric(sparkContext, "number of output rows"))

  override protected def doExecute(): RDD[InternalRow] =
    throw new UnsupportedOperationException("the operator returns columns, not rows")

  override protected def doExecuteColumnar(): RDD[ColumnarBatch] = {
    val isLimited = conf.contains(SQLConf.ARROW_EXECUTION_MAX_RECORDS_PER_BATCH.key) && conf.arrowMaxRecordsPerBatch > 0
    val maxRows = if (isLimited) conf.arrowMaxRecordsPerBatch else BatchBuilder.MaxRows
    session.withActive {
      val input = FunctionInput.of(child)
      val columns = Seq(AttributeReference("dissociated.conversation", StringType, nullable = false)())
      val python = MapInArrowExec(func, output, ConversationExec(columns, input.getNumPartitions),
        isBarrier = false, None)
      new FunctionRDD(input, python.execute(), child.schema, schema, maxRows, longMetric("numOutputRows"))
    }
  }

  override protected def withNewChildInternal(newChild: SparkPlan): MapInMemoryExec = copy(child = newChild)
}

/** The input of a function: rows, columns, or partitions of a dataset, which the Python worker reads by itself. */
object FunctionInput {
  def of(plan: SparkPlan): RDD[Any] = (plan match {
    case scan: BatchScanExec if scan.runtimeFilters.isEmpty && scan.scan.isInstanceOf[DatasetScan] =>
      val input = scan.scan.asInstanceOf[DatasetScan]
      new ItemsRDD(plan.session.sparkContext, scan.inputPartitions.collect {
        case DatasetPartition(partition, hosts) => (DatasetInput(input.reader, partition), hosts.toSeq)
      }, Some(input.dataset))
    case _ if plan.supportsColumnar => plan.executeColumnar()
    case _ => CachedBatches.of(plan).getOrElse(plan.execute())
  }).asInstanceOf[RDD[Any]]
}

/** A partition of a dataset that the Python worker reads. */
case class DatasetInput(reader: String, partition: String)

case class Item(index: Int, value: Any, hosts: Seq[String]) extends Partition

/**
 * An RDD with one item in each partition, and the preferred hosts of the item. On the driver it refers to the dataset
 * of the items: see `Temporary`.
 */
class ItemsRDD[T: ClassTag](context: SparkContext, items: Seq[(T, Seq[String])],
    @transient val dataset: Option[Dataset] = None) extends RDD[T](context, Nil) {
  override protected def getPartitions: Array[Partition] =
    items.zipWithIndex.map { case ((value, hosts), index) => Item(index, value, hosts) }.toArray

  override protected def getPreferredLocations(split: Partition): Seq[String] = split.asInstanceOf[Item].hosts

  override def compute(split: Partition, task: TaskContext): Iterator[T] =
    Iterator.single(split.asInstanceOf[Item].value.asInstanceOf[T])
}

/**
 * A plan with one row for each partition, which tells the Python worker how to reach the conversation that this
 * thread begins.
 */
case class ConversationExec(output: Seq[Attribute], partitions: Int) extends LeafExecNode {
  override protected def doExecute(): RDD[InternalRow] =
    new ItemsRDD(session.sparkContext, Seq.fill(partitions)((0, Nil))).mapPartitions(_ =>
      Iterator.single(InternalRow(UTF8String.fromString(Conversation.startMessage.get))))
}

/**
 * The batches that a Python function returns for `inputs`. `python` is the RDD in which Spark runs the function; it
 * returns no rows.
 */
class FunctionRDD(inputs: RDD[Any], python: RDD[InternalRow], inputSchema: StructType, resultSchema: StructType,
    maxRows: Int, count: SQLMetric)
    extends ZippedPartitionsBaseRDD[ColumnarBatch](inputs.sparkContext, Seq(inputs, python)) {
  // A task may have many partitions, one after the other.
  @transient private var lastBatches: FunctionBatches = _

  override def compute(split: Partition, task: TaskContext): Iterator[ColumnarBatch] = {
    val Seq(inputPartition, pythonPartition) = split.asInstanceOf[ZippedPartitionsPartition].partitions
    val input = rdds.head.asInstanceOf[RDD[Any]].iterator(inputPartition, task)
    val batches = new FunctionBatches(input, dataset(inputPartition), inputSchema, maxRows, task,
      rdds.last.iterator(pythonPartition, task))
    (batches.iterator ++ { releasePrevious(batches); Nil }).map { rows =>
      count += rows.count
      rows.batch(resultSchema)
    }
  }

  private def dataset(input: Partition): Map[String, Any] = input match {
    case Item(_, DatasetInput(reader, partition), _) => Map("reader" -> reader, "partition" -> partition)
    case _ => Map.empty
  }

  /** Close the previous batches of this task, and keep `batches`: Spark may still use the last one. */
  private def releasePrevious(batches: FunctionBatches): Unit = synchronized {
    if (lastBatches != null && (lastBatches.task eq batches.task) && (lastBatches ne batches)) lastBatches.close()
    lastBatches = batches
  }
}

/**
 * The batches that a function returns for `input`. The function runs only while a batch is requested, so that the
 * last batch does not change before. A thread of its own runs `python`, which ends when the function does.
 */
final class FunctionBatches(input: Iterator[Any], dataset: Map[String, Any], inputSchema: StructType, maxRows: Int,
    val task: TaskContext, python: => Iterator[Any]) extends Batches {
  private val conversation = new Conversation(dataset + ("max_rows" -> maxRows))
  private val writer = new InputWriter(input, inputSchema, maxRows)
  private val shared = new SharedBatches(() => requestNext(), () => ())
  private val outcome = new CompletableFuture[Unit]
  // The thread that called `next` last.
  @volatile private var consumer: Thread = _

  private val runner = {
    val results = try conversation.begin(python) catch {
      case error: Throwable =>
        conversation.close()
        throw error
    }
    new Thread(() => {
      TaskContext.setTaskContext(task)
      try {
        if (results.hasNext)
          throw Failure("a Python function returned rows through Spark's socket, and not in shared memory")
        outcome.complete(())
      } catch {
        case error: Throwable =>
          outcome.completeExceptionally(error)
          conversation.close()
      }
    }, s"dissociated-function-${task.taskAttemptId}")
  }
  // Spark calls the last listener first, so the function ends before Spark closes its worker.
  task.addTaskCompletionListener[Unit](_ => Feeders.whenEnded(task, consumer)(close()))
  runner.setDaemon(true)
  runner.start()

  override def next(): Option[Rows] = {
    consumer = Thread.currentThread
    shared.next()
  }

  /** Return the next answer of the worker that is not a request for input, which this writes. */
  private def requestNext(): JsonNode = {
    conversation.send("next" -> true)
    var answer = receive()
    while (answer.has("write")) {
      val path = answer.get("write").asText
      conversation.send("size" -> writer.writeNext(conversation.open(path)))
      answer = receive()
    }
    if (answer.get("ended").asBoolean) awaitFunction()
    answer
  }

  /** Return an answer of the worker. Throws if it has exited. */
  private def receive(): JsonNode = conversation.receive().getOrElse {
    awaitFunction()
    throw Failure("the Python worker exited before its function ended")
  }

  /** Wait until the function has ended, and throw Spark's exception if it failed. */
  private def awaitFunction(): Unit = try outcome.get() catch {
    case error: ExecutionException => throw error.getCause
  }

  override def close(): Unit = {
    conversation.close()
    shared.close()
    writer.free()
  }
}

/** A writer of rows or columns as record batches in files of the Python worker. */
final class InputWriter(input: Iterator[Any], schema: StructType, maxRows: Int) {
  private val batches = new BatchStream(input, schema, maxRows)

  /** Write the next batch to the file that `open` returns. Returns its size in bytes, which is 0 if there is none. */
  def writeNext(open: => FileChannel): Long = {
    var size = 0L
    batches.writeNext { (rows, layout) =>
      try size = Using.resource(open)(SegmentFile.write(_, layout.encodeMessage(rows, 0)))
      catch {
        case error: IOException =>
          throw Failure(s"a batch for a Python function cannot be written to shared memory: $error")
      }
    }
    size
  }

  def free(): Unit = batches.free()
}

/**
 * An exchange of JSON lines between this task and the Python worker that runs its function, over a socket to which
 * only this user can connect. The path of the socket is deleted as soon as the worker has connected.
 */
final class Conversation(start: Map[String, Any]) extends AutoCloseable {
  private val directory = Files.createTempDirectory(Conversation.parent, "dissociated")
  private val path = directory.resolve("socket")
  private val server = ServerSocketChannel.open(StandardProtocolFamily.UNIX)
  private var isClosed = false
  private var channel: SocketChannel = _
  private var reader: BufferedReader = _

  try server.bind(UnixDomainSocketAddress.of(path))
  catch {
    case error: IOException =>
      close()
      throw Failure(s"the socket for a Python function cannot be created: $error")
  }

  /** Call `python`, which creates the row for the worker in this thread, with the start message set. */
  def begin[T](python: => T): T = {
    Conversation.startMessage.set(Sidecar.json.writeValueAsString(start + ("socket" -> path.toString)))
    try python finally Conversation.startMessage.remove()
  }

  /** Send a message. If the worker has exited, this does nothing, and the next `receive` returns None. */
  def send(message: (String, Any)*): Unit = try {
    connect()
    val line = ByteBuffer.wrap((Sidecar.json.writeValueAsString(message.toMap) + "\n").getBytes(UTF_8))
    while (line.hasRemaining) channel.write(line)
  } catch { case _: IOException => }

  /** Return the next message, or None if the worker has exited or the conversation is closed. */
  def receive(): Option[JsonNode] =
    try Option(reader).flatMap(lines => Option(lines.readLine())).map(Sidecar.json.readTree)
    catch { case _: IOException => None }

  /**
   * Open a file of the worker for writing. The worker keeps it open until it has received an answer or the end of the
   * conversation. After that the path may lead to a file of another task.
   */
  def open(path: String): FileChannel = synchronized {
    if (isClosed) throw Failure("a Python function needs no more batches: its task has ended")
    FileChannel.open(Paths.get(path), StandardOpenOption.WRITE)
  }

  private def connect(): Unit = if (channel == null) {
    val accepted = server.accept()
    synchronized {
      channel = accepted
      if (isClosed) channel.close()
    }
    deletePath()
    reader = new BufferedReader(new InputStreamReader(Channels.newInputStream(channel), UTF_8))
  }

  private def deletePath(): Unit = {
    server.close()
    Files.deleteIfExists(path)
    Files.deleteIfExists(directory)
  }

  override def close(): Unit = {
    synchronized {
      isClosed = true
      if (channel != null) channel.close()
    }
    deletePath()
  }
}

object Conversation {
  // A socket's path has at most 107 bytes; the names of its directory and file take the rest.
  private val MaxPath = 60

  /** The message that tells the worker how to reach its task. It is set while the partition starts in this thread. */
  val startMessage = new ThreadLocal[String]

  /** Return the directory for sockets. */
  private def parent: Path =
    Some(System.getProperty("java.io.tmpdir")).filter(_.length <= MaxPath).map(Paths.get(_)).getOrElse(Paths.get("/tmp"))
}

package org.apache.spark.sql.dissociated

import java.io.{BufferedReader, IOException, InputStreamReader}
import java.net.{StandardProtocolFamily, UnixDomainSocketAddress}
import java.nio.ByteBuffer
import java.nio.channels.{Channels, FileChannel, ServerSocketChannel, SocketChannel}
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, Path, Paths, StandardOpenOption}
import java.util.concurrent.{CompletableFuture, ExecutionException}

import scala.reflect.ClassTag

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

/** Spark finds this in the jar, and asks it for rules when a session starts. */
class Extensions extends SparkSessionExtensionsProvider {
  override def apply(extensions: SparkSessionExtensions): Unit =
    if (Source.fits) {
      extensions.injectColumnar(_ => FunctionRule)
      extensions.injectHintResolutionRule(new UsingRule(_))
    }
}

/** `mapInArrow` by a function of dissociated.spark.map_in_arrow runs in shared memory. */
object FunctionRule extends ColumnarRule {
  private val name = "dissociated_map_in_arrow" // of the function, in Python

  override def preColumnarTransitions: Rule[SparkPlan] = _.transformUp {
    case map: MapInArrowExec if !map.isBarrier && map.profile.isEmpty && isOurs(map.func) &&
        Column.supports(map.child.schema) && Column.supports(map.schema) && !SQLConf.get.arrowUseLargeVarTypes =>
      MapInMemoryExec(inPythonOfDriver(map.func), map.output, map.child)
  }

  /** Spark makes columns of rows for whatever gives columns. The operator takes rows as well. */
  override def postColumnarTransitions: Rule[SparkPlan] = _.transformUp {
    case map @ MapInMemoryExec(_, _, RowToColumnarExec(rows)) => map.copy(child = rows)
  }

  private def isOurs(function: Expression): Boolean = function match {
    case udf: PythonUDF => udf.name == name && Source.enabled
    case _ => false
  }

  /** Spark itself takes the `python3` of PATH if nothing names a Python, which may have no dissociated. */
  private def inPythonOfDriver(function: Expression): Expression = function match {
    case udf @ PythonUDF(_, simple: SimplePythonFunction, _, _, _, _, _) =>
      udf.copy(func = simple.copy(pythonExec = Python.ofDriver().executable))
    case _ => function
  }
}

/** Runs a function of Python for each partition, whose batches lie in memory that this JVM and Python's worker share. */
case class MapInMemoryExec(func: Expression, output: Seq[Attribute], child: SparkPlan) extends UnaryExecNode {
  override def producedAttributes: AttributeSet = AttributeSet(output)
  override def outputPartitioning: Partitioning = child.outputPartitioning
  override def supportsColumnar: Boolean = true
  override lazy val metrics: Map[String, SQLMetric] =
    Map("numOutputRows" -> SQLMetrics.createMetric(sparkContext, "number of output rows"))

  override protected def doExecute(): RDD[InternalRow] =
    throw new UnsupportedOperationException("it gives columns")

  override protected def doExecuteColumnar(): RDD[ColumnarBatch] = {
    val limited = conf.contains(SQLConf.ARROW_EXECUTION_MAX_RECORDS_PER_BATCH.key) && conf.arrowMaxRecordsPerBatch > 0
    val maxRows = if (limited) conf.arrowMaxRecordsPerBatch else BatchBuilder.MaxRows
    session.withActive {
      val input = FunctionInput.of(child)
      val columns = Seq(AttributeReference("dissociated.conversation", StringType, nullable = false)())
      val python = MapInArrowExec(func, output, ConversationExec(columns, input.getNumPartitions), isBarrier = false, None)
      new FunctionRDD(input, python.execute(), child.schema, schema, maxRows, longMetric("numOutputRows"))
    }
  }

  override protected def withNewChildInternal(newChild: SparkPlan): MapInMemoryExec = copy(child = newChild)
}

/** What a function reads: rows, columns, or partitions of a dataset, which Python's worker reads by itself. */
object FunctionInput {
  def of(plan: SparkPlan): RDD[Any] = (plan match {
    case scan: BatchScanExec if scan.runtimeFilters.isEmpty && scan.scan.isInstanceOf[DatasetScan] =>
      val reader = scan.scan.asInstanceOf[DatasetScan].reader
      new ItemsRDD(plan.session.sparkContext, scan.inputPartitions.collect {
        case DatasetPartition(partition, hosts) => (DatasetInput(reader, partition), hosts.toSeq)
      })
    case _ if plan.supportsColumnar => plan.executeColumnar()
    case _ => plan.execute()
  }).asInstanceOf[RDD[Any]]
}

case class DatasetInput(reader: String, partition: String)

case class Item(index: Int, value: Any, hosts: Seq[String]) extends Partition

/** One item for each partition, with the hosts that are best for it. */
class ItemsRDD[T: ClassTag](context: SparkContext, items: Seq[(T, Seq[String])]) extends RDD[T](context, Nil) {
  override protected def getPartitions: Array[Partition] =
    items.zipWithIndex.map { case ((value, hosts), index) => Item(index, value, hosts) }.toArray

  override protected def getPreferredLocations(split: Partition): Seq[String] = split.asInstanceOf[Item].hosts

  override def compute(split: Partition, task: TaskContext): Iterator[T] =
    Iterator.single(split.asInstanceOf[Item].value.asInstanceOf[T])
}

/** A row for each partition: it tells Python's worker of the conversation that this thread begins. */
case class ConversationExec(output: Seq[Attribute], partitions: Int) extends LeafExecNode {
  override protected def doExecute(): RDD[InternalRow] =
    new ItemsRDD(session.sparkContext, Seq.fill(partitions)((0, Nil))).mapPartitions(_ =>
      Iterator.single(InternalRow(UTF8String.fromString(Conversation.beginning.get))))
}

/** What a function of Python makes of the first of two RDDs; by the second, Spark runs it, and gets no rows of it. */
class FunctionRDD(inputs: RDD[Any], python: RDD[InternalRow], inputSchema: StructType, resultSchema: StructType,
    maxRows: Int, count: SQLMetric) extends ZippedPartitionsBaseRDD[ColumnarBatch](inputs.sparkContext, Seq(inputs, python)) {
  @transient private var last: FunctionBatches = _ // the last in this task, which may have many partitions

  override def compute(split: Partition, task: TaskContext): Iterator[ColumnarBatch] = {
    val Seq(first, second) = split.asInstanceOf[ZippedPartitionsPartition].partitions
    val input = rdds.head.asInstanceOf[RDD[Any]].iterator(first, task)
    val batches = new FunctionBatches(input, dataset(first), inputSchema, maxRows, task, rdds.last.iterator(second, task))
    (batches.iterator ++ { end(batches); Nil }).map { rows =>
      count += rows.count
      rows.batch(resultSchema)
    }
  }

  private def dataset(input: Partition): Map[String, Any] = input match {
    case Item(_, DatasetInput(reader, partition), _) => Map("reader" -> reader, "partition" -> partition)
    case _ => Map.empty
  }

  /** What the last batch of a partition holds stays until the end of the next one. */
  private def end(batches: FunctionBatches): Unit = synchronized {
    if (last != null && (last.task eq batches.task) && (last ne batches)) last.close()
    last = batches
  }
}

/**
 * The batches that a function makes of `input`. It runs only while the next batch is asked for; until then, nothing
 * changes in the last one. `python` is run by a thread of its own, and ends when the function does.
 */
final class FunctionBatches(input: Iterator[Any], dataset: Map[String, Any], inputSchema: StructType, maxRows: Int,
    val task: TaskContext, python: => Iterator[Any]) extends Batches {
  private val conversation = new Conversation(dataset + ("max_rows" -> maxRows))
  private val writer = new InputWriter(input, inputSchema, maxRows)
  private val shared = new SharedBatches(() => ask(), () => ())
  private val outcome = new CompletableFuture[Unit]
  @volatile private var consumer: Thread = _ // the thread that asked last

  private val runner = {
    val results = try conversation.begin(python) catch {
      case error: Throwable =>
        conversation.close()
        throw error
    }
    new Thread(() => {
      TaskContext.setTaskContext(task)
      try {
        if (results.hasNext) throw Failure("a function has given rows in a way that nobody reads")
        outcome.complete(())
      } catch {
        case error: Throwable =>
          outcome.completeExceptionally(error)
          conversation.close()
      }
    }, s"dissociated-function-${task.taskAttemptId}")
  }
  // Spark calls the last listener first: the function ends before its worker is closed.
  task.addTaskCompletionListener[Unit](_ => Feeders.whenEnded(task, consumer)(close()))
  runner.setDaemon(true)
  runner.start()

  override def next(): Option[Rows] = {
    consumer = Thread.currentThread
    shared.next()
  }

  private def ask(): JsonNode = {
    conversation.send("next" -> true)
    var answer = receive()
    while (answer.has("write")) {
      conversation.send(writer.write(answer.get("write").asText): _*)
      answer = receive()
    }
    if (answer.get("ended").asBoolean) finish()
    answer
  }

  private def receive(): JsonNode = conversation.receive().getOrElse {
    finish()
    throw Failure("the worker of Python has left before its function has ended")
  }

  /** Waits for the end of the function, and throws what Spark says of it if it has failed. */
  private def finish(): Unit = try outcome.get() catch {
    case error: ExecutionException => throw error.getCause
  }

  override def close(): Unit = {
    conversation.close()
    shared.close()
    writer.free()
  }
}

/** Writes rows or columns as record batches to files. */
final class InputWriter(input: Iterator[Any], schema: StructType, maxRows: Int) {
  private val batches = new BatchStream(input, schema, maxRows)

  /** Writes the next batch to this file, and says how large it is, or that there is none. */
  def write(path: String): Seq[(String, Any)] = {
    var size = 0L
    batches.writeNext { (rows, layout) =>
      val channel = FileChannel.open(Paths.get(path), StandardOpenOption.WRITE)
      try size = SegmentFile.write(channel, layout.encodeMessage(rows, 0))
      catch { case error: IOException => throw Failure(s"there is no memory for the batches of a function: $error") }
      finally channel.close()
    }
    Seq("size" -> size)
  }

  def free(): Unit = batches.free()
}

/**
 * Lines of JSON between this task and the worker of Python that runs its function, over a socket that only this user
 * can connect to. The path of the socket is deleted as soon as the worker has connected.
 */
final class Conversation(start: Map[String, Any]) extends AutoCloseable {
  private val directory = Files.createTempDirectory(Conversation.parent, "dissociated")
  private val path = directory.resolve("socket")
  private val server = ServerSocketChannel.open(StandardProtocolFamily.UNIX)
  private var closed = false
  private var channel: SocketChannel = _
  private var reader: BufferedReader = _

  try server.bind(UnixDomainSocketAddress.of(path))
  catch { case error: IOException => close(); throw Failure(s"no socket for a function of Python: $error") }

  /** Calls what makes the row that tells the worker of this. */
  def begin[T](python: => T): T = {
    Conversation.beginning.set(Sidecar.json.writeValueAsString(start + ("socket" -> path.toString)))
    try python finally Conversation.beginning.remove()
  }

  /** Nothing is sent if the worker has gone: `receive` says so. */
  def send(message: (String, Any)*): Unit = try {
    connect()
    val line = ByteBuffer.wrap((Sidecar.json.writeValueAsString(message.toMap) + "\n").getBytes(UTF_8))
    while (line.hasRemaining) channel.write(line)
  } catch { case _: IOException => }

  /** None if the worker has gone, or this is closed. */
  def receive(): Option[JsonNode] =
    try Option(reader).flatMap(lines => Option(lines.readLine())).map(Sidecar.json.readTree)
    catch { case _: IOException => None }

  private def connect(): Unit = if (channel == null) {
    val accepted = server.accept()
    synchronized {
      channel = accepted
      if (closed) channel.close()
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
      closed = true
      if (channel != null) channel.close()
    }
    deletePath()
  }
}

object Conversation {
  private val MaxPath = 60 // characters; a socket's path has up to 107

  /** The message that tells the worker how to reach its task, while its partition begins in this thread. */
  val beginning = new ThreadLocal[String]

  private def parent: Path =
    Some(System.getProperty("java.io.tmpdir")).filter(_.length <= MaxPath).map(Paths.get(_)).getOrElse(Paths.get("/tmp"))
}

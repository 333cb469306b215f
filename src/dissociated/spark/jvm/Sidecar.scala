package org.apache.spark.sql.dissociated

import java.io.{IOException, UncheckedIOException}
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.{Files, Paths}
import java.util.concurrent.{CompletableFuture, ConcurrentHashMap}
import java.util.concurrent.atomic.AtomicLong

import scala.util.Try

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import com.fasterxml.jackson.module.scala.DefaultScalaModule
import org.apache.spark.{SparkConf, SparkEnv, SparkRuntimeException}
import org.apache.spark.api.python.PythonUtils

object Failure {
  /** Return an exception that Spark passes on from tasks unwrapped, and that PySpark raises as a PySparkException. */
  def apply(message: String): SparkRuntimeException = new DatasetFailure(message)
}

/**
 * A failure of the data source. It needs an error condition, since Spark wraps exceptions without one, but shows its
 * own message.
 */
class DatasetFailure(message: String) extends SparkRuntimeException("DATA_SOURCE_EXTERNAL_ERROR", Map.empty) {
  override def getMessage: String = s"[$getCondition] ${Source.name}: $message"
}

/** A failure of a call whose sidecar has ended before its answer. The call may have taken effect. */
class SidecarEnded(message: String) extends DatasetFailure(message)

/** The Python that runs the sidecar. Executors use that of the driver, as they do for Spark's own workers. */
case class Python(executable: String, path: String)

object Python {
  /** Return the Python of the driver: that of the settings, or in local mode that of the parent process. */
  def ofDriver(): Python = {
    val conf = Option(SparkEnv.get).fold(new SparkConf)(_.conf)
    val executable = conf.getOption("spark.pyspark.python").orElse(sys.env.get("PYSPARK_PYTHON"))
      .orElse(if (conf.get("spark.master", "").startsWith("local")) parentInterpreter else None).getOrElse("python3")
    Python(executable, PythonUtils.mergePythonPaths(PythonUtils.sparkPythonPath, sys.env.getOrElse("PYTHONPATH", "")))
  }

  /**
   * The interpreter that started this JVM, if one did. All virtual environments may share its executable, so the name
   * by which it was called decides.
   */
  private lazy val parentInterpreter: Option[String] = Try {
    val parent = Paths.get("/proc", ProcessHandle.current.parent.get.pid.toString)
    val file = parent.resolve("exe").toRealPath()
    def readStrings(name: String) = new String(Files.readAllBytes(parent.resolve(name)), UTF_8).split('\u0000')
    val command = readStrings("cmdline").head
    val directories = if (command.contains('/')) Array("")
      else readStrings("environ").collectFirst { case path if path.startsWith("PATH=") => path.drop(5).split(':') }.get
    directories.map(parent.resolve("cwd").resolve(_).resolve(command)).find { name =>
      file.getFileName.toString.startsWith("python") && Files.isExecutable(name) && name.toRealPath() == file
    }.map(name => name.getParent.toRealPath().resolve(name.getFileName).toString)
  }.toOption.flatten
}

/**
 * The Python process that serves this JVM and knows catalogs, tickets and leases: `dissociated.spark.sidecar`.
 * Requests and answers are lines of JSON over its pipes. It exits when this JVM does.
 */
final class Sidecar private (python: Python) {
  private val process = {
    val builder = new ProcessBuilder(python.executable, "-m", "dissociated.spark.sidecar")
    builder.environment.put("PYTHONPATH", python.path)
    builder.redirectError(ProcessBuilder.Redirect.INHERIT)
    try builder.start()
    catch {
      case error: IOException => throw Failure(
        s"the Python of dissociated cannot be started: $error: name the interpreter in spark.pyspark.python")
    }
  }
  private val output = process.outputWriter(UTF_8)
  private val pending = new ConcurrentHashMap[Long, CompletableFuture[JsonNode]]
  private val lastId = new AtomicLong
  @volatile private var hasEnded = false

  private val listener = new Thread(() => listen(), "dissociated-sidecar")
  listener.setDaemon(true)
  listener.start()

  /**
   * Return the answer of the sidecar's function `name`. Throws if it raises an error, with its message. An interrupt
   * does not end the wait.
   */
  def call(name: String, arguments: (String, Any)*): JsonNode = result(name, arguments, _.join())

  /** Like `call`, for functions that may take long: an interrupt of the task ends the wait. */
  def await(name: String, arguments: (String, Any)*): JsonNode = result(name, arguments, _.get())

  private def result(
      name: String, arguments: Seq[(String, Any)], awaitReply: CompletableFuture[JsonNode] => JsonNode): JsonNode = {
    val id = lastId.incrementAndGet()
    val answer = new CompletableFuture[JsonNode]
    pending.put(id, answer)
    val line = Sidecar.json.writeValueAsString(Map("id" -> id, "call" -> name, "with" -> arguments.toMap))
    try output.synchronized {
      output.write(line)
      output.newLine()
      output.flush()
    } catch { case _: IOException => hasEnded = true }
    if (hasEnded) failPending()
    val reply = try awaitReply(answer) finally pending.remove(id)
    if (reply.isNull) throw new SidecarEnded(s"${python.executable} -m dissociated.spark.sidecar has ended: see its " +
      "stderr, and install dissociated for that Python if it is missing")
    if (reply.has("error")) throw Failure(reply.get("error").asText)
    reply.get("result")
  }

  private def listen(): Unit =
    try process.inputReader(UTF_8).lines.forEach { line =>
      val reply = Sidecar.json.readTree(line)
      Option(pending.get(reply.get("id").asLong)).foreach(_.complete(reply))
    } catch { case _: UncheckedIOException => } finally {
      hasEnded = true
      process.destroyForcibly()
      failPending()
    }

  /** Fail all pending calls. */
  private def failPending(): Unit = pending.values.forEach(_.complete(Sidecar.json.nullNode))
}

object Sidecar {
  val json: ObjectMapper = new ObjectMapper().registerModule(DefaultScalaModule)
  private var running: Sidecar = _

  /** Return the sidecar of this JVM. Start it if it is not running. */
  def of(python: Python): Sidecar = synchronized {
    if (running == null || running.hasEnded) running = new Sidecar(python)
    running
  }

  /**
   * Call a function that changes nothing if it is repeated, such as a commit, which has a key. If the sidecar ends
   * before its answer, the call may have taken effect, so a new sidecar repeats it once.
   */
  def callRepeatable(python: Python, name: String, arguments: (String, Any)*): JsonNode =
    try of(python).call(name, arguments: _*)
    catch { case _: SidecarEnded => of(python).call(name, arguments: _*) }
}

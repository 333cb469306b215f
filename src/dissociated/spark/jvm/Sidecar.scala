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
  /** An exception of the kind that Spark hands on from tasks, and that is a PySparkException there. */
  def apply(message: String): SparkRuntimeException = new DatasetFailure(message)
}

/** Its message stands in for that of its condition, which has no place for one. Spark wraps what has no condition. */
class DatasetFailure(message: String) extends SparkRuntimeException("DATA_SOURCE_EXTERNAL_ERROR", Map.empty) {
  override def getMessage: String = s"[$getCondition] ${Source.name}: $message"
}

/** Which Python to ask. The driver says so, and executors take the same, as they do for Spark's own workers. */
case class Python(executable: String, path: String)

object Python {
  def ofDriver(): Python = {
    val conf = Option(SparkEnv.get).fold(new SparkConf)(_.conf)
    val executable = conf.getOption("spark.pyspark.python").orElse(sys.env.get("PYSPARK_PYTHON"))
      .orElse(if (conf.get("spark.master", "").startsWith("local")) ofParent else None).getOrElse("python3")
    Python(executable, PythonUtils.mergePythonPaths(PythonUtils.sparkPythonPath, sys.env.getOrElse("PYTHONPATH", "")))
  }

  /**
   * The interpreter that has started this JVM, if one has. Its file may be that of all virtual environments; the name by
   * which it was called tells them apart.
   */
  private lazy val ofParent: Option[String] = Try {
    val parent = Paths.get("/proc", ProcessHandle.current.parent.get.pid.toString)
    val file = parent.resolve("exe").toRealPath()
    def texts(name: String) = new String(Files.readAllBytes(parent.resolve(name)), UTF_8).split('\u0000')
    val called = texts("cmdline").head
    val directories = if (called.contains('/')) Array("")
      else texts("environ").collectFirst { case path if path.startsWith("PATH=") => path.drop(5).split(':') }.get
    directories.map(parent.resolve("cwd").resolve(_).resolve(called)).find { name =>
      file.getFileName.toString.startsWith("python") && Files.isExecutable(name) && name.toRealPath() == file
    }.map(name => name.getParent.toRealPath().resolve(name.getFileName).toString)
  }.toOption.flatten
}

/**
 * The Python process beside this JVM, which knows catalogs, tickets and leases: dissociated.spark.sidecar.
 * Requests and answers are lines of JSON over its pipes. It ends when this JVM does.
 */
final class Sidecar private (python: Python) {
  private val process = {
    val builder = new ProcessBuilder(python.executable, "-m", "dissociated.spark.sidecar")
    builder.environment.put("PYTHONPATH", python.path)
    builder.redirectError(ProcessBuilder.Redirect.INHERIT)
    try builder.start()
    catch {
      case error: IOException => throw Failure(s"there is no Python for dissociated: $error")
    }
  }
  private val output = process.outputWriter(UTF_8)
  private val waiting = new ConcurrentHashMap[Long, CompletableFuture[JsonNode]]
  private val numbers = new AtomicLong
  @volatile private var hasEnded = false

  private val listener = new Thread(() => listen(), "dissociated-sidecar")
  listener.setDaemon(true)
  listener.start()

  /** What the function `name` of the sidecar answers. Throws what it raises, with its message. Not interrupted. */
  def call(name: String, arguments: (String, Any)*): JsonNode = result(name, arguments, _.join())

  /** The same for what may take long: a task that is killed does not wait. */
  def await(name: String, arguments: (String, Any)*): JsonNode = result(name, arguments, _.get())

  private def result(
      name: String, arguments: Seq[(String, Any)], wait: CompletableFuture[JsonNode] => JsonNode): JsonNode = {
    val id = numbers.incrementAndGet()
    val answer = new CompletableFuture[JsonNode]
    waiting.put(id, answer)
    val line = Sidecar.json.writeValueAsString(Map("id" -> id, "call" -> name, "with" -> arguments.toMap))
    try output.synchronized {
      output.write(line)
      output.newLine()
      output.flush()
    } catch { case _: IOException => hasEnded = true }
    if (hasEnded) fail()
    val reply = try wait(answer) finally waiting.remove(id)
    if (reply.has("error")) throw Failure(reply.get("error").asText)
    reply.get("result")
  }

  private def listen(): Unit =
    try process.inputReader(UTF_8).lines.forEach { line =>
      val reply = Sidecar.json.readTree(line)
      Option(waiting.get(reply.get("id").asLong)).foreach(_.complete(reply))
    } catch { case _: UncheckedIOException => } finally {
      hasEnded = true
      process.destroyForcibly()
      fail()
    }

  private def fail(): Unit = waiting.values.forEach(_.complete(Sidecar.json.createObjectNode().put("error",
    s"${python.executable} -m dissociated.spark.sidecar has ended: is dissociated installed there? Its stderr says why")))
}

object Sidecar {
  val json: ObjectMapper = new ObjectMapper().registerModule(DefaultScalaModule)
  private var running: Sidecar = _

  /** The one of this JVM, which is started where there is none. */
  def of(python: Python): Sidecar = synchronized {
    if (running == null || running.hasEnded) running = new Sidecar(python)
    running
  }
}

package org.apache.spark.sql.dissociated

import java.io.IOException
import java.nio.channels.FileChannel
import java.nio.file.{Files, StandardOpenOption}

import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal

import com.fasterxml.jackson.databind.JsonNode
import org.apache.arrow.flatbuf.{Buffer, Endianness, MessageHeader, RecordBatch, Schema}
import org.apache.spark.internal.Logging
import org.apache.spark.util.Utils

/**
 * Batches as their server sends them, in native memory. What arrays consist of, the `layout` says. Those that are
 * compressed the sidecar takes apart, by `decode`.
 */
final class ServerBatches(server: Server, messages: Messages, request: JsonNode, layout: JsonNode,
    first: Option[(Part, Option[Part])], decode: (Part, Part) => Batches) extends Batches {
  private val batches = (Iterator.single(first) ++ Iterator.continually(messages.receive())).takeWhile(_.isDefined)
    .flatten.flatMap { case (header, body) => rows(header, body.get) }.map(wanted).filter(_.count > 0)
  private var decoded: Option[Batches] = None // the last that was compressed
  private var skip = request.get("skip").asLong
  private var remaining = if (request.has("rows")) request.get("rows").asLong else Long.MaxValue

  override def next(): Option[Rows] = ServerBatches.checked(server) {
    val rows = if (remaining > 0) batches.nextOption() else None
    if (rows.isEmpty && remaining > 0 && request.has("rows"))
      server.broke(s"$remaining rows are missing at the end of the stream")
    rows.foreach(remaining -= _.count)
    if (rows.isEmpty) messages.hangUp()
    rows
  }

  private def rows(header: Part, body: Part): Iterator[Rows] = {
    val batch = ServerBatches.batch(server, header)
    if (batch.length < 0 || batch.length > Int.MaxValue) server.broke(s"a batch of ${batch.length} rows")
    // Room for them is made before the first is looked at.
    if (math.max(batch.nodesLength, batch.buffersLength) > header.size / 16) server.broke("a batch of too many buffers")
    if (ServerBatches.isCompressed(batch)) decompressed(header, body)
    else Iterator.single(Rows(new Walk(batch, body).columns, ServerBatches.memory, 0, batch.length.toInt))
  }

  private def decompressed(header: Part, body: Part): Iterator[Rows] = {
    val before = decoded
    decoded = Some(decode(header, body))
    before.foreach(_.close())
    decoded.iterator.flatMap(_.all)
  }

  /** Of these rows those that are wanted. */
  private def wanted(rows: Rows): Rows = {
    val from = math.min(skip, rows.count)
    skip -= from
    rows.copy(from = from.toInt, count = math.min(rows.count - from, remaining).toInt)
  }

  /** Takes the arrays of a batch, which lie one after the other, each before those below it. */
  private final class Walk(batch: RecordBatch, body: Part) {
    private val nodes = Iterator.range(0, batch.nodesLength).map(batch.nodes)
    private val buffers = Iterator.range(0, batch.buffersLength).map(batch.buffers)
    private val counts = Iterator.range(0, batch.variadicBufferCountsLength).map(batch.variadicBufferCounts)

    def columns: Seq[ArrayData] = {
      val wanted = try below(layout) catch {
        case _: NoSuchElementException => server.broke("a batch has less than its schema")
      }
      if (nodes.hasNext || buffers.hasNext) server.broke("a batch has more than its schema")
      wanted
    }

    /** A layout is [kind, width, number of buffers, [children], [the numbers of those that are wanted]]. */
    private def below(layout: JsonNode): Array[ArrayData] = {
      val all = layout.get(3).elements.asScala.map(array).toArray
      layout.get(4).elements.asScala.map(number => all(number.asInt)).toArray
    }

    private def array(layout: JsonNode): ArrayData = {
      val node = nodes.next()
      val fixedCount = layout.get(2).asInt // else each batch has its own number of them, beside two
      val count = if (fixedCount >= 0) fixedCount else 2 + math.max(0, math.min(counts.next(), batch.buffersLength)).toInt
      val places = Array.fill(count)(place(buffers.next())).flatten
      ArrayData(node.length, 0, node.nullCount, places, below(layout), layout.get(0).asText, layout.get(1).asInt)
    }

    /** Its region, where it lies and how long it is. */
    private def place(buffer: Buffer): Array[Long] = {
      if (buffer.offset < 0 || buffer.length < 0 || buffer.offset > body.size - buffer.length)
        server.broke(s"a buffer of ${buffer.length} bytes at ${buffer.offset} of ${body.size}")
      Array(0, body.address + buffer.offset, buffer.length)
    }
  }

  override def close(): Unit = try messages.close() finally decoded.foreach(_.close())
}

object ServerBatches extends Logging {
  private val MaxSchema = 1L << 24 // bytes
  private val memory: Places = (_, at, _) => at // within its body, where it was looked for

  /** None where nothing comes, or what this JVM does not read: the sidecar may know another way, or why. */
  def open(sidecar: Sidecar, reader: String, request: JsonNode): Option[ServerBatches] = {
    val server = new Server(request)
    val messages = new Messages(server)
    val opened = try {
      messages.request()
      for (bytes <- schema(messages.receive().get._1);
           layout <- Option(sidecar.call("layout", "reader" -> reader, "schema" -> bytes)).filterNot(_.isNull);
           first = messages.receive() if !first.exists(parts => isCompressed(batch(server, parts._1))))
        yield new ServerBatches(server, messages, request, layout, first, (header, body) => withFile(body) { file =>
          SharedBatches.of(sidecar, sidecar.call("decode", "reader" -> reader, "schema" -> bytes,
            "header" -> Vectors.bytes(header.address, header.size.toInt), "body" -> file, "max_body" -> server.maxBody)
            .get("stream").asLong)
        })
    } catch {
      case NonFatal(error) =>
        logInfo(s"a partition is read by way of Python: $error")
        if (error.isInstanceOf[Unanswered])
          Utils.tryLogNonFatalError(sidecar.call("silent", "host" -> server.host, "port" -> server.port))
        None
    }
    if (opened.isEmpty) messages.close()
    opened
  }

  private def schema(header: Part): Option[Array[Byte]] = {
    val message = Messages.parsed(header)
    val schema = message.header(new Schema).asInstanceOf[Schema]
    val fits = message.headerType == MessageHeader.Schema && schema.endianness == Endianness.Little
    if (!fits || header.size > MaxSchema) None
    else Some(Vectors.bytes(header.address, header.size.toInt))
  }

  private def batch(server: Server, header: Part): RecordBatch = {
    val message = Messages.parsed(header)
    val batch = message.header(new RecordBatch).asInstanceOf[RecordBatch]
    if (message.headerType != MessageHeader.RecordBatch || batch == null)
      server.broke(s"a message of the type ${message.headerType} among the batches")
    batch
  }

  private def isCompressed(batch: RecordBatch): Boolean = batch.compression != null && batch.length > 0

  /** By way of a file, which is there meanwhile. */
  private def withFile[T](content: Part)(use: String => T): T = try {
    val file = Files.createTempFile("dissociated", null)
    try {
      val channel = FileChannel.open(file, StandardOpenOption.WRITE)
      try content.buffers.foreach(buffer => while (buffer.hasRemaining) channel.write(buffer)) finally channel.close()
      use(file.toString)
    } finally Files.delete(file)
  } catch { // not the server's: it has sent all of it
    case error: IOException => throw Failure(s"a batch cannot be decompressed by way of a file in java.io.tmpdir: $error")
  }

  /** What is read beyond the end of metadata, and what the socket has to say, as failures of the server. */
  private def checked[T](server: Server)(read: => T): T = try read catch {
    case error @ (_: IndexOutOfBoundsException | _: IOException) => throw server.failed(s"cannot be read: $error")
  }
}

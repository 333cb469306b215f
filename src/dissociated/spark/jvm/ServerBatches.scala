package org.apache.spark.sql.dissociated

import java.io.IOException

import scala.jdk.CollectionConverters._
import scala.util.control.NonFatal

import com.fasterxml.jackson.databind.JsonNode
import org.apache.arrow.flatbuf.{Endianness, MessageHeader, RecordBatch, Schema}
import org.apache.spark.internal.Logging

/** Batches as their server sends them, in native memory. */
final class ServerBatches(server: Server, messages: Messages, told: JsonNode, stream: JsonNode,
    first: Option[(Part, Option[Part])]) extends Batches {
  private val layouts = stream.get("layouts").elements.asScala.toSeq
  private val wanted = stream.get("columns").elements.asScala.map(_.asInt).toSeq
  private var begun = false
  private var skip = told.get("skip").asLong
  private var left = if (told.has("rows")) told.get("rows").asLong else Long.MaxValue
  private var columns: Seq[ArrayData] = Nil
  private var rows, from = 0 // of the batch, and those that were given

  override def next(): Option[Rows] = ServerBatches.checked(server) {
    while (from == rows && left > 0 && advance()) ()
    val count = math.min(math.min(rows - from, left), ServerBatches.MaxRows).toInt
    if (count == 0) None
    else {
      val found = Rows(columns, ServerBatches.memory, from, count)
      from += count
      left -= count
      Some(found)
    }
  }

  private def advance(): Boolean = (if (begun) messages.receive() else first) match {
    case None if told.has("rows") => server.broke(s"$left rows are missing at the end of the stream")
    case None => false
    case Some((header, body)) =>
      begun = true
      val batch = ServerBatches.batch(server, header)
      if (batch.compression != null) throw server.failed("sends compressed batches among others: read it over grpc")
      if (batch.length < 0 || batch.length > Int.MaxValue) server.broke(s"a batch of ${batch.length} rows")
      // Room for them is made before the first is looked at.
      if (math.max(batch.nodesLength, batch.buffersLength) > header.size / 16) server.broke("a batch of too many buffers")
      rows = batch.length.toInt
      columns = new Walk(batch, body.get).columns
      from = math.min(skip, rows).toInt
      skip -= from
      true
  }

  /** Takes the arrays of a batch, which lie one after the other, each before those below it. */
  private final class Walk(batch: RecordBatch, body: Part) {
    private var nodes, buffers, counts = 0

    def columns: Seq[ArrayData] = {
      val all = layouts.map(array)
      if (nodes != batch.nodesLength || buffers != batch.buffersLength) server.broke("a batch has more than its schema")
      wanted.map(all)
    }

    /** Its layout is [kind, width, number of buffers, [children]]. */
    private def array(layout: JsonNode): ArrayData = {
      if (nodes >= batch.nodesLength) server.broke("a batch has less than its schema")
      val node = batch.nodes(nodes)
      val (length, nulls) = (node.length, node.nullCount)
      nodes += 1
      val count = if (layout.get(2).asInt >= 0) layout.get(2).asInt else 2 + more()
      if (count < 0 || count > batch.buffersLength - buffers) server.broke("a batch has less than its schema")
      val places = Array.fill(count)(buffer()).flatten
      val children = layout.get(3).elements.asScala.map(array).toArray
      ArrayData(length, 0, nulls, places, children, layout.get(0).asText, layout.get(1).asInt)
    }

    /** How many buffers there are where each batch has its own number of them, beside two. */
    private def more(): Int = {
      if (counts >= batch.variadicBufferCountsLength) server.broke("a batch has less than its schema")
      counts += 1
      math.min(batch.variadicBufferCounts(counts - 1), batch.buffersLength).toInt
    }

    /** Its region, where it lies and how long it is. */
    private def buffer(): Array[Long] = {
      val one = batch.buffers(buffers)
      buffers += 1
      if (one.offset < 0 || one.length < 0 || one.offset > body.size - one.length)
        server.broke(s"a buffer of ${one.length} bytes at ${one.offset} of ${body.size}")
      Array(0, body.address + one.offset, one.length)
    }
  }

  override def close(): Unit = messages.close()
}

object ServerBatches extends Logging {
  private val MaxRows = 1L << 20
  private val MaxSchema = 1L << 24 // bytes
  private val memory: Places = (_, at, _) => at // within its body, where it was looked for

  /** None where nothing comes, or what this JVM does not read: the sidecar may know another way, or why. */
  def open(sidecar: Sidecar, reader: String, told: JsonNode): Option[ServerBatches] = {
    val server = new Server(told)
    val messages = new Messages(server)
    val opened = try {
      messages.request()
      for (bytes <- schema(messages.receive().get._1);
           found <- Option(sidecar.call("layouts", "reader" -> reader, "schema" -> bytes)).filterNot(_.isNull);
           first = messages.receive() if first.forall(one => batch(server, one._1).compression == null))
        yield new ServerBatches(server, messages, told, found, first)
    } catch {
      case NonFatal(error) =>
        logInfo(s"a partition is read by way of Python: $error")
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

  /** What is read beyond the end of metadata, and what the socket has to say, as failures of the server. */
  private def checked[T](server: Server)(read: => T): T = try read catch {
    case error @ (_: IndexOutOfBoundsException | _: IOException) => throw server.failed(s"cannot be read: $error")
  }
}

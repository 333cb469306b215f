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
 * The batches that a server sends, in native memory, which `close` frees. `layout` describes the arrays of a batch.
 * `decode` returns the batches of a compressed message, which the sidecar decompresses.
 */
final class ServerBatches(server: Server, messages: Messages, request: JsonNode, layout: JsonNode,
    first: Option[(Slice, Option[Slice])], decode: (Slice, Slice) => Batches) extends Batches {
  private val batches = (Iterator.single(first) ++ Iterator.continually(messages.receive())).takeWhile(_.isDefined)
    .flatten.flatMap { case (header, body) => readBatch(header, body.get) }.map(selectRows).filter(_.count > 0)
  // The batches of the last compressed message, whose memory the sidecar holds until they are closed.
  private var lastDecoded: Option[Batches] = None
  private var rowsToSkip = request.get("skip").asLong
  private var remainingRows = if (request.has("rows")) request.get("rows").asLong else Long.MaxValue

  override def next(): Option[Rows] = ServerBatches.rethrowAsServerFailure(server) {
    val rows = if (remainingRows > 0) batches.nextOption() else None
    if (rows.isEmpty && remainingRows > 0 && request.has("rows"))
      server.reject(s"$remainingRows rows are missing at the end of the stream")
    rows.foreach(remainingRows -= _.count)
    if (rows.isEmpty) messages.disconnect()
    rows
  }

  /** Return the rows of a message. Throws if it is no valid record batch. */
  private def readBatch(header: Slice, body: Slice): Iterator[Rows] = {
    val batch = ServerBatches.recordBatch(server, header)
    if (batch.length < 0 || batch.length > Int.MaxValue) server.reject(s"a batch has the invalid length ${batch.length}")
    // Arrays of this length are allocated before the first entry is read.
    if (math.max(batch.nodesLength, batch.buffersLength) > header.size / 16)
      server.reject("a batch has more arrays or buffers than its metadata can hold")
    if (ServerBatches.isCompressed(batch)) decompress(header, body)
    else Iterator.single(Rows(new BatchWalker(batch, body).columns, ServerBatches.nativeMemory, 0, batch.length.toInt))
  }

  /** Return the rows of a compressed message, and close those of the previous one. */
  private def decompress(header: Slice, body: Slice): Iterator[Rows] = {
    val previous = lastDecoded
    lastDecoded = Some(decode(header, body))
    previous.foreach(_.close())
    lastDecoded.iterator.flatMap(_.iterator)
  }

  /** Return the part of `rows` that the request asks for. */
  private def selectRows(rows: Rows): Rows = {
    val from = math.min(rowsToSkip, rows.count)
    rowsToSkip -= from
    rows.copy(from = from.toInt, count = math.min(rows.count - from, remainingRows).toInt)
  }

  /** A walk over the nodes and buffers of a batch, in which each array precedes its children. */
  private final class BatchWalker(batch: RecordBatch, body: Slice) {
    private val nodes = Iterator.range(0, batch.nodesLength).map(batch.nodes)
    private val buffers = Iterator.range(0, batch.buffersLength).map(batch.buffers)
    private val counts = Iterator.range(0, batch.variadicBufferCountsLength).map(batch.variadicBufferCounts)

    /** Return the arrays of the requested columns. Throws if the batch does not fit the schema. */
    def columns: Seq[ArrayData] = {
      val arrays = try children(layout) catch {
        case _: NoSuchElementException => server.reject("a batch has fewer arrays than its schema")
      }
      if (nodes.hasNext || buffers.hasNext) server.reject("a batch has more arrays than its schema")
      arrays
    }

    /**
     * Return the requested children of a layout, which is [kind, width, number of buffers, [children], [the indices
     * of the requested children]].
     */
    private def children(layout: JsonNode): Array[ArrayData] = {
      val all = layout.get(3).elements.asScala.map(array).toArray
      layout.get(4).elements.asScala.map(number => all(number.asInt)).toArray
    }

    private def array(layout: JsonNode): ArrayData = {
      val node = nodes.next()
      // A negative number stands for an array of views: the batch has the number of its buffers after the first two.
      val fixedCount = layout.get(2).asInt
      val count =
        if (fixedCount >= 0) fixedCount else 2 + math.max(0, math.min(counts.next(), batch.buffersLength)).toInt
      val locations = Array.fill(count)(locate(buffers.next())).flatten
      ArrayData(node.length, 0, node.nullCount, locations, children(layout), layout.get(0).asText, layout.get(1).asInt)
    }

    /** Return the region, address and size of a buffer. Throws if it is not within the body. */
    private def locate(buffer: Buffer): Array[Long] = {
      if (buffer.offset < 0 || buffer.length < 0 || buffer.offset > body.size - buffer.length)
        server.reject(s"a buffer of ${buffer.length} bytes at ${buffer.offset} of ${body.size} is outside of its body")
      Array(0, body.address + buffer.offset, buffer.length)
    }
  }

  override def close(): Unit = try messages.close() finally lastDecoded.foreach(_.close())
}

object ServerBatches extends Logging {
  private val MaxSchema = 1L << 24 // bytes
  // The addresses of buffers are absolute. BatchWalker has checked that they are within the body.
  private val nativeMemory: RegionAddresses = (_, address, _) => address

  /**
   * Open the stream, and return None if it fails or this JVM cannot read it. The caller then reads by way of the
   * sidecar, which supports more or raises the error.
   */
  def open(sidecar: Sidecar, reader: String, request: JsonNode): Option[ServerBatches] = {
    val server = new Server(request)
    val messages = new Messages(server)
    val opened = try {
      messages.request()
      for (bytes <- serializedSchema(messages.receive().get._1);
           layout <- Option(sidecar.call("layout", "reader" -> reader, "schema" -> bytes)).filterNot(_.isNull);
           first = messages.receive() if !first.exists(parts => isCompressed(recordBatch(server, parts._1))))
        yield new ServerBatches(server, messages, request, layout, first, (header, body) => withFile(body) { file =>
          SharedBatches.of(sidecar, sidecar.call("decode", "reader" -> reader, "schema" -> bytes,
            "header" -> Vectors.copyBytes(header.address, header.size.toInt), "body" -> file,
            "max_body" -> server.maxBody)
            .get("stream").asLong)
        })
    } catch {
      case NonFatal(error) =>
        logInfo(s"a partition is read by way of Python: error=$error")
        if (error.isInstanceOf[ConnectTimeout])
          Utils.tryLogNonFatalError(sidecar.call("unresponsive", "host" -> server.host, "port" -> server.port))
        None
    }
    if (opened.isEmpty) messages.close()
    opened
  }

  /** Return the message of the schema, or None if it is too large or not of little-endian data. */
  private def serializedSchema(header: Slice): Option[Array[Byte]] = {
    val message = Messages.parse(header)
    val schema = message.header(new Schema).asInstanceOf[Schema]
    val isSupported = message.headerType == MessageHeader.Schema && schema.endianness == Endianness.Little
    if (!isSupported || header.size > MaxSchema) None
    else Some(Vectors.copyBytes(header.address, header.size.toInt))
  }

  /** Return the record batch of a message. Throws if it is of another type. */
  private def recordBatch(server: Server, header: Slice): RecordBatch = {
    val message = Messages.parse(header)
    val batch = message.header(new RecordBatch).asInstanceOf[RecordBatch]
    if (message.headerType != MessageHeader.RecordBatch || batch == null)
      server.reject(s"a message of the type ${message.headerType} is no record batch")
    batch
  }

  private def isCompressed(batch: RecordBatch): Boolean = batch.compression != null && batch.length > 0

  /** Call `use` with the path of a temporary file that has this content. */
  private def withFile[T](content: Slice)(use: String => T): T = try {
    val file = Files.createTempFile("dissociated", null)
    try {
      val channel = FileChannel.open(file, StandardOpenOption.WRITE)
      try content.byteBuffers.foreach(buffer => while (buffer.hasRemaining) channel.write(buffer))
      finally channel.close()
      use(file.toString)
    } finally Files.delete(file)
  } catch {
    // The server is not the cause: it has sent the whole batch.
    case error: IOException =>
      throw Failure(s"a batch cannot be decompressed, because no file in java.io.tmpdir can be written: $error")
  }

  /**
   * Return the result of `read`. An error of the socket, or a read beyond the end of metadata, becomes a failure of
   * the server.
   */
  private def rethrowAsServerFailure[T](server: Server)(read: => T): T = try read catch {
    case error @ (_: IndexOutOfBoundsException | _: IOException) => throw server.failure(s"cannot be read: $error")
  }
}

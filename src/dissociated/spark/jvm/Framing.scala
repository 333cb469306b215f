package org.apache.spark.sql.dissociated

import java.io.IOException
import java.net.{InetSocketAddress, StandardSocketOptions}
import java.nio.{ByteBuffer, ByteOrder}
import java.nio.channels.{ClosedByInterruptException, SelectionKey, Selector, SocketChannel}
import java.nio.charset.StandardCharsets.UTF_8

import scala.collection.mutable

import com.fasterxml.jackson.databind.JsonNode
import org.apache.arrow.flatbuf.{Message, MessageHeader}
import org.apache.arrow.memory.util.MemoryUtil
import org.apache.spark.SparkRuntimeException
import org.apache.spark.unsafe.Platform

/**
 * The address of a server, the request to it, and limits of its answer, as the sidecar sends them. See
 * `docs/framing.md`.
 */
final class Server(request: JsonNode) {
  val host: String = request.get("host").asText
  val port: Int = request.get("port").asInt
  val timeout: Long = (request.get("timeout").asDouble * 1000).toLong // milliseconds
  val connectTimeout: Long = (request.get("connect_timeout").asDouble * 1000).toLong
  val wantData: Long = java.lang.Long.parseUnsignedLong(request.get("want_data").asText)
  val identifier: Array[Byte] = request.get("identifier").binaryValue
  val maxMetadata: Long = request.get("max_metadata").asLong
  val maxBody: Long = request.get("max_body").asLong

  /** Return an exception that names the server. */
  def failure(reason: String): SparkRuntimeException = Failure(s"the server at tcp://$host:$port $reason")
  def connectTimeoutFailure: SparkRuntimeException = new ConnectTimeout(
    s"connecting to the tcp server $host:$port: no answer in time; open that port in the firewall of its host")
  /** Throw an exception that says how the server breaks the protocol. */
  def reject(reason: String): Nothing = throw failure(s"broke the protocol: $reason")
}

/** The exception for a server that did not accept the connection in time. */
final class ConnectTimeout(message: String) extends DatasetFailure(message)

/** A range of `size` bytes in a buffer. Its `address` is valid until the buffer goes back to its pool. */
final case class Slice(memory: Memory, offset: Long, size: Long) {
  def address: Long = memory.address + offset
  /** Return the bytes as buffers of at most 1 GiB each, since a ByteBuffer cannot hold 2 GiB. */
  def byteBuffers: Iterator[ByteBuffer] = Iterator.iterate(0L)(_ + Wire.MaxRead).takeWhile(_ < size)
    .map(from => MemoryUtil.directBuffer(address + from, math.min(size - from, Wire.MaxRead).toInt))
  def byteBuffer: ByteBuffer = MemoryUtil.directBuffer(address, size.toInt).order(ByteOrder.LITTLE_ENDIAN)
}

/**
 * The buffers of one stream, which `close` frees. One released buffer is kept for the next body, because fresh memory
 * costs as much as a copy.
 */
final class BufferPool extends AutoCloseable {
  private val allocated = mutable.Set.empty[Memory]
  private var spare: Option[Memory] = None

  /** Return a slice of `size` bytes in a buffer with one reference. */
  def acquire(size: Long): Slice = {
    val memory = spare.filter(_.isReusableFor(size)).getOrElse(new Memory)
    if (!allocated.contains(memory)) {
      memory.allocate(size + size / 4 + 8)
      allocated += memory
    }
    spare = spare.filter(_ != memory)
    memory.references = 1
    Slice(memory, 0, size)
  }

  /** Drop a reference to the buffer of `slice`. After the last one, the buffer may be reused. */
  def release(slice: Slice): Unit = {
    slice.memory.references -= 1
    if (slice.memory.references == 0) {
      spare.foreach(free)
      spare = Some(slice.memory)
    }
  }

  private def free(memory: Memory): Unit = if (allocated.remove(memory)) memory.free()

  override def close(): Unit = allocated.toSeq.foreach(free)
}

/** A frame that was received. The receiver releases `payload`. */
final case class Frame(kind: Int, tag: Long, payload: Slice)

/** A TCP connection to `server`. Every wait ends after the time that the server may be silent. */
final class Wire(server: Server, pool: BufferPool) extends AutoCloseable {
  private val channel = SocketChannel.open()
  private val selector = try Selector.open() catch { case error: IOException => channel.close(); throw error }
  private val readAhead = pool.acquire(Wire.ReadAheadSize)
  // The part of `readAhead` that has been received and not been used.
  private val unread = readAhead.byteBuffer.limit(0)
  private val frameHeader = pool.acquire(16)
  private val frameHeaderBuffer = frameHeader.byteBuffer

  /** Connect and send the request. Throws if the server does not answer in time, or speaks another protocol. */
  def request(): Unit = {
    channel.configureBlocking(false)
    channel.setOption[java.lang.Boolean](StandardSocketOptions.TCP_NODELAY, true)
    channel.register(selector, 0)
    if (!channel.connect(new InetSocketAddress(server.host, server.port)))
      do if (!waitUntilReady(SelectionKey.OP_CONNECT, server.connectTimeout)) throw server.connectTimeoutFailure
      while (!channel.finishConnect())
    val length = server.identifier.length
    val request = ByteBuffer.allocate(24 + Wire.padded(length).toInt).order(ByteOrder.LITTLE_ENDIAN)
    request.putLong(Wire.Preamble).putLong(Wire.Tagged.toLong << 56 | length).putLong(server.wantData)
    request.put(server.identifier).rewind()
    while (request.hasRemaining) if (channel.write(request) == 0) await(SelectionKey.OP_WRITE)
    val greeting = frameHeader.copy(size = 8)
    if (!fill(greeting, mayEnd = true)) throw server.failure("closed the connection")
    if (frameHeaderBuffer.getLong(0) != Wire.Preamble) server.reject("its preamble is of another protocol or version")
  }

  /** Wait until the operation is possible. Throws if the server is silent for too long. */
  private def await(operation: Int): Unit =
    if (!waitUntilReady(operation, server.timeout))
      throw server.failure(s"has been silent for ${server.timeout / 1000.0} s")

  /**
   * Wait for at most `timeout` milliseconds, and return whether the operation is possible. Throws if Spark has
   * interrupted the thread.
   */
  private def waitUntilReady(operation: Int, timeout: Long): Boolean = {
    channel.keyFor(selector).interestOps(operation)
    // In an interrupted thread, each call returns at once, so the state must be checked.
    val ready = selector.select(timeout)
    if (Thread.currentThread.isInterrupted) throw new ClosedByInterruptException
    selector.selectedKeys.clear()
    ready > 0
  }

  /** Read at least one byte into `into`. Returns the number of bytes, or -1 at the end. */
  private def readSome(into: ByteBuffer): Int = {
    var count = channel.read(into)
    while (count == 0) {
      await(SelectionKey.OP_READ)
      count = channel.read(into)
    }
    count
  }

  /**
   * Fill `slice` with received bytes. Returns false if `mayEnd` is set and the stream ends before the first byte.
   * Throws if it ends later.
   */
  private def fill(slice: Slice, mayEnd: Boolean = false): Boolean = {
    var filled, count = 0L
    while (filled < slice.size && count >= 0) {
      val remaining = slice.size - filled
      if (unread.hasRemaining) {
        count = math.min(unread.remaining, remaining)
        Platform.copyMemory(null, readAhead.address + unread.position, null, slice.address + filled, count)
        unread.position(unread.position + count.toInt)
        filled += count
      } else if (remaining >= Wire.ReadAheadSize) {
        count = readSome(MemoryUtil.directBuffer(slice.address + filled, math.min(remaining, Wire.MaxRead).toInt))
        filled += math.max(count, 0)
      } else {
        count = readSome(unread.clear())
        unread.flip()
      }
    }
    if (count < 0 && !(mayEnd && filled == 0)) throw server.failure("ended the connection within a message")
    count >= 0
  }

  /**
   * Return the next frame, or None if the server has closed the connection. Throws if the frame has more than
   * `maxLength(kind, tag)` bytes.
   */
  def receive(maxLength: (Int, Long) => Long): Option[Frame] = if (!fill(frameHeader, mayEnd = true)) None else {
    val (word, tag) = (frameHeaderBuffer.getLong(0), frameHeaderBuffer.getLong(8))
    val (kind, length) = ((word >>> 56).toInt, word & (1L << 56) - 1)
    if (length > maxLength(kind, tag)) server.reject(s"a frame of kind $kind has $length bytes, which is too large")
    if (kind != Wire.Tagged && tag != 0) server.reject(s"a frame of kind $kind has the tag $tag")
    val payload = pool.acquire(Wire.padded(length))
    fill(payload)
    Some(Frame(kind, tag, payload.copy(size = length)))
  }

  override def close(): Unit = {
    channel.close()
    selector.close()
  }
}

object Wire {
  val Untagged = 1
  val Tagged = 2
  val Abort = 4
  val Run = 5
  private val Preamble = 0x0100434f53534944L // "DISSOC", 0 and the version
  private val ReadAheadSize = 1L << 16
  val MaxRead = 1L << 30

  /** Return `length` rounded up to a multiple of 8. */
  def padded(length: Long): Long = (length + 7) & ~7L
}

/** Headers or bodies that arrived before their turn, by sequence number. Throws if they exceed `limit` bytes. */
final class PendingSlices(server: Server, limit: Long) {
  private val slices = mutable.HashMap.empty[Int, Slice]
  private var size = 0L

  def add(number: Int, slice: Slice): Unit = {
    if (size > limit || slices.size >= PendingSlices.MaxCount)
      server.reject("too many messages arrived out of order, and those before them are missing")
    if (slices.put(number, slice).isDefined) server.reject(s"message $number was sent twice")
    size += slice.size + PendingSlices.Overhead
  }

  def get(number: Int): Option[Slice] = slices.get(number)
  def numbers: Iterable[Int] = slices.keys
  def remove(number: Int): Slice = {
    val slice = slices.remove(number).get
    size -= slice.size + PendingSlices.Overhead
    slice
  }
}

object PendingSlices {
  // The entries lie in Java's heap, which is small.
  private val MaxCount = 1 << 20
  // An estimate of the bytes that one entry takes beside its content.
  private val Overhead = 512
}

/** The messages of a stream in order, whose frames may arrive in any order. */
final class Messages(server: Server) extends AutoCloseable {
  private val pool = new BufferPool
  private val wire = new Wire(server, pool)
  private val headers = new PendingSlices(server, math.max(server.maxMetadata, 1L << 28))
  private val bodies = new PendingSlices(server, math.max(server.maxBody, 1L << 32))
  // Each step handles one message of the run frame that was received last.
  private var runSteps = Iterator.empty[Unit]
  private var next = 0
  private var endNumber: Option[Int] = None
  private var delivered: Seq[Slice] = Nil

  def request(): Unit = wire.request()

  /**
   * Return the flatbuffer and the body of the next message, or None at the end of the stream. Both are valid until
   * the next call; those of the last message until `close`.
   */
  def receive(): Option[(Slice, Option[Slice])] = {
    while (!endNumber.contains(next) && !isNextComplete) if (runSteps.hasNext) runSteps.next() else processFrame()
    Option.when(!endNumber.contains(next)) {
      val header = headers.remove(next)
      val body = if (hasBody(header)) Some(bodies.remove(next)) else None
      if (body.exists(_.size != Messages.parse(header).bodyLength))
        server.reject(s"the body of message $next differs in length from its metadata")
      releaseDelivered()
      delivered = header +: body.toSeq
      next += 1
      (header, body)
    }
  }

  private def isNextComplete: Boolean =
    headers.get(next).exists(header => bodies.get(next).isDefined || !hasBody(header))
  
  private def hasBody(header: Slice): Boolean = Messages.parse(header).headerType != MessageHeader.Schema

  /** Release the message that was delivered last. The end of the stream does not, since its reader may still use it. */
  private def releaseDelivered(): Unit = {
    delivered.foreach(pool.release)
    delivered = Nil
  }

  private def processFrame(): Unit = wire.receive(maxLength) match {
    case None => throw server.failure("ended the connection before the end of the stream")
    case Some(Frame(Wire.Untagged, _, message)) => handleUntagged(message)
    case Some(Frame(Wire.Tagged, tag, message)) => handleTagged(tag, message)
    case Some(Frame(Wire.Run, _, messages)) => runSteps = unpackRun(messages)
    case Some(Frame(_, _, reason)) =>
      // The reason ends with a zero byte, after which a code follows.
      val text = new String(Vectors.copyBytes(reason.address, reason.size.toInt), UTF_8).takeWhile(_ != '\u0000')
      throw server.failure(s"gave up: ${text.take(Messages.MaxReason).replaceAll("\\p{Cntrl}", " ")}")
  }

  private def maxLength(kind: Int, tag: Long): Long = kind match {
    case Wire.Untagged => server.maxMetadata + 5
    case Wire.Tagged =>
      // The next body may reuse the buffer of the last one.
      releaseDelivered()
      headers.get(tag.toInt).map(Messages.parse(_).bodyLength).foldLeft(server.maxBody)(_ min _)
    case Wire.Run =>
      releaseDelivered()
      1L << 26
    case Wire.Abort => 1L << 16
    case _ => server.reject(s"a frame of kind $kind is invalid over TCP")
  }

  private def handleUntagged(message: Slice): Unit = {
    if (message.size < 5) server.reject(s"metadata has only ${message.size} bytes")
    val content = message.byteBuffer
    val number = content.getInt(1)
    content.get(0) match {
      case 1 =>
        checkExpected(number)
        headers.add(number, detachFromRun(number, Slice(message.memory, message.offset + 5, message.size - 5)))
      case 0 if message.size == 5 && number != 0 && number - next >= 0 && endNumber.isEmpty =>
        endNumber = Some(number)
        (headers.numbers ++ bodies.numbers).foreach(checkExpected)
        pool.release(message)
      case _ => server.reject("metadata of an unknown kind")
    }
  }

  private def handleTagged(tag: Long, message: Slice): Unit =
    // Over TCP, the tag's high half is 0: the body itself follows, not its address.
    if (tag >>> 32 != 0) server.reject(f"a body has the invalid tag $tag%x")
    else if (tag == 0 && message.size == 0) pool.release(message) // the schema's body
    else {
      checkExpected(tag.toInt)
      bodies.add(tag.toInt, detachFromRun(tag.toInt, message))
    }

  /**
   * Return `slice` itself, or a copy if it must wait and shares its buffer with a run. Otherwise a waiting slice
   * would keep the whole run, which `PendingSlices` does not count.
   */
  private def detachFromRun(number: Int, slice: Slice): Slice =
    if (number == next || slice.memory.references == 1) slice
    else {
      val copy = pool.acquire(slice.size)
      Platform.copyMemory(null, slice.address, null, copy.address, slice.size)
      pool.release(slice)
      copy
    }

  /** Throw if the message of this number has been delivered, or is beyond the end. Numbers wrap around after 2^32. */
  private def checkExpected(number: Int): Unit =
    if (number - next < 0 || endNumber.exists(_ - number <= 0))
      server.reject(s"message $number is out of sequence")

  /** Return the steps that handle the messages of a run frame. The last one releases the frame. */
  private def unpackRun(messages: Slice): Iterator[Unit] = {
    val content = messages.byteBuffer
    if (messages.size < 24) server.reject("a run is shorter than its header")
    val Seq(count, headerSize, bodySize) = Seq(0, 8, 16).map(content.getLong)
    val first = 24 + 8 * count
    def sum = first + Wire.padded(count * headerSize) + Wire.padded(count * bodySize)
    if (count < 1 || Seq(count, headerSize, bodySize).exists(size => size < 0 || size > messages.size) ||
        sum != messages.size)
      server.reject("the sizes in a run are inconsistent")
    val second = first + Wire.padded(count * headerSize)
    Iterator.range(0, count.toInt).map { index =>
      messages.memory.references += 2
      handleUntagged(Slice(messages.memory, messages.offset + first + index * headerSize, headerSize))
      handleTagged(content.getLong(24 + 8 * index),
        Slice(messages.memory, messages.offset + second + index * bodySize, bodySize))
      if (index == count - 1) pool.release(messages)
    }
  }

  /** Close the connection. The message that was delivered last stays valid. */
  def disconnect(): Unit = wire.close()

  /** Close the connection and free all messages. */
  override def close(): Unit = try wire.close() finally pool.close()
}

object Messages {
  private val MaxReason = 1000

  /** Return a view of the flatbuffer, valid as long as `header` is. */
  def parse(header: Slice): Message = Message.getRootAsMessage(header.byteBuffer)
}

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

/** The address of a server, the request to it, and limits of its answer, as the sidecar sends them: see docs/framing.md. */
final class Server(request: JsonNode) {
  val host: String = request.get("host").asText
  val port: Int = request.get("port").asInt
  val timeout: Long = (request.get("timeout").asDouble * 1000).toLong // milliseconds
  val connectTimeout: Long = (request.get("connect_timeout").asDouble * 1000).toLong
  val wantData: Long = java.lang.Long.parseUnsignedLong(request.get("want_data").asText)
  val identifier: Array[Byte] = request.get("identifier").binaryValue
  val maxMetadata: Long = request.get("max_metadata").asLong
  val maxBody: Long = request.get("max_body").asLong

  def failed(how: String): SparkRuntimeException = Failure(s"the server at tcp://$host:$port $how")
  def unanswered: SparkRuntimeException = new Unanswered(
    s"connecting to the tcp server $host:$port: no answer in time; open that port in the firewall of its host")
  def broke(how: String): Nothing = throw failed(s"broke the protocol: $how")
}

/** A server did not accept the connection in time. */
final class Unanswered(message: String) extends DatasetFailure(message)

/** Bytes of native memory. */
final case class Part(memory: Memory, at: Long, size: Long) {
  def address: Long = memory.address + at
  def buffers: Iterator[ByteBuffer] = Iterator.iterate(0L)(_ + Wire.MaxRead).takeWhile(_ < size)
    .map(from => MemoryUtil.directBuffer(address + from, math.min(size - from, Wire.MaxRead).toInt))
  def buffer: ByteBuffer = MemoryUtil.directBuffer(address, size.toInt).order(ByteOrder.LITTLE_ENDIAN)
}

/** The native memory of one stream. What held a body holds the next one: fresh memory costs as much as to copy. */
final class Pool extends AutoCloseable {
  private val all = mutable.Set.empty[Memory]
  private var spare: Option[Memory] = None

  def take(size: Long): Part = {
    val memory = spare.filter(_.suits(size)).getOrElse(new Memory)
    if (!all.contains(memory)) {
      memory.allocate(size + size / 4 + 8)
      all += memory
    }
    spare = spare.filter(_ != memory)
    memory.users = 1
    Part(memory, 0, size)
  }

  def give(part: Part): Unit = {
    part.memory.users -= 1
    if (part.memory.users == 0) {
      spare.foreach(free)
      spare = Some(part.memory)
    }
  }

  private def free(memory: Memory): Unit = if (all.remove(memory)) memory.free()

  override def close(): Unit = all.toSeq.foreach(free)
}

final case class Frame(kind: Int, tag: Long, payload: Part)

/** A connection, which waits for no longer than the server may be silent. */
final class Wire(server: Server, pool: Pool) extends AutoCloseable {
  private val channel = SocketChannel.open()
  private val selector = try Selector.open() catch { case error: IOException => channel.close(); throw error }
  private val ahead = pool.take(Wire.Ahead)
  private val arrived = ahead.buffer.limit(0) // and not taken yet
  private val head = pool.take(16)
  private val headBuffer = head.buffer

  /** Connects, and asks. */
  def request(): Unit = {
    channel.configureBlocking(false)
    channel.setOption[java.lang.Boolean](StandardSocketOptions.TCP_NODELAY, true)
    channel.register(selector, 0)
    if (!channel.connect(new InetSocketAddress(server.host, server.port)))
      do if (!comes(SelectionKey.OP_CONNECT, server.connectTimeout)) throw server.unanswered while (!channel.finishConnect())
    val length = server.identifier.length
    val request = ByteBuffer.allocate(24 + Wire.padded(length).toInt).order(ByteOrder.LITTLE_ENDIAN)
    request.putLong(Wire.Preamble).putLong(Wire.Tagged.toLong << 56 | length).putLong(server.wantData)
    request.put(server.identifier).rewind()
    while (request.hasRemaining) if (channel.write(request) == 0) await(SelectionKey.OP_WRITE)
    val greeting = head.copy(size = 8)
    if (!fill(greeting, mayEnd = true)) throw server.failed("closed the connection")
    if (headBuffer.getLong(0) != Wire.Preamble) server.broke("it speaks something else, or another version of it")
  }

  private def await(operation: Int): Unit =
    if (!comes(operation, server.timeout)) throw server.failed(s"has been silent for ${server.timeout / 1000.0} s")

  /** Whether the operation becomes possible within so many milliseconds. */
  private def comes(operation: Int, timeout: Long): Boolean = {
    channel.keyFor(selector).interestOps(operation)
    val ready = selector.select(timeout) // returns at once, again and again, where the task has been killed
    if (Thread.currentThread.isInterrupted) throw new ClosedByInterruptException
    selector.selectedKeys.clear()
    ready > 0
  }

  /** Some bytes; -1 at the end. */
  private def read(into: ByteBuffer): Int = {
    var count = channel.read(into)
    while (count == 0) {
      await(SelectionKey.OP_READ)
      count = channel.read(into)
    }
    count
  }

  /** Bytes for all of the part. False where none come any more, before the first of them. */
  private def fill(part: Part, mayEnd: Boolean = false): Boolean = {
    var at, count = 0L
    while (at < part.size && count >= 0) {
      val wanted = part.size - at
      if (arrived.hasRemaining) {
        count = math.min(arrived.remaining, wanted)
        Platform.copyMemory(null, ahead.address + arrived.position, null, part.address + at, count)
        arrived.position(arrived.position + count.toInt)
        at += count
      } else if (wanted >= Wire.Ahead) {
        count = read(MemoryUtil.directBuffer(part.address + at, math.min(wanted, Wire.MaxRead).toInt))
        at += math.max(count, 0)
      } else {
        count = read(arrived.clear())
        arrived.flip()
      }
    }
    if (count < 0 && !(mayEnd && at == 0)) throw server.failed("ended the connection within a message")
    count >= 0
  }

  /** The next frame; None where the server has ended. The largest that may come depends on its kind and tag. */
  def receive(largest: (Int, Long) => Long): Option[Frame] = if (!fill(head, mayEnd = true)) None else {
    val (word, tag) = (headBuffer.getLong(0), headBuffer.getLong(8))
    val (kind, length) = ((word >>> 56).toInt, word & (1L << 56) - 1)
    if (length > largest(kind, tag)) server.broke(s"a frame of kind $kind has $length bytes")
    if (kind != Wire.Tagged && tag != 0) server.broke(s"a frame of kind $kind has the tag $tag")
    val payload = pool.take(Wire.padded(length))
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
  private val Ahead = 1L << 16
  val MaxRead = 1L << 30

  def padded(length: Long): Long = (length + 7) & ~7L
}

/** Messages that wait for others, by their sequence numbers. */
final class Waiting(server: Server, limit: Long) {
  private val parts = mutable.HashMap.empty[Int, Part]
  private var size = 0L

  def add(number: Int, part: Part): Unit = {
    if (size > limit || parts.size >= Waiting.MaxCount) server.broke("too much waits for messages that do not come")
    if (parts.put(number, part).isDefined) server.broke(s"message $number came twice")
    size += part.size + Waiting.Cost
  }

  def get(number: Int): Option[Part] = parts.get(number)
  def numbers: Iterable[Int] = parts.keys
  def take(number: Int): Part = {
    val part = parts.remove(number).get
    size -= part.size + Waiting.Cost
    part
  }
}

object Waiting {
  private val MaxCount = 1 << 20 // the heap is small
  private val Cost = 512
}

/** The messages of a stream in order, whose frames may come in any. */
final class Messages(server: Server) extends AutoCloseable {
  private val pool = new Pool
  private val wire = new Wire(server, pool)
  private val headers = new Waiting(server, math.max(server.maxMetadata, 1L << 28))
  private val bodies = new Waiting(server, math.max(server.maxBody, 1L << 32))
  private var run = Iterator.empty[Unit] // which takes messages out of a frame
  private var next = 0
  private var end: Option[Int] = None
  private var current: Seq[Part] = Nil

  def request(): Unit = wire.request()

  /** The flatbuffer of the next message, and its body; both are good until another is given. None at the end. */
  def receive(): Option[(Part, Option[Part])] = {
    while (!end.contains(next) && !isHere) if (run.hasNext) run.next() else take()
    Option.when(!end.contains(next)) {
      val header = headers.take(next)
      val body = if (hasBody(header)) Some(bodies.take(next)) else None
      if (body.exists(_.size != Messages.parsed(header).bodyLength))
        server.broke(s"the body of message $next has another length")
      giveBack()
      current = header +: body.toSeq
      next += 1
      (header, body)
    }
  }

  private def isHere: Boolean = headers.get(next).exists(header => bodies.get(next).isDefined || !hasBody(header))
  private def hasBody(header: Part): Boolean = Messages.parsed(header).headerType != MessageHeader.Schema

  /** What was given last. The end of the stream takes nothing back: somebody may still look at the last message. */
  private def giveBack(): Unit = {
    current.foreach(pool.give)
    current = Nil
  }

  private def take(): Unit = wire.receive(largest) match {
    case None => throw server.failed("ended the connection before the end of the stream")
    case Some(Frame(Wire.Untagged, _, message)) => untagged(message)
    case Some(Frame(Wire.Tagged, tag, message)) => tagged(tag, message)
    case Some(Frame(Wire.Run, _, messages)) => run = apart(messages)
    case Some(Frame(_, _, reason)) =>
      val text = new String(Vectors.bytes(reason.address, reason.size.toInt), UTF_8).takeWhile(_ != '\u0000') // a code follows
      throw server.failed(s"gave up: ${text.take(Messages.MaxReason).replaceAll("\\p{Cntrl}", " ")}")
  }

  private def largest(kind: Int, tag: Long): Long = kind match {
    case Wire.Untagged => server.maxMetadata + 5
    case Wire.Tagged =>
      giveBack() // the next body may lie where the last one lay
      headers.get(tag.toInt).map(Messages.parsed(_).bodyLength).foldLeft(server.maxBody)(_ min _)
    case Wire.Run =>
      giveBack()
      1L << 26
    case Wire.Abort => 1L << 16
    case _ => server.broke(s"a frame of kind $kind")
  }

  private def untagged(message: Part): Unit = {
    if (message.size < 5) server.broke(s"metadata of ${message.size} bytes")
    val content = message.buffer
    val number = content.getInt(1)
    content.get(0) match {
      case 1 =>
        check(number)
        headers.add(number, own(number, Part(message.memory, message.at + 5, message.size - 5)))
      case 0 if message.size == 5 && number != 0 && number - next >= 0 && end.isEmpty =>
        end = Some(number)
        (headers.numbers ++ bodies.numbers).foreach(check)
        pool.give(message)
      case _ => server.broke("metadata that is none")
    }
  }

  private def tagged(tag: Long, message: Part): Unit =
    if (tag >>> 32 != 0) server.broke(f"a body with the tag $tag%x") // 0: the body itself, all that there is over TCP
    else if (tag == 0 && message.size == 0) pool.give(message) // of the schema
    else {
      check(tag.toInt)
      bodies.add(tag.toInt, own(tag.toInt, message))
    }

  /** What has to wait holds no more memory than is counted: it is taken out of its run. */
  private def own(number: Int, part: Part): Part = if (number == next || part.memory.users == 1) part else {
    val copy = pool.take(part.size)
    Platform.copyMemory(null, part.address, null, copy.address, part.size)
    pool.give(part)
    copy
  }

  /** Whether a message of this number may still come. Numbers begin anew after the last. */
  private def check(number: Int): Unit =
    if (number - next < 0 || end.exists(_ - number <= 0)) server.broke(s"there is no message $number to come")

  private def apart(messages: Part): Iterator[Unit] = {
    val content = messages.buffer
    if (messages.size < 24) server.broke("a run without a head")
    val Seq(count, headerSize, bodySize) = Seq(0, 8, 16).map(content.getLong)
    val first = 24 + 8 * count
    def sum = first + Wire.padded(count * headerSize) + Wire.padded(count * bodySize)
    if (count < 1 || Seq(count, headerSize, bodySize).exists(size => size < 0 || size > messages.size) || sum != messages.size)
      server.broke("a run that does not add up")
    val second = first + Wire.padded(count * headerSize)
    Iterator.range(0, count.toInt).map { index =>
      messages.memory.users += 2
      untagged(Part(messages.memory, messages.at + first + index * headerSize, headerSize))
      tagged(content.getLong(24 + 8 * index), Part(messages.memory, messages.at + second + index * bodySize, bodySize))
      if (index == count - 1) pool.give(messages)
    }
  }

  /** Nothing more is wanted. What was given stays. */
  def hangUp(): Unit = wire.close()

  override def close(): Unit = try wire.close() finally pool.close()
}

object Messages {
  private val MaxReason = 1000

  def parsed(header: Part): Message = Message.getRootAsMessage(header.buffer)
}

package org.apache.spark.sql.dissociated

import java.util.concurrent.atomic.LongAdder

import scala.collection.mutable

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.unsafe.Platform

/**
 * An owner of native memory, made of parts that also own some. The addresses in it are valid until `clear` or `free`.
 */
abstract class NativeOwner {
  private val parts = mutable.ArrayBuffer.empty[NativeOwner]

  /** Add `part` to the parts that `clear` and `free` reach, and return it. */
  final protected def own[T <: NativeOwner](part: T): T = {
    parts += part
    part
  }

  /** Discard the content. Most of the memory stays allocated for the next content. */
  def clear(): Unit = parts.foreach(_.clear())

  /** Free the memory. The owner is empty then, and can be used again. */
  def free(): Unit = parts.foreach(_.free())
}

/** A growable buffer of native memory. Growing may move it, so an `address` is valid until the next `reserve`. */
final class Memory extends NativeOwner {
  private var capacity = 0L
  var address = 0L
  /** The number of messages in this buffer that are in use. See `BufferPool`. */
  var references = 0

  /** Grow the buffer to a capacity of at least `size` bytes, and keep its content. Throws if no memory is left. */
  @inline def reserve(size: Long): Unit = if (size > capacity) grow(size)

  private def grow(size: Long): Unit = {
    if (size > Memory.MaxCapacity)
      throw Failure(s"a column of a batch cannot hold $size bytes: the values of one row are too large")
    allocate(math.min(Memory.MaxCapacity, math.max(2 * capacity, math.max(size, Memory.MinCapacity))))
  }

  /** Set the capacity to `size` bytes, which must exceed the present one, and keep the content. */
  def allocate(size: Long): Unit = {
    address = try Platform.reallocateMemory(address, capacity, size)
      catch { case _: OutOfMemoryError => throw Failure(s"there is no memory for a buffer of $size bytes") }
    Memory.total.add(size - capacity)
    capacity = size
  }

  /** Return whether `size` bytes fit, and fill at least a quarter of the capacity. */
  def isReusableFor(size: Long): Boolean = size <= capacity && size >= capacity / 4

  /** Fill the buffer with zeros from `size` to `paddedSize`, and return `paddedSize`. */
  def padWithZeros(size: Long, paddedSize: Long): Long = {
    reserve(paddedSize)
    Platform.setMemory(address + size, 0, paddedSize - size)
    paddedSize
  }

  /** Free the buffer if a large row has made it larger than what is worth keeping. */
  override def clear(): Unit = if (capacity > Memory.MaxKept) free()

  override def free(): Unit = if (address != 0) {
    Platform.freeMemory(address)
    Memory.total.add(-capacity)
    address = 0
    capacity = 0
  }
}

object Memory {
  // The system provides pages when they are first written, so unused capacity costs less than growing.
  private val MinCapacity = 1L << 16
  private val MaxKept = 1L << 26
  private val MaxCapacity = Int.MaxValue - 63L // a multiple of 64
  // The call of `copyMemory` takes longer than a loop over this many bytes.
  private val MaxWordCopy = 64
  private val total = new LongAdder

  /** Return the total capacity of all buffers of this JVM, in bytes. */
  def allocated: Long = total.sum

  /**
   * Copy `size` bytes to `to`. A short copy moves whole words: it reads and writes up to 7 bytes beyond the end,
   * which must be within the buffers.
   */
  @inline def copy(base: AnyRef, from: Long, to: Long, size: Int): Unit =
    if (size > MaxWordCopy) Platform.copyMemory(base, from, null, to, size)
    else {
      var copied = 0
      while (copied < size) {
        Platform.putLong(null, to + copied, Platform.getLong(base, from + copied))
        copied += 8
      }
    }
}

object Loop {
  /** Call `body` for each number below `count`. The compiler inlines the loop and the body, so it costs no calls. */
  @inline def over(count: Int)(body: Int => Unit): Unit = {
    var index = 0
    while (index < count) {
      body(index)
      index += 1
    }
  }
}

/**
 * A buffer of Spark's rows, from which columns are filled one after the other. That takes much less time than filling
 * all columns for each row.
 */
final class RowBuffer(fields: Int) extends NativeOwner {
  private val data = own(new Memory)
  private val ends = new Array[Long](RowBuffer.MaxRows + 1)
  private val bitSetBytes = UnsafeRow.calculateBitSetWidthInBytes(fields)
  private val nullBits = new Array[Long](bitSetBytes / 8)
  // The number of rows whose null bits are in `nullBits`.
  private var scannedRows = 0
  private val row = new UnsafeRow(fields)
  var count = 0
  var size = 0L // bytes

  /** Copy `row` into the buffer. Returns false if it is full; an empty buffer accepts a row of any size. */
  def add(row: UnsafeRow): Boolean = {
    val length = row.getSizeInBytes
    val hasRoom = count < RowBuffer.MaxRows && size + length <= RowBuffer.MaxBytes || count == 0
    if (hasRoom) {
      if (count == 0) data.reserve(math.max(length, RowBuffer.MaxBytes) + 8L)
      Memory.copy(row.getBaseObject, row.getBaseOffset, data.address + size, length)
      size += length
      count += 1
      ends(count) = size
    }
    hasRoom
  }

  /** Return the address of a row. */
  @inline def address(index: Int): Long = data.address + ends(index)

  /** Return whether a field is null in any of the rows. */
  def hasNulls(ordinal: Int): Boolean = {
    while (scannedRows < count) {
      Loop.over(nullBits.length)(index => nullBits(index) |= Platform.getLong(null, address(scannedRows) + 8L * index))
      scannedRows += 1
    }
    (nullBits(ordinal >> 6) >> (ordinal & 63) & 1) != 0
  }

  @inline def isNullAt(index: Int, ordinal: Int): Boolean =
    (Platform.getLong(null, address(index) + (ordinal >> 6 << 3)) >> (ordinal & 63) & 1) != 0

  /**
   * Return the 8-byte word of a field: a value, or an offset within the row in the high half and a size in the low
   * half; 0 if the field is null.
   */
  @inline def word(index: Int, ordinal: Int): Long = Platform.getLong(null, address(index) + bitSetBytes + 8L * ordinal)

  /** Return a row. It is valid until the next call. */
  def apply(index: Int): UnsafeRow = {
    row.pointTo(null, address(index), (ends(index + 1) - ends(index)).toInt)
    row
  }

  override def clear(): Unit = {
    super.clear()
    count = 0
    size = 0
    scannedRows = 0
    java.util.Arrays.fill(nullBits, 0)
  }
}

object RowBuffer {
  private val MaxRows = 256
  // The rows stay in the processor's cache.
  private val MaxBytes = 1 << 17
}

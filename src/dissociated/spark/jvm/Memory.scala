package org.apache.spark.sql.dissociated

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.unsafe.Platform

/** What lies in native memory: `clear` begins anew, and `free` gives the memory back. */
trait Native {
  def clear(): Unit
  def free(): Unit
}

/** Bytes, which become more. */
final class Memory extends Native {
  private var capacity = 0L
  var address = 0L

  /** Room for so many bytes; what is there stays. */
  @inline def ensure(size: Long): Unit = if (size > capacity) grow(size)

  private def grow(size: Long): Unit = {
    if (size > Memory.Max) throw Failure(s"a batch cannot hold the $size bytes that one row adds to a column")
    val larger = math.min(Memory.Max, math.max(2 * capacity, math.max(size, Memory.Least)))
    address =
      if (address == 0) Platform.allocateMemory(larger) else Platform.reallocateMemory(address, capacity, larger)
    capacity = larger
  }

  /** What one large row has taken is not kept. */
  override def clear(): Unit = if (capacity > Memory.Kept) free()

  override def free(): Unit = if (address != 0) {
    Platform.freeMemory(address)
    address = 0
    capacity = 0
  }
}

object Memory {
  private val Least = 1L << 16 // untouched, it costs nothing; to become more often does
  private val Kept = 1L << 26
  private val Max = Int.MaxValue - 64L
}

/** Some of Spark's rows: it takes much less time to go through them one column after the other. */
final class RowBuffer(fields: Int) extends Native {
  private val data = new Memory
  private val ends = new Array[Long](RowBuffer.Max + 1)
  private val bits = UnsafeRow.calculateBitSetWidthInBytes(fields)
  private val row = new UnsafeRow(fields)
  var count = 0

  def isFull: Boolean = count == RowBuffer.Max || ends(count) >= RowBuffer.MaxBytes

  def add(row: UnsafeRow): Unit = {
    val used = ends(count)
    val size = row.getSizeInBytes
    data.ensure(used + size + 8) // a word may be read wherever one of its bytes may be
    Platform.copyMemory(row.getBaseObject, row.getBaseOffset, null, data.address + used, size)
    count += 1
    ends(count) = used + size
  }

  /** Where a row lies. */
  @inline def at(index: Int): Long = data.address + ends(index)

  @inline def isNullAt(index: Int, ordinal: Int): Boolean =
    (Platform.getLong(null, at(index) + (ordinal >> 6 << 3)) >> (ordinal & 63) & 1) != 0

  /** What it has for a field: a value, or where that begins and how long it is. */
  @inline def word(index: Int, ordinal: Int): Long = Platform.getLong(null, at(index) + bits + 8L * ordinal)

  /** One of them, until another is asked for. */
  def apply(index: Int): UnsafeRow = {
    row.pointTo(null, at(index), (ends(index + 1) - ends(index)).toInt)
    row
  }

  override def clear(): Unit = {
    count = 0
    data.clear()
  }

  override def free(): Unit = data.free()
}

object RowBuffer {
  private val Max = 256
  private val MaxBytes = 1 << 17 // so that they stay in the processor's cache
}

package org.apache.spark.sql.dissociated

import java.util.concurrent.atomic.LongAdder

import scala.collection.mutable

import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.unsafe.Platform

/** What lies in native memory, in its parts: `clear` begins anew, and `free` gives the memory back. */
abstract class Native {
  private val parts = mutable.ArrayBuffer.empty[Native]

  final protected def own[T <: Native](part: T): T = {
    parts += part
    part
  }

  def clear(): Unit = parts.foreach(_.clear())
  def free(): Unit = parts.foreach(_.free())
}

/** Bytes, which become more. */
final class Memory extends Native {
  private var capacity = 0L
  var address = 0L
  /** How many parts of it somebody may look at. */
  var users = 0

  /** Room for so many bytes; what is there stays. */
  @inline def ensure(size: Long): Unit = if (size > capacity) grow(size)

  private def grow(size: Long): Unit = {
    if (size > Memory.Max) throw Failure(s"a batch cannot hold the $size bytes that one row adds to a column")
    allocate(math.min(Memory.Max, math.max(2 * capacity, math.max(size, Memory.Least))))
  }

  /** So many bytes, which are more than now. */
  def allocate(size: Long): Unit = {
    address = try Platform.reallocateMemory(address, capacity, size)
      catch { case _: OutOfMemoryError => throw Failure(s"there is no memory for $size bytes") }
    Memory.sizes.add(size - capacity)
    capacity = size
  }

  /** Whether so many bytes fit, and fill a part of it that is worth keeping it for. */
  def suits(size: Long): Boolean = size <= capacity && size >= capacity / 4

  /** Zeros from `size` on up to `whole`, which it gives back. */
  def fill(size: Long, whole: Long): Long = {
    ensure(whole)
    Platform.setMemory(address + size, 0, whole - size)
    whole
  }

  /** What one large row has taken is not kept. */
  override def clear(): Unit = if (capacity > Memory.Kept) free()

  override def free(): Unit = if (address != 0) {
    Platform.freeMemory(address)
    Memory.sizes.add(-capacity)
    address = 0
    capacity = 0
  }
}

object Memory {
  private val Least = 1L << 16 // untouched, it costs nothing; to become more often does
  private val Kept = 1L << 26
  private val Max = Int.MaxValue - 63L // a multiple of 64
  private val Call = 64 // bytes: to call what copies them takes longer
  private val sizes = new LongAdder

  /** Bytes that all of them have. */
  def allocated: Long = sizes.sum

  /** Copies bytes, by whole words if they are few: up to 7 more are read and written. */
  @inline def copy(base: AnyRef, from: Long, to: Long, size: Int): Unit =
    if (size > Call) Platform.copyMemory(base, from, null, to, size)
    else {
      var copied = 0
      while (copied < size) {
        Platform.putLong(null, to + copied, Platform.getLong(base, from + copied))
        copied += 8
      }
    }
}

object Loop {
  /** For each number below `count`. It is compiled into where it stands, as is what it does. */
  @inline def over(count: Int)(body: Int => Unit): Unit = {
    var index = 0
    while (index < count) {
      body(index)
      index += 1
    }
  }
}

/** Some of Spark's rows: it takes much less time to go through them one column after the other. */
final class RowBuffer(fields: Int) extends Native {
  private val data = own(new Memory)
  private val ends = new Array[Long](RowBuffer.Max + 1)
  private val bits = UnsafeRow.calculateBitSetWidthInBytes(fields)
  private val nulls = new Array[Long](bits / 8)
  private var scanned = 0 // rows whose nulls are in there
  private val row = new UnsafeRow(fields)
  var count = 0
  var size = 0L // bytes

  /** False where there is no room for one more. One that is larger than all room comes alone. */
  def add(row: UnsafeRow): Boolean = {
    val length = row.getSizeInBytes
    val fits = count < RowBuffer.Max && size + length <= RowBuffer.MaxBytes || count == 0
    if (fits) {
      if (count == 0) data.ensure(math.max(length, RowBuffer.MaxBytes) + 8L)
      Memory.copy(row.getBaseObject, row.getBaseOffset, data.address + size, length)
      size += length
      count += 1
      ends(count) = size
    }
    fits
  }

  /** Where a row lies. */
  @inline def at(index: Int): Long = data.address + ends(index)

  /** Whether a field is null in any of them. */
  def hasNulls(ordinal: Int): Boolean = {
    while (scanned < count) {
      Loop.over(nulls.length)(index => nulls(index) |= Platform.getLong(null, at(scanned) + 8L * index))
      scanned += 1
    }
    (nulls(ordinal >> 6) >> (ordinal & 63) & 1) != 0
  }

  @inline def isNullAt(index: Int, ordinal: Int): Boolean =
    (Platform.getLong(null, at(index) + (ordinal >> 6 << 3)) >> (ordinal & 63) & 1) != 0

  /** What it has for a field: a value, or where that begins and how long it is; 0 for null. */
  @inline def word(index: Int, ordinal: Int): Long = Platform.getLong(null, at(index) + bits + 8L * ordinal)

  /** One of them, until another is asked for. */
  def apply(index: Int): UnsafeRow = {
    row.pointTo(null, at(index), (ends(index + 1) - ends(index)).toInt)
    row
  }

  override def clear(): Unit = {
    super.clear()
    count = 0
    size = 0
    scanned = 0
    java.util.Arrays.fill(nulls, 0)
  }
}

object RowBuffer {
  private val Max = 256
  private val MaxBytes = 1 << 17 // so that they stay in the processor's cache
}

package org.apache.spark.sql.dissociated

import org.apache.spark.sql.catalyst.expressions.SpecializedGetters
import org.apache.spark.unsafe.Platform

/** Where strings or lists begin, and the last of them ends. */
final class Ends extends Native {
  private val offsets = new Memory
  private var count = 0

  clear()

  /** The next one ends there. */
  def add(end: Long): Unit = {
    if (end < last || end > Int.MaxValue) throw Failure(s"a batch cannot hold the $end values of lists of one row")
    offsets.ensure(4 * (count + 2L))
    count += 1
    Platform.putInt(null, offsets.address + 4L * count, end.toInt)
  }

  @inline def apply(row: Int): Int = Platform.getInt(null, offsets.address + 4L * row)
  def last: Int = this(count)
  def size: Long = 4 * (count + 1L)
  def describe(layout: Layout): Unit = layout.buffer(offsets.address, size)

  override def clear(): Unit = {
    offsets.clear()
    count = 0
    offsets.ensure(4)
    Platform.putInt(null, offsets.address, 0)
  }

  override def free(): Unit = offsets.free()
}

/** Strings or binaries. */
final class BytesColumn(strings: Boolean, ends: Ends = new Ends, data: Memory = new Memory)
    extends Column(ends, data) {
  private def bytes = data
  private def offsets = ends

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    if (strings) {
      val value = from.getUTF8String(ordinal)
      append(value.getBaseObject, value.getBaseOffset, value.numBytes)
    } else {
      val value = from.getBinary(ordinal)
      append(value, Platform.BYTE_ARRAY_OFFSET, value.length)
    }

  /** By whole words: each value is padded in a row, and what that adds here the next value is written over. */
  override def take(from: RowBuffer, ordinal: Int): Unit = {
    var index = 0
    while (index < from.count) {
      if (from.isNullAt(index, ordinal)) putNull()
      else {
        val word = from.word(index, ordinal)
        val size = word.toInt
        val at = from.at(index) + (word >>> 32)
        val to = room(size)
        var copied = 0
        if (size > BytesColumn.Call) Platform.copyMemory(null, at, null, to, size)
        else while (copied < size) {
          Platform.putLong(null, to + copied, Platform.getLong(null, at + copied))
          copied += 8
        }
        ends.add(ends.last.toLong + size)
        added()
      }
      index += 1
    }
  }

  override protected def addCopy(from: Column, row: Int): Unit = {
    val other = from.asInstanceOf[BytesColumn]
    append(null, other.bytes.address + other.offsets(row), other.offsets(row + 1) - other.offsets(row))
  }

  override protected def addEmpty(): Unit = ends.add(ends.last)

  /** Where the next value of so many bytes goes. A word may be read and written wherever one of its bytes may be. */
  @inline private def room(size: Int): Long = {
    data.ensure(ends.last + 8L + size)
    data.address + ends.last
  }

  private def append(base: AnyRef, from: Long, size: Int): Unit = {
    Platform.copyMemory(base, from, null, room(size), size)
    ends.add(ends.last.toLong + size)
  }

  /** Known where values are short: to compare others takes as long as to write them. */
  override def extremes(): Option[(Int, Int)] = if (ends.last > BytesColumn.MeanForBounds * length) None else {
    var leastWord, mostWord = 0L
    var (least, most, row) = (-1, -1, 0)
    while (row < length) {
      if (isValid(row)) {
        val word = firstWord(row)
        if (least < 0 || word < leastWord || word == leastWord && isLess(row, least)) {
          least = row
          leastWord = word
        }
        if (most < 0 || word > mostWord || word == mostWord && isLess(most, row)) {
          most = row
          mostWord = word
        }
      }
      row += 1
    }
    if (least < 0 || math.max(size(least), size(most)) > BytesColumn.MaxBound) None else Some((least, most))
  }

  @inline private def size(row: Int): Int = ends(row + 1) - ends(row)

  /** The first bytes of a value: where two such numbers differ, values are in the order of these. */
  @inline private def firstWord(row: Int): Long = {
    val unused = 64 - 8 * math.min(size(row), 8) // bits
    val word = if (unused == 64) 0 else java.lang.Long.reverseBytes(Platform.getLong(null, data.address + ends(row)))
    (word >>> unused << unused) ^ Long.MinValue // which compares without a sign
  }

  override protected def isLess(row: Int, other: Int): Boolean = {
    val (from, otherFrom) = (data.address + ends(row), data.address + ends(other))
    val (size, otherSize) = (ends(row + 1) - ends(row), ends(other + 1) - ends(other))
    val both = math.min(size, otherSize)
    var index = 0
    while (index <= both - 8) {
      val (word, other) = (Platform.getLong(null, from + index), Platform.getLong(null, otherFrom + index))
      if (word != other)
        return java.lang.Long.compareUnsigned(java.lang.Long.reverseBytes(word), java.lang.Long.reverseBytes(other)) < 0
      index += 8
    }
    while (index < both) {
      val difference = (Platform.getByte(null, from + index) & 0xff) - (Platform.getByte(null, otherFrom + index) & 0xff)
      if (difference != 0) return difference < 0
      index += 1
    }
    size < otherSize
  }

  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    layout.buffer(data.address, ends.last)
  }
}

object BytesColumn {
  private val Call = 64 // bytes: to call what copies them takes longer
  private val MeanForBounds = 16L // bytes
  private val MaxBound = 256
}

final class ListColumn(values: Column, ends: Ends = new Ends) extends Column(values, ends) {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val array = from.getArray(ordinal)
    val count = array.numElements
    var index = 0
    while (index < count) {
      values.put(array, index)
      index += 1
    }
    ends.add(values.length)
  }

  override protected def addEmpty(): Unit = ends.add(ends.last)
  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    values.describe(layout)
  }
}

/** A list of structs of a key and a value, as Arrow has it. */
final class MapColumn(keys: Column, values: Column, ends: Ends = new Ends) extends Column(keys, values, ends) {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val map = from.getMap(ordinal)
    val (key, value) = (map.keyArray, map.valueArray)
    for (index <- 0 until map.numElements) {
      keys.put(key, index)
      values.put(value, index)
    }
    ends.add(keys.length)
  }

  override protected def addEmpty(): Unit = ends.add(ends.last)
  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    layout.array(keys.length, 0)
    layout.buffer(0, 0)
    keys.describe(layout)
    values.describe(layout)
  }
}

final class StructColumn(fields: Array[Column], nullable: Array[Boolean]) extends Column(fields: _*) {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val struct = from.getStruct(ordinal, fields.length)
    for (index <- fields.indices) fields(index).put(struct, index)
  }

  override protected def addEmpty(): Unit =
    for (index <- fields.indices) if (nullable(index)) fields(index).putNull() else fields(index).putEmpty()

  override protected def describeParts(layout: Layout): Unit = fields.foreach(_.describe(layout))
}

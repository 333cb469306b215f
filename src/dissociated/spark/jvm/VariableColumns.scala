package org.apache.spark.sql.dissociated

import org.apache.spark.sql.catalyst.expressions.SpecializedGetters
import org.apache.spark.unsafe.Platform

/** Where strings or lists begin, and the last of them ends. */
final class Ends extends Native {
  private val offsets = own(new Memory)
  private var count = 0
  var last = 0

  /** The next one ends there. */
  def add(end: Long): Unit = {
    if (end < last || end > Int.MaxValue) throw Failure(s"a batch cannot hold the $end values of lists of one row")
    offsets.ensure(4 * (count + 2L))
    count += 1
    last = end.toInt
    Platform.putInt(null, offsets.address + 4L * count, last)
  }

  def describe(layout: Layout): Unit = {
    offsets.ensure(4)
    Platform.putInt(null, offsets.address, 0) // where the first begins
    layout.buffer(offsets, 4 * (count + 1L))
  }

  override def clear(): Unit = {
    super.clear()
    count = 0
    last = 0
  }
}

/** Strings or binaries. */
final class BytesColumn(strings: Boolean) extends Column {
  private val ends = own(new Ends)
  private val data = own(new Memory)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    if (strings) {
      val value = from.getUTF8String(ordinal)
      append(value.getBaseObject, value.getBaseOffset, value.numBytes)
    } else {
      val value = from.getBinary(ordinal)
      append(value, Platform.BYTE_ARRAY_OFFSET, value.length)
    }

  private def append(base: AnyRef, from: Long, size: Int): Unit = {
    Platform.copyMemory(base, from, null, room(size), size)
    ends.add(ends.last.toLong + size)
  }

  /** By whole words: each value is padded in a row, and what that adds here the next value is written over. */
  override def take(from: RowBuffer, ordinal: Int): Unit = {
    val nulls = from.hasNulls(ordinal)
    Loop.over(from.count) { index =>
      val word = if (nulls && from.isNullAt(index, ordinal)) 0 else from.word(index, ordinal)
      val size = word.toInt
      Memory.copy(null, from.at(index) + (word >>> 32), room(size), size)
      ends.add(ends.last.toLong + size)
    }
    added(from, ordinal)
  }

  /** Where the next value of so many bytes goes. A word may be read and written wherever one of its bytes may be. */
  @inline private def room(size: Int): Long = {
    data.ensure(ends.last + 8L + size)
    data.address + ends.last
  }

  override protected def addEmpty(): Unit = ends.add(ends.last)

  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    layout.buffer(data, ends.last)
  }
}

final class ListColumn(values: Column) extends Column {
  private val ends = own(new Ends)
  own(values)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val array = from.getArray(ordinal)
    Loop.over(array.numElements)(index => values.put(array, index))
    ends.add(values.length)
  }

  override protected def addEmpty(): Unit = ends.add(ends.last)
  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    values.describe(layout)
  }
}

/** A list of structs of a key and a value, as Arrow has it. */
final class MapColumn(keys: Column, values: Column) extends Column {
  private val ends = own(new Ends)
  own(keys)
  own(values)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val map = from.getMap(ordinal)
    val (key, value) = (map.keyArray, map.valueArray)
    Loop.over(map.numElements) { index =>
      keys.put(key, index)
      values.put(value, index)
    }
    ends.add(keys.length)
  }

  override protected def addEmpty(): Unit = ends.add(ends.last)
  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    layout.array(keys.length, 0)
    layout.buffer(new Memory, 0)
    keys.describe(layout)
    values.describe(layout)
  }
}

final class StructColumn(fields: Array[Column], nullable: Array[Boolean]) extends Column {
  fields.foreach(own(_))

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val struct = from.getStruct(ordinal, fields.length)
    Loop.over(fields.length)(index => fields(index).put(struct, index))
  }

  override protected def addEmpty(): Unit =
    for (index <- fields.indices) if (nullable(index)) fields(index).putNull() else fields(index).putEmpty()

  override protected def describeParts(layout: Layout): Unit = fields.foreach(_.describe(layout))
}

package org.apache.spark.sql.dissociated

import org.apache.spark.sql.catalyst.expressions.{SpecializedGetters, UnsafeRow}
import org.apache.spark.sql.types._
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

/** Values of one type, taken from Spark's rows into the buffers of an Arrow array. */
abstract class Column(parts: Native*) extends Native {
  private val validity = new Memory
  private var marked = 0 // bytes of it that are set; all others would say "valid"
  private var rows = 0
  private var nulls = 0

  /** How many values there are. */
  final def length: Int = rows
  final def nullCount: Int = nulls

  /** There is one more. */
  @inline final protected def added(): Unit = rows += 1

  /** The value there becomes the next one here. */
  final def put(from: SpecializedGetters, ordinal: Int): Unit =
    if (from.isNullAt(ordinal)) putNull()
    else {
      add(from, ordinal)
      rows += 1
    }

  /** This field of rows. */
  def take(from: RowBuffer, ordinal: Int): Unit = takeEach(from, ordinal)

  final protected def takeEach(from: RowBuffer, ordinal: Int): Unit = {
    var index = 0
    while (index < from.count) {
      put(from(index), ordinal)
      index += 1
    }
  }

  /** The value of another column of this type. */
  final def copy(from: Column, row: Int): Unit = {
    addCopy(from, row)
    rows += 1
  }

  final def putNull(): Unit = {
    addEmpty()
    mark(rows)
    val byte = validity.address + (rows >> 3)
    Platform.putByte(null, byte, (Platform.getByte(null, byte) & ~(1 << (rows & 7))).toByte)
    nulls += 1
    rows += 1
  }

  /** A value that says nothing, where null is not allowed. */
  final def putEmpty(): Unit = {
    addEmpty()
    rows += 1
  }

  @inline final protected def isValid(row: Int): Boolean =
    nulls == 0 || (row >> 3) >= marked || (Platform.getByte(null, validity.address + (row >> 3)) >> (row & 7) & 1) != 0

  private def mark(row: Int): Unit = if (marked <= (row >> 3)) {
    val end = (row >> 3) + 1
    validity.ensure(end)
    Platform.setMemory(validity.address + marked, 0xff.toByte, end - marked)
    marked = end
  }

  protected def add(from: SpecializedGetters, ordinal: Int): Unit
  protected def addCopy(from: Column, row: Int): Unit = throw new UnsupportedOperationException
  protected def addEmpty(): Unit

  /** Whether one value is less than another. */
  protected def isLess(row: Int, other: Int): Boolean = throw new UnsupportedOperationException

  /** Rows with the smallest and the largest value; None where that is not known. */
  def extremes(): Option[(Int, Int)] = extremesByOrder()

  final protected def extremesByOrder(): Option[(Int, Int)] = {
    var (least, most, row) = (-1, -1, 0)
    while (row < rows) {
      if (isValid(row)) {
        if (least < 0) {
          least = row
          most = row
        } else if (isLess(row, least)) least = row
        else if (isLess(most, row)) most = row
      }
      row += 1
    }
    if (least < 0) None else Some((least, most))
  }

  /** Tells the layout of this array, and of those below it. */
  def describe(layout: Layout): Unit = {
    layout.array(rows, nulls)
    if (nulls > 0) mark(rows - 1)
    layout.buffer(validity.address, if (nulls > 0) (rows + 7) >> 3 else 0)
    describeParts(layout)
  }

  /** What follows validity. */
  protected def describeParts(layout: Layout): Unit

  override def clear(): Unit = {
    rows = 0
    nulls = 0
    marked = 0
    validity.clear()
    parts.foreach(_.clear())
  }

  override def free(): Unit = {
    validity.free()
    parts.foreach(_.free())
  }
}

object Column {
  /** Whether there is one for this type. */
  def supports(wanted: DataType): Boolean = wanted match {
    case ArrayType(element, _) => supports(element)
    case MapType(key, value, _) => supports(key) && supports(value)
    case StructType(fields) => fields.forall(field => supports(field.dataType))
    case user: UserDefinedType[_] => supports(user.sqlType)
    case NullType | BooleanType | ByteType | ShortType | IntegerType | LongType | FloatType | DoubleType | BinaryType |
        DateType | TimestampType | TimestampNTZType | _: DayTimeIntervalType | _: TimeType | _: DecimalType |
        _: StringType => true
    case _ => false
  }

  def of(wanted: DataType): Column = wanted match {
    case NullType => new NullColumn
    case BooleanType => new BooleanColumn
    case ByteType => new IntegerColumn(1)
    case ShortType => new IntegerColumn(2)
    case IntegerType | DateType => new IntegerColumn(4)
    case FloatType => new FloatColumn(4)
    case DoubleType => new FloatColumn(8)
    case decimal: DecimalType =>
      if (decimal.precision <= Decimal.MAX_LONG_DIGITS) new ShortDecimalColumn else new DecimalColumn(decimal)
    case _: StringType => new BytesColumn(true)
    case BinaryType => new BytesColumn(false)
    case ArrayType(element, _) => new ListColumn(of(element))
    case MapType(key, value, _) => new MapColumn(of(key), of(value))
    case StructType(fields) => new StructColumn(fields.map(field => of(field.dataType)), fields.map(_.nullable))
    case user: UserDefinedType[_] => of(user.sqlType)
    case _ => new IntegerColumn(8)
  }
}

final class NullColumn extends Column {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = ()
  override protected def addEmpty(): Unit = ()
  override def describe(layout: Layout): Unit = layout.array(length, length)
  override protected def describeParts(layout: Layout): Unit = ()
}

final class BooleanColumn(bits: Memory = new Memory) extends Column(bits) {
  private def add(value: Boolean): Unit = {
    bits.ensure((length >> 3) + 1)
    val byte = bits.address + (length >> 3)
    val before = if ((length & 7) == 0) 0 else Platform.getByte(null, byte)
    Platform.putByte(null, byte, (if (value) before | 1 << (length & 7) else before).toByte)
  }

  private def apply(row: Int) = (Platform.getByte(null, bits.address + (row >> 3)) >> (row & 7) & 1) != 0

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = add(from.getBoolean(ordinal))
  override protected def addCopy(from: Column, row: Int): Unit = add(from.asInstanceOf[BooleanColumn](row))
  override protected def addEmpty(): Unit = add(false)
  override protected def isLess(row: Int, other: Int): Boolean = !this(row) && this(other)
  override protected def describeParts(layout: Layout): Unit = layout.buffer(bits.address, (length + 7) >> 3)
}

/** Values of `width` bytes each, of which Spark has a word; it has no more of those that have more. */
abstract class FixedColumn(width: Int, values: Memory = new Memory) extends Column(values) {
  /** Where the next value goes. */
  @inline final protected def next(): Long = {
    val from = length.toLong * width
    values.ensure(from + width)
    values.address + from
  }

  @inline final protected def at(row: Int): Long = values.address + row.toLong * width

  @inline final protected def store(word: Long): Unit = {
    val to = next()
    if (width >= 8) Platform.putLong(null, to, word)
    else if (width == 4) Platform.putInt(null, to, word.toInt)
    else if (width == 2) Platform.putShort(null, to, word.toShort)
    else Platform.putByte(null, to, word.toByte)
    if (width == 16) Platform.putLong(null, to + 8, word >> 63)
  }

  @inline final protected def integer(row: Int): Long =
    if (width >= 8) Platform.getLong(null, at(row))
    else if (width == 4) Platform.getInt(null, at(row))
    else if (width == 2) Platform.getShort(null, at(row))
    else Platform.getByte(null, at(row))

  override def take(from: RowBuffer, ordinal: Int): Unit = {
    var index = 0
    while (index < from.count) {
      if (from.isNullAt(index, ordinal)) putNull()
      else {
        store(from.word(index, ordinal))
        added()
      }
      index += 1
    }
  }

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    store(
      if (width >= 8) from.getLong(ordinal)
      else if (width == 4) from.getInt(ordinal)
      else if (width == 2) from.getShort(ordinal)
      else from.getByte(ordinal))

  override protected def addCopy(from: Column, row: Int): Unit =
    Platform.copyMemory(null, from.asInstanceOf[FixedColumn].at(row), null, next(), width)

  override protected def addEmpty(): Unit = Platform.setMemory(next(), 0, width)

  /** Those of integers; not by `isLess`, which takes several times as long. */
  override def extremes(): Option[(Int, Int)] = {
    var least, most = 0L
    var (leastRow, mostRow, row) = (-1, -1, 0)
    while (row < length) {
      if (isValid(row)) {
        val value = integer(row)
        if (leastRow < 0 || value < least) {
          least = value
          leastRow = row
        }
        if (mostRow < 0 || value > most) {
          most = value
          mostRow = row
        }
      }
      row += 1
    }
    if (leastRow < 0) None else Some((leastRow, mostRow))
  }

  override protected def describeParts(layout: Layout): Unit = layout.buffer(values.address, length.toLong * width)
}

/** Integers, and what Spark has as such: dates, times, instants, intervals. */
final class IntegerColumn(width: Int) extends FixedColumn(width) {
  def put(value: Long): Unit = {
    store(value)
    added()
  }
}

final class FloatColumn(width: Int) extends FixedColumn(width) {
  @inline private def apply(row: Int): Double =
    if (width == 8) Platform.getDouble(null, at(row)) else Platform.getFloat(null, at(row))

  /** None with a NaN among them, which is larger than all others in Spark, and unlike anything elsewhere. */
  override def extremes(): Option[(Int, Int)] = {
    var (least, most, row) = (-1, -1, 0)
    while (row < length) {
      if (isValid(row)) {
        val value = this(row)
        if (value.isNaN) return None
        if (least < 0 || value < this(least)) least = row
        if (most < 0 || value > this(most)) most = row
      }
      row += 1
    }
    if (least < 0) None else Some((least, most))
  }
}

/** Decimals of as many digits as a word has. */
final class ShortDecimalColumn extends FixedColumn(16)

/** Decimals of more digits, of which Spark has the bytes. */
final class DecimalColumn(wanted: DecimalType) extends FixedColumn(16) {
  override def take(from: RowBuffer, ordinal: Int): Unit = takeEach(from, ordinal)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val value = from.getDecimal(ordinal, wanted.precision, wanted.scale)
    val unscaled = value.toJavaBigDecimal.setScale(wanted.scale).unscaledValue
    val to = next()
    Platform.putLong(null, to, unscaled.longValue)
    Platform.putLong(null, to + 8, unscaled.shiftRight(64).longValueExact)
  }

  override def extremes(): Option[(Int, Int)] = extremesByOrder()

  override protected def isLess(row: Int, other: Int): Boolean = {
    val (high, otherHigh) = (Platform.getLong(null, at(row) + 8), Platform.getLong(null, at(other) + 8))
    high < otherHigh || high == otherHigh &&
      java.lang.Long.compareUnsigned(Platform.getLong(null, at(row)), Platform.getLong(null, at(other))) < 0
  }
}

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

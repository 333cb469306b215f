package org.apache.spark.sql.dissociated

import org.apache.spark.sql.catalyst.expressions.SpecializedGetters
import org.apache.spark.sql.types._
import org.apache.spark.unsafe.Platform

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

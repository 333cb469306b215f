package org.apache.spark.sql.dissociated

import scala.util.Try

import org.apache.spark.sql.catalyst.expressions.SpecializedGetters
import org.apache.spark.sql.execution.vectorized.WritableColumnVector
import org.apache.spark.sql.types._
import org.apache.spark.sql.vectorized.ColumnVector
import org.apache.spark.unsafe.Platform

/** Values of one type, taken from Spark's rows into the buffers of an Arrow array. */
abstract class Column extends Native {
  private val validity = own(new Memory)
  private var marked = 0 // bytes of it that are set; all others would say "valid"
  private var rows = 0
  private var nulls = 0

  /** How many values there are. */
  final def length: Int = rows

  /** The value there becomes the next one here. */
  final def put(from: SpecializedGetters, ordinal: Int): Unit = if (from.isNullAt(ordinal)) putNull() else {
    add(from, ordinal)
    rows += 1
  }

  final def putNull(): Unit = {
    putEmpty()
    markNull(rows - 1)
  }

  /** A value that says nothing. */
  final def putEmpty(): Unit = {
    addEmpty()
    rows += 1
  }

  /** This field of rows. */
  def take(from: RowBuffer, ordinal: Int): Unit = takeEach(from, ordinal)

  final protected def takeEach(from: RowBuffer, ordinal: Int): Unit =
    Loop.over(from.count)(index => put(from(index), ordinal))

  /** Bytes of the values. */
  def nbytes: Long

  /** There is a value for each of these rows, whatever it is for those that are null. */
  final protected def added(from: RowBuffer, ordinal: Int): Unit = {
    if (from.hasNulls(ordinal))
      Loop.over(from.count)(index => if (from.isNullAt(index, ordinal)) markNull(rows + index))
    rows += from.count
  }

  /** There are `count` more values, none of which is null. */
  final protected def added(count: Int): Unit = rows += count

  private def markNull(row: Int): Unit = {
    mark(row)
    val byte = validity.address + (row >> 3)
    Platform.putByte(null, byte, (Platform.getByte(null, byte) & ~(1 << (row & 7))).toByte)
    nulls += 1
  }

  private def mark(row: Int): Unit = if (marked <= (row >> 3)) {
    val end = (row >> 3) + 1
    validity.ensure(end)
    Platform.setMemory(validity.address + marked, 0xff.toByte, end - marked)
    marked = end
  }

  protected def add(from: SpecializedGetters, ordinal: Int): Unit
  protected def addEmpty(): Unit

  /** Tells the layout of this array, and of those below it. */
  def describe(layout: Layout): Unit = {
    layout.array(rows, nulls)
    if (nulls > 0) mark(rows - 1)
    layout.buffer(validity, if (nulls > 0) (rows + 7) >> 3 else 0)
    describeParts(layout)
  }

  /** What follows validity. */
  protected def describeParts(layout: Layout): Unit

  override def clear(): Unit = {
    super.clear()
    rows = 0
    nulls = 0
    marked = 0
  }
}

object Column {
  /** Whether there is one for this type. */
  def supports(wanted: DataType): Boolean = Try(of(wanted)).isSuccess

  /** Returns the bytes of the values of all `columns`. It allocates nothing, because it is called for each row. */
  def nbytes(columns: Array[Column]): Long = {
    var total = 0L
    Loop.over(columns.length)(index => total += columns(index).nbytes)
    total
  }

  def of(wanted: DataType): Column = wanted match { // for others there is none
    case NullType => new NullColumn
    case BooleanType => new BooleanColumn
    case FloatType => new FloatColumn
    case DoubleType => new DoubleColumn
    case FixedWidth(width) => new FixedColumn(width)
    case decimal: DecimalType =>
      if (decimal.precision <= Decimal.MAX_LONG_DIGITS) new ShortDecimalColumn(decimal) else new DecimalColumn(decimal)
    case _: StringType => new BytesColumn(true)
    case BinaryType => new BytesColumn(false)
    case ArrayType(element, _) => new ListColumn(Array(of(element)))
    case MapType(key, value, _) => new ListColumn(Array(of(key), of(value)))
    case StructType(fields) => new StructColumn(fields.map(field => of(field.dataType)), fields.map(_.nullable))
    case user: UserDefinedType[_] => of(user.sqlType)
  }
}

/** Numbers, and what Spark has as numbers: how many bytes each has, there and in Arrow. */
object FixedWidth {
  def unapply(wanted: DataType): Option[Int] = Option(wanted).collect {
    case ByteType | ShortType | IntegerType | LongType | FloatType | DoubleType | DateType | TimestampType |
        TimestampNTZType | _: DayTimeIntervalType | _: YearMonthIntervalType | _: TimeType => wanted.defaultSize
  }
}

final class NullColumn extends Column {
  override def nbytes: Long = 0
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = ()
  override protected def addEmpty(): Unit = ()
  override def describe(layout: Layout): Unit = layout.array(length, length)
  override protected def describeParts(layout: Layout): Unit = ()
}

final class BooleanColumn extends Column {
  private val bits = own(new Memory)

  override def nbytes: Long = length >> 3

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = add(from.getBoolean(ordinal))
  override protected def addEmpty(): Unit = add(false)

  private def add(value: Boolean): Unit = {
    bits.ensure((length >> 3) + 1)
    val byte = bits.address + (length >> 3)
    val before = if ((length & 7) == 0) 0 else Platform.getByte(null, byte)
    Platform.putByte(null, byte, (if (value) before | 1 << (length & 7) else before).toByte)
  }

  override protected def describeParts(layout: Layout): Unit = layout.buffer(bits, (length + 7) >> 3)
}

/** Values of `width` bytes each, of which Spark has a word: numbers, dates, times, decimals of up to 18 digits. */
class FixedColumn(val width: Int) extends Column {
  private val values = own(new Memory)

  override def nbytes: Long = length.toLong * width

  /** Where the next value goes, and as many after it. */
  final protected def room(count: Int): Long = {
    val from = length.toLong * width
    values.ensure(from + count.toLong * width)
    values.address + from
  }

  override def take(from: RowBuffer, ordinal: Int): Unit = {
    val to = room(from.count)
    @inline def words(store: (Int, Long) => Unit): Unit =
      Loop.over(from.count)(index => store(index, from.word(index, ordinal)))
    width match {
      case 1 => words((index, word) => Platform.putByte(null, to + index, word.toByte))
      case 2 => words((index, word) => Platform.putShort(null, to + 2L * index, word.toShort))
      case 4 => words((index, word) => Platform.putInt(null, to + 4L * index, word.toInt))
      case 8 => words((index, word) => Platform.putLong(null, to + 8L * index, word))
      case _ => words { (index, word) =>
          Platform.putLong(null, to + 16L * index, word)
          Platform.putLong(null, to + 16L * index + 8, word >> 63)
        }
    }
    added(from, ordinal)
  }

  /** Takes `count` values of a vector, from `first` on. */
  final def take(from: ColumnVector, first: Int, count: Int): Unit =
    if (!from.hasNull) copyEach(from, first, count)
    else Loop.over(count)(index => if (from.isNullAt(first + index)) putNull() else copyEach(from, first + index, 1))

  private def copyEach(from: ColumnVector, first: Int, count: Int): Unit = {
    copy(from, first, count, room(count))
    added(count)
  }

  /** Copies values that are not null. */
  protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit = width match {
    case 1 => Loop.over(count)(index => Platform.putByte(null, to + index, from.getByte(first + index)))
    case 2 => Loop.over(count)(index => Platform.putShort(null, to + 2L * index, from.getShort(first + index)))
    case 4 => Loop.over(count)(index => Platform.putInt(null, to + 4L * index, from.getInt(first + index)))
    case _ => Loop.over(count)(index => Platform.putLong(null, to + 8L * index, from.getLong(first + index)))
  }

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val to = room(1)
    width match {
      case 1 => Platform.putByte(null, to, from.getByte(ordinal))
      case 2 => Platform.putShort(null, to, from.getShort(ordinal))
      case 4 => Platform.putInt(null, to, from.getInt(ordinal))
      case _ => Platform.putLong(null, to, from.getLong(ordinal))
    }
  }

  override protected def addEmpty(): Unit = Platform.setMemory(room(1), 0, width)
  override protected def describeParts(layout: Layout): Unit = layout.buffer(values, length.toLong * width)
}

final class FloatColumn extends FixedColumn(4) {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    Platform.putFloat(null, room(1), from.getFloat(ordinal))

  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit =
    Loop.over(count)(index => Platform.putFloat(null, to + 4L * index, from.getFloat(first + index)))
}

final class DoubleColumn extends FixedColumn(8) {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    Platform.putDouble(null, room(1), from.getDouble(ordinal))

  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit =
    Loop.over(count)(index => Platform.putDouble(null, to + 8L * index, from.getDouble(first + index)))
}

/** Decimals of up to 18 digits, which are words in Spark's rows. */
final class ShortDecimalColumn(wanted: DecimalType) extends FixedColumn(16) {
  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    store(room(1), from.getDecimal(ordinal, wanted.precision, wanted.scale).toUnscaledLong)

  /** Spark's own vectors have numbers, from which it would make a decimal for each value. */
  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit = from match {
    case numbers: WritableColumnVector if wanted.precision <= Decimal.MAX_INT_DIGITS =>
      Loop.over(count)(index => store(to + 16L * index, numbers.getInt(first + index)))
    case numbers: WritableColumnVector =>
      Loop.over(count)(index => store(to + 16L * index, numbers.getLong(first + index)))
    case _ =>
      @inline def word(row: Int): Long = from.getDecimal(row, wanted.precision, wanted.scale).toUnscaledLong
      Loop.over(count)(index => store(to + 16L * index, word(first + index)))
  }

  @inline private def store(to: Long, word: Long): Unit = {
    Platform.putLong(null, to, word)
    Platform.putLong(null, to + 8, word >> 63)
  }
}

/** Decimals of more digits, of which Spark has the bytes. */
final class DecimalColumn(wanted: DecimalType) extends FixedColumn(16) {
  override def take(from: RowBuffer, ordinal: Int): Unit = takeEach(from, ordinal)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit =
    store(room(1), from.getDecimal(ordinal, wanted.precision, wanted.scale))

  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit =
    Loop.over(count) { index =>
      store(to + 16L * index, from.getDecimal(first + index, wanted.precision, wanted.scale))
    }

  private def store(to: Long, value: Decimal): Unit = {
    val unscaled = value.toJavaBigDecimal.setScale(wanted.scale).unscaledValue
    Platform.putLong(null, to, unscaled.longValue)
    Platform.putLong(null, to + 8, unscaled.shiftRight(64).longValueExact)
  }
}

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

  override def nbytes: Long = 4L * length + ends.last

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

/** Lists of one part; and maps, which are lists of structs of a key and a value in Arrow. */
final class ListColumn(parts: Array[Column]) extends Column {
  private val ends = own(new Ends)
  parts.foreach(own(_))

  override def nbytes: Long = 4L * length + Column.nbytes(parts)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    if (parts.length == 1) {
      val list = from.getArray(ordinal)
      append(parts.head, list, list.numElements)
    } else {
      val map = from.getMap(ordinal)
      append(parts.head, map.keyArray, map.numElements)
      append(parts.last, map.valueArray, map.numElements)
    }
    ends.add(parts.head.length)
  }

  private def append(part: Column, values: SpecializedGetters, count: Int): Unit =
    Loop.over(count)(index => part.put(values, index))

  override protected def addEmpty(): Unit = ends.add(ends.last)
  override protected def describeParts(layout: Layout): Unit = {
    ends.describe(layout)
    if (parts.length > 1) {
      layout.array(parts.head.length, 0)
      layout.buffer(new Memory, 0)
    }
    parts.foreach(_.describe(layout))
  }
}

final class StructColumn(fields: Array[Column], nullable: Array[Boolean]) extends Column {
  fields.foreach(own(_))

  override def nbytes: Long = Column.nbytes(fields)

  override protected def add(from: SpecializedGetters, ordinal: Int): Unit = {
    val struct = from.getStruct(ordinal, fields.length)
    Loop.over(fields.length)(index => fields(index).put(struct, index))
  }

  override protected def addEmpty(): Unit =
    for (index <- fields.indices) if (nullable(index)) fields(index).putNull() else fields(index).putEmpty()

  override protected def describeParts(layout: Layout): Unit = fields.foreach(_.describe(layout))
}

package org.apache.spark.sql.dissociated

import scala.util.Try

import org.apache.spark.sql.catalyst.expressions.{SpecializedGetters, UnsafeRow}
import org.apache.spark.sql.execution.vectorized.WritableColumnVector
import org.apache.spark.sql.types._
import org.apache.spark.sql.vectorized.ColumnVector
import org.apache.spark.unsafe.Platform

/** A builder of an Arrow array: it appends values from Spark's rows to buffers in native memory. */
abstract class Column extends NativeOwner {
  private val validity = own(new Memory)
  // The bytes of the validity bitmap that are initialized. Until a null is appended, none need be.
  private var validityBytes = 0
  private var rows = 0
  private var nullCount = 0

  /** Return the number of values. */
  final def length: Int = rows

  /** Append the value of a field, which may be null. */
  final def append(from: SpecializedGetters, ordinal: Int): Unit = if (from.isNullAt(ordinal)) appendNull() else {
    appendValue(from, ordinal)
    rows += 1
  }

  final def appendNull(): Unit = {
    appendPlaceholder()
    markNull(rows - 1)
  }

  /** Append a value that no reader uses, because it or the value that holds it is null. */
  final def appendPlaceholder(): Unit = {
    appendPlaceholderValue()
    rows += 1
  }

  /** Append a field of all rows of the buffer. */
  def appendRows(from: RowBuffer, ordinal: Int): Unit = appendEach(from, ordinal)

  /** Append `count` fields of a row, which are the values of this column, from the field `first` on. */
  def appendFields(from: UnsafeRow, first: Int, count: Int): Unit =
    Loop.over(count)(index => append(from, first + index))

  final protected def appendEach(from: RowBuffer, ordinal: Int): Unit =
    Loop.over(from.count)(index => append(from(index), ordinal))

  /** Return the size of the values in bytes, without the validity bitmap. */
  def nbytes: Long

  /** Count the rows of the buffer, whose values have been appended, and mark its nulls. */
  final protected def countAppended(from: RowBuffer, ordinal: Int): Unit = {
    if (from.hasNulls(ordinal))
      Loop.over(from.count)(index => if (from.isNullAt(index, ordinal)) markNull(rows + index))
    rows += from.count
  }

  /** Count `count` appended values, none of which is null. */
  final protected def countAppended(count: Int): Unit = rows += count

  private def markNull(row: Int): Unit = {
    extendValidity(row)
    val byte = validity.address + (row >> 3)
    Platform.putByte(null, byte, (Platform.getByte(null, byte) & ~(1 << (row & 7))).toByte)
    nullCount += 1
  }

  /** Extend the validity bitmap to `row`. The new bits say that their values are valid. */
  private def extendValidity(row: Int): Unit = if (validityBytes <= (row >> 3)) {
    val end = (row >> 3) + 1
    validity.reserve(end)
    Platform.setMemory(validity.address + validityBytes, 0xff.toByte, end - validityBytes)
    validityBytes = end
  }

  /** Append a value that is not null, without counting it. */
  protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit
  /** Append any value, without counting it. */
  protected def appendPlaceholderValue(): Unit

  /** Add the field nodes and buffers of this array and its children to `layout`, in the order of a record batch. */
  def describe(layout: Layout): Unit = {
    layout.addNode(rows, nullCount)
    if (nullCount > 0) extendValidity(rows - 1)
    layout.addBuffer(validity, if (nullCount > 0) (rows + 7) >> 3 else 0)
    describeBuffers(layout)
  }

  /** Add what follows the validity bitmap: the other buffers, and the children. */
  protected def describeBuffers(layout: Layout): Unit

  override def clear(): Unit = {
    super.clear()
    rows = 0
    nullCount = 0
    validityBytes = 0
  }
}

object Column {
  /** Return whether a column can hold values of `dataType`. */
  def supports(dataType: DataType): Boolean = Try(of(dataType)).isSuccess

  /**
   * Return the size of the values of all `columns` in bytes. It allocates nothing, because it is called for each row.
   */
  def nbytes(columns: Array[Column]): Long = {
    var total = 0L
    Loop.over(columns.length)(index => total += columns(index).nbytes)
    total
  }

  /** Return a new column for values of `dataType`. Throws a MatchError if the type is unsupported. */
  def of(dataType: DataType): Column = dataType match {
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

/** An extractor of the width in bytes of types that Spark and Arrow store as numbers of the same width. */
object FixedWidth {
  def unapply(dataType: DataType): Option[Int] = Option(dataType).collect {
    case ByteType | ShortType | IntegerType | LongType | FloatType | DoubleType | DateType | TimestampType |
        TimestampNTZType | _: DayTimeIntervalType | _: YearMonthIntervalType | _: TimeType => dataType.defaultSize
  }
}

final class NullColumn extends Column {
  override def nbytes: Long = 0
  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit = ()
  override protected def appendPlaceholderValue(): Unit = ()
  override def describe(layout: Layout): Unit = layout.addNode(length, length)
  override protected def describeBuffers(layout: Layout): Unit = ()
}

final class BooleanColumn extends Column {
  private val bits = own(new Memory)

  override def nbytes: Long = length >> 3

  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit = appendBit(from.getBoolean(ordinal))
  override protected def appendPlaceholderValue(): Unit = appendBit(false)

  private def appendBit(value: Boolean): Unit = {
    bits.reserve((length >> 3) + 1)
    val byte = bits.address + (length >> 3)
    val oldByte = if ((length & 7) == 0) 0 else Platform.getByte(null, byte)
    Platform.putByte(null, byte, (if (value) oldByte | 1 << (length & 7) else oldByte).toByte)
  }

  override protected def describeBuffers(layout: Layout): Unit = layout.addBuffer(bits, (length + 7) >> 3)
}

/**
 * A column of values of `width` bytes that Spark stores in one word: numbers, dates, times, decimals of up to 18
 * digits.
 */
class FixedColumn(val width: Int) extends Column {
  private val values = own(new Memory)

  override def nbytes: Long = length.toLong * width

  /** Make room for `count` values and return the address of the first. */
  final protected def reserveValues(count: Int): Long = {
    val from = length.toLong * width
    values.reserve(from + count.toLong * width)
    values.address + from
  }

  override def appendRows(from: RowBuffer, ordinal: Int): Unit = {
    val to = reserveValues(from.count)
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
    countAppended(from, ordinal)
  }

  /** Append `count` values of a vector, from the row `first` on. */
  final def appendRange(from: ColumnVector, first: Int, count: Int): Unit =
    if (!from.hasNull) copyEach(from, first, count)
    else Loop.over(count)(index => if (from.isNullAt(first + index)) appendNull() else copyEach(from, first + index, 1))

  private def copyEach(from: ColumnVector, first: Int, count: Int): Unit = {
    copy(from, first, count, reserveValues(count))
    countAppended(count)
  }

  /** Copy `count` values, none of which is null, to the address `to`. */
  protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit = width match {
    case 1 => Loop.over(count)(index => Platform.putByte(null, to + index, from.getByte(first + index)))
    case 2 => Loop.over(count)(index => Platform.putShort(null, to + 2L * index, from.getShort(first + index)))
    case 4 => Loop.over(count)(index => Platform.putInt(null, to + 4L * index, from.getInt(first + index)))
    case _ => Loop.over(count)(index => Platform.putLong(null, to + 8L * index, from.getLong(first + index)))
  }

  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit = {
    val to = reserveValues(1)
    width match {
      case 1 => Platform.putByte(null, to, from.getByte(ordinal))
      case 2 => Platform.putShort(null, to, from.getShort(ordinal))
      case 4 => Platform.putInt(null, to, from.getInt(ordinal))
      case _ => Platform.putLong(null, to, from.getLong(ordinal))
    }
  }

  override protected def appendPlaceholderValue(): Unit = Platform.setMemory(reserveValues(1), 0, width)
  override protected def describeBuffers(layout: Layout): Unit = layout.addBuffer(values, length.toLong * width)
}

final class FloatColumn extends FixedColumn(4) {
  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit =
    Platform.putFloat(null, reserveValues(1), from.getFloat(ordinal))

  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit =
    Loop.over(count)(index => Platform.putFloat(null, to + 4L * index, from.getFloat(first + index)))
}

final class DoubleColumn extends FixedColumn(8) {
  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit =
    Platform.putDouble(null, reserveValues(1), from.getDouble(ordinal))

  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit =
    Loop.over(count)(index => Platform.putDouble(null, to + 8L * index, from.getDouble(first + index)))
}

/** A column of decimals of up to 18 digits, which Spark's rows store in one word. */
final class ShortDecimalColumn(dataType: DecimalType) extends FixedColumn(16) {
  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit =
    store(reserveValues(1), from.getDecimal(ordinal, dataType.precision, dataType.scale).toUnscaledLong)

  /**
   * Copy the unscaled numbers of Spark's own vectors, since `getDecimal` would create an object for each value.
   * Parquet has up to 9 digits as an Int, and Spark's cache has all as a Long.
   */
  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit = from match {
    case numbers: WritableColumnVector
        if dataType.precision <= Decimal.MAX_INT_DIGITS && numbers.dataType != LongType =>
      Loop.over(count)(index => store(to + 16L * index, numbers.getInt(first + index)))
    case numbers: WritableColumnVector =>
      Loop.over(count)(index => store(to + 16L * index, numbers.getLong(first + index)))
    case _ =>
      @inline def word(row: Int): Long = from.getDecimal(row, dataType.precision, dataType.scale).toUnscaledLong
      Loop.over(count)(index => store(to + 16L * index, word(first + index)))
  }

  @inline private def store(to: Long, word: Long): Unit = {
    Platform.putLong(null, to, word)
    Platform.putLong(null, to + 8, word >> 63)
  }
}

/** A column of decimals of more than 18 digits, which Spark's rows store as byte strings. */
final class DecimalColumn(dataType: DecimalType) extends FixedColumn(16) {
  override def appendRows(from: RowBuffer, ordinal: Int): Unit = appendEach(from, ordinal)

  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit =
    store(reserveValues(1), from.getDecimal(ordinal, dataType.precision, dataType.scale))

  override protected def copy(from: ColumnVector, first: Int, count: Int, to: Long): Unit =
    Loop.over(count) { index =>
      store(to + 16L * index, from.getDecimal(first + index, dataType.precision, dataType.scale))
    }

  private def store(to: Long, value: Decimal): Unit = {
    val unscaled = value.toJavaBigDecimal.setScale(dataType.scale).unscaledValue
    Platform.putLong(null, to, unscaled.longValue)
    Platform.putLong(null, to + 8, unscaled.shiftRight(64).longValueExact)
  }
}

/** A builder of the offsets buffer of strings or lists. */
final class OffsetsBuilder extends NativeOwner {
  private val offsets = own(new Memory)
  private var count = 0
  var lastEnd = 0

  /** Append the end of the next value. Throws if it does not fit in 32 bits. */
  def append(end: Long): Unit = {
    if (end < lastEnd || end > Int.MaxValue)
      throw Failure(s"a column of a batch cannot hold $end bytes or list items: the values of one row are too large")
    offsets.reserve(4 * (count + 2L))
    count += 1
    lastEnd = end.toInt
    Platform.putInt(null, offsets.address + 4L * count, lastEnd)
  }

  def describe(layout: Layout): Unit = {
    offsets.reserve(4)
    Platform.putInt(null, offsets.address, 0) // the first offset
    layout.addBuffer(offsets, 4 * (count + 1L))
  }

  override def clear(): Unit = {
    super.clear()
    count = 0
    lastEnd = 0
  }
}

/** A column of strings or binaries. */
final class BytesColumn(strings: Boolean) extends Column {
  private val offsets = own(new OffsetsBuilder)
  private val data = own(new Memory)

  override def nbytes: Long = 4L * length + offsets.lastEnd

  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit =
    if (strings) {
      val value = from.getUTF8String(ordinal)
      appendBytes(value.getBaseObject, value.getBaseOffset, value.numBytes)
    } else {
      val value = from.getBinary(ordinal)
      appendBytes(value, Platform.BYTE_ARRAY_OFFSET, value.length)
    }

  private def appendBytes(base: AnyRef, from: Long, size: Int): Unit = {
    Platform.copyMemory(base, from, null, reserveBytes(size), size)
    offsets.append(offsets.lastEnd.toLong + size)
  }

  /**
   * Append a field of all rows. Values are copied by whole words: Spark's rows pad them, and the next value
   * overwrites the padding here.
   */
  override def appendRows(from: RowBuffer, ordinal: Int): Unit = {
    val nulls = from.hasNulls(ordinal)
    Loop.over(from.count) { index =>
      val word = if (nulls && from.isNullAt(index, ordinal)) 0 else from.word(index, ordinal)
      val size = word.toInt
      Memory.copy(null, from.address(index) + (word >>> 32), reserveBytes(size), size)
      offsets.append(offsets.lastEnd.toLong + size)
    }
    countAppended(from, ordinal)
  }

  /** Append fields of a row, which pads them, too. */
  override def appendFields(from: UnsafeRow, first: Int, count: Int): Unit = {
    val (base, start) = (from.getBaseObject, from.getBaseOffset)
    Loop.over(count) { index =>
      if (from.isNullAt(first + index)) appendNull()
      else {
        val word = from.getLong(first + index)
        val size = word.toInt
        Memory.copy(base, start + (word >>> 32), reserveBytes(size), size)
        offsets.append(offsets.lastEnd.toLong + size)
        countAppended(1)
      }
    }
  }

  /**
   * Make room for a value of `size` bytes and return its address. The room includes one more word, because values are
   * copied by whole words.
   */
  @inline private def reserveBytes(size: Int): Long = {
    data.reserve(offsets.lastEnd + 8L + size)
    data.address + offsets.lastEnd
  }

  override protected def appendPlaceholderValue(): Unit = offsets.append(offsets.lastEnd)

  override protected def describeBuffers(layout: Layout): Unit = {
    offsets.describe(layout)
    layout.addBuffer(data, offsets.lastEnd)
  }
}

/**
 * A column of lists, which have one part, or of maps, which have two: Arrow stores a map as a list of structs of a
 * key and a value.
 */
final class ListColumn(parts: Array[Column]) extends Column {
  private val offsets = own(new OffsetsBuilder)
  parts.foreach(own(_))

  override def nbytes: Long = 4L * length + Column.nbytes(parts)

  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit = {
    if (parts.length == 1) {
      val list = from.getArray(ordinal)
      appendElements(parts.head, list, list.numElements)
    } else {
      val map = from.getMap(ordinal)
      appendElements(parts.head, map.keyArray, map.numElements)
      appendElements(parts.last, map.valueArray, map.numElements)
    }
    offsets.append(parts.head.length)
  }

  private def appendElements(part: Column, values: SpecializedGetters, count: Int): Unit =
    Loop.over(count)(index => part.append(values, index))

  override protected def appendPlaceholderValue(): Unit = offsets.append(offsets.lastEnd)
  override protected def describeBuffers(layout: Layout): Unit = {
    offsets.describe(layout)
    if (parts.length > 1) {
      layout.addNode(parts.head.length, 0)
      layout.addBuffer(new Memory, 0)
    }
    parts.foreach(_.describe(layout))
  }
}

final class StructColumn(fields: Array[Column], nullable: Array[Boolean]) extends Column {
  fields.foreach(own(_))

  override def nbytes: Long = Column.nbytes(fields)

  override protected def appendValue(from: SpecializedGetters, ordinal: Int): Unit = {
    val struct = from.getStruct(ordinal, fields.length)
    Loop.over(fields.length)(index => fields(index).append(struct, index))
  }

  override protected def appendPlaceholderValue(): Unit =
    for (index <- fields.indices) if (nullable(index)) fields(index).appendNull() else fields(index).appendPlaceholder()

  override protected def describeBuffers(layout: Layout): Unit = fields.foreach(_.describe(layout))
}

package org.apache.spark.sql.dissociated

import java.math.{BigDecimal, BigInteger}

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.sql.types._
import org.apache.spark.sql.vectorized.{ColumnarArray, ColumnarMap, ColumnVector}
import org.apache.spark.unsafe.Platform
import org.apache.spark.unsafe.types.UTF8String

/**
 * Where an Arrow array lies, as the sidecar tells it: [length, offset, nulls, [region, at, size of each buffer],
 * [children]]. Nothing checks bounds later, so whatever is asked for here is checked, once a batch.
 */
final class ArrayPlace(told: JsonNode, regions: Regions, val column: String, from: Int, val length: Int) {
  private val there = told.get(0).asInt
  private val offset = told.get(1).asLong + from
  /** How many nulls; of a part of an array, how many there may be. */
  val nulls: Int = math.min(told.get(2).asInt, length)
  if (from < 0 || length < 0 || from > there - length || nulls < 0 || offset < from)
    damaged(s"$there values, of which $length from $from are wanted")

  /** Values of an array below this one. */
  def child(index: Int, from: Int, length: Int): ArrayPlace =
    new ArrayPlace(told.get(4).get(index), regions, column, from, length)

  /** Of a struct, whose values lie where its own do. */
  def field(index: Int): ArrayPlace = child(index, from, length)

  def damaged(how: String): Nothing = throw Failure(s"column '$column' is damaged: $how")

  def size(buffer: Int): Long = told.get(3).get(3 * buffer + 2).asLong

  /** The address of `length` bytes from `from` of a buffer; 0 for none. */
  def address(buffer: Int, from: Long, length: Long): Long = {
    val there = size(buffer)
    if (from < 0 || length < 0 || from > there - length) damaged(s"a buffer of $there bytes, which needs ${from + length}")
    val place = told.get(3)
    if (length == 0) 0 else regions.address(place.get(3 * buffer).asInt, place.get(3 * buffer + 1).asLong + from, length)
  }

  /** The address of values of `width` bytes each, the first of this array first. */
  def values(buffer: Int, width: Int): Long = address(buffer, offset * width, length.toLong * width)

  def bits(buffer: Int): Bits =
    new Bits(address(buffer, offset >> 3, ((offset & 7) + length + 7) >> 3), (offset & 7).toInt)

  /** The address of offsets, which ascend, and stay within `limit`. */
  def offsets(limit: Long): Long = if (length == 0) 0 else {
    val at = address(1, offset * 4, (length + 1L) * 4)
    var last = Platform.getInt(null, at)
    var wrong = last < 0
    var index = 1
    while (index <= length) {
      val next = Platform.getInt(null, at + 4L * index)
      wrong |= next < last
      last = next
      index += 1
    }
    if (wrong || last > limit) damaged(s"its offsets do not ascend within $limit")
    at
  }
}

/** Bits in memory, from one within the byte at `address` on. */
final class Bits(address: Long, first: Int) {
  def apply(index: Int): Boolean = {
    val bit = index + first
    (Platform.getByte(null, address + (bit >> 3)) >> (bit & 7) & 1) != 0
  }
}

object Vectors {
  /** The array as a column of Spark's. Throws where it is damaged. */
  def of(wanted: DataType, place: ArrayPlace): ColumnVector = wanted match {
    case NullType => new NullVector(place)
    case BooleanType => new BooleanVector(place)
    case ByteType => new FixedVector(wanted, place, 1)
    case ShortType => new FixedVector(wanted, place, 2)
    case IntegerType | DateType | FloatType => new FixedVector(wanted, place, 4)
    case LongType | DoubleType | TimestampType | TimestampNTZType | _: DayTimeIntervalType | _: TimeType =>
      new FixedVector(wanted, place, 8)
    case decimal: DecimalType => new DecimalVector(decimal, place)
    case _: StringType | BinaryType => new BytesVector(wanted, place)
    case ArrayType(element, _) => new ListVector(wanted, place, element)
    case MapType(key, value, _) => new MapVector(wanted, place, key, value)
    case StructType(fields) => new StructVector(wanted, place, fields.map(_.dataType))
    case _ => place.damaged(s"there is no reader for ${wanted.simpleString}")
  }
}

/** What all columns have: nulls. What a column is not asked for, it does not know. */
abstract class ArrowVector(wanted: DataType, place: ArrayPlace) extends ColumnVector(wanted) {
  private val nulls = place.nulls
  private val valid = if (nulls == 0 || wanted == NullType) null else place.bits(0)

  private def not(what: String) = throw new UnsupportedOperationException(s"$what of ${wanted.simpleString}")

  override def isNullAt(row: Int): Boolean = valid != null && !valid(row)
  override def hasNull: Boolean = nulls != 0
  override def numNulls: Int = nulls
  override def close(): Unit = ()
  override def getBoolean(row: Int): Boolean = not("boolean")
  override def getByte(row: Int): Byte = not("byte")
  override def getShort(row: Int): Short = not("short")
  override def getInt(row: Int): Int = not("int")
  override def getLong(row: Int): Long = not("long")
  override def getFloat(row: Int): Float = not("float")
  override def getDouble(row: Int): Double = not("double")
  override def getArray(row: Int): ColumnarArray = not("array")
  override def getMap(row: Int): ColumnarMap = not("map")
  override def getDecimal(row: Int, precision: Int, scale: Int): Decimal = not("decimal")
  override def getUTF8String(row: Int): UTF8String = not("string")
  override def getBinary(row: Int): Array[Byte] = not("binary")
  override def getChild(ordinal: Int): ColumnVector = not("child")
}

final class NullVector(place: ArrayPlace) extends ArrowVector(NullType, place) {
  override def isNullAt(row: Int): Boolean = true
}

final class BooleanVector(place: ArrayPlace) extends ArrowVector(BooleanType, place) {
  private val bits = place.bits(1)
  override def getBoolean(row: Int): Boolean = bits(row)
}

/** Numbers, and what Spark has as numbers. */
final class FixedVector(wanted: DataType, place: ArrayPlace, width: Int) extends ArrowVector(wanted, place) {
  private val at = place.values(1, width)
  override def getByte(row: Int): Byte = Platform.getByte(null, at + row)
  override def getShort(row: Int): Short = Platform.getShort(null, at + 2L * row)
  override def getInt(row: Int): Int = Platform.getInt(null, at + 4L * row)
  override def getLong(row: Int): Long = Platform.getLong(null, at + 8L * row)
  override def getFloat(row: Int): Float = Platform.getFloat(null, at + 4L * row)
  override def getDouble(row: Int): Double = Platform.getDouble(null, at + 8L * row)
}

final class DecimalVector(wanted: DecimalType, place: ArrayPlace) extends ArrowVector(wanted, place) {
  private val at = place.values(1, 16)

  override def getDecimal(row: Int, precision: Int, scale: Int): Decimal = if (isNullAt(row)) null else {
    val low = Platform.getLong(null, at + 16L * row)
    val high = Platform.getLong(null, at + 16L * row + 8)
    if (precision <= Decimal.MAX_LONG_DIGITS && high == low >> 63) Decimal.createUnsafe(low, precision, scale)
    else {
      val bytes = new Array[Byte](16) // the most significant first
      for (index <- 0 until 8) {
        bytes(7 - index) = (high >> 8 * index).toByte
        bytes(15 - index) = (low >> 8 * index).toByte
      }
      Decimal(new BigDecimal(new BigInteger(bytes), scale), precision, scale)
    }
  }
}

/** Strings and binaries, which are handed out where they lie. */
final class BytesVector(wanted: DataType, place: ArrayPlace) extends ArrowVector(wanted, place) {
  private val offsets = place.offsets(place.size(2))
  private val data = if (place.length == 0) 0 else {
    val first = Platform.getInt(null, offsets)
    place.address(2, first, Platform.getInt(null, offsets + 4L * place.length) - first) - first
  }

  override def getUTF8String(row: Int): UTF8String = if (isNullAt(row)) null else {
    val from = Platform.getInt(null, offsets + 4L * row)
    UTF8String.fromAddress(null, data + from, Platform.getInt(null, offsets + 4L * row + 4) - from)
  }

  override def getBinary(row: Int): Array[Byte] = if (isNullAt(row)) null else {
    val from = Platform.getInt(null, offsets + 4L * row)
    val bytes = new Array[Byte](Platform.getInt(null, offsets + 4L * row + 4) - from)
    Platform.copyMemory(null, data + from, bytes, Platform.BYTE_ARRAY_OFFSET, bytes.length)
    bytes
  }
}

final class ListVector(wanted: DataType, place: ArrayPlace, element: DataType) extends ArrowVector(wanted, place) {
  private val lists = new Lists(place)
  private val values = Vectors.of(element, place.child(0, lists.first, lists.count))

  override def getArray(row: Int): ColumnarArray =
    if (isNullAt(row)) null else new ColumnarArray(values, lists.start(row), lists.size(row))
}

final class MapVector(wanted: DataType, place: ArrayPlace, key: DataType, value: DataType)
    extends ArrowVector(wanted, place) {
  private val lists = new Lists(place)
  private val keys = Vectors.of(key, place.child(0, lists.first, lists.count))
  private val values = Vectors.of(value, place.child(1, lists.first, lists.count))

  override def getMap(row: Int): ColumnarMap =
    if (isNullAt(row)) null else new ColumnarMap(keys, values, lists.start(row), lists.size(row))
}

/** Where each list of an array begins, counted from its `first` value, and how many it has. */
final class Lists(place: ArrayPlace) {
  private val offsets = place.offsets(Int.MaxValue)
  val first: Int = if (offsets == 0) 0 else Platform.getInt(null, offsets)
  val count: Int = if (offsets == 0) 0 else Platform.getInt(null, offsets + 4L * place.length) - first
  def start(row: Int): Int = Platform.getInt(null, offsets + 4L * row) - first
  def size(row: Int): Int = Platform.getInt(null, offsets + 4L * row + 4) - Platform.getInt(null, offsets + 4L * row)
}

final class StructVector(wanted: DataType, place: ArrayPlace, types: Array[DataType])
    extends ArrowVector(wanted, place) {
  private val children = types.zipWithIndex.map { case (one, index) => Vectors.of(one, place.field(index)) }
  override def getChild(ordinal: Int): ColumnVector = children(ordinal)
}

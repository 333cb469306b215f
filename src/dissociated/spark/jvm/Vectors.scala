package org.apache.spark.sql.dissociated

import java.math.{BigDecimal, BigInteger}
import java.nio.ByteBuffer
import java.util

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.sql.types._
import org.apache.spark.sql.vectorized.{ColumnarArray, ColumnarMap, ColumnVector}
import org.apache.spark.unsafe.Platform
import org.apache.spark.unsafe.types.UTF8String

/** Regions of memory, by number. Addresses in them are valid until their owner is closed. */
trait RegionAddresses {
  /** Return the address of `length` bytes of a region. Throws if the region does not have them. */
  def address(region: Int, offset: Long, length: Long): Long
}

/**
 * The description of an Arrow array, which has not been checked. Each buffer has three numbers in `buffers`: its
 * region, its offset there, and its size in bytes. `kind` names the difference from the usual layout of Spark's type.
 * `width` is the size of a value or dictionary index in bytes, or the length of a fixed-size list.
 */
final case class ArrayData(length: Long, offset: Long, nullCount: Long, buffers: Array[Long],
    children: Array[ArrayData], kind: String, width: Int)

object ArrayData {
  /** Return the description that the sidecar sent. */
  def fromJson(json: JsonNode): ArrayData = ArrayData(json.get(0).asLong, json.get(1).asLong, json.get(2).asLong,
    json.get(3).elements.asScala.map(_.asLong).toArray, json.get(4).elements.asScala.map(fromJson).toArray,
    json.get(5).asText, json.get(6).asInt)
}

/**
 * The values of an array from `from` on. Bounds are checked when an address is requested, once for each batch;
 * nothing checks them later. A value that is not `reachable`, because its parent is null, may be anything.
 */
final class ArraySlice(data: ArrayData, regions: RegionAddresses, val column: String, from: Int, val length: Int,
    reachable: Int => Boolean = _ => true) {
  private val offset = data.offset + from
  if (from < 0 || length < 0 || from > data.length - length || data.nullCount < 0 || offset < from)
    reject(s"it has ${data.length} values, and $length were requested from $from on")

  /** The layout: empty, or "large", "fixed", "view", "unsigned" or "dictionary". */
  def kind: String = data.kind
  def width: Int = data.width

  /** The number of nulls; of a part of an array, an upper bound. */
  val nullCount: Int = math.min(data.nullCount, length).toInt

  private lazy val validity = bitmap(0)

  /** Return whether a value is reachable and not null. */
  def isValid(row: Int): Boolean = reachable(row) && (nullCount == 0 || validity(row))

  /**
   * Throw if a reachable value is null. Spark reads a column without checks for nulls if its schema says that it has
   * none.
   */
  def requireNoNulls(isNull: Int => Boolean): Unit =
    Loop.over(length)(row => if (isNull(row) && reachable(row)) throw Failure(
      s"column '$column' has nulls, and its schema says that it has none: declare a schema in which it may be null " +
        "(for a read, .schema('...'))"))

  /** Return values of a child array. */
  def child(index: Int, from: Int, length: Int, reachable: Int => Boolean): ArraySlice =
    new ArraySlice(data.children(index), regions, column, from, length, reachable)

  /** Return a field of a struct, whose values have the positions of the struct's own. */
  def field(index: Int): ArraySlice = child(index, from, length, isValid)

  /** Return the values of a dictionary. */
  def dictionary: ArraySlice = child(0, 0, math.min(data.children(0).length, Int.MaxValue).toInt, _ => true)

  def bufferCount: Int = data.buffers.length / 3

  /** Throw an exception that says how the column is damaged. */
  def reject(reason: String): Nothing = throw Failure(s"column '$column' is damaged: $reason")

  def bufferSize(buffer: Int): Long = data.buffers(3 * buffer + 2)

  /** Return the address of `length` bytes of a buffer, or 0 if `length` is 0. Throws if the buffer is too small. */
  def address(buffer: Int, from: Long, length: Long): Long = {
    if (from < 0 || length < 0 || from > bufferSize(buffer) - length)
      reject(s"a buffer of ${bufferSize(buffer)} bytes must have ${from + length}")
    if (length == 0) 0
    else regions.address(data.buffers(3 * buffer).toInt, data.buffers(3 * buffer + 1) + from, length)
  }

  /** Return the address of the first of the values, which have `width` bytes each. */
  def valuesAddress(buffer: Int, width: Int): Long = address(buffer, offset * width, length.toLong * width)

  /** Return a buffer of bits, beginning with the first value. */
  def bitmap(buffer: Int): Bitmap =
    new Bitmap(address(buffer, offset >> 3, ((offset & 7) + length + 7) >> 3), (offset & 7).toInt)

  def offsets: Offsets = new Offsets(this, offset)
}

/**
 * The offsets of strings or lists: those of a buffer, or multiples of `width` if all values have one size. Throws
 * unless they ascend, by less than 2 GiB each.
 */
final class Offsets(slice: ArraySlice, offset: Long) {
  private val length = slice.length
  private val width = slice.kind match {
    case "fixed" => 0
    case "large" => 8
    case _ => 4
  }
  private val address = if (length == 0 || width == 0) 0 else slice.address(1, offset * width, (length + 1L) * width)

  @inline def apply(row: Int): Long = width match {
    case 4 => Platform.getInt(null, address + 4L * row)
    case 8 => Platform.getLong(null, address + 8L * row)
    case _ => (offset + row) * slice.width
  }

  val first: Long = if (length == 0) 0 else apply(0)
  /** The number of bytes or child values between the first and the last offset. */
  val valueCount: Long = if (length == 0) 0 else apply(length) - first
  private var isInvalid = first < 0
  Loop.over(length)(row => isInvalid |= apply(row + 1) < apply(row) || apply(row + 1) - apply(row) > Int.MaxValue)
  if (isInvalid) slice.reject("its offsets do not ascend, or one value has 2 GiB")

  @inline def size(row: Int): Int = (apply(row + 1) - apply(row)).toInt

  /** The child values that belong to a valid list. */
  private lazy val usedValues = {
    val rows = new util.BitSet(valueCount.toInt)
    Loop.over(length)(row =>
      if (slice.isValid(row)) rows.set((apply(row) - first).toInt, (apply(row + 1) - first).toInt))
    rows
  }

  /** Return the child values between the offsets. Spark counts them with an Int. */
  def values: ArraySlice =
    if (first + valueCount <= Int.MaxValue) slice.child(0, first.toInt, valueCount.toInt, usedValues.get(_))
    else slice.reject(s"its lists have ${first + valueCount} values, and Spark takes at most ${Int.MaxValue}")
}

/** Bits in native memory, beginning with the bit `first` of the byte at `address`. */
final class Bitmap(address: Long, first: Int) {
  def apply(index: Int): Boolean = {
    val bit = index + first
    (Platform.getByte(null, address + (bit >> 3)) >> (bit & 7) & 1) != 0
  }
}

object Vectors {
  /**
   * Return the array as a column of Spark, valid as long as its regions. Throws if the array is damaged, or has nulls
   * and must not.
   */
  def of(dataType: DataType, nullable: Boolean, slice: ArraySlice): ColumnVector = {
    val vector = of(dataType, slice)
    if (!nullable && vector.hasNull) slice.requireNoNulls(vector.isNullAt)
    vector
  }

  private def of(dataType: DataType, slice: ArraySlice): ColumnVector = (slice.kind, dataType) match {
    case (_, user: UserDefinedType[_]) => of(user.sqlType, slice)
    case ("dictionary", _) => new DictionaryVector(dataType, slice)
    case ("unsigned", ShortType | IntegerType | LongType) => new UnsignedVector(dataType, slice)
    case ("view", _: StringType | BinaryType) => new ViewVector(dataType, slice)
    case ("" | "large" | "fixed", _: StringType | BinaryType) => new BytesVector(dataType, slice)
    case ("" | "large" | "fixed", ArrayType(element, nullable)) =>
      new ListVector(dataType, slice, items => Seq(of(element, nullable, items)))
    case ("", MapType(key, value, nullable)) => new ListVector(dataType, slice, entries => {
      val pair = StructType(Seq(nonNullField("key", key), StructField("value", value, nullable)))
      val pairs = of(pair, nullable = false, entries)
      Seq(pairs.getChild(0), pairs.getChild(1))
    })
    case ("", StructType(parts)) => new StructVector(dataType, slice, fieldVectors(slice, parts))
    case ("", VariantType) =>
      new StructVector(dataType, slice,
        fieldVectors(slice, Array("value", "metadata").map(nonNullField(_, BinaryType))))
    case ("", NullType) => new NullVector(slice)
    case ("", BooleanType) => new BooleanVector(slice)
    case ("", FixedWidth(width)) => new FixedVector(dataType, slice, width)
    case ("", decimal: DecimalType) => new DecimalVector(decimal, slice)
    case (kind, _) => slice.reject(s"the layout '$kind' of ${dataType.simpleString} is unsupported")
  }

  private def nonNullField(name: String, kind: DataType) = StructField(name, kind, nullable = false)

  private def fieldVectors(slice: ArraySlice, parts: Array[StructField]): Seq[ColumnVector] =
    parts.toSeq.zipWithIndex.map { case (field, index) => of(field.dataType, field.nullable, slice.field(index)) }

  /** Return a copy of native memory. */
  def copyBytes(address: Long, length: Int): Array[Byte] = {
    val copy = new Array[Byte](length)
    Platform.copyMemory(null, address, copy, Platform.BYTE_ARRAY_OFFSET, length)
    copy
  }
}

/** A column with a validity bitmap. The getters of other types throw. */
abstract class ArrowVector(dataType: DataType, slice: ArraySlice) extends ColumnVector(dataType) {
  private val nullCount = slice.nullCount
  private val validity = if (nullCount == 0 || dataType == NullType) null else slice.bitmap(0)

  private def unsupported(kind: String) =
    throw new UnsupportedOperationException(s"a column of ${dataType.simpleString} has no values of the type $kind")

  override def isNullAt(row: Int): Boolean = validity != null && !validity(row)
  override def hasNull: Boolean = nullCount != 0
  override def numNulls: Int = nullCount
  override def close(): Unit = ()
  override def getBoolean(row: Int): Boolean = unsupported("boolean")
  override def getByte(row: Int): Byte = unsupported("byte")
  override def getShort(row: Int): Short = unsupported("short")
  override def getInt(row: Int): Int = unsupported("int")
  override def getLong(row: Int): Long = unsupported("long")
  override def getFloat(row: Int): Float = unsupported("float")
  override def getDouble(row: Int): Double = unsupported("double")
  override def getArray(row: Int): ColumnarArray = unsupported("array")
  override def getMap(row: Int): ColumnarMap = unsupported("map")
  override def getDecimal(row: Int, precision: Int, scale: Int): Decimal = unsupported("decimal")
  override def getUTF8String(row: Int): UTF8String = unsupported("string")
  override def getBinary(row: Int): Array[Byte] = unsupported("binary")
  override def getChild(ordinal: Int): ColumnVector = unsupported("child")
}

final class NullVector(slice: ArraySlice) extends ArrowVector(NullType, slice) {
  override def isNullAt(row: Int): Boolean = true
}

final class BooleanVector(slice: ArraySlice) extends ArrowVector(BooleanType, slice) {
  private val bits = slice.bitmap(1)
  override def getBoolean(row: Int): Boolean = bits(row)
}

/** A column of numbers, or of other types that Spark stores as numbers. */
final class FixedVector(dataType: DataType, slice: ArraySlice, width: Int) extends ArrowVector(dataType, slice) {
  private val address = slice.valuesAddress(1, width)
  override def getByte(row: Int): Byte = Platform.getByte(null, address + row)
  override def getShort(row: Int): Short = Platform.getShort(null, address + 2L * row)
  override def getInt(row: Int): Int = Platform.getInt(null, address + 4L * row)
  override def getLong(row: Int): Long = Platform.getLong(null, address + 8L * row)
  override def getFloat(row: Int): Float = Platform.getFloat(null, address + 4L * row)
  override def getDouble(row: Int): Double = Platform.getDouble(null, address + 8L * row)
}

/** A column of decimals of 16 bytes. */
final class DecimalVector(dataType: DecimalType, slice: ArraySlice) extends ArrowVector(dataType, slice) {
  private val address = slice.valuesAddress(1, 16)

  override def getDecimal(row: Int, precision: Int, scale: Int): Decimal = if (isNullAt(row)) null else {
    val low = Platform.getLong(null, address + 16L * row)
    val high = Platform.getLong(null, address + 16L * row + 8)
    if (precision <= Decimal.MAX_LONG_DIGITS && high == low >> 63) Decimal.createUnsafe(low, precision, scale)
    else {
      val unscaled = new BigInteger(ByteBuffer.allocate(16).putLong(high).putLong(low).array)
      Decimal(new BigDecimal(unscaled, scale), precision, scale)
    }
  }
}

/**
 * A column of strings or binaries, which lie in the last buffer one after the other. Strings are read without a copy.
 */
final class BytesVector(dataType: DataType, slice: ArraySlice) extends ArrowVector(dataType, slice) {
  private val offsets = slice.offsets
  private val data = slice.address(slice.bufferCount - 1, offsets.first, offsets.valueCount) - offsets.first

  override def getUTF8String(row: Int): UTF8String = if (isNullAt(row)) null else {
    val from = offsets(row)
    UTF8String.fromAddress(null, data + from, (offsets(row + 1) - from).toInt)
  }

  override def getBinary(row: Int): Array[Byte] =
    if (isNullAt(row)) null else Vectors.copyBytes(data + offsets(row), offsets.size(row))
}

/** A column of views: 16 bytes with the size, and either up to 12 bytes of content, or a buffer and an offset in it. */
final class ViewVector(dataType: DataType, slice: ArraySlice) extends ArrowVector(dataType, slice) {
  private val views = slice.valuesAddress(1, 16)
  private val data = Array.tabulate(slice.bufferCount - 2)(index =>
    slice.address(index + 2, 0, slice.bufferSize(index + 2)))
  Loop.over(slice.length)(row => if (!isNullAt(row) && (size(row) < 0 || size(row) > 12)) {
    val isKnown = buffer(row) >= 0 && buffer(row) < data.length
    if (size(row) < 0 || !isKnown || from(row) < 0 || from(row) > slice.bufferSize(buffer(row) + 2) - size(row))
      slice.reject(s"a view of ${size(row)} bytes at ${from(row)} of buffer ${buffer(row)} is outside of it")
  })

  private def buffer(row: Int): Int = Platform.getInt(null, views + 16L * row + 8)
  private def from(row: Int): Int = Platform.getInt(null, views + 16L * row + 12)
  private def size(row: Int): Int = Platform.getInt(null, views + 16L * row)
  private def address(row: Int): Long = if (size(row) <= 12) views + 16L * row + 4 else data(buffer(row)) + from(row)

  override def getUTF8String(row: Int): UTF8String =
    if (isNullAt(row)) null else UTF8String.fromAddress(null, address(row), size(row))
  override def getBinary(row: Int): Array[Byte] =
    if (isNullAt(row)) null else Vectors.copyBytes(address(row), size(row))
}

/** A column of unsigned numbers, for which Spark has the next wider type. */
final class UnsignedVector(dataType: DataType, slice: ArraySlice) extends ArrowVector(dataType, slice) {
  private val address = slice.valuesAddress(1, dataType.defaultSize / 2)
  override def getShort(row: Int): Short = (Platform.getByte(null, address + row) & 0xff).toShort
  override def getInt(row: Int): Int = Platform.getShort(null, address + 2L * row) & 0xffff
  override def getLong(row: Int): Long = Platform.getInt(null, address + 4L * row) & 0xffffffffL
}

/** A column of indices into a dictionary, which may have nulls, too. */
final class DictionaryVector(dataType: DataType, slice: ArraySlice) extends ArrowVector(dataType, slice) {
  private val width = slice.width
  private val address = slice.valuesAddress(1, width)
  private val values = Vectors.of(dataType, nullable = true, slice.dictionary)
  private val limit = slice.dictionary.length
  for (row <- 0 until slice.length if !super.isNullAt(row) && (key(row) < 0 || key(row) >= limit))
    slice.reject(s"the index ${key(row)} is beyond a dictionary of $limit values")

  /**
   * Return an index, read as unsigned: a negative one is then beyond the dictionary. An unsigned one of 8 bytes that
   * is too large is read as negative.
   */
  private def key(row: Int): Long = width match {
    case 1 => Platform.getByte(null, address + row) & 0xff
    case 2 => Platform.getShort(null, address + 2L * row) & 0xffff
    case 4 => Platform.getInt(null, address + 4L * row) & 0xffffffffL
    case _ => Platform.getLong(null, address + 8L * row)
  }
  private def index(row: Int): Int = key(row).toInt

  // The index of a null may be anything, and Spark copies a list with all of its values, so getters check for nulls.
  override def isNullAt(row: Int): Boolean = super.isNullAt(row) || values.isNullAt(index(row))
  override def hasNull: Boolean = super.hasNull || values.hasNull
  override def getBoolean(row: Int): Boolean = if (super.isNullAt(row)) false else values.getBoolean(index(row))
  override def getByte(row: Int): Byte = if (super.isNullAt(row)) 0 else values.getByte(index(row))
  override def getShort(row: Int): Short = if (super.isNullAt(row)) 0 else values.getShort(index(row))
  override def getInt(row: Int): Int = if (super.isNullAt(row)) 0 else values.getInt(index(row))
  override def getLong(row: Int): Long = if (super.isNullAt(row)) 0 else values.getLong(index(row))
  override def getFloat(row: Int): Float = if (super.isNullAt(row)) 0 else values.getFloat(index(row))
  override def getDouble(row: Int): Double = if (super.isNullAt(row)) 0 else values.getDouble(index(row))
  override def getDecimal(row: Int, precision: Int, scale: Int): Decimal =
    if (isNullAt(row)) null else values.getDecimal(index(row), precision, scale)
  override def getUTF8String(row: Int): UTF8String = if (isNullAt(row)) null else values.getUTF8String(index(row))
  override def getBinary(row: Int): Array[Byte] = if (isNullAt(row)) null else values.getBinary(index(row))
}

/** A column of lists, or of maps, which are lists of structs. */
final class ListVector(dataType: DataType, slice: ArraySlice, children: ArraySlice => Seq[ColumnVector])
    extends ArrowVector(dataType, slice) {
  private val lists = slice.offsets
  private val parts = children(lists.values).toArray

  private def from(row: Int): Int = (lists(row) - lists.first).toInt

  override def getArray(row: Int): ColumnarArray =
    if (isNullAt(row)) null else new ColumnarArray(parts(0), from(row), lists.size(row))
  override def getMap(row: Int): ColumnarMap =
    if (isNullAt(row)) null else new ColumnarMap(parts(0), parts(1), from(row), lists.size(row))
}

final class StructVector(dataType: DataType, slice: ArraySlice, children: Seq[ColumnVector])
    extends ArrowVector(dataType, slice) {
  private val parts = children.toArray
  override def getChild(ordinal: Int): ColumnVector = parts(ordinal)
}

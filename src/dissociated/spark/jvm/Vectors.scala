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

/** Memory that buffers lie in, by numbers; its addresses are good until it is closed. */
trait Places {
  /** The address of these bytes. Throws where they are not there. */
  def address(region: Int, at: Long, length: Long): Long
}

/**
 * The description of an Arrow array, which nobody has checked yet: for each buffer region, place in it and size; how it
 * differs from what Spark's type is in Arrow; and how wide its offsets, its indices, or its values are.
 */
final case class ArrayData(length: Long, offset: Long, nulls: Long, buffers: Array[Long], children: Array[ArrayData],
    kind: String, width: Int)

object ArrayData {
  /** As the sidecar tells it. */
  def of(plain: JsonNode): ArrayData = ArrayData(plain.get(0).asLong, plain.get(1).asLong, plain.get(2).asLong,
    plain.get(3).elements.asScala.map(_.asLong).toArray, plain.get(4).elements.asScala.map(of).toArray,
    plain.get(5).asText, plain.get(6).asInt)
}

/**
 * Values of an array. Nothing checks bounds later, so whatever is asked for here is checked, once a batch. What is not
 * `reachable`, since something above it is null, is not looked at.
 */
final class ArrayPlace(data: ArrayData, places: Places, val column: String, from: Int, val length: Int,
    reachable: Int => Boolean = _ => true) {
  private val offset = data.offset + from
  if (from < 0 || length < 0 || from > data.length - length || data.nulls < 0 || offset < from)
    damaged(s"${data.length} values, of which $length from $from are wanted")

  def kind: String = data.kind
  def width: Int = data.width

  /** How many nulls; of a part of an array, how many there may be. */
  val nulls: Int = math.min(data.nulls, length).toInt

  private lazy val valid = bits(0)

  /** Whether a value is there, and can be got at. */
  def has(row: Int): Boolean = reachable(row) && (nulls == 0 || valid(row))

  /** Spark is told that there are no nulls, and then takes what lies under them for values. */
  def refuseNulls(isNull: Int => Boolean): Unit = Loop.over(length)(row => if (isNull(row) && reachable(row)) throw Failure(
    s"column '$column' has nulls, and its schema says that it has none: name it in .schema('...'), which allows them"))

  /** Values of an array below this one. */
  def child(index: Int, from: Int, length: Int, reachable: Int => Boolean): ArrayPlace =
    new ArrayPlace(data.children(index), places, column, from, length, reachable)

  /** Of a struct, whose values lie where its own do. */
  def field(index: Int): ArrayPlace = child(index, from, length, has)

  /** The values of a dictionary. */
  def dictionary: ArrayPlace = child(0, 0, math.min(data.children(0).length, Int.MaxValue).toInt, _ => true)

  def buffers: Int = data.buffers.length / 3

  def damaged(how: String): Nothing = throw Failure(s"column '$column' is damaged: $how")

  def size(buffer: Int): Long = data.buffers(3 * buffer + 2)

  /** The address of `length` bytes from `from` of a buffer; 0 for none. */
  def address(buffer: Int, from: Long, length: Long): Long = {
    if (from < 0 || length < 0 || from > size(buffer) - length)
      damaged(s"a buffer of ${size(buffer)} bytes, which needs ${from + length}")
    if (length == 0) 0
    else places.address(data.buffers(3 * buffer).toInt, data.buffers(3 * buffer + 1) + from, length)
  }

  /** The address of values of `width` bytes each, the first of this array first. */
  def values(buffer: Int, width: Int): Long = address(buffer, offset * width, length.toLong * width)

  def bits(buffer: Int): Bits =
    new Bits(address(buffer, offset >> 3, ((offset & 7) + length + 7) >> 3), (offset & 7).toInt)

  def offsets: Offsets = new Offsets(this, offset)
}

/**
 * Where each string or list begins, and the last ends: as numbers say, or, where all have one size, one after the other.
 * They ascend: that is looked at.
 */
final class Offsets(place: ArrayPlace, offset: Long) {
  private val length = place.length
  private val width = place.kind match {
    case "fixed" => 0
    case "large" => 8
    case _ => 4
  }
  private val at = if (length == 0 || width == 0) 0 else place.address(1, offset * width, (length + 1L) * width)

  @inline def apply(row: Int): Long = width match {
    case 4 => Platform.getInt(null, at + 4L * row)
    case 8 => Platform.getLong(null, at + 8L * row)
    case _ => (offset + row) * place.width
  }

  val first: Long = if (length == 0) 0 else apply(0)
  /** How many bytes or values there are between the first and the last. */
  val count: Long = if (length == 0) 0 else apply(length) - first
  private var wrong = first < 0
  Loop.over(length)(row => wrong |= apply(row + 1) < apply(row) || apply(row + 1) - apply(row) > Int.MaxValue)
  if (wrong) place.damaged("its offsets do not ascend, or one value has 2 GiB")

  @inline def size(row: Int): Int = (apply(row + 1) - apply(row)).toInt

  /** Those that a list has which is there. */
  private lazy val used = {
    val found = new util.BitSet(count.toInt)
    Loop.over(length)(row => if (place.has(row)) found.set((apply(row) - first).toInt, (apply(row + 1) - first).toInt))
    found
  }

  /** The values between, which Spark counts by Int. */
  def values: ArrayPlace = if (first + count <= Int.MaxValue) place.child(0, first.toInt, count.toInt, used.get(_))
    else place.damaged(s"${first + count} values")
}

/** Bits in memory, from one within the byte at `address` on. */
final class Bits(address: Long, first: Int) {
  def apply(index: Int): Boolean = {
    val bit = index + first
    (Platform.getByte(null, address + (bit >> 3)) >> (bit & 7) & 1) != 0
  }
}

object Vectors {
  /** The array as a column of Spark's. Throws where it is damaged, and where it has nulls that it must not have. */
  def of(wanted: DataType, nullable: Boolean, place: ArrayPlace): ColumnVector = {
    val vector = of(wanted, place)
    if (!nullable && vector.hasNull) place.refuseNulls(vector.isNullAt)
    vector
  }

  private def of(wanted: DataType, place: ArrayPlace): ColumnVector = (place.kind, wanted) match {
    case (_, user: UserDefinedType[_]) => of(user.sqlType, place)
    case ("dictionary", _) => new DictionaryVector(wanted, place)
    case ("unsigned", ShortType | IntegerType | LongType) => new UnsignedVector(wanted, place)
    case ("view", _: StringType | BinaryType) => new ViewVector(wanted, place)
    case ("" | "large" | "fixed", _: StringType | BinaryType) => new BytesVector(wanted, place)
    case ("" | "large" | "fixed", ArrayType(element, nullable)) =>
      new ListVector(wanted, place, items => Seq(of(element, nullable, items)))
    case ("", MapType(key, value, nullable)) => new ListVector(wanted, place, entries => {
      val pair = StructType(Seq(present("key", key), StructField("value", value, nullable)))
      val pairs = of(pair, nullable = false, entries)
      Seq(pairs.getChild(0), pairs.getChild(1))
    })
    case ("", StructType(parts)) => new StructVector(wanted, place, fields(place, parts))
    case ("", VariantType) =>
      new StructVector(wanted, place, fields(place, Array("value", "metadata").map(present(_, BinaryType))))
    case ("", NullType) => new NullVector(place)
    case ("", BooleanType) => new BooleanVector(place)
    case ("", FixedWidth(width)) => new FixedVector(wanted, place, width)
    case ("", decimal: DecimalType) => new DecimalVector(decimal, place)
    case (kind, _) => place.damaged(s"there is no reader for $kind ${wanted.simpleString}")
  }

  private def present(name: String, kind: DataType) = StructField(name, kind, nullable = false)

  private def fields(place: ArrayPlace, wanted: Array[StructField]): Seq[ColumnVector] =
    wanted.toSeq.zipWithIndex.map { case (field, index) => of(field.dataType, field.nullable, place.field(index)) }

  def bytes(at: Long, length: Int): Array[Byte] = {
    val copy = new Array[Byte](length)
    Platform.copyMemory(null, at, copy, Platform.BYTE_ARRAY_OFFSET, length)
    copy
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
      val unscaled = new BigInteger(ByteBuffer.allocate(16).putLong(high).putLong(low).array)
      Decimal(new BigDecimal(unscaled, scale), precision, scale)
    }
  }
}

/** Strings and binaries, which are handed out where they lie: one after the other, in the last buffer. */
final class BytesVector(wanted: DataType, place: ArrayPlace) extends ArrowVector(wanted, place) {
  private val offsets = place.offsets
  private val data = place.address(place.buffers - 1, offsets.first, offsets.count) - offsets.first

  override def getUTF8String(row: Int): UTF8String = if (isNullAt(row)) null else {
    val from = offsets(row)
    UTF8String.fromAddress(null, data + from, (offsets(row + 1) - from).toInt)
  }

  override def getBinary(row: Int): Array[Byte] =
    if (isNullAt(row)) null else Vectors.bytes(data + offsets(row), offsets.size(row))
}

/** Strings and binaries of which each says where it lies: within its 16 bytes if it has up to 12. */
final class ViewVector(wanted: DataType, place: ArrayPlace) extends ArrowVector(wanted, place) {
  private val views = place.values(1, 16)
  private val data = Array.tabulate(place.buffers - 2)(index => place.address(index + 2, 0, place.size(index + 2)))
  Loop.over(place.length)(row => if (!isNullAt(row) && (size(row) < 0 || size(row) > 12)) {
    val known = buffer(row) >= 0 && buffer(row) < data.length
    if (size(row) < 0 || !known || from(row) < 0 || from(row) > place.size(buffer(row) + 2) - size(row))
      place.damaged(s"a view of ${size(row)} bytes at ${from(row)} of buffer ${buffer(row)}")
  })

  private def buffer(row: Int): Int = Platform.getInt(null, views + 16L * row + 8)
  private def from(row: Int): Int = Platform.getInt(null, views + 16L * row + 12)
  private def size(row: Int): Int = Platform.getInt(null, views + 16L * row)
  private def at(row: Int): Long = if (size(row) <= 12) views + 16L * row + 4 else data(buffer(row)) + from(row)

  override def getUTF8String(row: Int): UTF8String =
    if (isNullAt(row)) null else UTF8String.fromAddress(null, at(row), size(row))
  override def getBinary(row: Int): Array[Byte] = if (isNullAt(row)) null else Vectors.bytes(at(row), size(row))
}

/** Numbers without a sign, which have the next wider type in Spark. */
final class UnsignedVector(wanted: DataType, place: ArrayPlace) extends ArrowVector(wanted, place) {
  private val at = place.values(1, wanted.defaultSize / 2)
  override def getShort(row: Int): Short = (Platform.getByte(null, at + row) & 0xff).toShort
  override def getInt(row: Int): Int = Platform.getShort(null, at + 2L * row) & 0xffff
  override def getLong(row: Int): Long = Platform.getInt(null, at + 4L * row) & 0xffffffffL
}

/** Values by their number in a dictionary, which may have nulls, too. */
final class DictionaryVector(wanted: DataType, place: ArrayPlace) extends ArrowVector(wanted, place) {
  private val width = place.width
  private val at = place.values(1, width)
  private val values = Vectors.of(wanted, nullable = true, place.dictionary)
  private val limit = place.dictionary.length
  for (row <- 0 until place.length if !super.isNullAt(row) && (key(row) < 0 || key(row) >= limit))
    place.damaged(s"${key(row)} is not in a dictionary of $limit")

  /** Read without a sign: a number below 0 is too large then, but for 8 bytes, where one that is too large is below 0. */
  private def key(row: Int): Long = width match {
    case 1 => Platform.getByte(null, at + row) & 0xff
    case 2 => Platform.getShort(null, at + 2L * row) & 0xffff
    case 4 => Platform.getInt(null, at + 4L * row) & 0xffffffffL
    case _ => Platform.getLong(null, at + 8L * row)
  }
  private def of(row: Int): Int = key(row).toInt

  // Under a null, a key may be anything, and a list is copied by all of its values.
  override def isNullAt(row: Int): Boolean = super.isNullAt(row) || values.isNullAt(of(row))
  override def hasNull: Boolean = super.hasNull || values.hasNull
  override def getBoolean(row: Int): Boolean = if (super.isNullAt(row)) false else values.getBoolean(of(row))
  override def getByte(row: Int): Byte = if (super.isNullAt(row)) 0 else values.getByte(of(row))
  override def getShort(row: Int): Short = if (super.isNullAt(row)) 0 else values.getShort(of(row))
  override def getInt(row: Int): Int = if (super.isNullAt(row)) 0 else values.getInt(of(row))
  override def getLong(row: Int): Long = if (super.isNullAt(row)) 0 else values.getLong(of(row))
  override def getFloat(row: Int): Float = if (super.isNullAt(row)) 0 else values.getFloat(of(row))
  override def getDouble(row: Int): Double = if (super.isNullAt(row)) 0 else values.getDouble(of(row))
  override def getDecimal(row: Int, precision: Int, scale: Int): Decimal =
    if (isNullAt(row)) null else values.getDecimal(of(row), precision, scale)
  override def getUTF8String(row: Int): UTF8String = if (isNullAt(row)) null else values.getUTF8String(of(row))
  override def getBinary(row: Int): Array[Byte] = if (isNullAt(row)) null else values.getBinary(of(row))
}

/** Lists; and maps, which are lists of structs. */
final class ListVector(wanted: DataType, place: ArrayPlace, below: ArrayPlace => Seq[ColumnVector])
    extends ArrowVector(wanted, place) {
  private val lists = place.offsets
  private val parts = below(lists.values).toArray

  private def from(row: Int): Int = (lists(row) - lists.first).toInt

  override def getArray(row: Int): ColumnarArray =
    if (isNullAt(row)) null else new ColumnarArray(parts(0), from(row), lists.size(row))
  override def getMap(row: Int): ColumnarMap =
    if (isNullAt(row)) null else new ColumnarMap(parts(0), parts(1), from(row), lists.size(row))
}

final class StructVector(wanted: DataType, place: ArrayPlace, children: Seq[ColumnVector])
    extends ArrowVector(wanted, place) {
  private val parts = children.toArray
  override def getChild(ordinal: Int): ColumnVector = parts(ordinal)
}

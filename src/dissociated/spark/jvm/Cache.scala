package org.apache.spark.sql.dissociated

import java.nio.ByteBuffer

import org.apache.spark.rdd.RDD
import org.apache.spark.sql.catalyst.expressions.UnsafeRow
import org.apache.spark.sql.catalyst.expressions.codegen.UnsafeRowWriter
import org.apache.spark.sql.execution.SparkPlan
import org.apache.spark.sql.execution.adaptive.TableCacheQueryStageExec
import org.apache.spark.sql.execution.columnar._
import org.apache.spark.sql.execution.vectorized.OnHeapColumnVector
import org.apache.spark.sql.types._

/** The batches of a DataFrame that Spark has cached. Spark itself returns their columns only if all are primitive. */
object CachedBatches {
  /** Return the batches that `plan` reads from Spark's cache, or None if it does more. */
  def of(plan: SparkPlan): Option[RDD[CachedRows]] = plan match {
    case stage: TableCacheQueryStageExec => of(stage.plan)
    case scan @ InMemoryTableScanExec(attributes, Seq(), relation)
        if relation.cacheBuilder.serializer.getClass == classOf[DefaultCachedBatchSerializer] =>
      val ordinals = attributes.map(attribute => relation.output.indexWhere(_.exprId == attribute.exprId)).toArray
      val types = attributes.map(_.dataType).toArray
      val rows = scan.longMetric("numOutputRows")
      Some(relation.cacheBuilder.cachedColumnBuffers.mapPartitions { batches =>
        val columns = types.map(CachedColumn.of)
        batches.map { case batch: DefaultCachedBatch =>
          Loop.over(columns.length)(index => columns(index).decode(batch.buffers(ordinals(index)), batch.numRows))
          rows += batch.numRows
          new CachedRows(columns, batch.numRows)
        }
      })
    case _ => None
  }
}

/** The decoded rows of a batch. They are valid until the next batch is decoded. */
final class CachedRows(val columns: Array[CachedColumn], val count: Int) {
  private val fixedSize = columns.map(_.fixedSize).sum
  private val fields = columns.collect { case column: CachedFields if column.varies => column }

  /** Return the size of a row in bytes. It allocates nothing, because it is called for each row. */
  def size(row: Int): Long = {
    var total = fixedSize
    Loop.over(fields.length)(index => total += fields(index).size(row))
    total
  }
}

/** A decoder of the values of a column in Spark's cache, one batch after the other. */
abstract class CachedColumn {
  /** The bytes that each value has at least. */
  def fixedSize: Long
  def decode(encoded: Array[Byte], count: Int): Unit
  /** Append `count` values to `column`, from the row `first` on. */
  def appendTo(column: Column, first: Int, count: Int): Unit
}

object CachedColumn {
  def of(dataType: DataType): CachedColumn = dataType match {
    case FloatType | DoubleType => new CachedPrimitives(dataType)
    case FixedWidth(1) => new CachedPrimitives(ByteType)
    case FixedWidth(2) => new CachedPrimitives(ShortType)
    case FixedWidth(4) => new CachedPrimitives(IntegerType)
    case FixedWidth(8) => new CachedPrimitives(LongType)
    case decimal: DecimalType if decimal.precision <= Decimal.MAX_LONG_DIGITS => new CachedPrimitives(LongType)
    case user: UserDefinedType[_] => of(user.sqlType)
    case _ => new CachedFields(dataType)
  }
}

/** Values of a primitive type, or of a type that Spark caches as one. */
final class CachedPrimitives(dataType: DataType) extends CachedColumn {
  private var vector: OnHeapColumnVector = _

  override def fixedSize: Long = dataType.defaultSize

  override def decode(encoded: Array[Byte], count: Int): Unit = {
    // `reset` would keep the dictionary of the previous batch.
    vector = new OnHeapColumnVector(count, dataType)
    ColumnAccessor.decompress(encoded, vector, dataType, count)
  }

  override def appendTo(column: Column, first: Int, count: Int): Unit =
    column.asInstanceOf[FixedColumn].appendRange(vector, first, count)
}

/** Values of other types. Spark decodes them only into rows, so the values become the fields of a row. */
final class CachedFields(dataType: DataType) extends CachedColumn {
  private var writer = new UnsafeRowWriter(0)
  private var fields: UnsafeRow = _

  /** Whether the size of a value depends on the value. */
  val varies: Boolean = !dataType.isInstanceOf[DecimalType] && dataType != BooleanType && dataType != NullType

  override def fixedSize: Long = dataType match {
    case _: DecimalType => 16
    case _ if varies => 4 // an offset
    case _ => 0 // at most a bit
  }

  override def decode(encoded: Array[Byte], count: Int): Unit = {
    if (fields == null || fields.numFields != count) writer = new UnsafeRowWriter(count, encoded.length)
    writer.reset()
    writer.zeroOutNullBytes()
    val values = ColumnAccessor(dataType, ByteBuffer.wrap(encoded))
    val row = new MutableUnsafeRow(writer)
    Loop.over(count)(index => values.extractTo(row, index))
    fields = writer.getRow
  }

  /** Return the size of a value that Spark stores outside of the field, which then has the size in its low half. */
  def size(row: Int): Int = fields.getLong(row).toInt

  override def appendTo(column: Column, first: Int, count: Int): Unit = column.appendFields(fields, first, count)
}

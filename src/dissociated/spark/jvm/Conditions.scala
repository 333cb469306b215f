package org.apache.spark.sql.dissociated

import org.apache.spark.sql.connector.expressions.{Expression, Literal, NamedReference}
import org.apache.spark.sql.connector.expressions.filter.Predicate
import org.apache.spark.sql.types.{DataType, Decimal, StringType, StructType}
import org.apache.spark.unsafe.types.UTF8String

/**
 * The conversion of predicates for the sidecar, to [column, operator, values]. Servers use them to skip batches.
 * Spark evaluates every predicate again, so unsupported ones are omitted.
 */
object Conditions {
  private val operators = Set("=", ">", ">=", "<", "<=", "IN", "IS_NULL", "IS_NOT_NULL")
  // The largest number of values of one IN.
  private val MaxValues = 1 << 16

  /** Return the condition, or None if it is unsupported. */
  def of(predicate: Predicate, schema: StructType): Option[Seq[Any]] = predicate.children.toSeq match {
    case (column: NamedReference) +: values if operators.contains(predicate.name) && values.length <= MaxValues =>
      val isColumn = column.fieldNames.length == 1 &&
        schema.exists(field => field.name == column.fieldNames.head && isBinary(field.dataType))
      val literals = values.map(value)
      Option.when(isColumn && literals.forall(_.isDefined))(Seq(column.fieldNames.head, predicate.name, literals.flatten))
    case _ => None
  }

  /** Return whether values are compared by their bytes. The statistics of batches do not follow other collations. */
  private def isBinary(kind: DataType): Boolean = kind match {
    case text: StringType => text.isUTF8BinaryCollation
    case _ => true
  }

  /**
   * Return a literal as a value of JSON, or None if it has none. Days, microseconds and nanoseconds are numbers;
   * decimals are strings.
   */
  private def value(expression: Expression): Option[Any] = expression match {
    case literal: Literal[_] => literal.value match {
      case whole @ (null | _: Byte | _: Short | _: Int | _: Long | _: Boolean) => Some(whole)
      case number: Float if !number.isNaN && !number.isInfinite => Some(number.toDouble)
      case number: Double if !number.isNaN && !number.isInfinite => Some(number)
      case text: UTF8String => Some(text.toString).filter(UTF8String.fromString(_) == text) // invalid UTF-8 differs
      case decimal: Decimal => Some(decimal.toJavaBigDecimal.toPlainString)
      case _ => None
    }
    case _ => None
  }
}

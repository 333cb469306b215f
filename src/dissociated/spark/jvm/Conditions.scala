package org.apache.spark.sql.dissociated

import java.util

import scala.jdk.CollectionConverters._

import org.apache.spark.sql.connector.expressions.{Expression, Literal, NamedReference}
import org.apache.spark.sql.connector.expressions.filter.Predicate
import org.apache.spark.sql.types.{DataType, Decimal, StringType, StructType}
import org.apache.spark.unsafe.types.UTF8String

/**
 * What a query filters by, as the sidecar takes it: [column, operator, value]. By these the server leaves out batches
 * without such rows, where it knows. Spark filters what comes all the same: so what is not simple is not told.
 */
object Conditions {
  private val operators = Set("=", ">", ">=", "<", "<=")
  private val MaxValues = 1 << 16 // of one `in`

  def of(predicate: Predicate, schema: StructType): Option[util.List[Any]] = {
    val name = predicate.children.headOption.collect {
      case reference: NamedReference if reference.fieldNames.length == 1 => reference.fieldNames.head
    }.filter(schema.fieldNames.contains(_)).filter(name => isBinary(schema(name).dataType))
    val values = predicate.children.drop(1).filterNot(isNull).map(value) // nothing equals null
    def told(operator: String, more: Any*) = name.map(one => (one +: operator +: more).asJava)
    predicate.name match {
      case "IS_NULL" => told("is null")
      case "IS_NOT_NULL" => told("is not null")
      case _ if values.isEmpty || values.contains(None) => None
      case "IN" if values.length <= MaxValues => told("in", values.flatten.toSeq.asJava)
      case operator if operators.contains(operator) && values.length == 1 => told(operator, values.head.get)
      case _ => None
    }
  }

  private def isNull(expression: Expression) = expression match {
    case literal: Literal[_] => literal.value == null
    case _ => false
  }

  /** Whether values are compared as they are. Statistics know nothing of collations. */
  private def isBinary(kind: DataType): Boolean = kind match {
    case text: StringType => text.isUTF8BinaryCollation
    case _ => true
  }

  /** A literal as JSON has it: days, microseconds and nanoseconds are numbers, decimals are text. */
  private def value(expression: Expression): Option[Any] = expression match {
    case literal: Literal[_] => literal.value match {
      case whole @ (_: Byte | _: Short | _: Int | _: Long | _: Boolean) => Some(whole)
      case number: Float if !number.isNaN && !number.isInfinite => Some(number.toDouble)
      case number: Double if !number.isNaN && !number.isInfinite => Some(number)
      case text: UTF8String => Some(text.toString)
      case decimal: Decimal => Some(decimal.toJavaBigDecimal.toPlainString)
      case _ => None
    }
    case _ => None
  }
}

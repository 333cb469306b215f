package org.apache.spark.sql.dissociated

import java.util

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.sql.catalyst.analysis.{NoSuchTableException, TableAlreadyExistsException}
import org.apache.spark.sql.connector.catalog._
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read.ScanBuilder
import org.apache.spark.sql.connector.write.{LogicalWriteInfo, LogicalWriteInfoImpl, SupportsTruncate, WriteBuilder}
import org.apache.spark.sql.types.{DataType, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/** `spark.sql.catalog.NAME`: the datasets of one of our catalogs as tables of Spark's. */
class DatasetCatalog extends StagingTableCatalog {
  private var catalogName: String = _
  private var options: Map[String, String] = _

  override def initialize(name: String, given: CaseInsensitiveStringMap): Unit = {
    catalogName = name
    options = given.asScala.toMap
  }

  override def name(): String = catalogName

  private def ask(call: String, arguments: (String, Any)*): JsonNode =
    Sidecar.of(Python.ofDriver()).call(call, ("options" -> options) +: arguments: _*)

  private def named(table: Identifier): (String, String) = "name" -> (table.namespace :+ table.name).mkString(".")

  private def of(table: Identifier, schema: StructType): Dataset =
    new DatasetTable(schema, options + ("path" -> named(table)._2))

  override def listTables(namespace: Array[String]): Array[Identifier] =
    if (namespace.nonEmpty) Array.empty
    else ask("tables").elements.asScala.map(name => Identifier.of(Array.empty, name.asText)).toArray

  override def tableExists(table: Identifier): Boolean = ask("table_exists", named(table)).asBoolean

  override def loadTable(table: Identifier): Table = {
    if (!tableExists(table)) throw new NoSuchTableException(table)
    val found = ask("table_schema", named(table)).asText
    of(table, DataType.fromJson(found).asInstanceOf[StructType])
  }

  override def createTable(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): Table = {
    stageCreate(table, schema, by, properties).commitStagedChanges()
    of(table, schema)
  }

  override def stageCreate(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = {
    if (tableExists(table)) throw new TableAlreadyExistsException(table)
    stageCreateOrReplace(table, schema, by, properties)
  }

  override def stageReplace(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = {
    if (!tableExists(table)) throw new NoSuchTableException(table)
    stageCreateOrReplace(table, schema, by, properties)
  }

  /** A write replaces what there is, whole and at once. So only a table that is not written is made in the end. */
  override def stageCreateOrReplace(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = {
    refusePartitions(table, by)
    new DatasetTable(schema, options + ("path" -> named(table)._2)) with StagedTable {
      private var written = false

      override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
        written = true
        super.newWriteBuilder(info).asInstanceOf[SupportsTruncate].truncate()
      }

      override def commitStagedChanges(): Unit =
        if (!written) ask("create_table", named(table), "schema" -> schema.json)
      override def abortStagedChanges(): Unit = ()
    }
  }

  private def refusePartitions(table: Identifier, by: Array[Transform]): Unit =
    if (by.nonEmpty) throw new UnsupportedOperationException(
      s"$table has no partitions by columns: leave them out, and sort what is written, so that queries skip batches")

  override def dropTable(table: Identifier): Boolean = ask("drop_table", named(table)).asBoolean

  override def alterTable(table: Identifier, changes: TableChange*): Table =
    throw new UnsupportedOperationException(s"$table stays as it is: write it anew, or drop it")

  override def renameTable(from: Identifier, to: Identifier): Unit =
    throw new UnsupportedOperationException(s"$from keeps its name: write it under another")
}

/** One of them. A query's own options come to those of the catalog. */
class DatasetTable(schema: StructType, options: Map[String, String])
    extends Dataset(schema, Array.empty, options.asJava) {
  private def joined(given: CaseInsensitiveStringMap) =
    new CaseInsensitiveStringMap((options ++ given.asScala).asJava)

  override def name(): String = options("path")

  override def newScanBuilder(given: CaseInsensitiveStringMap): ScanBuilder = super.newScanBuilder(joined(given))

  /** Its types stay, also where a query gives no nulls. */
  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder =
    super.newWriteBuilder(LogicalWriteInfoImpl(info.queryId, schema, joined(info.options)))
}

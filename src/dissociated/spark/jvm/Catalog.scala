package org.apache.spark.sql.dissociated

import java.util

import scala.collection.mutable
import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.sql.SparkSession
import org.apache.spark.sql.catalyst.analysis._
import org.apache.spark.sql.catalyst.plans.logical._
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.classic
import org.apache.spark.sql.connector.catalog._
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read.ScanBuilder
import org.apache.spark.sql.connector.write.{LogicalWriteInfo, LogicalWriteInfoImpl, SupportsTruncate, WriteBuilder}
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.{DataType, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * `spark.sql.catalog.NAME`: the datasets of one of our catalogs as tables of Spark's. The dataset `a.b.t` is the table
 * `t` of the namespace `a.b`.
 */
class DatasetCatalog extends StagingTableCatalog with SupportsNamespaces {
  private var catalogName: String = _
  private var options: Map[String, String] = _
  /** Namespaces that this session created. Any other namespace exists if it has a table. */
  private val created = mutable.LinkedHashSet.empty[Seq[String]]

  override def initialize(name: String, settings: CaseInsensitiveStringMap): Unit = {
    catalogName = name
    options = settings.asScala.toMap
  }

  override def name(): String = catalogName

  private def ask(call: String, arguments: (String, Any)*): JsonNode =
    Sidecar.of(Python.ofDriver()).call(call, ("options" -> options) +: arguments: _*)

  private def named(table: Identifier): (String, String) = "name" -> DatasetCatalog.dataset(table)

  private def tables: Seq[Identifier] =
    ask("tables").elements.asScala.map(name => DatasetCatalog.identifier(name.asText)).toSeq

  override def listTables(namespace: Array[String]): Array[Identifier] = synchronized {
    val all = tables
    requireNamespace(namespace, all)
    all.filter(_.namespace.sameElements(namespace)).toArray
  }

  override def tableExists(table: Identifier): Boolean = ask("table_exists", named(table)).asBoolean

  override def loadTable(table: Identifier): Table = load(table)

  /** `VERSION AS OF`. */
  override def loadTable(table: Identifier, version: String): Table = load(table, "version" -> version)

  /** `TIMESTAMP AS OF`, in microseconds since 1970. */
  override def loadTable(table: Identifier, timestamp: Long): Table = load(table, "timestamp" -> timestamp)

  private def load(table: Identifier, at: (String, Any)*): Table = {
    val answer = ask("load_table", named(table) +: at: _*)
    if (answer.isNull) throw new NoSuchTableException(table)
    val version = Option.when(at.nonEmpty)("version" -> answer.get("version").asText)
    val tags = answer.get("tags").properties.asScala.map(tag => tag.getKey -> tag.getValue.asText).toMap
    val schema = DataType.fromJson(answer.get("schema").asText).asInstanceOf[StructType]
    new DatasetTable(schema, options + ("path" -> named(table)._2) ++ version, tags) with TruncatableTable {
      /** `TRUNCATE TABLE`, and `DELETE FROM` without a condition. */
      override def truncateTable(): Boolean = {
        create(table, schema, tags)
        true
      }
    }
  }

  private def create(table: Identifier, schema: StructType, tags: Map[String, String]): Unit =
    ask("create_table", named(table), "schema" -> schema.json, "tags" -> tags)

  override def createTable(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): Table = {
    stageCreate(table, schema, by, properties).commitStagedChanges()
    loadTable(table)
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

  /** A write replaces the table at once and whole. So only a table that is not written is made in the end. */
  override def stageCreateOrReplace(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = {
    Source.refusePartitions(table.toString, by)
    val tags = keptProperties(table, properties.asScala.toMap)
    new DatasetTable(schema, options + ("path" -> named(table)._2), tags) with StagedTable {
      private var written = false

      override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
        written = true
        super.newWriteBuilder(info).asInstanceOf[SupportsTruncate].truncate()
      }

      override def commitStagedChanges(): Unit =
        if (!written) create(table, schema, tags)
      override def abortStagedChanges(): Unit = ()
    }
  }

  /** The properties that become tags. Refuses those that say how Spark is to store the table. */
  private def keptProperties(table: Identifier, properties: Map[String, String]): Map[String, String] = {
    def refuse(clause: String, advice: String): Unit =
      throw new UnsupportedOperationException(s"$table cannot have $clause: $advice")
    if (properties.keys.exists(_.startsWith(TableCatalog.OPTION_PREFIX)))
      refuse("OPTIONS", "write properties of your own as TBLPROPERTIES, which are kept as tags")
    if (properties.contains(TableCatalog.PROP_LOCATION) || properties.contains(TableCatalog.PROP_EXTERNAL))
      refuse("LOCATION or EXTERNAL", "its rows lie in the store of a node; leave the clause out")
    // saveAsTable names Spark's default format where the user names none. For statements, see UsingRule.
    val provider = properties.get(TableCatalog.PROP_PROVIDER)
    if (!provider.forall(name => name == Source.name || name == SQLConf.get.defaultDataSourceName))
      DatasetCatalog.refuseUsing(table, provider.get)
    properties -- Seq(TableCatalog.PROP_PROVIDER, TableCatalog.PROP_OWNER)
  }

  override def dropTable(table: Identifier): Boolean = ask("drop_table", named(table)).asBoolean

  override def alterTable(table: Identifier, changes: TableChange*): Table =
    throw new UnsupportedOperationException(s"$table stays as it is: write it anew, or drop it")

  override def renameTable(from: Identifier, to: Identifier): Unit =
    throw new UnsupportedOperationException(s"$from keeps its name: write it under another")

  private def namespaces(all: Seq[Identifier]): Seq[Seq[String]] = created.toSeq ++ all.map(_.namespace.toSeq)

  private def exists(namespace: Seq[String], all: Seq[Identifier]): Boolean =
    namespace.isEmpty || namespaces(all).exists(_.startsWith(namespace))

  private def requireNamespace(namespace: Array[String], all: Seq[Identifier]): Unit =
    if (!exists(namespace.toSeq, all)) throw new NoSuchNamespaceException(namespace)

  override def namespaceExists(namespace: Array[String]): Boolean = synchronized(exists(namespace.toSeq, tables))

  override def listNamespaces(): Array[Array[String]] = listNamespaces(Array.empty)

  override def listNamespaces(namespace: Array[String]): Array[Array[String]] = synchronized {
    val all = tables
    requireNamespace(namespace, all)
    namespaces(all).filter(name => name.startsWith(namespace) && name.length > namespace.length)
      .map(_.take(namespace.length + 1)).distinct.map(_.toArray).toArray
  }

  override def loadNamespaceMetadata(namespace: Array[String]): util.Map[String, String] = {
    if (!namespaceExists(namespace)) throw new NoSuchNamespaceException(namespace)
    util.Map.of()
  }

  override def createNamespace(namespace: Array[String], properties: util.Map[String, String]): Unit = synchronized {
    if (namespaceExists(namespace)) throw new NamespaceAlreadyExistsException(namespace)
    if (namespace.exists(_.contains('.')))
      throw new UnsupportedOperationException(s"the namespace ${namespace.mkString(".")} has a part with a dot")
    if ((properties.asScala - SupportsNamespaces.PROP_OWNER).nonEmpty)
      throw new UnsupportedOperationException(s"the namespace ${namespace.mkString(".")} has no properties: it is the " +
        "beginning of the names of its tables; leave COMMENT, LOCATION and WITH DBPROPERTIES out")
    created += namespace.toSeq
  }

  override def alterNamespace(namespace: Array[String], changes: NamespaceChange*): Unit =
    throw new UnsupportedOperationException(s"the namespace ${namespace.mkString(".")} has no properties")

  override def dropNamespace(namespace: Array[String], cascade: Boolean): Boolean = synchronized {
    val all = tables
    requireNamespace(namespace, all)
    val inside = all.filter(_.namespace.startsWith(namespace))
    if (inside.nonEmpty && !cascade) throw new NonEmptyNamespaceException(namespace)
    inside.foreach(dropTable)
    created --= created.filter(_.startsWith(namespace)).toSeq
    true
  }
}

object DatasetCatalog {
  def refuseUsing(table: Identifier, format: String): Nothing = throw new UnsupportedOperationException(
    s"$table cannot have USING $format: all tables of this catalog are datasets; leave the clause out")

  def dataset(table: Identifier): String = (table.namespace :+ table.name).mkString(".")

  /** The table of a dataset. A name that is not made of parts between dots is whole the name of a table. */
  def identifier(dataset: String): Identifier = {
    val parts = dataset.split("\\.", -1)
    if (parts.exists(_.isEmpty)) Identifier.of(Array.empty, dataset) else Identifier.of(parts.init, parts.last)
  }
}

/**
 * Refuses `CREATE TABLE ... USING parquet` in our catalogs. To the catalog itself, Spark's default format looks the same
 * if a statement names it and if `saveAsTable` adds it; only a statement has a text, and only before it is resolved.
 */
class UsingRule(session: SparkSession) extends Rule[LogicalPlan] with LookupCatalog {
  override protected lazy val catalogManager: CatalogManager =
    session.asInstanceOf[classic.SparkSession].sessionState.catalogManager

  override def apply(plan: LogicalPlan): LogicalPlan = {
    if (plan.origin.sqlText.isDefined) plan match {
      case create: CreateTable => check(create.name, create.tableSpec)
      case create: CreateTableAsSelect => check(create.name, create.tableSpec)
      case replace: ReplaceTable => check(replace.name, replace.tableSpec)
      case replace: ReplaceTableAsSelect => check(replace.name, replace.tableSpec)
      case _ =>
    }
    plan
  }

  private def check(name: LogicalPlan, spec: TableSpecBase): Unit = (name, spec.provider) match {
    case (UnresolvedIdentifier(CatalogAndIdentifier(_: DatasetCatalog, table), _), Some(format))
        if format != Source.name => DatasetCatalog.refuseUsing(table, format)
    case _ =>
  }
}

/** A table of such a catalog. The options of a query are added to those of the catalog. */
class DatasetTable(schema: StructType, options: Map[String, String], tags: Map[String, String])
    extends Dataset(schema, Array.empty, options.asJava) {
  /** Without the options by which Spark has chosen the version of this table. */
  private def joined(more: CaseInsensitiveStringMap) = options ++ more.asScala -- Seq("versionasof", "timestampasof")

  private def insensitive(options: Map[String, String]) = new CaseInsensitiveStringMap(options.asJava)

  override def name(): String = options("path")

  override def properties(): util.Map[String, String] = (tags + (TableCatalog.PROP_PROVIDER -> Source.name)).asJava

  override def newScanBuilder(more: CaseInsensitiveStringMap): ScanBuilder =
    super.newScanBuilder(insensitive(joined(more)))

  /** Its types and properties stay, also where a query gives no nulls. */
  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
    val all = joined(info.options)
    val ownTags = Option.when(tags.nonEmpty)("tags" -> Sidecar.of(Python.ofDriver())
      .call("merged_tags", "tags" -> tags, "added" -> info.options.getOrDefault("tags", "")).asText)
    super.newWriteBuilder(LogicalWriteInfoImpl(info.queryId, schema, insensitive(all ++ ownTags)))
  }
}

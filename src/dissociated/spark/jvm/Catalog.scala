package org.apache.spark.sql.dissociated

import java.util
import java.util.UUID

import scala.collection.mutable
import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.sql.SparkSession
import org.apache.spark.sql.catalyst.analysis._
import org.apache.spark.sql.catalyst.plans.logical._
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.catalyst.util.CharVarcharUtils
import org.apache.spark.sql.classic
import org.apache.spark.sql.connector.catalog._
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read.ScanBuilder
import org.apache.spark.sql.connector.write.{LogicalWriteInfo, LogicalWriteInfoImpl, SupportsTruncate, WriteBuilder}
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.types.{DataType, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * The plug-in for `spark.sql.catalog.NAME`: the datasets of a dissociated catalog as tables of Spark. The dataset
 * `a.b.t` is the table `t` of the namespace `a.b`.
 */
class DatasetCatalog extends StagingTableCatalog with SupportsNamespaces {
  private var catalogName: String = _
  private var options: Map[String, String] = _
  /** Namespaces that this session created. Any other namespace exists if it has a table. */
  private val createdNamespaces = mutable.LinkedHashSet.empty[Seq[String]]

  override def initialize(name: String, settings: CaseInsensitiveStringMap): Unit = {
    catalogName = name
    // All uses must mean the same catalog, so the option is never absent: if it is empty, Python takes the default.
    options = Map("catalog" -> "") ++ Source.withDefaultCatalog(settings).asScala
  }

  override def name(): String = catalogName

  private def callSidecar(call: String, arguments: (String, Any)*): JsonNode =
    Sidecar.of(Python.ofDriver()).call(call, ("options" -> options) +: arguments: _*)

  private def nameArgument(table: Identifier): (String, String) = "name" -> DatasetCatalog.datasetName(table)

  private def tables: Seq[Identifier] =
    callSidecar("tables").elements.asScala.map(name => DatasetCatalog.identifier(name.asText)).toSeq

  override def listTables(namespace: Array[String]): Array[Identifier] = synchronized {
    val all = tables
    requireNamespace(namespace, all)
    all.filter(_.namespace.sameElements(namespace)).toArray
  }

  override def tableExists(table: Identifier): Boolean = callSidecar("table_exists", nameArgument(table)).asBoolean

  override def loadTable(table: Identifier): Table = load(table)

  /** Load a table with `VERSION AS OF`. */
  override def loadTable(table: Identifier, version: String): Table = load(table, "version" -> version)

  /** Load a table with `TIMESTAMP AS OF`, in microseconds since 1970. */
  override def loadTable(table: Identifier, timestamp: Long): Table = load(table, "timestamp" -> timestamp)

  private def load(table: Identifier, at: (String, Any)*): Table = {
    val answer = callSidecar("load_table", nameArgument(table) +: at: _*)
    if (answer.isNull) throw new NoSuchTableException(table)
    val version = Option.when(at.nonEmpty)("version" -> answer.get("version").asText)
    val tags = answer.get("tags").properties.asScala.map(tag => tag.getKey -> tag.getValue.asText).toMap
    val schema = DataType.fromJson(answer.get("schema").asText).asInstanceOf[StructType]
    new DatasetTable(schema, options + ("path" -> nameArgument(table)._2) ++ version, tags) with TruncatableTable {
      /** Replace the table by an empty one, for `TRUNCATE TABLE` and for `DELETE FROM` without a condition. */
      override def truncateTable(): Boolean = {
        create(table, schema, tags, exists = Some(true))
        true
      }
    }
  }

  /** Create or replace a table. `exists` says whether it must exist, or must not exist, at that moment. */
  private def create(
      table: Identifier, schema: StructType, tags: Map[String, String], exists: Option[Boolean]): Unit =
    Sidecar.callRepeatable(Python.ofDriver(), "create_table", "options" -> options, nameArgument(table),
      "schema" -> schema.json, "tags" -> tags, "exists" -> exists, "key" -> UUID.randomUUID.toString.replace("-", ""))

  override def createTable(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): Table = {
    stageCreate(table, schema, by, properties).commitStagedChanges()
    loadTable(table)
  }

  override def stageCreate(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = {
    if (tableExists(table)) throw new TableAlreadyExistsException(table)
    stage(table, schema, by, properties, exists = Some(false))
  }

  override def stageReplace(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = {
    if (!tableExists(table)) throw new NoSuchTableException(table)
    stage(table, schema, by, properties, exists = Some(true))
  }

  override def stageCreateOrReplace(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String]): StagedTable = stage(table, schema, by, properties, exists = None)

  /**
   * Return a table to be created or replaced. A write replaces a table atomically, so only a table without a write is
   * created at the commit. `exists` says whether the table must exist, or must not exist, at the commit.
   */
  private def stage(table: Identifier, schema: StructType, by: Array[Transform],
      properties: util.Map[String, String], exists: Option[Boolean]): StagedTable = {
    Source.refusePartitions(table.toString, by)
    val tags = keptProperties(table, properties.asScala.toMap)
    val condition = exists.map("tableExists" -> _.toString)
    new DatasetTable(schema, options + ("path" -> nameArgument(table)._2) ++ condition, tags) with StagedTable {
      private var isWritten = false

      override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
        isWritten = true
        super.newWriteBuilder(info).asInstanceOf[SupportsTruncate].truncate()
      }

      override def commitStagedChanges(): Unit =
        if (!isWritten) create(table, schema, tags, exists)
      override def abortStagedChanges(): Unit = ()
    }
  }

  /** Return the properties that become tags. Throws if others say how Spark is to store the table. */
  private def keptProperties(table: Identifier, properties: Map[String, String]): Map[String, String] = {
    def refuse(clause: String, advice: String): Unit =
      throw new UnsupportedOperationException(s"$table cannot have $clause: $advice")
    if (properties.keys.exists(_.startsWith(TableCatalog.OPTION_PREFIX)))
      refuse("OPTIONS", "write properties of your own as TBLPROPERTIES, which are kept as tags")
    if (properties.contains(TableCatalog.PROP_LOCATION) || properties.contains(TableCatalog.PROP_EXTERNAL))
      refuse("LOCATION or EXTERNAL", "its rows lie in the store of a node; leave out the clause")
    // If the user names no format, saveAsTable names Spark's default. UsingRule checks statements.
    val provider = properties.get(TableCatalog.PROP_PROVIDER)
    if (!provider.forall(name => name == Source.name || name == SQLConf.get.defaultDataSourceName))
      DatasetCatalog.refuseUsing(table, provider.get)
    properties -- Seq(TableCatalog.PROP_PROVIDER, TableCatalog.PROP_OWNER)
  }

  override def dropTable(table: Identifier): Boolean = callSidecar("drop_table", nameArgument(table)).asBoolean

  override def alterTable(table: Identifier, changes: TableChange*): Table =
    throw new UnsupportedOperationException(
      s"$table cannot be altered: replace it by CREATE OR REPLACE TABLE ... AS SELECT, which may read $table itself")

  override def renameTable(from: Identifier, to: Identifier): Unit =
    throw new UnsupportedOperationException(s"$from cannot be renamed: write its rows to another table, and drop it")

  private def namespaces(all: Seq[Identifier]): Seq[Seq[String]] = createdNamespaces.toSeq ++ all.map(_.namespace.toSeq)

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
      throw new UnsupportedOperationException(s"the namespace ${namespace.mkString(".")} has a part with a dot, " +
        "which separates namespaces: choose another name")
    if ((properties.asScala - SupportsNamespaces.PROP_OWNER).nonEmpty)
      throw new UnsupportedOperationException(s"the namespace ${namespace.mkString(".")} has no properties: it is the " +
        "beginning of the names of its tables; leave out COMMENT, LOCATION and WITH DBPROPERTIES")
    createdNamespaces += namespace.toSeq
  }

  override def alterNamespace(namespace: Array[String], changes: NamespaceChange*): Unit =
    throw new UnsupportedOperationException(s"the namespace ${namespace.mkString(".")} has no properties")

  override def dropNamespace(namespace: Array[String], cascade: Boolean): Boolean = synchronized {
    val all = tables
    requireNamespace(namespace, all)
    val tablesInside = all.filter(_.namespace.startsWith(namespace))
    if (tablesInside.nonEmpty && !cascade) throw new NonEmptyNamespaceException(namespace)
    tablesInside.foreach(dropTable)
    createdNamespaces --= createdNamespaces.filter(_.startsWith(namespace)).toSeq
    true
  }
}

object DatasetCatalog {
  def refuseUsing(table: Identifier, format: String): Nothing = throw new UnsupportedOperationException(
    s"$table cannot have USING $format: all tables of this catalog are datasets; leave out the clause")

  /** Return the name of the dataset of a table. */
  def datasetName(table: Identifier): String = (table.namespace :+ table.name).mkString(".")

  /** Return the table of a dataset. A name with an empty part between dots is the name of a table as a whole. */
  def identifier(dataset: String): Identifier = {
    val parts = dataset.split("\\.", -1)
    if (parts.exists(_.isEmpty)) Identifier.of(Array.empty, dataset) else Identifier.of(parts.init, parts.last)
  }
}

/**
 * A rule that refuses `CREATE TABLE ... USING parquet` in catalogs of dissociated. The catalog itself cannot tell a
 * format that a statement names from the default that `saveAsTable` adds. Only a statement has a text, which Spark
 * keeps until the plan is resolved.
 */
class UsingRule(session: SparkSession) extends Rule[LogicalPlan] with LookupCatalog {
  override protected lazy val catalogManager: CatalogManager =
    session.asInstanceOf[classic.SparkSession].sessionState.catalogManager

  override def apply(plan: LogicalPlan): LogicalPlan = {
    if (plan.origin.sqlText.isDefined) plan match {
      case create: CreateTable => refuseOtherFormat(create.name, create.tableSpec)
      case create: CreateTableAsSelect => refuseOtherFormat(create.name, create.tableSpec)
      case replace: ReplaceTable => refuseOtherFormat(replace.name, replace.tableSpec)
      case replace: ReplaceTableAsSelect => refuseOtherFormat(replace.name, replace.tableSpec)
      case _ =>
    }
    plan
  }

  private def refuseOtherFormat(name: LogicalPlan, spec: TableSpecBase): Unit = (name, spec.provider) match {
    case (UnresolvedIdentifier(CatalogAndIdentifier(_: DatasetCatalog, table), _), Some(format))
        if format != Source.name => DatasetCatalog.refuseUsing(table, format)
    case _ =>
  }
}

/** A check of statements that would change rows of datasets. It refuses them, and gives the statement to use instead. */
object ChangeCheck extends (LogicalPlan => Unit) {
  override def apply(plan: LogicalPlan): Unit = plan match {
    // If the condition is a constant, Spark truncates the table, or refuses the statement by itself.
    case delete: DeleteFromTable if !delete.condition.foldable => refuse(delete.table, "deleted",
        table => s"SELECT * FROM $table WHERE (CONDITION) IS NOT TRUE")
    case update: UpdateTable => refuse(update.table, "updated",
        table => s"SELECT * EXCEPT (COLUMN), IF(CONDITION, VALUE, COLUMN) AS COLUMN FROM $table")
    case merge: MergeIntoTable => refuse(merge.targetTable, "merged", table =>
        s"SELECT COLUMNS FROM $table LEFT ANTI JOIN CHANGES USING (KEYS) UNION ALL SELECT COLUMNS FROM CHANGES")
    case _ =>
  }

  private def refuse(target: LogicalPlan, verb: String, rows: String => String): Unit = target.foreach {
    case relation: DataSourceV2Relation if relation.table.isInstanceOf[Dataset] =>
      throw new UnsupportedOperationException(s"the rows of ${relation.name} cannot be $verb in place: " +
        s"write all rows again by INSERT OVERWRITE ${relation.name} BY NAME ${rows(relation.name)}")
    case _ =>
  }
}

/** A table of a catalog of dissociated. The options of a query are added to those of the catalog. */
class DatasetTable(schema: StructType, options: Map[String, String], tags: Map[String, String])
    extends Dataset(schema, Array.empty, options.asJava) {
  /** Return the options of the catalog and the query, without those that chose the version of this table. */
  private def mergedOptions(queryOptions: CaseInsensitiveStringMap) =
    options ++ queryOptions.asScala -- Seq("versionasof", "timestampasof")

  private def caseInsensitive(options: Map[String, String]) = new CaseInsensitiveStringMap(options.asJava)

  override def name(): String = options("path")

  override def properties(): util.Map[String, String] = (tags + (TableCatalog.PROP_PROVIDER -> Source.name)).asJava

  override def newScanBuilder(queryOptions: CaseInsensitiveStringMap): ScanBuilder =
    super.newScanBuilder(caseInsensitive(mergedOptions(queryOptions)))

  /**
   * Write with the table's own schema and tags. Spark has converted the rows of a batch query to that schema and has
   * checked nulls and the lengths of text, so only nullability may differ. It has done nothing to the rows of a stream.
   */
  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
    val ownTags = Option.when(tags.nonEmpty)("tags" -> Sidecar.of(Python.ofDriver())
      .call("merged_tags", "tags" -> tags, "added" -> info.options.getOrDefault("tags", "")).asText)
    val merged = mergedOptions(info.options) ++ ownTags
    val unresolved = LogicalWriteInfoImpl(info.queryId, info.schema,
      caseInsensitive(merged + ("tableSchema" -> schema.json)))
    val isResolved = DataType.equalsIgnoreCompatibleNullability(
      info.schema, CharVarcharUtils.replaceCharVarcharWithStringInSchema(schema))
    newWrite(
      batch = if (isResolved) LogicalWriteInfoImpl(info.queryId, schema, caseInsensitive(merged)) else unresolved,
      stream = unresolved)
  }
}

package org.apache.spark.sql.dissociated

import java.nio.charset.StandardCharsets.UTF_8
import java.util

import scala.collection.mutable

import com.fasterxml.jackson.databind.JsonNode
import org.apache.spark.SPARK_VERSION
import org.apache.spark.internal.Logging
import org.apache.spark.sql.connector.catalog.{SupportsRead, SupportsWrite, Table, TableCapability, TableProvider}
import org.apache.spark.sql.connector.expressions.Transform
import org.apache.spark.sql.connector.read.ScanBuilder
import org.apache.spark.sql.connector.write.{LogicalWriteInfo, LogicalWriteInfoImpl, WriteBuilder}
import org.apache.spark.sql.execution.datasources.v2.python.PythonDataSourceV2
import org.apache.spark.sql.internal.SQLConf
import org.apache.spark.sql.sources.DataSourceRegister
import org.apache.spark.sql.types.{DataType, StructType}
import org.apache.spark.sql.util.CaseInsensitiveStringMap

/**
 * The data source `dissociated`. Spark looks for a name here before it does in Python, where a data source of the same
 * name does what this one cannot.
 */
class Source extends TableProvider with DataSourceRegister {
  override def shortName(): String = Source.name

  override def supportsExternalMetadata(): Boolean = true

  override def inferSchema(explicitOptions: CaseInsensitiveStringMap): StructType = {
    Source.refuseTable(explicitOptions)
    val options = Source.withCatalog(explicitOptions)
    if (Source.enabled) {
      val answer = Sidecar.of(Python.ofDriver()).call("describe", "options" -> options)
      DataType.fromJson(answer.get("schema").asText).asInstanceOf[StructType]
    } else Source.inPython().inferSchema(options)
  }

  override def getTable(schema: StructType, by: Array[Transform], properties: util.Map[String, String]): Table = {
    Source.refuseTable(properties)
    Source.refusePartitions("a dataset", by)
    if (Source.enabled) new Dataset(schema, by, properties) else Source.inPython().getTable(schema, by, properties)
  }
}

object Source extends Logging {
  val name = "dissociated"

  /** Whether this source reads and writes; if not, the one in Python does. */
  def enabled: Boolean = fits && SQLConf.get.getConfString("spark.dissociated.jvm", "true").toBoolean

  /** Whether this was compiled for the Spark that runs: its internal interfaces differ between releases. */
  lazy val fits: Boolean = {
    val compiledFor = new String(getClass.getResourceAsStream("spark-version").readAllBytes(), UTF_8)
    if (compiledFor != SPARK_VERSION) logWarning(s"the jar of dissociated is for Spark $compiledFor, and this is " +
      s"$SPARK_VERSION: its data source in Python stands in, which is slower. Run `dissociated spark-jar` with this Spark")
    compiledFor == SPARK_VERSION
  }

  /** Spark's own catalog keeps no name of a dataset, so what it takes for a table of ours could not be read again. */
  def refuseTable(properties: util.Map[String, String]): Unit =
    if (properties.containsKey("owner") && properties.containsKey("provider"))
      throw Failure("a table of Spark's own catalog cannot be a dataset: set spark.sql.catalog.NAME = " +
        "org.apache.spark.sql.dissociated.DatasetCatalog and spark.sql.catalog.NAME.catalog = URI, and call the " +
        "table NAME.TABLE; or write by save; or CREATE TEMPORARY VIEW v USING dissociated OPTIONS (catalog 'URI', " +
        "path 'NAME')")

  /** Refuses `partitionBy` and `clusterBy`, which a dataset cannot keep. */
  def refusePartitions(subject: String, by: Array[Transform]): Unit =
    if (by.nonEmpty) throw Failure(s"$subject has no partitions by columns: leave them out, and sort the rows that are " +
      "written, so that queries skip batches")

  /** The same options; where they do not name the catalog, the session's setting does. */
  def withCatalog(options: CaseInsensitiveStringMap): CaseInsensitiveStringMap = {
    val catalog = SQLConf.get.getConfString("spark.dissociated.catalog", "")
    if (catalog.isEmpty || options.containsKey("catalog")) options
    else {
      val all = new util.HashMap[String, String](options)
      all.put("catalog", catalog)
      new CaseInsensitiveStringMap(all)
    }
  }

  def inPython(): PythonDataSourceV2 = {
    val source = new PythonDataSourceV2
    source.setShortName(name)
    source
  }
}

/** A dataset, as Spark sees it: `schema` is what there is to read, or what is to be written. */
class Dataset(override val schema: StructType, by: Array[Transform], options: util.Map[String, String])
    extends Table with SupportsRead with SupportsWrite {
  /** For what this JVM does not do itself. */
  private[dissociated] lazy val inPython =
    Source.inPython().getTable(schema, by, options).asInstanceOf[Table with SupportsRead with SupportsWrite]

  private val described = mutable.Map.empty[CaseInsensitiveStringMap, JsonNode]

  /** What the sidecar says of it: its version, and how large that is. All queries read the version of the first. */
  private[dissociated] def description(options: CaseInsensitiveStringMap): JsonNode = synchronized {
    described.getOrElseUpdate(options, Sidecar.of(Python.ofDriver()).call("describe", "options" -> options))
  }

  override def name(): String = Source.name

  override def capabilities(): util.Set[TableCapability] = util.EnumSet.of(
    TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.MICRO_BATCH_READ,
    TableCapability.STREAMING_WRITE, TableCapability.TRUNCATE, TableCapability.OVERWRITE_DYNAMIC)

  override def newScanBuilder(explicitOptions: CaseInsensitiveStringMap): ScanBuilder = {
    val options = Source.withCatalog(explicitOptions)
    val geometry = schema.existsRecursively(_.typeName.startsWith("geo")) // its values are more than Arrow's columns
    if (geometry) inPython.newScanBuilder(options) else new DatasetScanBuilder(this, options)
  }

  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = {
    val completed = LogicalWriteInfoImpl(info.queryId, info.schema, Source.withCatalog(info.options))
    new DatasetWrite(completed, inPython.newWriteBuilder(completed))
  }
}

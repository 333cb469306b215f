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
 * The data source `dissociated`. Spark prefers this class to the Python data source of the same name, which does what
 * this class cannot.
 */
class Source extends TableProvider with DataSourceRegister {
  override def shortName(): String = Source.name

  override def supportsExternalMetadata(): Boolean = true

  override def inferSchema(explicitOptions: CaseInsensitiveStringMap): StructType = {
    Source.refuseTable(explicitOptions)
    val options = Source.withDefaultCatalog(explicitOptions)
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

  /** Return whether this source is to be used, instead of the one in Python. */
  def enabled: Boolean = fits && SQLConf.get.getConfString("spark.dissociated.jvm", "true").toBoolean

  /** Whether this was compiled for the running release of Spark, whose internal interfaces differ between releases. */
  lazy val fits: Boolean = {
    val compiledFor = new String(getClass.getResourceAsStream("spark-version").readAllBytes(), UTF_8)
    if (compiledFor != SPARK_VERSION) logWarning(s"the jar of dissociated is for Spark $compiledFor, and this is " +
      s"Spark $SPARK_VERSION: the slower data source in Python is used. Run `dissociated spark-jar` with this Spark")
    compiledFor == SPARK_VERSION
  }

  /**
   * Refuse a table of Spark's own catalog. It does not keep the name of a dataset, so the table could not be read
   * again.
   */
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

  /** Return the options with the session's catalog if they do not name one. */
  def withDefaultCatalog(options: CaseInsensitiveStringMap): CaseInsensitiveStringMap = {
    val catalog = SQLConf.get.getConfString("spark.dissociated.catalog", "")
    if (catalog.isEmpty || options.containsKey("catalog")) options
    else {
      val all = new util.HashMap[String, String](options)
      all.put("catalog", catalog)
      new CaseInsensitiveStringMap(all)
    }
  }

  /** Return the data source in Python. */
  def inPython(): PythonDataSourceV2 = {
    val source = new PythonDataSourceV2
    source.setShortName(name)
    source
  }
}

/** A dataset as a table of Spark. `schema` is that of the rows to be read, or to be written. */
class Dataset(override val schema: StructType, by: Array[Transform], options: util.Map[String, String])
    extends Table with SupportsRead with SupportsWrite {
  /** The table of the data source in Python, for operations that this JVM does not support. */
  private[dissociated] lazy val pythonTable =
    Source.inPython().getTable(schema, by, options).asInstanceOf[Table with SupportsRead with SupportsWrite]

  private val descriptions = mutable.Map.empty[CaseInsensitiveStringMap, JsonNode]

  /**
   * Return the sidecar's description: the version, and its size. It is requested once, so all queries read the same
   * version.
   */
  private[dissociated] def description(options: CaseInsensitiveStringMap): JsonNode = synchronized {
    descriptions.getOrElseUpdate(options, Sidecar.of(Python.ofDriver()).call("describe", "options" -> options))
  }

  override def name(): String = Source.name

  override def capabilities(): util.Set[TableCapability] = util.EnumSet.of(
    TableCapability.BATCH_READ, TableCapability.BATCH_WRITE, TableCapability.MICRO_BATCH_READ,
    TableCapability.STREAMING_WRITE, TableCapability.TRUNCATE, TableCapability.OVERWRITE_DYNAMIC)

  override def newScanBuilder(explicitOptions: CaseInsensitiveStringMap): ScanBuilder = {
    val options = Source.withDefaultCatalog(explicitOptions)
    // Values of these types need more than an Arrow column.
    val hasGeometry = schema.existsRecursively(_.typeName.startsWith("geo"))
    if (hasGeometry) pythonTable.newScanBuilder(options) else new DatasetScanBuilder(this, options)
  }

  override def newWriteBuilder(info: LogicalWriteInfo): WriteBuilder = newWrite(batch = info, stream = info)

  /** Return a builder of a write, by a batch query or by a stream, whose rows have the schema of `batch` or `stream`. */
  protected def newWrite(batch: LogicalWriteInfo, stream: LogicalWriteInfo): WriteBuilder = {
    def completed(info: LogicalWriteInfo) =
      LogicalWriteInfoImpl(info.queryId, info.schema, Source.withDefaultCatalog(info.options))
    new DatasetWrite(completed(batch), completed(stream), info => pythonTable.newWriteBuilder(info))
  }
}

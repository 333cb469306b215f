package org.apache.spark.sql.dissociated

import java.lang.ref.Cleaner

import scala.util.Try

import org.apache.spark.sql.classic.{Dataset => Frame}
import org.apache.spark.sql.execution.datasources.v2.DataSourceV2Relation

/** Datasets that last as long as plans that read them. */
object Temporary {
  private val cleaner = Cleaner.create()

  /** Drops a dataset of this catalog when Java has collected all plans with the table that `frame` reads. */
  def watch(frame: Frame[_], catalog: String, name: String): Unit = {
    val python = Python.ofDriver()
    frame.queryExecution.analyzed.foreach {
      case relation: DataSourceV2Relation => cleaner.register(relation.table, () => drop(python, catalog, name))
      case _ =>
    }
  }

  private def drop(python: Python, catalog: String, name: String): Unit =
    Try(Sidecar.of(python).call("drop_table", "options" -> Map("catalog" -> catalog), "name" -> name))
}

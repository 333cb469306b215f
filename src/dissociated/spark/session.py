"""A Spark session set up for moving Arrow, and one line each to publish a DataFrame and to read one."""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dissociated.base.host import machine_memory
from dissociated.control.commit import Publication
from dissociated.errors import JarNotMade, PySparkNotFound
from dissociated.spark.catalog import VARIABLE, CatalogConfig
from dissociated.spark.jar import jar
from dissociated.spark.java import java_home
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GIB = 1 << 30

_launching = threading.Lock()  # the environment is the whole process's


@contextmanager
def _packages() -> Iterator[None]:
    """Say which extra has what Spark does not find."""
    try:
        yield
    except ImportError as error:
        raise PySparkNotFound(
            f"{error}: pip install 'dissociated[spark]', and for Spark Connect 'pyspark[connect]'", name=error.name
        ) from None


@_packages()
def session(
    app_name: str = "dissociated", master: str = "local[*]", *, remote: str | None = None, **conf: str | int | bool
) -> SparkSession:
    """Start Spark, or take the session that runs already, with the settings that matter for Arrow.

    - `app_name`, `master`: as Spark has them.
    - `remote`: a session of Spark Connect, in place of `master`. "sc://HOST:PORT" is a server that runs already, which
      must have `dissociated` installed. "local[*]" starts one here.
    - `conf`: any other setting, by its own name. It wins over those of this function:
      `session(**{"spark.driver.memory": "16g"})`.

    Turns off Spark's UI and progress bar, and gives the driver a quarter of the machine's memory, from 1 to 8 GiB.
    Finds a Java by itself. Raises JavaNotFound where there is none, and one is to be started; PySparkNotFound.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    builder = builder.master(master) if remote is None else builder.remote(remote)
    started = master if remote is None else remote
    starts = not started.startswith("sc://") and not SparkSession.getActiveSession()
    settings = {**_settings(started), **conf}
    if starts and (found := _jar()):
        settings["spark.jars"] = ",".join(filter(None, (str(settings.get("spark.jars", "")), str(found))))
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _launching, _environment(_launch_variables(started)) if starts else nullcontext():
        running = builder.getOrCreate()
    jvm: Any = getattr(running, "_jvm", None)
    if jvm is not None:  # Spark finds data sources in Python by a thread's own session, which only the first thread has
        jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(running._jsparkSession)
    return running


def publish(
    df: DataFrame,
    name: str,
    catalog: str | None = None,
    mode: str = "overwrite",
    *,
    tags: Mapping[str, str] | None = None,
    ttl: float | None = None,
    merge_schema: bool = False,
    token_file: str | None = None,
    tls_roots: str | None = None,
) -> None:
    """Publish `df` as the dataset `name` of a catalog.

    Every partition writes its own Arrow batches into shared memory; nothing passes through the driver. The dataset
    changes at once and whole, or not at all. This does what `df.write.format("dissociated")` does, in less time where a
    Spark has no data source for its JVM.

    - `catalog`: its URI. Left out, it is that of the setting spark.dissociated.catalog or the variable
      DISSOCIATED_CATALOG.
    - `mode`: "overwrite" or "append". What is appended takes the schema of the dataset, by the names of the columns;
      with `merge_schema`, it may also lack columns and have narrower numbers.
    - `tags`, `ttl`: kept with the dataset; after how many seconds it is gone.
    - `token_file`, `tls_roots`: for a catalog that is guarded. Every host must have these files.

    Raises SourceError for a type that Arrow cannot carry and for what cannot be appended, OptionError for what makes no
    sense, CatalogError and AccessDenied where the catalog refuses, and what Spark raises where a task fails.
    """
    from pyspark.sql.utils import is_remote

    config = CatalogConfig(_catalog(df.sparkSession, catalog), token_file, tls_roots)
    target = WriteTarget(config, Publication(name, mode, tags or {}, ttl), merge_schema)
    if not is_remote():  # else the server of Spark Connect writes: this process may not even reach the catalog
        from dissociated.spark import writer

        if not _writes_in_jvm(df.sparkSession):
            writer.publish(df, target)
            return
        writer.DatasetWriter(target, arrow_schema(df.schema))  # raises what Spark would hide in an exception of its own
    df.write.format("dissociated").options(**target.options()).mode(mode).save(name)


def read(
    spark: SparkSession,
    name: str,
    catalog: str | None = None,
    *,
    columns: Sequence[str] | None = None,
    filters: Sequence[Any] | None = None,
    **options: str | int,
) -> DataFrame:
    """The dataset `name` of a catalog, as a DataFrame.

    - `catalog`: as for `publish`.
    - `columns`: read only these, in this order.
    - `filters`: conditions `(column, operator, value)`, which must all be true for a row to be read; or lists of such
      conditions, of which one list must be true. They are decided as Spark decides, before rows come to it.
    - `options`: those of the data source: `version`, `transport`, `partitions`, `nanoseconds`, `token_file`,
      `tls_roots`.

    Raises CatalogError where nobody says where the catalog is. What the data source raises, Spark tells in exceptions
    of its own.
    """
    reader = spark.read.format("dissociated").option("catalog", _catalog(spark, catalog)).options(**options)
    if columns is not None:
        reader = reader.option("columns", json.dumps([*columns]))
    if filters is not None:
        reader = reader.option("filters", json.dumps([*filters], default=str))  # dates, instants and decimals as text
    return reader.load(name)


def _catalog(spark: SparkSession, uri: str | None) -> str:
    configured = uri or spark.conf.get("spark.dissociated.catalog", None) or os.environ.get(VARIABLE, "")
    return CatalogConfig.parse({"catalog": configured}).uri


def _settings(master: str) -> dict[str, str]:
    settings = {
        # By default Spark measures the batch again after every row; with this value it does not.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.timeType.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{_heap()}g",
    }
    if master.startswith("local"):
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = "127.0.0.1"
    return settings


def _jar() -> Path | None:
    """The data source for Spark's JVM; None, with a warning, where there is none: then the one in Python reads."""
    try:
        return jar()
    except JarNotMade as error:
        warnings.warn(f"{error}\nThe data source in Python stands in: it is slower, and does the same", stacklevel=3)
        return None


def _writes_in_jvm(spark: SparkSession) -> bool:
    """Whether Spark has the data source for its JVM, and may use it."""
    assert spark._jvm is not None, "it is no Spark Connect"
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    present = loader.getResource("org/apache/spark/sql/dissociated/Source.class") is not None
    return present and spark.conf.get("spark.dissociated.jvm", "true") == "true"


def _heap() -> int:
    """GiB for the JVM: a quarter of the machine (segments and Python need room too), from 1 to 8."""
    return max(1, min(8, machine_memory() // 4 // GIB))


def _launch_variables(master: str) -> dict[str, str]:
    variables = {
        "JAVA_HOME": java_home(),
        "PYSPARK_PYTHON": os.environ.get("PYSPARK_PYTHON", sys.executable),
    }
    if master.startswith("local"):
        variables["SPARK_LOCAL_IP"] = "127.0.0.1"
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for as long as it takes: the JVM is started from here and inherits them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

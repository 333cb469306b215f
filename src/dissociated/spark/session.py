"""A Spark session with settings for Arrow, and functions to publish and to read a DataFrame."""

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
from dissociated.base.tracing import TRACEPARENT, current_traceparent
from dissociated.control.catalog_uri import CATALOG_VARIABLE
from dissociated.control.commit import Commit
from dissociated.errors import JarNotMade, OptionError, PySparkNotFound
from dissociated.spark.catalog_config import WAIT, CatalogConfig
from dissociated.spark.jar import jar
from dissociated.spark.java import java_home
from dissociated.spark.target import WriteTarget
from dissociated.spark.types import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

GIB = 1 << 30

_launch_lock = threading.Lock()  # the process has one environment, which starting a JVM changes


@contextmanager
def _needs_pyspark() -> Iterator[None]:
    """Turn an ImportError into PySparkNotFound, which names the extra to install."""
    try:
        yield
    except ImportError as error:
        raise PySparkNotFound(
            f"{error}: pip install 'dissociated[spark]', and for Spark Connect 'pyspark[connect]'", name=error.name
        ) from None


@_needs_pyspark()
def session(
    app_name: str = "dissociated", master: str = "local[*]", *, remote: str | None = None, **conf: str | int | bool
) -> SparkSession:
    """Start Spark, or return the running session, with the settings that matter for Arrow.

    Spark's UI and progress bar are turned off, and the driver gets a quarter of the machine's memory, from 1 to 8 GiB.
    A Java is found by `java_home`. The variable DISSOCIATED_CATALOG, as it is now, becomes the setting
    spark.dissociated.catalog, unless a server of Spark Connect runs elsewhere.

    Args:
        app_name: The name of the application.
        master: The master to connect to, in Spark's notation.
        remote: A server of Spark Connect, in place of `master`. "sc://HOST:PORT" is a running server, which must have
            `dissociated` installed. "local[*]" starts a server here. Default: the variable SPARK_REMOTE, as in Spark.
        conf: Any other setting, by its own name. It wins over those of this function:
            `session(**{"spark.driver.memory": "16g"})`.

    Raises:
        JavaNotFound: A JVM is to be started, and there is no Java.
        PySparkNotFound: The packages of Spark are not installed.
        TypeError: A name of `conf` is no setting of Spark, as "memory" or "conf".

    Example:
        ```python
        from dissociated.spark import session

        spark = session("my pipeline")
        ```
    """
    for name in conf:
        if "." not in name:
            raise TypeError(
                f"session() has no argument {name!r}; it takes Spark's settings by their own names, as "
                'session(**{"spark.driver.memory": "16g"})'
            )
    from pyspark.sql import SparkSession

    remote = remote or os.environ.get("SPARK_REMOTE")
    builder = SparkSession.builder.appName(app_name)
    builder = builder.master(master) if remote is None else builder.remote(remote)
    target = master if remote is None else remote
    starts_jvm = not target.startswith("sc://") and not SparkSession.getActiveSession()
    settings = {**_settings(target), **conf}
    if starts_jvm and (jar_path := _jar()):
        settings["spark.jars"] = ",".join(filter(None, (str(settings.get("spark.jars", "")), str(jar_path))))
    for key, value in settings.items():
        builder = builder.config(key, value)
    with _launch_lock, _environment(_launch_variables(target)) if starts_jvm else nullcontext():
        running = builder.getOrCreate()
    jvm: Any = getattr(running, "_jvm", None)
    # Spark finds data sources in Python by the active session of the thread, which only the first thread has.
    if jvm is not None:
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
    wait: float = WAIT,
) -> None:
    """Publish `df` as the dataset `name` of a catalog.

    Every partition writes its own Arrow batches into shared memory; nothing passes through the driver. The dataset
    changes at once and whole, or not at all. If the calling thread has a current span of OpenTelemetry, the calls of
    Spark's tasks to the catalog belong to it. The effect is that of `df.write.format("dissociated")`, in less time if
    Spark lacks the data source for its JVM.

    Args:
        df: The DataFrame to publish.
        name: The name of the dataset.
        catalog: The URI of the catalog. Default: the setting spark.dissociated.catalog, or else the variable
            DISSOCIATED_CATALOG, or else this user's node on this host.
        mode: "overwrite" or "append". Appended rows take the schema of the dataset, matched by column name.
        tags: Tags to keep with the dataset.
        ttl: The time after which the dataset expires, in seconds. Default: never.
        merge_schema: Whether appended rows may lack columns and have narrower numbers.
        token_file: The file with the token for a catalog with access control. Every host must have it.
        tls_roots: The file with the trusted certificates for TLS. Every host must have it.
        wait: The seconds for which the driver and the tasks wait for a catalog or a node that is away.

    Raises:
        SourceError: Arrow cannot carry a type, or the rows cannot be appended.
        OptionError: An argument is invalid.
        CatalogError: The catalog refuses or cannot be reached.
        AccessDenied: The token does not permit the write.
        Exception: A task failed; Spark raises its own exception.

    Example:
        ```python
        from dissociated.spark import publish

        publish(spark.range(1000), "numbers", catalog, ttl=3600)
        ```
    """
    from pyspark.sql.utils import is_remote

    credentials = {"token_file": token_file, "tls_roots": tls_roots}
    config = _catalog(df.sparkSession, catalog, wait=wait, **credentials, **{TRACEPARENT: current_traceparent()})
    target = WriteTarget(config, Commit(name, mode=mode, tags=tags or {}, ttl=ttl), merge_schema)
    # With Spark Connect the server writes: this process may be unable to reach the catalog.
    if not is_remote():
        from dissociated.spark import writer

        if not has_jvm_source(df.sparkSession):
            writer.publish(df, target)
            return
        # Raise errors of planning here: Spark would wrap them in exceptions of its own.
        writer.DatasetWriter(target, arrow_schema(df.schema))
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
    """Return the dataset `name` of a catalog as a DataFrame.

    Args:
        spark: The session to read with.
        name: The name of the dataset.
        catalog: The URI of the catalog, with the same default as in `publish`.
        columns: The columns to read, in this order. Default: all columns.
        filters: Conditions `(column, operator, value)`, which must all be true for a row to be read; or lists of such
            conditions, of which one list must be true. They are applied before Spark gets the rows, with the result
            that Spark itself would have.
        options: Options of the data source: `version`, `transport`, `partitions`, `nanoseconds`, `token_file`,
            `tls_roots`, `wait`, `traceparent`. If the calling thread has a current span of OpenTelemetry, the reads of
            Spark's tasks belong to it.

    Raises:
        CatalogError: Neither the arguments, the settings nor the environment name the catalog.
        OptionError: `columns` is a text, not a list.
        Exception: The data source failed; Spark wraps the error in its own exception.

    Example:
        ```python
        from dissociated.spark import read

        read(spark, "flights", catalog).groupBy("dest").count().show()
        ```
    """
    if isinstance(columns, str):
        raise OptionError(f"columns is a list of names: [{columns!r}]")
    reader = spark.read.format("dissociated").option("catalog", _catalog(spark, catalog).uri).options(**options)
    if columns is not None:
        reader = reader.option("columns", json.dumps([*columns]))
    if filters is not None:
        reader = reader.option("filters", json.dumps([*filters], default=str))  # dates, instants and decimals as text
    if (traceparent := current_traceparent()) is not None:
        reader = reader.option(TRACEPARENT, traceparent)
    return reader.load(name)


def _catalog(spark: SparkSession, uri: str | None, **options: str | float | None) -> CatalogConfig:
    configured = uri or spark.conf.get("spark.dissociated.catalog", None) or ""
    texts = {name: str(value) for name, value in options.items() if value is not None}
    return CatalogConfig.parse({"catalog": configured, **texts})


def _settings(master: str) -> dict[str, str]:
    settings = {
        # By default Spark measures the batch again after every row; with this value it does not.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.timeType.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": f"{_heap()}g",
    }
    if CATALOG_VARIABLE in os.environ and not master.startswith("sc://"):
        # The JVM keeps the environment in which it was started, so it may not know this variable.
        settings["spark.dissociated.catalog"] = os.environ[CATALOG_VARIABLE]
    if master.startswith("local"):
        settings["spark.driver.host"] = settings["spark.driver.bindAddress"] = "127.0.0.1"
    return settings


def _jar() -> Path | None:
    """Return the jar with the data source for Spark's JVM.

    Returns:
        None, with a warning, if the jar cannot be made: Spark then uses the data source in Python.
    """
    try:
        return jar()
    except JarNotMade as error:
        warnings.warn(f"{error}\nThe data source in Python is used in its place, which is slower", stacklevel=3)
        return None


def has_jvm_source(spark: SparkSession) -> bool:
    """Return whether Spark has the data source for its JVM, of its own release, and the settings do not turn it off."""
    assert spark._jvm is not None, "this session is not one of Spark Connect"
    loader = spark._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    present = loader.getResource("org/apache/spark/sql/dissociated/Source.class") is not None
    if not present or spark.conf.get("spark.dissociated.jvm", "true") != "true":
        return False
    source: Any = spark._jvm.org.apache.spark.sql.dissociated.Source
    return bool(source.fits())


def _heap() -> int:
    """Return the size of the JVM's heap in GiB: a quarter of the machine's memory, from 1 to 8.

    Segments and Python need the rest.
    """
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
    """Set environment variables inside the `with` block: the JVM that starts there inherits them."""
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

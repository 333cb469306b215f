"""dissociated spark-jar: the data source for Spark's JVM."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Print the path of the data source for Spark's JVM, for the setting spark.jars. Where it has not been compiled for this
Spark yet, it is now, by the compiler that Spark brings.

dissociated.spark.session() does this by itself: this command is for clusters, and for sessions that others start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has none."""


def run(arguments: argparse.Namespace) -> None:
    """Print it."""
    from dissociated.spark.jar import jar

    print(jar())

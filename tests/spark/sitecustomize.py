"""A module that Python imports when it starts if this directory is on its path. It warms Spark's own daemons."""

import sys
from importlib import import_module

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    warm = import_module("warm")
    warm.load(*warm.PLANNING, *sys.orig_argv[3:])

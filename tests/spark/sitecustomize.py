"""A module that Python imports when it starts if this directory is on its path. It warms Spark's own daemons."""

import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    import warm

    warm.load(*warm.PLANNING, *sys.orig_argv[3:])

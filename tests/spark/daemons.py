"""The master and the workers of a standalone cluster in one Java process, which ends with its standard input.

Each of Spark's own commands starts a Java process, and another one that finds out how to start it.
"""

from __future__ import annotations

import json
import os
import sys

from pyspark.java_gateway import launch_gateway


def main() -> None:
    """Start them. Print a line when the last worker has been started."""
    os.setsid()  # so that a test kills this process and its Java by their group
    host, port, workers = json.loads(sys.argv[1])
    gateway = launch_gateway()
    jvm = gateway.jvm
    conf, deploy = jvm.org.apache.spark.SparkConf(), jvm.org.apache.spark.deploy
    deploy.master.Master.startRpcEnvAndEndpoint(host, port, 0, conf)
    urls = gateway.new_array(jvm.java.lang.String, 1)
    urls[0] = f"spark://{host}:{port}"
    for number, (place, cores, directory) in enumerate(workers):
        size, none = cores * 1024, jvm.scala.Option.empty()
        some = jvm.scala.Option.apply(number)
        deploy.worker.Worker.startRpcEnvAndEndpoint(place, 0, 0, cores, size, urls, directory, some, conf, none)
    print(flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

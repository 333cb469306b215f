"""Spark on the hosts of a cluster, and the processes and links that its jobs lose: see `prove.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyspark

import dissociated as dis
from cluster.hosts import Cluster, Host, answer
from dissociated.spark import java_home
from spark.processes import descendants
from support.helpers import wait_until

ROWS = 80_000  # of a job that writes
#: A driver that runs a job for each line of JSON. Its tasks pause after each batch of 10,000 rows. It answers with a
#: text: what it has done, or an error.
DRIVER = """
import json, sys, time
from pathlib import Path
from dissociated.spark import publish, read, session

def slowly(begun, pause):
    def wait(batches):
        Path(begun).touch()
        for batch in batches:
            time.sleep(pause)
            yield batch
    return wait

catalog, conf = sys.argv[1], json.loads(sys.argv[2])
with session("proof", conf.pop("master"), **conf) as spark:
    print("{}", flush=True)
    for line in sys.stdin:
        first, rows, pause, jvm, begun = json.loads(line)
        spark.conf.set("spark.dissociated.jvm", jvm)
        try:
            if rows:
                numbers = spark.range(first, first + rows, numPartitions=4)
                publish(numbers.mapInArrow(slowly(begun, pause), "id long"), "rows", catalog, "append")
                done = "written"
            else:
                seen = read(spark, "rows", catalog, partitions=4).mapInArrow(slowly(begun, pause), "id long")
                done = "{} rows with the sum {}".format(*seen.selectExpr("count(id)", "sum(id)").first())
        except Exception as error:
            done = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps(done), flush=True)
"""


def _environment() -> dict[str, str]:
    source, tests = Path(dis.__file__).parents[1], Path(__file__).parents[1]
    return {
        **os.environ,
        "JAVA_HOME": java_home(),
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, (source, tests / "spark"))),
        "DISSOCIATED_NODE": "--store /dev/shm/second --heartbeat 1",
    }


@contextmanager
def _started(host: Host, *command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*host.prefix, *command],
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


class Spark:
    """Spark on the hosts of a cluster: master and driver on a, a worker with one executor on b, and one on c."""

    def __init__(self, driver: subprocess.Popen[str], worker: int, directory: Path) -> None:
        self._driver, self._worker, self._begun = driver, worker, directory / "begun"

    @classmethod
    @contextmanager
    def on(cls, cluster: Cluster, catalog: str, directory: Path) -> Iterator[Spark]:
        spark_class = f"{Path(pyspark.__file__).parent}/bin/spark-class"
        package, master = "org.apache.spark.deploy", "spark://a:7077"
        conf = {
            "master": master,
            "spark.driver.host": "a",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": 1,
            "spark.cores.max": 2,
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.sql.execution.arrow.maxRecordsPerBatch": 10_000,
            "spark.log.level": "OFF",
        }
        with ExitStack() as ends:

            def start(name: str, *command: str) -> subprocess.Popen[str]:
                return ends.enter_context(_started(cluster[name], *command))

            def daemon(name: str, kind: str, *arguments: str) -> subprocess.Popen[str]:
                return start(name, spark_class, f"{package}.{kind}", "--host", name, "--webui-port", "0", *arguments)

            daemon("a", "master.Master", "--port", "7077")
            has = [("-c", "1", "-m", "1g", "-d", str(directory / name), master) for name in "bc"]
            worker, _ = (daemon(name, "worker.Worker", *arguments) for name, arguments in zip("bc", has, strict=True))
            driver = start("a", sys.executable, "-c", DRIVER, catalog, json.dumps(conf))
            assert answer(driver) == "{}\n", "Spark's driver did not start"
            yield cls(driver, worker.pid, directory)

    def write(self, first: int, rows: int, jvm: bool, lose: Callable[[], None]) -> str:
        """Append numbers, and lose something when the first task runs. Return "written", or an error."""
        return self._run(first, rows, 1.0, jvm, lose)

    def read(self, jvm: bool, lose: Callable[[], None]) -> str:
        """Read all rows, and lose something when the first task runs. Return their number and sum, or an error."""
        return self._run(0, 0, 0.2, jvm, lose)

    def _run(self, first: int, rows: int, pause: float, jvm: bool, lose: Callable[[], None]) -> str:
        self._begun.unlink(missing_ok=True)
        assert self._driver.stdin is not None
        asked = [first, rows, pause, str(jvm).lower(), str(self._begun)]
        self._driver.stdin.write(json.dumps(asked) + "\n")
        self._driver.stdin.flush()
        wait_until(self._begun.exists, "a task has begun", 120)
        time.sleep(0.5)  # of the seconds that the task takes
        lose()
        return str(json.loads(answer(self._driver)))

    def kill(self, program: str) -> None:
        """Kill a process of host b whose command line has the text `program`: its youngest."""
        found = [pid for pid in descendants(self._worker) if program in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(max(found), signal.SIGKILL)

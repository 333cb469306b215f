"""A driver that is killed while it writes: uncommitted data is removed, and a streaming query resumes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING

import pytest

import dissociated as dis
from dissociated.spark import java_home
from support.helpers import PATIENCE, wait_until
from support.processes import HEARTBEAT, Fork, Start, free_port, kill_group

from .test_streaming import numbers, put, run, staged, stream, wait_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Three concurrent writes that never finish.
DRIVER = """
import os, sys
from threading import Thread

from dissociated.spark import session
from driver import never_ending

os.setsid()  # so that the test kills this process and its Java by their group
catalog, checkpoint, gate, forgetful = sys.argv[1:]
spark = session("driver", "local[3]", **{"spark.log.level": "OFF", "spark.python.daemon.module": "warm"})

def gated(batches):
    yield from batches
    open(gate).read()  # until the test opens it for writing

for mode in ("overwrite", "append"):
    Thread(target=never_ending, args=(spark, forgetful, mode, 100_000, 2, mode), daemon=True).start()
rows = spark.readStream.format("dissociated").schema("id long").option("catalog", catalog).load("in")
out = rows.mapInArrow(gated, "id long").writeStream.format("dissociated")
out = out.option("catalog", catalog).option("checkpointLocation", checkpoint).trigger(availableNow=True)
out.start("out").awaitTermination()
"""


class Driver:
    """A driver process, which is killed with its JVM and its Python workers."""

    def __init__(self, python: Path, *arguments: str | Path) -> None:
        path = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
        env = {
            **os.environ,
            "JAVA_HOME": java_home(),
            "PYSPARK_PYTHON": str(python),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        }
        self._process = Fork("-c", DRIVER, *arguments, stdout=DEVNULL, stderr=DEVNULL, env=env)

    def kill(self) -> None:
        if self._process.returncode is None:
            kill_group(self._process)
            self._process.wait(PATIENCE)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.mark.timeout(500)
def test_a_driver_that_is_killed_leaves_nothing_and_its_query_goes_on(
    spark: SparkSession, python: Path, start: Start, memory: Path, tmp_path: Path
) -> None:
    store, forgetful = memory / "store", memory / "forgetful"
    check, gate = tmp_path / "check", tmp_path / "gate"
    os.mkfifo(gate)
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", f"grpc://127.0.0.1:{free_port()}")
    start("node", "--store", store, "--catalog", catalog.uri, "--heartbeat", HEARTBEAT)
    other = start("node", "--store", forgetful, "--forget", "2", "--heartbeat", "0.1")
    put(catalog.uri, "in", range(50_000))
    seen: set[tuple[str, str]] = set()

    def written() -> bool:
        """Return whether both batch writes have had a whole segment and a half-written one.

        The whole segment of the node with a short `staging_timeout` may be deleted by now.
        """
        seen.update((job, rest[:6]) for job, _, rest in (name.partition("-") for name in staged(forgetful)))
        return sorted(partition for _, partition in seen) == ["000000", "000000", "000001", "000001"]

    with Driver(python, catalog.uri, check, gate, other.uri) as driver:
        wait_until(written, "both batch writes wait for their last partition", 300)  # includes the start of Spark
        wait_for(store, ".part")
        catalog.signal(signal.SIGSTOP)  # to prevent a commit
        gate.open("w").close()
        wait_for(store, ".arrows")
        driver.kill()
    resumed = time.time()
    catalog.signal(signal.SIGCONT)
    with dis.connect(catalog.uri) as client:
        assert [info.name for info in client.list()] == ["in"]
        wait_until(lambda: any(node["seen"] > resumed for node in client.nodes()), "the node was heard again")
    assert len(staged(store)) == 1
    put(catalog.uri, "in", range(50_000, 50_003))
    # The batch of the killed driver, and a new one.
    assert run(stream(spark, catalog.uri, "in"), catalog.uri, "out", check) == [50_000, 3]
    assert numbers(catalog.uri, "out") == [*range(50_003)]
    wait_until(lambda: staged(store) == [], "what the killed driver wrote is gone")
    wait_until(lambda: staged(forgetful) == [], "what was never to be committed is forgotten")
    with dis.connect(other.uri) as client:
        assert client.list() == []
    assert not list(forgetful.glob("segments/*"))

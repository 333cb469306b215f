"""Spark on several processes and two hosts that are killed: rows exactly once, and only the winners' segments.

The two hosts are 127.0.0.1 and 127.0.0.2. DISSOCIATED_HOST keeps them apart: they share no memory. The first host has
two executors, the second has one.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pyspark
import pytest

import dissociated as dis
from dissociated.node.launch import running
from support.forks import MARK
from support.helpers import PATIENCE, wait_until
from support.processes import Fork, Process, free_port, kill_group

from .processes import function_memory, marked

pytestmark = pytest.mark.timeout(300)

EXECUTORS = {"127.0.0.1": 2, "127.0.0.2": 1}  # per host
HOSTS = tuple(EXECUTORS)
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": 1,
    "spark.python.daemon.module": "warm",
    "spark.sql.execution.arrow.maxRecordsPerBatch": 10_000,  # which is the default, but for map_in_arrow
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    # By default, an attempt counts as slow after three times as long as the others: minutes on a busy machine.
    "spark.speculation.multiplier": "1",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
}

#: A Java for Spark's workers, which all run in one process.
JAVA = """#!/bin/sh
case "$*" in
{cases}
esac
exec '{java}/bin/java' "$@"
"""
CASE = """*'--hostname {host} '*) export DISSOCIATED_HOST={host} DISSOCIATED_NODE='{options}';;"""

CONSUMER = """
import json, sys, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    table = client.read(sys.argv[2]).read_all()
    maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".arrows" in line}
    print(json.dumps({"ids": table["id"].to_pylist(), "maps": sorted(maps)}))
"""


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Yield a directory in memory for stores and for Spark's files."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


def environment(java: str, python: Path, home: Path) -> dict[str, str]:
    """Return the environment of a process without a host."""
    return {
        **os.environ,
        "JAVA_HOME": java,
        "SPARK_HOME": str(Path(pyspark.__file__).parent),
        "PYSPARK_PYTHON": str(python),
        "PYTHONPATH": os.pathsep.join(map(str, (Path(dis.__file__).parents[1], Path(__file__).parent))),
        MARK: str(os.getpid()),
        "DISSOCIATED_NODE": node_options(home),
    }


def node_options(home: Path, host: str = "") -> str:
    """Return the options for a node of a host, whose store lies below `home`."""
    where = f"--listen shm: --listen tcp://{host}:0 --flight grpc://{host}:0" if host else ""
    return f"--store {store(home, host)} --heartbeat 1 {where}"


def store(home: Path, host: str = "") -> Path:
    return home / f"store-{host}"


class Driver:
    """A Spark driver process that runs the jobs of driver.py."""

    def __init__(self, master: str, env: Mapping[str, str], log: Path, **conf: object) -> None:
        script = Path(__file__).with_name("driver.py")
        with log.open("w") as output:
            self.process = Fork(
                script, json.dumps({"master": master, **CONF, **conf}), stdin=PIPE, stdout=PIPE, stderr=output, env=env
            )
        self._log = log
        self._answer()

    def begin(self, job: str, **arguments: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"job": job, **arguments}) + "\n")
        self.process.stdin.flush()

    def run(self, job: str, **arguments: object) -> None:
        self.begin(job, **arguments)
        error = self._answer()["error"]
        assert not error, error

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the driver ended: {self._log.read_text()}"
        return json.loads(line)

    def kill(self) -> None:
        """Kill the driver and its Java process, unless they were killed before."""
        if self.process.returncode is None:
            kill_group(self.process)
            self.process.communicate(timeout=PATIENCE)


class Cluster:
    """A Spark cluster, its catalog and the stores of its hosts."""

    def __init__(self, driver: Driver, catalog: Catalog, home: Path) -> None:
        self.driver = driver
        self.catalog = catalog
        self.stores = {host: store(home, host) for host in HOSTS}

    @property
    def uri(self) -> str:
        return self.catalog.uri

    def run(self, job: str, name: str, **arguments: object) -> None:
        self.driver.run(job, uri=self.uri, name=name, **arguments)

    def read(self, name: str) -> list[int]:
        with dis.connect(self.uri) as client:
            numbers: list[int] = client.read(name).read_all()["id"].to_pylist()
        return sorted(numbers)

    def segments(self, name: str, host: str | None = None) -> list[Path]:
        """Return the committed segments of a dataset, on one host or on all."""
        stores = self.stores.values() if host is None else [self.stores[host]]
        manifests = [path for one in stores for path in one.glob("segments/*/manifest.json")]
        named = [path.parent for path in manifests if json.loads(path.read_text())["name"] == name]
        return [segment for version in named for segment in version.glob("*.arrows")]

    def leaves_nothing(self) -> None:
        wait_until(lambda: not self._staged(), "nothing is staged any more", 3 * PATIENCE)

    def _staged(self) -> list[str]:
        return [name for one in self.stores.values() if one.exists() for name in os.listdir(one / "staging")]


class Catalog:
    """A catalog process that can be killed and restarted."""

    def __init__(self, database: Path) -> None:
        self._arguments = ("catalog", "--db", database, "--listen", f"grpc://127.0.0.1:{free_port()}")
        self.start()

    def start(self) -> None:
        self._process = Process(*self._arguments, forked=True)
        self.uri = self._process.uri

    def kill(self) -> None:
        self._process.kill()


def java_of_hosts(java: str, home: Path) -> str:
    """Return the home of a Java that runs the executors of each host in the environment of that host."""
    script = home / "java" / "bin" / "java"
    script.parent.mkdir(parents=True)
    cases = "\n".join(CASE.format(host=host, options=node_options(home, host)) for host in HOSTS)
    script.write_text(JAVA.format(cases=cases, java=java))
    script.chmod(0o700)
    return str(home / "java")


@contextmanager
def daemons(env: Mapping[str, str], home: Path, port: int) -> Iterator[None]:
    """Run the master and the workers of daemons.py."""
    workers = [(host, executors, str(home / f"work-{host}")) for host, executors in EXECUTORS.items()]
    arguments = json.dumps(["127.0.0.1", port, workers])
    with Fork(Path(__file__).with_name("daemons.py"), arguments, env=env, stdin=PIPE, stdout=PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "Spark's daemons have ended"
        try:
            yield
        finally:
            kill_group(process)


@pytest.fixture(scope="module")
def cluster(java: str, python: Path, home: Path) -> Iterator[Cluster]:
    """Yield a cluster of a master and one worker for each host."""
    port = free_port()
    with ExitStack() as ends:
        ends.enter_context(daemons(environment(java_of_hosts(java, home), python, home), home, port))
        settings = {
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.cores.max": sum(EXECUTORS.values()),
        }
        env = environment(java, python, home)
        driver = Driver(f"spark://127.0.0.1:{port}", env, home / "driver.log", **settings)
        ends.callback(driver.kill)
        catalog = Catalog(home / "catalog.db")
        ends.callback(catalog.kill)
        ends.callback(kill_nodes, home)
        yield Cluster(driver, catalog, home)


def kill_nodes(home: Path) -> None:
    for host in HOSTS:
        address = running(store(home, host))
        if address is not None:
            os.kill(address.pid, signal.SIGKILL)


def test_one_node_of_each_host_serves_its_segments_by_shm_there_and_by_tcp_elsewhere(
    cluster: Cluster, home: Path, tmp_path: Path
) -> None:
    """This test writes first: both executors of a host begin at once, and start one node."""
    executors = sum(EXECUTORS.values())
    cluster.run("spread", "spread", rows=20_000, partitions=8, meeting=str(tmp_path), executors=executors)
    assert all(cluster.segments("spread", host) for host in HOSTS)
    assert len(cluster.segments("spread")) == 8
    with dis.connect(cluster.uri) as client:
        assert sorted(one.hosts for one in client.describe("spread").endpoints) == [(host,) for host in HOSTS]
        assert len(client.nodes()) == len(HOSTS)
    for host in HOSTS:
        there = {**os.environ, "DISSOCIATED_HOST": host}
        with Fork("-c", CONSUMER, cluster.uri, "spread", env=there, stdout=PIPE) as consumer:
            told = json.loads(consumer.communicate(timeout=PATIENCE)[0])
        assert sorted(told["ids"]) == [*range(20_000)]
        assert told["maps"] == sorted(map(str, cluster.segments("spread", host)))
    cluster.run("summed", "spread", rows=20_000, partitions=4)


def test_what_is_killed_within_a_task_is_done_again_once(cluster: Cluster, home: Path, tmp_path: Path) -> None:
    """A Python worker is killed within an overwrite, and an executor within an append."""

    def lose(whom: str, mode: str, rows: int, partitions: int) -> None:
        killed = tmp_path / mode
        told = {"whom": whom, "stores": str(home), "killed": str(killed)}
        cluster.run("killed_within", "killed", rows=rows, partitions=partitions, mode=mode, **told)
        wait_until(lambda: not Path("/proc", killed.read_text()).exists(), "it is dead, and its parent knows it")

    lose("worker", "overwrite", 120_000, 2)
    assert cluster.read("killed") == [*range(120_000)]
    assert len(cluster.segments("killed")) == 2
    lose("executor", "append", 180_000, 3)
    assert cluster.read("killed") == sorted([*range(120_000), *range(180_000)])
    cluster.leaves_nothing()


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_of_two_attempts_that_finish_one_counts(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    name = f"raced {mode}"
    cluster.run("raced", name, rows=20_000, partitions=2, meeting=str(tmp_path), mode=mode)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]  # both attempts finished
    assert cluster.read(name) == [*range(20_000)]
    cluster.leaves_nothing()
    assert len(cluster.segments(name)) == 2


def test_a_node_that_is_killed_comes_back_with_the_next_write_and_serves_the_same(cluster: Cluster) -> None:
    cluster.run("plain", "kept", rows=10_000, partitions=4)
    address = running(cluster.stores[HOSTS[1]])
    assert address is not None
    with dis.connect(cluster.uri) as client:
        before = [endpoint.ticket for endpoint in client.describe("kept").endpoints]
        os.kill(address.pid, signal.SIGKILL)

        def back() -> bool:
            cluster.run("plain", "next", rows=10_000, partitions=8)
            return running(cluster.stores[HOSTS[1]]) not in (None, address)

        wait_until(back, "a task on that host has started it", 120)  # a node killed for being slow does not count
        wait_until(lambda: all(one.locations for one in client.describe("kept").endpoints), "it is heard again")
        assert [endpoint.ticket for endpoint in client.describe("kept").endpoints] == before
    assert cluster.read("kept") == cluster.read("next") == [*range(10_000)]


def test_a_catalog_that_is_killed_knows_every_dataset_again(cluster: Cluster) -> None:
    cluster.run("plain", "known", rows=10_000, partitions=4)
    with dis.connect(cluster.uri) as client:
        before = client.list()
    cluster.catalog.kill()
    cluster.catalog.start()
    with dis.connect(cluster.uri) as client:
        wait_until(lambda: client.list() == before, "the nodes are heard again, and nothing was forgotten")
    assert cluster.read("known") == [*range(10_000)]
    cluster.run("plain", "known", rows=10, partitions=2, mode="append")
    assert cluster.read("known") == sorted([*range(10_000), *range(10)])


def test_an_executor_that_is_killed_under_map_in_arrow_leaves_nothing(
    cluster: Cluster, home: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    cluster.driver.run("function_killed", rows=40_000, killed=str(killed))
    processes = {int(process) for process in killed.read_text().split()}
    wait_until(lambda: not processes & marked(), "the executor and its Python worker have ended")
    wait_until(lambda: not function_memory(marked()), "all memory of functions is freed")


def test_a_driver_that_is_killed_under_map_in_arrow_leaves_nothing(
    cluster: Cluster, home: Path, tmp_path: Path
) -> None:
    """This test comes last, because it leaves the cluster without a driver."""
    cluster.driver.begin("function_never_ends", rows=40_000, started=str(tmp_path))
    wait_until(lambda: len(os.listdir(tmp_path)) == 2, "two functions run")
    workers = {int(process) for process in os.listdir(tmp_path)}
    assert workers <= marked()
    assert function_memory(workers) > 0
    cluster.driver.kill()
    wait_until(lambda: not workers & marked(), "the Python workers have ended")
    wait_until(lambda: not function_memory(marked()), "all memory of functions is freed")

"""Spark on several processes and on two hosts, which are killed: rows exactly once, winners' segments alone.

The two hosts are 127.0.0.1 and 127.0.0.2, kept apart by DISSOCIATED_HOST: nothing is shared between them in memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import dissociated as dis
from dissociated.errors import JavaNotFound
from dissociated.node.launch import running
from dissociated.spark import java_home
from helpers import PATIENCE, wait_until
from processes import Process, Start, free_port

pytestmark = pytest.mark.timeout(300)

HOSTS = ("127.0.0.1", "127.0.0.2")
CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": 1,
    "spark.python.daemon.module": "warm",
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "500ms",
}

CONSUMER = """
import json, sys, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    table = client.read(sys.argv[2]).read_all()
    maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".arrows" in line}
    print(json.dumps({"ids": table["id"].to_pylist(), "maps": sorted(maps)}))
"""


@pytest.fixture(scope="module")
def java() -> str:
    try:
        return java_home()
    except JavaNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A SPARK_HOME that Spark may write to, and memory for stores beside it."""
    import pyspark

    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        spark = Path(directory, "spark")
        spark.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            if entry.name != "work":
                (spark / entry.name).symlink_to(entry)
        yield Path(directory)


def environment(java: str, home: Path, host: str = "") -> dict[str, str]:
    """That of a process on a host, whose nodes have their stores below `home`."""
    named = {"DISSOCIATED_HOST": host} if host else {}
    where = f"--listen shm: --listen tcp://{host}:0 --flight grpc://{host}:0" if host else ""
    return {
        **os.environ,
        "JAVA_HOME": java,
        "SPARK_HOME": str(home / "spark"),
        "SPARK_DAEMON_MEMORY": "256m",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(map(str, (Path(dis.__file__).parents[1], Path(__file__).parent))),
        "DISSOCIATED_NODE": f"--store {store(home, host)} --beat 1 {where}",
        **named,
    }


def store(home: Path, host: str = "") -> Path:
    return home / f"store-{host}"


class Driver:
    """See driver.py."""

    def __init__(self, master: str, env: Mapping[str, str], log: Path, **conf: object) -> None:
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("driver.py")),
                    json.dumps({"master": master, **CONF, **conf}),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=env,
                start_new_session=True,
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
        """It, and the Java that it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE)


class Cluster:
    """Spark, the catalog and the stores of its hosts."""

    def __init__(self, driver: Driver, catalog: Catalog, home: Path, hosts: Sequence[str]) -> None:
        self.driver = driver
        self.catalog = catalog
        self.stores = {host: store(home, host) for host in hosts}

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
        """Those that are committed under a name, on one host or on all."""
        stores = self.stores.values() if host is None else [self.stores[host]]
        manifests = [path for one in stores for path in one.glob("segments/*/manifest.json")]
        named = [path.parent for path in manifests if json.loads(path.read_text())["name"] == name]
        return [segment for version in named for segment in version.glob("*.arrows")]

    def leaves_nothing(self) -> None:
        wait_until(lambda: not self._staged(), "nothing is staged any more")

    def _staged(self) -> list[str]:
        return [name for one in self.stores.values() if one.exists() for name in os.listdir(one / "staging")]


class Catalog:
    """A catalog alone, which can be killed and started again."""

    def __init__(self, database: Path) -> None:
        self._arguments = ("catalog", "--db", database, "--listen", f"grpc://127.0.0.1:{free_port()}")
        self.start()

    def start(self) -> None:
        self._process = Process(*self._arguments)
        self.uri = self._process.uri

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def daemon(env: Mapping[str, str], *arguments: str) -> Iterator[None]:
    """One of Spark's own."""
    command = [f"{env['SPARK_HOME']}/bin/spark-class", *arguments]
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


@contextmanager
def running_cluster(driver: Driver, home: Path, hosts: Sequence[str]) -> Iterator[Cluster]:
    catalog = Catalog(home / f"{len(hosts)}.db")
    try:
        yield Cluster(driver, catalog, home, hosts)
    finally:
        driver.kill()
        catalog.kill()
        for host in hosts:
            address = running(store(home, host))
            if address is not None:
                os.kill(address.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def one_host(java: str, home: Path) -> Iterator[Cluster]:
    """Two executors, each a process of its own."""
    env = environment(java, home)
    with running_cluster(Driver("local-cluster[2,1,1024]", env, home / "one.log"), home, [""]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_hosts(java: str, home: Path) -> Iterator[Cluster]:
    """A master, and one worker on each host."""
    master = f"spark://127.0.0.1:{free_port()}"
    package = "org.apache.spark.deploy"
    with ExitStack() as daemons:
        port = master.rpartition(":")[2]
        places = ("--host", "127.0.0.1", "--port", port, "--webui-port", "0")
        daemons.enter_context(daemon(environment(java, home), f"{package}.master.Master", *places))
        for host in HOSTS:
            place = ("--host", host, "--webui-port", "0", "-c", "1", "-m", "1g", "-d", str(home / f"work-{host}"))
            daemons.enter_context(daemon(environment(java, home, host), f"{package}.worker.Worker", *place, master))
        settings = {"spark.scheduler.minRegisteredResourcesRatio": "1.0", "spark.cores.max": 2}
        driver = Driver(master, environment(java, home), home / "two.log", **settings)
        with running_cluster(driver, home, HOSTS) as cluster:
            yield cluster


@pytest.mark.parametrize(
    ("hosts", "first", "second"), [("one_host", "worker", "executor"), ("two_hosts", "executor", "worker")]
)
def test_what_is_killed_within_a_task_is_done_again_once(
    request: pytest.FixtureRequest, home: Path, tmp_path: Path, hosts: str, first: str, second: str
) -> None:
    """On one host and on two each kind of process once; within an overwrite and within an append each kind once."""
    cluster: Cluster = request.getfixturevalue(hosts)

    def lose(whom: str, mode: str, rows: int, partitions: int) -> None:
        killed = tmp_path / mode
        told = {"whom": whom, "stores": str(home), "killed": str(killed)}
        cluster.run("killed_within", "killed", rows=rows, partitions=partitions, mode=mode, **told)
        assert not Path("/proc", killed.read_text()).exists()

    lose(first, "overwrite", 400_000, 2)
    assert cluster.read("killed") == [*range(400_000)]
    assert len(cluster.segments("killed")) == 2
    lose(second, "append", 300_000, 3)
    assert cluster.read("killed") == sorted([*range(400_000), *range(300_000)])
    cluster.leaves_nothing()


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_of_two_attempts_that_finish_one_counts(two_hosts: Cluster, tmp_path: Path, mode: str) -> None:
    name = f"raced {mode}"
    two_hosts.run("raced", name, rows=200_000, partitions=2, meeting=str(tmp_path), mode=mode)
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]  # both came to their ends
    assert two_hosts.read(name) == [*range(200_000)]
    two_hosts.leaves_nothing()
    assert len(two_hosts.segments(name)) == 2


def test_one_node_is_started_on_a_host_however_many_tasks_there_are(one_host: Cluster) -> None:
    one_host.run("plain", "many", rows=100, partitions=6)
    assert one_host.read("many") == [*range(100)]
    with dis.connect(one_host.uri) as client:
        assert len(client.nodes()) == 1
        assert len(client.describe("many").endpoints) == 1


def test_each_host_serves_its_own_segments_by_shm_there_and_by_tcp_elsewhere(
    two_hosts: Cluster, java: str, home: Path, tmp_path: Path
) -> None:
    two_hosts.run("spread", "spread", rows=200_000, partitions=8, meeting=str(tmp_path))
    assert all(two_hosts.segments("spread", host) for host in HOSTS)
    assert len(two_hosts.segments("spread")) == 8
    with dis.connect(two_hosts.uri) as client:
        assert sorted(one.hosts for one in client.describe("spread").endpoints) == [(host,) for host in HOSTS]
    for host in HOSTS:
        told = json.loads(
            subprocess.run(
                [sys.executable, "-c", CONSUMER, two_hosts.uri, "spread"],
                env=environment(java, home, host),
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE,
            ).stdout
        )
        assert sorted(told["ids"]) == [*range(200_000)]
        assert told["maps"] == sorted(map(str, two_hosts.segments("spread", host)))
    two_hosts.run("summed", "spread", rows=200_000, partitions=4)


def test_a_node_that_is_killed_comes_back_with_the_next_write_and_serves_the_same(two_hosts: Cluster) -> None:
    two_hosts.run("plain", "kept", rows=100_000, partitions=4)
    address = running(two_hosts.stores[HOSTS[1]])
    assert address is not None
    with dis.connect(two_hosts.uri) as client:
        before = [endpoint.ticket for endpoint in client.describe("kept").endpoints]
        os.kill(address.pid, signal.SIGKILL)

        def back() -> bool:
            two_hosts.run("plain", "next", rows=100_000, partitions=8)
            return running(two_hosts.stores[HOSTS[1]]) not in (None, address)

        wait_until(back, "a task on that host has started it", 120)  # not one that was killed for being slow
        wait_until(lambda: all(one.locations for one in client.describe("kept").endpoints), "it is heard again")
        assert [endpoint.ticket for endpoint in client.describe("kept").endpoints] == before
    assert two_hosts.read("kept") == two_hosts.read("next") == [*range(100_000)]


def test_a_catalog_that_is_killed_knows_every_dataset_again(two_hosts: Cluster) -> None:
    two_hosts.run("plain", "known", rows=100_000, partitions=4)
    with dis.connect(two_hosts.uri) as client:
        before = client.list()
    two_hosts.catalog.kill()
    two_hosts.catalog.start()
    with dis.connect(two_hosts.uri) as client:
        wait_until(lambda: client.list() == before, "the nodes are heard again, and nothing was forgotten")
    assert two_hosts.read("known") == [*range(100_000)]
    two_hosts.run("plain", "known", rows=10, partitions=2, mode="append")
    assert two_hosts.read("known") == sorted([*range(100_000), *range(10)])


@pytest.mark.parametrize("mode", ["overwrite", "append"])
def test_a_driver_that_is_killed_leaves_nothing(java: str, home: Path, start: Start, mode: str) -> None:
    place = store(home, f"forgetful {mode}")
    node = start("node", "--store", place, "--forget", "2", "--beat", "0.1")
    driver = Driver("local[2]", environment(java, home), home / "killed.log")
    try:
        driver.begin("never_ending", uri=node.uri, name="never", rows=100_000, partitions=2, mode=mode)
        wait_until(
            lambda: {name.partition("-")[2][:6] for name in os.listdir(place / "staging")} == {"000000", "000001"},
            "one segment is whole, the other is half",
            180,  # to which belongs that Spark starts
        )
    finally:
        driver.kill()
    wait_until(lambda: not os.listdir(place / "staging"), "both are gone")
    with dis.connect(node.uri) as client:
        assert client.list() == []
    assert not list(place.glob("segments/*"))

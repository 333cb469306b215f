"""This user's node on this host: everybody finds it without an address, and start, stop and clean manage it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from cli.shell import python, run
from dissociated.errors import CatalogUnreachable
from dissociated.node.launch import running
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support import processes
from support.helpers import PATIENCE, wait_until
from support.nodes import MIB

pytestmark = pytest.mark.usefixtures("forks")

TABLE = pa.table({"n": range(1000)})


def facts(output: str) -> dict[str, str]:
    """Return the lines of `start`, such as "store    DIR", as a dict."""
    return dict(line.split(None, 1) for line in output.splitlines() if re.match(r"\w+ {2,}", line))


def test_one_address_is_found_by_all_and_survives_a_restart(own_store: Path, tmp_path: Path) -> None:
    started = facts(run("start", "--limit", "64MB"))
    assert started["store"] == str(own_store)
    assert started["log"] == str(own_store / "node.log")
    with dis.connect() as client:
        assert client.uri == started["catalog"]
        client.put("d", TABLE)
        assert client.status().pid == int(started["process"])
        held = client.status().store
        assert held is not None
        assert held.limit == 64_000_000
        assert held.log == started["log"]
        again = run("start")
        assert again.startswith("the node is running already")
        assert facts(again) == started
        stopped = run("stop")
        assert started["process"] in stopped
        assert started["log"] in stopped
        assert str(own_store) in stopped
        assert running(own_store) is None
        restarted = facts(run("start"))
        assert restarted["catalog"] == started["catalog"]
        assert restarted["process"] != started["process"]
        assert client.read("d", transport="shm").read_all() == TABLE
    assert run("ls").splitlines()[1].split()[:2] == ["d", "1,000"]
    assert python("import dissociated as dis; print(dis.connect().uri)").strip() == started["catalog"]


def test_connect_starts_a_node_that_keeps_what_was_put(own_store: Path) -> None:
    python("import dissociated as dis, pyarrow as pa; dis.connect().put('d', pa.table({'n': [1]}))")
    node = running(own_store)
    assert node is not None
    assert python("import dissociated as dis; print(dis.connect().read('d').read_all()['n'].to_pylist())") == "[1]\n"


def test_a_node_that_connect_started_for_nothing_ends(own_store: Path) -> None:
    python("import dissociated as dis; print(dis.connect().list())")
    wait_until(lambda: not (own_store / "node.json").exists(), "the unused node has ended")
    assert running(own_store) is None


def test_the_variable_wins(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dis.Server(["shm:"], authorize=["secret"]) as server:
        server.publish("d", TABLE)
        monkeypatch.setenv("DISSOCIATED_CATALOG", server.catalog_uri)
        monkeypatch.setenv("DISSOCIATED_TOKEN", "secret")
        with dis.connect() as client:
            assert client.read("d").read_all() == TABLE
    assert not own_store.exists()


def test_the_token_of_the_environment_is_sent_nowhere_else(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISSOCIATED_TOKEN", "secret")
    with (
        dis.Server(["shm:"], authorize=["secret"]) as server,
        dis.connect(server.catalog_uri) as client,
        pytest.raises(dis.errors.AccessDenied),
    ):
        client.list()


def test_stop_and_clean_find_nothing(own_store: Path) -> None:
    assert run("stop") == f"no node with the store {own_store} runs on this host\n"
    assert run("clean") == "nothing was freed\n"
    assert "dissociated start" in run("ls", status=1)


def test_stop_ends_no_process_that_has_taken_the_id_of_a_dead_node(own_store: Path) -> None:
    run("start")
    with dis.connect() as client:
        client.put("d", TABLE)
        node = running(own_store)
        assert node is not None
        os.kill(node.pid, signal.SIGKILL)
        wait_until(lambda: running(own_store) is None, "the node has ended")
        with pytest.raises(
            CatalogUnreachable, match=r"'d' cannot be looked up: .* It last answered at \d{4}-\S+ \S+ UTC"
        ):
            client.read("d")
    assert "holds 1 dataset: d. Its node was last alive at " in run("ls", status=1)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        address = (own_store / "node.json").read_text()
        (own_store / "node.json").write_text(address.replace(str(node.pid), str(other.pid)))
        assert run("stop") == f"no node with the store {own_store} runs on this host\n"
        assert other.poll() is None
        other.communicate(b"\n", PATIENCE)


def test_clean_frees_what_lies_on_disk_too(memory: Path, tmp_path: Path) -> None:
    directory, disk = memory / "store", tmp_path / "disk"
    with Node(Store(directory, 14 * MIB, Policy.SPILL, disk), ["shm:"]) as node, dis.connect(node.uri) as client:
        for name in "ab":
            client.put(name, pa.table({"n": range(MIB)}))
        assert [*disk.rglob("*.arrows")]
    assert re.search(r"^freed \S+ MB$", run("clean", "--store", str(directory), "--yes"), re.MULTILINE)
    assert [*disk.rglob("*.arrows"), *directory.rglob("*.arrows")] == []
    with Store(directory) as store:
        assert store.versions() == []


def test_clean_frees_what_a_stopped_node_left_after_asking(own_store: Path) -> None:
    run("start")
    with dis.connect() as client:
        for number in range(2):
            client.put("d", pa.table({"n": [*range(200_000 + number)]}))
        mapped = client.read("d").read_all()
        client.put("e", TABLE)
    assert "dissociated stop" in run("clean")
    run("stop")
    since = r"which holds 2 datasets: d, e\. Its node was stopped at \d{4}-\d\d-\d\d .*: dissociated start serves"
    assert re.search(since, run("ls", status=1))
    assert "--yes" in run("clean", status=1)
    command = [sys.executable, "-m", "dissociated", "clean"]
    around = {**os.environ, "TERM": "dumb"}
    asked = processes.in_terminal(80, command, around, given=b"n\n")
    assert "2 datasets" in asked
    assert "nothing was freed" in asked
    freed = processes.in_terminal(80, command, around, given=b"y\n")
    assert "in use by other processes" in freed
    assert mapped["n"][-1].as_py() == 200_000
    del mapped
    assert re.search(r"^freed \S+ MB$", run("clean", "--yes"), re.MULTILINE)
    assert run("clean", "--yes") == "nothing was freed\n"
    assert list(own_store.rglob("*.arrows")) == []
    with dis.connect() as client:
        assert client.list() == []
        client.put("d", TABLE)
        assert client.describe("d").version == 3  # a number means one version forever


def test_spark_asks_the_same_catalog(own_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from dissociated.spark.catalog_config import CatalogConfig

    config = CatalogConfig.parse({})
    with dis.connect() as client, config.connect() as same:
        client.put("d", TABLE)
        assert config.uri == client.uri
        assert same.describe("d").rows == 1000
    monkeypatch.setenv("DISSOCIATED_CATALOG", "grpc://127.0.0.1:1")
    assert CatalogConfig.parse({}).uri == "grpc://127.0.0.1:1"
    assert CatalogConfig.parse({"catalog": "grpc://127.0.0.1:2"}).uri == "grpc://127.0.0.1:2"

from __future__ import annotations

import os
import signal
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.base.host import boot_id, host_name
from dissociated.catalog.service import CatalogService
from dissociated.errors import CatalogUnreachable, NodeUnreachable
from dissociated.node.launch import running
from dissociated.node.local import stage_here
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import wait_until
from support.processes import Start, free_port


def test_a_node_that_is_the_catalog_is_the_node_of_its_host(tmp_path: Path) -> None:
    with Node(Store(tmp_path), ["shm:"]) as node:
        place = stage_here(node.uri, dis.connect)
        assert (place.node, place.flight, place.directory) == (node.store.id, node.uri, str(node.store.staging))


def test_a_directory_of_the_same_path_elsewhere_is_not_taken(tmp_path: Path) -> None:
    with Node(Store(tmp_path), ["shm:"]) as node, dis.connect(node.uri) as client:
        place = client.stage()
    assert place.here
    assert not replace(place, inode="0:0").here
    assert not replace(place, boot_id="another").here
    assert not replace(place, directory=str(tmp_path / "nowhere")).here


def test_a_host_with_a_name_is_not_the_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = boot_id()
    monkeypatch.setenv("DISSOCIATED_HOST", "one")
    one = boot_id()
    assert host_name() == "one"
    monkeypatch.setenv("DISSOCIATED_HOST", "two")
    assert len({machine, one, boot_id()}) == 3
    monkeypatch.delenv("DISSOCIATED_HOST")
    assert (boot_id(), host_name()) == (machine, os.uname().nodename)


def test_no_node_is_started_for_a_catalog_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {tmp_path / 'store'}")
    with pytest.raises(CatalogUnreachable):
        stage_here(f"grpc://127.0.0.1:{free_port()}", dis.connect)
    assert not (tmp_path / "store").exists()


@pytest.mark.usefixtures("forked_nodes")
def test_a_node_of_a_catalog_at_a_unix_socket_is_started_at_one(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of Spark starts its node like this."""
    store, directory = memory / "store", memory / "catalog"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {store}")
    with closing(CatalogService(f"grpc+unix://{directory}/catalog.sock")) as catalog:
        place = stage_here(catalog.uri, dis.connect)
        started = running(store)
        assert started is not None
        try:
            assert place.flight == started.uri == f"grpc+unix://{store}/run/flight.sock"
            with dis.connect(catalog.uri) as client:
                client.put("d", pa.table({"n": [1]}))
                assert client.read("d", transport="shm").read_all() == pa.table({"n": [1]})
        finally:
            os.kill(started.pid, signal.SIGKILL)


def test_a_host_that_has_a_node_waits_for_it_and_starts_no_second_one(
    memory: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {memory / 'second'}")
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    flight = f"grpc://127.0.0.1:{free_port()}"
    arguments = (
        "node",
        "--store",
        memory / "service",
        "--catalog",
        catalog.uri,
        "--flight",
        flight,
        "--heartbeat",
        "1",
    )
    node = start(*arguments)
    node.kill()
    with dis.connect(catalog.uri) as client:
        with pytest.raises(NodeUnreachable, match=f"{flight}: start it"):
            stage_here(catalog.uri, dis.connect)
        wait_until(lambda: not client.nodes()[0]["alive"], "the catalog has noticed")
        with pytest.raises(NodeUnreachable, match=f"dissociated forget {flight}$"):
            stage_here(catalog.uri, dis.connect)
        assert not (memory / "second").exists()
        start(*arguments)
        assert stage_here(catalog.uri, dis.connect).flight == flight
        assert len(client.nodes()) == 1


@pytest.mark.usefixtures("forked_nodes")
def test_a_node_that_was_started_for_a_writer_starts_again_and_goes_when_it_is_empty(
    memory: Path, tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = memory / "store"
    monkeypatch.setenv("DISSOCIATED_NODE", f"--store {store} --empty-exit 0.1 --heartbeat 0.2 --limit 12MiB")
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    with dis.connect(catalog.uri) as client:
        for again in range(2):
            assert stage_here(catalog.uri, dis.connect).limited
            client.put("d", pa.table({"n": [again]}))
            node = running(store)
            assert node is not None
            os.kill(node.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(node.pid, 0)
        stage_here(catalog.uri, dis.connect)
        assert client.read("d").read_all() == pa.table({"n": [1]})  # it stays as long as it has data
        node = running(store)
        assert node is not None
        client.drop("d")
        with suppress(ChildProcessError):
            os.waitpid(node.pid, 0)
        wait_until(lambda: client.nodes() == [], "the catalog has forgotten it")

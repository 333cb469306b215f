from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.errors import CatalogUnreachable
from dissociated.host import boot_id, host_name
from dissociated.node.local import stage_here
from dissociated.node.node import Node
from dissociated.store.store import Store
from processes import free_port


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

"""Changes of datasets: each is logged in a line, and counted in the status and for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.catalog.service import CatalogService
from dissociated.errors import DatasetNotFound
from dissociated.monitoring.log import record_fields
from dissociated.monitoring.status import ChangeCounts
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support.helpers import Serve, wait_until

MIB = 1 << 20
SMALL = pa.table({"n": [1, 2, 3]})
LARGE = pa.table({"n": np.zeros(5 * MIB // 8)})
SIZES = {3: 24, 5 * MIB // 8: 5 * MIB}


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the logged changes: the kind of change, the version, and the reason."""
    found: list[tuple[Any, ...]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said = record_fields(record)
            assert said["bytes"] == SIZES[said["rows"]]
            assert repr(said["dataset"]) in record.getMessage()
            found.append((said["change"], said["dataset"], said.get("version"), said["why"]))

    collect, logger = Collect(), logging.getLogger("dissociated.monitoring.changes")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(collect)
    yield found
    logger.removeHandler(collect)


def put(node: Node, name: str, data: pa.Table, **options: Any) -> None:
    with dis.connect(node.uri) as client:
        client.put(name, data.to_reader(), **options)


def kept(node: Node) -> ChangeCounts:
    """Return the counts that a client sees, after comparing them to those for Prometheus."""
    prometheus = pytest.importorskip("prometheus_client.parser", reason="the extra `metrics` is not installed")
    with dis.connect(node.uri) as client:
        counts = client.status().changed
    import urllib.request

    with urllib.request.urlopen(node.server.metrics_uri, timeout=10) as answer:
        families = [*prometheus.text_string_to_metric_families(answer.read().decode())]
    (family,) = (one for one in families if one.name == "dissociated_dataset_versions")
    scraped = {one.labels["change"]: one.value for one in family.samples if one.name.endswith("_total")}
    assert scraped == vars(counts)
    return counts


def test_a_server_that_publishes_by_itself(serve: Serve, told: list[tuple[Any, ...]]) -> None:
    for catalog in (None, "grpc://127.0.0.1:0"):
        server = serve("inproc:", catalog=catalog)
        server.publish("d", SMALL)
        server.publish("d", SMALL)
        server.drop("d")
        first, second = (None, None) if catalog is None else (1, 2)
        assert [one[:3] for one in told] == [
            ("committed", "d", first),
            ("committed", "d", second),
            ("retired", "d", first),
            ("dropped", "d", second),
        ]
        assert "replaces" in told[1][3]
        assert server.status().changed == ChangeCounts(committed=2, retired=1, dropped=1)
        told.clear()


def test_what_expires_is_told_and_a_node_that_starts_again_finds_no_news(
    tmp_path: Path, told: list[tuple[Any, ...]]
) -> None:
    with Node(Store(tmp_path / "store"), ["shm:"], retain=300.0, metrics="127.0.0.1:0") as node:
        put(node, "kept", SMALL)
        put(node, "short", SMALL, ttl=0.2)
        wait_until(lambda: len(told) == 3, "its time is over")
        assert told == [
            ("committed", "kept", 1, "it is new"),
            ("committed", "short", 1, "it is new"),
            ("expired", "short", 1, "its time to live has ended"),
        ]
        assert kept(node) == ChangeCounts(committed=2, expired=1)
    told.clear()
    with Node(Store(tmp_path / "store"), ["shm:"], metrics="127.0.0.1:0") as node:
        assert kept(node) == ChangeCounts()
    assert told == []


def test_a_replaced_version_whose_time_is_over_keeps_no_node_from_starting(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["shm:"], retain=300.0) as node:
        wait_until(lambda: _promised(node), "its tickets are promised before its time is over")
        put(node, "d", LARGE)
    wait_until(lambda: _older(tmp_path / "store", 0.5), "its time is over")
    with Node(Store(tmp_path / "store"), ["shm:"], retain=300.0) as node, dis.connect(node.uri) as client:
        assert client.read("d").read_all() == LARGE


def _promised(node: Node) -> bool:
    put(node, "d", SMALL, ttl=0.5)
    with dis.connect(node.uri) as client:
        try:
            client.describe("d")  # this call makes the tickets valid for a while
        except DatasetNotFound:
            return False
    return True


def _older(store: Path, seconds: float) -> bool:
    import json
    import time

    created = [json.loads(path.read_bytes())["created"] for path in store.glob("segments/*/manifest.json")]
    assert len(created) == 2
    return time.time() > min(created) + seconds


@pytest.mark.parametrize("policy", [Policy.EVICT, Policy.SPILL])
def test_evictions_and_spills_are_recorded(tmp_path: Path, told: list[tuple[Any, ...]], policy: Policy) -> None:
    spill = tmp_path / "disk" if policy is Policy.SPILL else None
    kind = "evicted" if policy is Policy.EVICT else "spilled"
    store = Store(tmp_path / "store", 14 * MIB, policy, spill)
    with Node(store, ["shm:"], metrics="127.0.0.1:0") as node:
        for name in "abc":
            put(node, name, LARGE)
        assert sorted(told) == [
            *(("committed", name, 1, "it is new") for name in "abc"),
            (kind, "a", 1, "the store had to make room"),
        ]
        assert kept(node) == ChangeCounts(**{"committed": 3, kind: 1})
        with dis.connect(node.uri) as client:
            for info in client.list():
                client.drop(info.name)
        left = 2 if policy is Policy.EVICT else 3
        assert kept(node) == ChangeCounts(**{"committed": 3, kind: 1, "dropped": left})


def test_a_catalog_counts_what_it_decides_and_a_node_what_its_store_does(
    tmp_path: Path, told: list[tuple[Any, ...]]
) -> None:
    catalog = CatalogService("grpc://127.0.0.1:0")
    try:
        store = Store(tmp_path / "store", 14 * MIB, Policy.EVICT)
        with Node(store, ["shm:"], catalog=catalog.uri, heartbeat_interval=1.0) as node:
            for name in "abc":
                put(node, name, LARGE)
            wait_until(lambda: catalog.catalog.status().changed.evicted, "the catalog hears that it is gone")
            assert catalog.catalog.status().changed == ChangeCounts(committed=3, evicted=1)
            assert node.server.status().changed == ChangeCounts(evicted=1)
            with dis.connect(catalog.uri) as client:
                client.drop("b")
            assert catalog.catalog.status().changed == ChangeCounts(committed=3, evicted=1, dropped=1)
    finally:
        catalog.close()
    assert [one[:3] for one in told if one[0] == "evicted"] == [("evicted", "a", 1), ("evicted", "a", None)]

"""Nodes that are away and file systems that are full: how commands show them, also in a narrow terminal."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from cli.shell import run
from dissociated.errors import CatalogError, DissociatedError, NodeUnreachable
from support import processes
from support.helpers import wait_until
from support.nodes import put, small_file_system, table
from support.processes import Start

pytestmark = pytest.mark.usefixtures("forks")


def test_a_node_that_is_away_is_described_as_that(memory: Path, tmp_path: Path, start: Start) -> None:
    catalog = start("catalog", "--db", tmp_path / "db", "--listen", "grpc://127.0.0.1:0")
    node = start("node", "--store", memory / "a", "--catalog", catalog.uri, "--heartbeat", "0.5")
    put(catalog.uri, "orders", table(1, 2))
    assert "STATE" not in run("ls", catalog.uri)
    node.kill()
    with dis.connect(catalog.uri) as client:
        with pytest.raises(DissociatedError, match=r"'orders' is on .* last heard \d{4}-"):
            client.read("orders")
        wait_until(lambda: client.describe("orders").endpoints[0].is_away, "the catalog has noticed")
        (host,) = client.describe("orders").endpoints[0].hosts
        assert repr(client.list()).splitlines()[1].endswith("cannot be read")
        told = (
            rf"'orders' is on {re.escape(host)}, and no node there is alive "
            r"\(last heard \d{4}-\S+ \S+ UTC\): start .* forget"
        )
        for transport in (None, "shm", "grpc"):
            with pytest.raises(DissociatedError, match=told):
                client.read("orders", transport=transport).read_all()
        with pytest.raises(NodeUnreachable, match=told):
            client.dataset("orders").to_table()
        with pytest.raises(
            CatalogError, match=rf"no node of this catalog is alive: start that on {re.escape(host)} again"
        ):
            client.put("more", table(1))
    listed = run("ls", catalog.uri)
    assert listed.splitlines()[1].startswith(f"orders  cannot be read: {host} is away")
    assert f"dissociated forget {host}" in listed
    assert re.search(told, run("describe", f"{catalog.uri}/orders"))
    (plain,) = json.loads(run("ls", "--json", catalog.uri))
    assert plain["readable"] is False
    status = run("status", catalog.uri)
    assert "1 part cannot be read, since no node that is alive can serve the data: orders\n" in status
    assert re.search(rf"^{re.escape(host)} +away ", status, re.MULTILINE)
    assert f"{host} has been away for " in status


def test_a_full_file_system_is_seen(tmp_path: Path, start: Start) -> None:
    """The file system has 8 MiB, and the limit would allow more."""
    root = tmp_path / "small"
    root.mkdir()
    options = (
        "--store",
        root / "store",
        "--limit",
        "64MiB",
        "--metrics",
        "127.0.0.1:0",
        "--flight",
        "grpc://127.0.0.1:0",
    )
    with small_file_system(root) as mounts:
        node = start("node", *options, mounts=mounts)
        with dis.connect(node.uri) as client:
            client.put("small", pa.table({"n": range(1000)}))
            with pytest.raises(DissociatedError):
                client.put("large", pa.table({"n": np.arange(2_000_000)}))
            store = client.status().store
            assert store is not None
            assert store.free is not None
            assert store.effective_limit is not None
            assert store.limit == 64 << 20
            assert store.held + store.free == store.effective_limit < 9 << 20
            assert client.status().totals.refused_puts > 0
        shown = run("status", node.uri)
        assert re.search(r"the store holds \S+ kB of at most 8\.\d\d MB: the limit is 67\.1 MB, and the file", shown)
        assert re.search(r"^[1-9]\d* puts? refused$", shown, re.MULTILINE)
        assert f"store {root / 'store'}" in shown


def test_a_narrow_terminal_shows_whole_columns(tmp_path: Path) -> None:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        server.publish("a/dataset/with/a/long/name", table(1, 2))
        command = [sys.executable, "-m", "dissociated", "status", "--once", server.catalog_uri]
        around = {**os.environ, "TERM": "dumb"}
        narrow, wide = (processes.in_terminal(columns, command, around).splitlines() for columns in (60, 120))
    assert max(map(len, narrow)) <= 60
    (head,) = (line for line in narrow if line.startswith("DATASET"))
    assert head.split() == ["DATASET", "ROWS", "SIZE", "CONSUMERS", "…"]
    (row,) = (line for line in narrow if line.startswith("a/dataset/with/a/long/name "))
    assert row.split()[1:] == ["2", "16", "B", "0", "…"]
    assert any(line.split()[:1] == ["DATASET"] and line.split()[-1] == "LEASES" for line in wide)
    assert "0 done, 0 gone, 0 refused, 0 failed; streams over Flight: 0" in " ".join(" ".join(narrow).split())


def test_long_names_and_tags_are_whole_in_a_notebook() -> None:
    column, name, tag = "column_" * 10, "a/dataset/with/a/name/" * 5, "value " * 20
    wide = pa.table({column: [1]})
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        client.put(name, wide, tags={"tag": tag})
        displays: dict[str, Any] = {"handle": client[name], "list": client.list(), "client": client}
        shown = {kind: displayed._repr_html_() for kind, displayed in displays.items()}
    assert all(name in text and "…" not in text for text in shown.values())
    assert column in shown["handle"]
    assert f"tag={tag}".strip() in shown["handle"]


def test_long_types_are_whole_in_a_notebook_and_in_the_schema() -> None:
    wide = pa.struct({f"field_{number}": pa.list_(pa.int64()) for number in range(20)})
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("d", pa.table({"n": [1], "wide": pa.array([None], wide)}))
        handle = client.dataset("d")
        assert "field_19: list&lt;item: int64&gt;" in handle._repr_html_()
        assert "…" not in handle._repr_html_()
        assert ".schema" in repr(handle)
        server.publish("d", pa.table({"n": [1]}))
        assert ".schema" not in repr(client.dataset("d"))


def test_ls_fits_into_a_narrow_terminal_and_describe_shows_whole_types() -> None:
    wide = pa.struct({f"field_{number}": pa.list_(pa.int64()) for number in range(20)})
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        client.put("d", pa.table({"wide": pa.array([None], wide)}), ttl=3595, tags={"a long tag": "a long value"})
        command = [sys.executable, "-m", "dissociated"]
        around = {**os.environ, "TERM": "dumb"}
        for arguments in (["ls"], ["ls", "--long"]):
            lines = processes.in_terminal(60, [*command, *arguments, server.catalog_uri], around).splitlines()
            assert max(map(len, lines)) <= 60
            assert lines[0].split()[:5] == ["NAME", "ROWS", "SIZE", "COLUMNS", "VERSION"]
            assert re.search(r" in 59 min \d\d s", lines[1]) or arguments == ["ls", "--long"]
        name = f"team/{'features-of-' * 4}origin"  # 57 characters
        client.put(name, pa.table({"n": [1]}))
        lines = processes.in_terminal(60, [*command, "ls", server.catalog_uri], around).splitlines()
        assert max(map(len, lines)) <= 60
        assert lines[0].split()[:3] == ["NAME", "ROWS", "SIZE"]
        assert re.match(r"team/features-\S+…\S+-of-origin +1  ", lines[2])
        described = processes.in_terminal(60, [*command, "describe", f"{server.catalog_uri}/d"], around)
        assert str(wide) in described

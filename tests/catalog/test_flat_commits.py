"""The cost of a commit or a drop: it does not grow with the number of datasets.

The tests count instructions, because times depend on the machine.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from dissociated.catalog.base import Catalog
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.service import CatalogService
from dissociated.control.commit import Commit, StagedSegment
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.nodes import SCHEMA, table

FEW, MORE, TRIED = 50, 200, 3  # datasets


class Instructions:
    """A count of the Python instructions that this thread runs within the `with` block."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Instructions:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if frame.f_code.co_name == "step":  # a callback of SQLite, which counts its own instructions
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


class Work(NamedTuple):
    """The cost of a call in instructions: of the catalog, of its database, and of a node that prepares the data."""

    catalog: int
    database: int
    node: int


class Changing:
    """Counted commits and drops of datasets with one row."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._is_counting = False  # which makes commits several times slower
        self._preparing = 0
        self._steps = 0  # instructions that SQLite has run for any database
        prepare, connect = Catalog.prepare, sqlite3.connect

        def counted(catalog: Catalog, body: Any) -> dict[str, Any]:
            if not self._is_counting:
                return prepare(catalog, body)
            with Instructions() as ran:
                prepared = prepare(catalog, body)
            self._preparing = ran.count
            return prepared

        def step() -> None:
            self._steps += 1

        def connected(*arguments: Any, **options: Any) -> sqlite3.Connection:
            connection = connect(*arguments, **options)
            connection.set_progress_handler(step, 1)
            return connection

        patch.setattr(Catalog, "prepare", counted)
        patch.setattr(sqlite3, "connect", connected)

    def use(self, catalog: CatalogService, node: Node) -> None:
        """Set the catalog and the node to count. Call it before any other method."""
        assert isinstance(catalog.catalog, LocalCatalog)
        self._catalog, self._node = catalog.catalog, node

    def _staged(self, number: int, key: str) -> Commit:
        name = f"{key} of {number}"
        with self._node.store.writer(name, SCHEMA) as writer:
            writer.write_batch(table(1).to_batches()[0])
        return Commit(f"d{number}", [StagedSegment(name, self._node.store.id)], SCHEMA, key=name)

    def commit(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._catalog.commit(self._staged(number, "first"))

    def work(self, numbers: Sequence[int]) -> dict[str, tuple[Work, Work]]:
        """Count creating, replacing twice and dropping some datasets; return the least and the most work of each step.

        The counts vary because some work may or may not have been done by a thread of the node already.
        """
        did: dict[str, list[Work]] = {}
        for what in ("first", "second", "third"):
            did[what] = [self._count(self._catalog.commit, self._staged(number, what)) for number in numbers]
        did["drop"] = [self._count(self._catalog.drop, f"d{number}") for number in numbers]
        return {
            what: (Work(*map(min, zip(*some, strict=True))), Work(*map(max, zip(*some, strict=True))))
            for what, some in did.items()
        }

    def _count(self, call: Callable[[Any], None], argument: object) -> Work:
        self._preparing = self._steps = 0
        self._is_counting = True
        with Instructions() as ran:
            call(argument)
        self._is_counting = False
        return Work(ran.count, self._steps, self._preparing)


def look(changing: Changing) -> None:
    changing.commit(range(FEW))
    before = changing.work(range(FEW, FEW + TRIED))
    changing.commit(range(FEW, FEW + MORE))
    after = changing.work(range(FEW + MORE, FEW + MORE + TRIED))
    # A single instruction per dataset would add one instruction for each of the additional datasets.
    more = {
        (what, whose): (most, least)
        for what, (_, was) in before.items()
        for whose, most, least in zip(Work._fields, was, after[what][0], strict=True)
        if least - most >= MORE
    }
    assert all(least.database for least, _ in after.values())
    assert more == {}


def test_of_a_node(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Changing(monkeypatch)
    with Node(Store(memory), heartbeat_interval=600) as node:
        changing.use(node.service, node)
        look(changing)


def test_of_a_catalog_with_a_node(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changing = Changing(monkeypatch)
    with (
        closing(CatalogService("grpc://127.0.0.1:0")) as catalog,
        Node(Store(memory), catalog=catalog.uri, heartbeat_interval=600) as node,
    ):
        changing.use(catalog, node)
        look(changing)

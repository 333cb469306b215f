"""Database files of a catalog that are damaged, of another schema, or of another program."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.catalog.database import Database
from dissociated.catalog.service import CatalogService
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import Commit
from dissociated.control.version import NodeRecord, Part, Version
from dissociated.errors import CatalogDamaged, CatalogError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import leaving_nothing
from support.nodes import put, read, table
from support.processes import free_port, run_script

NODES = [NodeRecord(id, f"host-{id}", f"boot-{id}", f"grpc://{id}:1", (f"tcp://{id}:2?want_data=1",)) for id in "ab"]
SCHEMA = bytes(pa.schema([("n", pa.int64())]).serialize())
ATTEMPTS = 60


def part(name: str, node: str = "a") -> Part:
    return Part(name, node, f"ticket {name}".encode(), 1, 8)


def fill(path: Path) -> list[Version]:
    """Create a database of datasets, and return the announcements of its nodes, which hold the same facts."""
    with closing(Database(str(path), clock=lambda: 1000.0)) as database:
        for node in NODES:
            database.register(node, [], "digest", FOREVER)
        announced = []
        for number in range(12):
            name, key = f"dataset {number % 5}", f"key {number}"
            one = part(f"part {number}", "ab"[number % 2])
            version = database.publish(Commit(name, key=key, tags={"number": str(number)}), SCHEMA, [one])
            tags = {"number": str(number)}
            announced.append(Version(name, key, SCHEMA, 1000.0, (one,), tags=tags, number=version))
            database.find(name, retain=60.0)
        database.publish(Commit("dropped", key="dropped"), SCHEMA, [part("dropped")])
        database.drop("dropped")
        database.abort("aborted")
    return announced


def fill_beyond_memory(path: Path) -> None:
    """Create a database that is larger than SQLite's cache of pages."""
    with closing(Database(str(path))) as database:
        database.register(NODES[0], [], "", FOREVER)
        for number in range(30):
            tags = {"x": "y" * 100_000}
            database.publish(Commit(f"d{number}", key=f"{number}", tags=tags), SCHEMA, [part(f"{number}")])


def answers(database: Database) -> object:
    found = database.datasets()
    return (
        found,
        [database.versions(record.name) for record in found],
        [database.find_by_ticket(f"ticket part {number}".encode()) for number in range(12)],
        database.nodes(),
        [database.committed(f"key {number}") for number in range(12)],
        database.resolved_commits(["aborted", "dropped", "unknown"]),
        database.unreferenced_parts("a"),
        database.referenced_parts("a", [f"part {number}" for number in range(12)]),
        [database.next_version(name) for name in ("dataset 0", "dropped", "new")],
    )


def datasets(database: Database) -> list[tuple[str, int]]:
    return [(record.name, record.number) for record in database.datasets()]


def test_whatever_byte_is_damaged_an_answer_is_right_or_none(memory: Path) -> None:
    whole = memory / "whole.db"
    announced = fill(whole)
    shutil.copy(whole, memory / "catalog.db")
    with closing(Database(str(memory / "catalog.db"), clock=lambda: 1001.0)) as database:
        expected, listed = answers(database), datasets(database)
    content = whole.read_bytes()
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    outcomes = {"right": 0, "refused": 0, "set aside": 0}
    for attempt in range(ATTEMPTS):
        directory = memory / str(attempt)
        directory.mkdir()
        damaged, path = bytearray(content), directory / "catalog.db"
        first = chance.randrange(len(content))
        for place in range(first, min(first + chance.choice([1, 1, 2, 100]), len(content))):
            damaged[place] ^= chance.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            with leaving_nothing(), closing(Database(str(path), clock=lambda: 1001.0)) as database:
                if (directory / "catalog.db.damaged").exists():
                    outcomes["set aside"] += 1
                    assert database.datasets() == []
                    for node in NODES:
                        mine = [one for one in announced if one.part.node == node.id]
                        database.register(node, mine, "digest", FOREVER)
                    assert datasets(database) == listed
                else:
                    outcomes["right"] += 1
                    assert answers(database) == expected
        except CatalogError:
            outcomes["refused"] += 1
        except BaseException as error:
            error.add_note(f"seed {seed}, attempt {attempt}, byte {first}")
            raise
        shutil.rmtree(directory)
    assert outcomes["right"]
    assert outcomes["set aside"]


def test_damage_to_a_value_that_sqlite_does_not_notice_is_told(memory: Path) -> None:
    path = memory / "catalog.db"
    fill(path)
    damaged = path.read_bytes().replace(b'{"number": "11"}', b'{"number": "12"}')
    path.write_bytes(damaged)
    database = Database(str(path))
    database.close()
    assert (memory / "catalog.db.damaged").read_bytes() == damaged


def test_damage_that_comes_while_a_catalog_runs_is_told(memory: Path) -> None:
    path = memory / "catalog.db"
    fill_beyond_memory(path)
    with closing(Database(str(path))) as database:
        path.write_bytes(path.read_bytes().replace(b"y" * 1000, b"z" * 1000))
        with pytest.raises(CatalogDamaged, match=r"catalog\.db' is damaged .* sets the database aside"):
            database.datasets()


@pytest.mark.usefixtures("forks")
def test_a_catalog_that_finds_damage_keeps_its_database_locked(memory: Path) -> None:
    """Otherwise, a second catalog could set the database of the first one aside."""
    path = memory / "catalog.db"
    fill_beyond_memory(path)
    size = path.stat().st_size
    with closing(Database(str(path))) as database:
        os.truncate(path, size // 2)
        os.truncate(path, size)
        with pytest.raises(CatalogDamaged, match=r"is damaged \(.*\): restart the catalog"):
            database.datasets()
        script = "import sqlite3, sys; sqlite3.connect(sys.argv[1], timeout=0).execute('SELECT * FROM nodes')"
        other = run_script(script, path)
        assert other.stderr.splitlines()[-1] == "sqlite3.OperationalError: database is locked"


def test_a_damaged_database_is_set_aside_and_nodes_tell_what_they_have(
    memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = memory / "catalog.db"
    uri = f"grpc://127.0.0.1:{free_port()}"
    with closing(CatalogService(uri, database=Database(str(path)))) as catalog:
        node = Node(Store(memory / "store"), ["shm:"], catalog=uri, heartbeat_interval=600.0)
        for number in range(3):
            put(node.uri, "d", table(number))
        node.service.catalog.reconcile()
        catalog.close()
    content = bytearray(path.read_bytes())
    content[4096:8192] = bytes(4096)
    for number in range(2):
        path.write_bytes(content)
        with closing(CatalogService(uri, database=Database(str(path)))), closing(dis.connect(uri)) as client:
            node.service.catalog.reconcile()
            assert (client.describe("d").version, read(uri, "d")) == (3, [2])
        aside = memory / ("catalog.db.damaged", "catalog.db.damaged-2")[number]
        assert aside.read_bytes() == content
    node.close()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert [line.partition(":")[0] for line in told] == ["the catalog's database is damaged and was set aside"] * 2
    assert f"path={path} aside={memory}/catalog.db.damaged " in told[0]


def test_nothing_becomes_a_dataset_by_an_append_after_the_database_was_damaged(memory: Path) -> None:
    """Else, the rows of a node that has not reported yet would no longer be part of the dataset."""
    path, uri = memory / "catalog.db", f"grpc://127.0.0.1:{free_port()}"

    def catalog() -> closing[CatalogService]:
        return closing(CatalogService(uri, database=Database(str(path))))

    def node(name: str) -> Node:
        return Node(Store(memory / name), ["shm:"], catalog=uri, heartbeat_interval=600.0)

    with catalog(), node("a") as a:
        put(a.uri, "d", table(1))
        a.service.catalog.reconcile()
    path.write_bytes(bytes(4096) + path.read_bytes()[4096:])
    with catalog(), node("b") as b:
        with pytest.raises(CatalogError, match=r"'d' cannot be appended to: the catalog's database was damaged"):
            put(b.uri, "d", table(2), mode="append")
        put(b.uri, "e", table(3))
        put(b.uri, "e", table(4), mode="append")
        with node("a"):
            put(b.uri, "d", table(2), mode="append")
            assert (read(uri, "d"), read(uri, "e")) == ([1, 2], [3, 4])
    with catalog(), node("b") as b:
        put(b.uri, "f", table(5), mode="append")
        assert read(uri, "f") == [5]


def test_a_file_of_somebody_else_stays_as_it_is(memory: Path) -> None:
    path = memory / "catalog.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE versions (precious)")
        connection.commit()
    before = path.read_bytes()
    with leaving_nothing(), pytest.raises(CatalogError, match="has the tables of another program"):
        Database(str(path))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("versions",)]
    path.write_bytes(b"precious" + before[8:])
    with leaving_nothing(), pytest.raises(CatalogError, match=r"file is not a database; .* move it away"):
        Database(str(path))
    assert path.read_bytes() == b"precious" + before[8:]
    assert [one.name for one in memory.iterdir()] == ["catalog.db"]


def test_a_database_of_another_schema_is_refused_and_stays_as_it_is(memory: Path) -> None:
    path = memory / "catalog.db"
    fill(path)
    for number in (4, 6):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {number}")
        before = path.read_bytes()
        with leaving_nothing(), pytest.raises(CatalogError, match="was written by another version of this library"):
            Database(str(path))
        assert path.read_bytes() == before
        assert [one.name for one in memory.iterdir()] == ["catalog.db"]

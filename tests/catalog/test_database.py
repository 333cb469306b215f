"""The catalog's database: whole commits in one order, which outlive the process."""

from __future__ import annotations

import inspect
import os
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from dissociated.catalog.database import PREPARE_TIMEOUT, Database
from dissociated.catalog.tables import Tables
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import Commit
from dissociated.control.version import NodeRecord, Part, Version
from dissociated.errors import CatalogError, DatasetNotFound
from dissociated.store.numbers import Removal
from support.helpers import case, leaving_nothing, rest_of
from support.processes import Fork

A = NodeRecord("a", "host-a", "boot-a", "grpc://a:1", ("shm:///a?want_data=1",))
B = NodeRecord("b", "host-b", "boot-b", "grpc://b:1", ("tcp://b:2?want_data=1",))
SCHEMA, OTHER_SCHEMA = (bytes(pa.schema([("n", kind)]).serialize()) for kind in (pa.int64(), pa.string()))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(clock: Clock) -> Iterator[Database]:
    with closing(Database(clock=clock)) as made:
        for node in (A, B):
            made.register(node, [], "", FOREVER)
        yield made


def part(name: str, node: str = "a", number: int = 0, rows: int | None = 1, serial: int = 1) -> Part:
    return Part(name, node, f"ticket {name}".encode(), rows, 8, number, serial)


def announced(
    name: str, dataset: str, number: int = 1, *, prepared: bool = False, created: float = 1.0, node: str = "a"
) -> Version:
    parts = (part(name, node),)
    return Version(dataset, f"key {name}", SCHEMA, created, parts, prepared=prepared, number=number)


def tickets(database: Database, name: str) -> list[bytes]:
    return [held.ticket for held in database.find(name).parts]


def test_a_dataset_is_its_parts_in_order(database: Database) -> None:
    database.publish(Commit("d", key="k", tags={"x": "y"}), SCHEMA, [part("2", "b", 1), part("1", "a", 0)])
    found = database.find("d")
    assert (found.name, found.schema, found.rows, found.nbytes, found.tags) == ("d", SCHEMA, 2, 16, {"x": "y"})
    assert [(held.ticket, [node.id for node in held.nodes]) for held in found.parts] == [
        (b"ticket 1", ["a"]),
        (b"ticket 2", ["b"]),
    ]


def test_copies_of_a_part_are_one_part(database: Database) -> None:
    copies = [Part("1", "a", b"t"), Part("2", "b", b"t")]
    database.publish(Commit("d", key="k"), SCHEMA, copies)
    (held,) = database.find("d").parts
    assert [node.id for node in held.nodes] == ["a", "b"]
    database.delete_parts(["1"])
    (held,) = database.find("d").parts
    assert [node.id for node in held.nodes] == ["b"]
    database.delete_parts(["2"])
    with pytest.raises(DatasetNotFound):
        database.find("d")


def test_replacing_is_at_once_and_a_repeated_commit_does_nothing(database: Database) -> None:
    first = database.publish(Commit("d", key="1"), SCHEMA, [part("1")])
    second = database.publish(Commit("d", key="2"), SCHEMA, [part("2")])
    assert database.publish(Commit("d", key="1"), SCHEMA, [part("1")]) == first
    assert tickets(database, "d") == [b"ticket 2"]
    assert second > first
    assert database.unreferenced_parts("a") == ["1"]
    database.delete_parts(["1"])
    assert database.unreferenced_parts("a") == []


def test_append_keeps_the_parts_and_wants_the_schema(database: Database) -> None:
    database.publish(Commit("d", key="1", mode="append"), SCHEMA, [part("1")])
    database.publish(Commit("d", key="2", mode="append"), SCHEMA, [part("2")])
    assert tickets(database, "d") == [b"ticket 1", b"ticket 2"]
    assert database.find("d").rows == 2
    assert database.unreferenced_parts("a") == []
    with pytest.raises(CatalogError, match="must have one schema, and in the new rows"):
        database.publish(Commit("d", key="3", mode="append"), OTHER_SCHEMA, [part("3")])
    assert tickets(database, "d") == [b"ticket 1", b"ticket 2"]


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_missing_version_does_not_bring_back_an_earlier_one(database: Database, is_dropped: bool) -> None:
    """The earlier version was dropped or replaced while its node was away, which was then forgotten."""
    database.publish(Commit("d", key="key 1"), SCHEMA, [part("1")])
    if is_dropped:
        database.drop("d")
    database.publish(Commit("d", key="key 2"), SCHEMA, [part("2", "b")])
    database.deregister("a")
    database.forget("a")
    database.touch_node("b", "", FOREVER, removed=["2"])
    earlier = replace(announced("1", "d"), catalog=database.id)
    database.register(A, [earlier], "", FOREVER)
    assert database.versions("d") == []
    assert database.unreferenced_parts("a", [earlier]) == ["1"]


def test_a_commit_of_unknown_nodes_changes_nothing(database: Database) -> None:
    database.publish(Commit("d", key="1"), SCHEMA, [part("1")])
    with pytest.raises(CatalogError, match="no node 'z' has registered"):
        database.publish(Commit("d", key="2"), SCHEMA, [part("2"), part("3", "z", 1)])
    assert tickets(database, "d") == [b"ticket 1"]
    assert database.publish(Commit("d", key="2"), SCHEMA, [part("2")])  # the key was not used up


def test_a_replaced_version_is_there_for_as_long_as_was_promised(database: Database, clock: Clock) -> None:
    database.publish(Commit("d", key="1"), SCHEMA, [part("1")])
    old = database.find("d", retain=60).number
    database.publish(Commit("d", key="2"), SCHEMA, [part("2")])
    clock.now += 59
    assert database.find("d", old).current is False
    assert database.find_by_ticket(b"ticket 1", retain=60)[0].number == old  # renewed
    assert database.unreferenced_parts("a") == []
    clock.now += 59
    assert [record.number == old for record in database.versions("d")] == [True, False]
    clock.now += 20
    with pytest.raises(DatasetNotFound, match=f"no version {old} of the dataset 'd'"):
        database.find("d", old)
    with pytest.raises(DatasetNotFound, match="look the dataset up again"):
        database.find_by_ticket(b"ticket 1")
    assert database.unreferenced_parts("a") == ["1"]


def test_nothing_is_appended_to_rows_that_were_lost_after_the_number_was_assigned(database: Database) -> None:
    database.register(B, [], "then", FOREVER)
    database.publish(Commit("d", key="1"), SCHEMA, [part("1", "b")])
    number = database.next_version("d", append=True)
    assert database.touch_node("b", "now", FOREVER, since="then", removed=["1"])
    with pytest.raises(CatalogError, match="version 1 was evicted, or lost with its node"):
        database.publish(Commit("d", key="2", mode="append", number=number), SCHEMA, [part("2")])
    assert database.datasets() == []


def test_no_lineage_goes_on_if_a_node_reports_a_later_version_during_the_commit(database: Database) -> None:
    database.publish(Commit("d", key="first"), SCHEMA, [part("1")])
    number = database.next_version("d", append=True)
    assert not database.is_overtaken("d")
    database.register(B, [announced("9", "d", 9, prepared=True, node="b")], "", FOREVER, serial=9)
    assert database.is_overtaken("d")
    append = Commit("d", key="second", mode="append", number=number)
    with pytest.raises(CatalogError, match="a node has just reported another version"):
        database.publish(append, SCHEMA, [part("2")], before=["first"], base=1)
    assert tickets(database, "d") == [b"ticket 1"]
    again = replace(append, number=database.next_version("d"))
    database.publish(again, SCHEMA, [part("2")], before=["second"], base=1)
    assert (database.find("d").number, database.find("d").lineage_id) == (10, "second")


@pytest.mark.parametrize("mode", ["append", "append on one node", "overwrite"])
@pytest.mark.parametrize("reported", [2, 7])
def test_a_version_that_a_node_reports_during_a_commit_is_not_replaced(
    database: Database, mode: str, reported: int
) -> None:
    """The catalog was restored from a backup, and the node was away."""
    database.publish(Commit("d", key="first"), SCHEMA, [part("1")])
    commit = Commit("d", key="key", mode=mode.split()[0], number=database.next_version("d"))
    later = replace(announced("7", "d", reported, node="b"), catalog=database.id)
    assert database.touch_node("b", "now", FOREVER, since="", announced=[later])
    with pytest.raises(CatalogError, match=r"nothing was committed to 'd', since a node .* put the rows again"):
        database.publish(commit, SCHEMA, [part("2")], before=["first"] if "one" in mode else [], base=1)
    assert (database.find("d").number, tickets(database, "d")) == (reported, [b"ticket 7"])
    again = replace(commit, number=database.next_version("d"))
    assert database.publish(again, SCHEMA, [part("2")], base=reported) == reported + 1


@pytest.mark.parametrize("base", [0, 1])
def test_an_append_extends_the_version_that_it_was_made_for_or_fails(database: Database, base: int) -> None:
    """A node reports a version with a lower number than the commit has."""
    if base:
        database.publish(Commit("d", key="first"), SCHEMA, [part("1")])
    database.register(B, [announced("8", "d", 8, prepared=True, node="b")], "then", FOREVER, serial=9)
    commit = Commit("d", key="key", mode="append", number=database.next_version("d"))
    later = replace(announced("7", "d", 7, node="b"), catalog=database.id)
    assert database.touch_node("b", "now", FOREVER, since="then", announced=[later])
    with pytest.raises(CatalogError, match=r"nothing was committed to 'd', since a node .* put the rows again"):
        database.publish(commit, SCHEMA, [part("2")], base=base)
    assert tickets(database, "d") == [b"ticket 7"]
    database.publish(commit, SCHEMA, [part("2")], base=7)
    assert tickets(database, "d") == [b"ticket 7", b"ticket 2"]


def test_a_time_to_live(database: Database, clock: Clock) -> None:
    database.publish(Commit("d", key="0"), SCHEMA, [part("0")])
    database.find("d", retain=60)
    database.publish(Commit("d", key="1", ttl=10), SCHEMA, [part("1")])
    clock.now += 9.9
    assert database.find("d", retain=60).expires == 1010.0
    clock.now += 0.2
    before = database.changes
    assert database.datasets() == database.versions("d") == []  # with all that it replaced, which must not come back
    assert (database.names(9), database.current(["d"]), database.unreadable()) == ([], {}, (0, ()))
    for look_up in (
        lambda: database.find("d"),
        lambda: database.find("d", 1),
        lambda: database.find_by_ticket(b"ticket 0"),
        lambda: database.find_by_ticket(b"ticket 1"),
    ):
        with pytest.raises(DatasetNotFound):
            look_up()
    assert database.changes == before  # A reader writes nothing.
    assert database.unreferenced_parts("a") == ["0", "1"]
    assert database.changes > before


def test_a_dataset_that_expired_is_not_lost_even_if_its_node_could_not_read_it(
    database: Database, clock: Clock
) -> None:
    database.publish(Commit("d", key="0", ttl=10), SCHEMA, [part("0")])
    clock.now += 11
    lost = Removal.of(1, lost=True, published=True)
    database.register(A, [], "", FOREVER, serial=0, removed={"d": lost}, set_aside=["0"])
    assert database.next_version("d", append=True) == 2


def test_drop(database: Database) -> None:
    database.publish(Commit("d", key="1"), SCHEMA, [part("1")])
    database.find("d", retain=60)
    database.publish(Commit("d", key="2"), SCHEMA, [part("2")])
    database.drop("d")
    assert database.unreferenced_parts("a") == ["1", "2"]
    with pytest.raises(DatasetNotFound, match="no dataset 'd'"):
        database.drop("d")


def test_listing_by_prefix_and_tags(database: Database) -> None:
    for name, tags in (("a%/1", {"x": "1"}), ("a%/2", {"x": "2", "y": "3"}), ("ab", {})):
        database.publish(Commit(name, key=name, tags=tags), SCHEMA, [part(name)])

    def names(*arguments: object) -> list[str]:
        return [record.name for record in database.datasets(*arguments)]  # type: ignore[arg-type]

    assert names() == ["a%/1", "a%/2", "ab"]
    assert names("a%/") == ["a%/1", "a%/2"]
    assert names("", {"x": "2"}) == ["a%/2"]
    assert names("ab", {"x": "2"}) == []


# Nodes


def test_nodes_come_and_go(database: Database, clock: Clock) -> None:
    database.register(B, [], "digest", clock.now + 10)
    assert [(node.id, node.alive) for node in database.nodes()] == [("a", True), ("b", True)]
    clock.now += 11
    assert [(node.id, node.alive) for node in database.nodes()] == [("a", True), ("b", False)]
    assert database.touch_node("b", "other", clock.now + 10) is False
    assert database.touch_node("b", "digest", clock.now + 10) is True
    assert database.nodes()[1].alive
    assert database.touch_node("stranger", "digest", clock.now + 10) is False
    database.deregister("b")
    assert not database.nodes()[1].alive


def test_what_a_node_published_itself_becomes_known_when_it_registers(database: Database) -> None:
    database.publish(Commit("newer", key="k"), SCHEMA, [part("n", "b")])
    mine = [announced("1", "d"), announced("2", "d", 2), announced("o", "newer")]
    database.register(A, mine, "", FOREVER, serial=9)
    assert tickets(database, "d") == [b"ticket 2"]
    assert tickets(database, "newer") == [b"ticket n"]
    assert database.unreferenced_parts("a", mine) == ["1"]  # another node's older part stays


def test_a_version_that_a_node_tells_of_is_shown_unless_a_later_one_was_published(database: Database) -> None:
    def told(name: str, number: int, **options: bool) -> Version:
        return replace(
            announced(name, "d", node="b", **options), number=number, parts=(part(name, "b", serial=number),)
        )

    database.register(A, [replace(told("8", 8, prepared=True), parts=(part("8"),))], "", FOREVER, serial=9)
    database.register(B, [told("7", 7), told("6", 6)], "", FOREVER, serial=9)
    assert (tickets(database, "d"), database.find("d").number) == ([b"ticket 7"], 7)
    database.register(B, [told("7", 7)], "", FOREVER, serial=9, removed={"d": Removal(9, True, 10)})
    assert [version.number for version in database.versions("d")] == [7]  # it may be all that is left
    assert database.datasets() == []
    database.register(B, [], "", FOREVER, serial=9)
    with pytest.raises(CatalogError, match="'d' cannot be appended to: version 9 was evicted"):
        database.next_version("d", append=True)
    database.register(A, [replace(told("8", 8), parts=(part("8"),))], "", FOREVER, serial=9)
    assert database.datasets() == []
    assert database.publish(Commit("d", key="new"), SCHEMA, [part("new")]) == 11
    database.register(B, [told("12", 12)], "", FOREVER, serial=99)
    assert (tickets(database, "d"), database.next_version("d")) == ([b"ticket new"], 13)


@pytest.mark.parametrize("is_found_first", [False, True])
def test_a_version_whose_successor_was_lost_is_kept_until_it_expires_or_is_replaced(
    database: Database, clock: Clock, is_found_first: bool
) -> None:
    def find_again(*names: str, created: float = clock.now) -> None:
        held_versions = [replace(announced(name, name, created=created), ttl=60.0) for name in names]
        successors = {name: Removal(2, True, 2) for name in names}
        for is_held in (is_found_first, not is_found_first):
            if is_held:
                database.register(A, held_versions, "", FOREVER, serial=9)
            else:
                database.register(B, [], "", FOREVER, serial=9, removed=successors)

    def kept() -> list[str]:
        return [name for name in ("expired", "replaced") if database.versions(name)]

    find_again("expired", "replaced")
    assert (database.datasets(), kept()) == ([], ["expired", "replaced"])
    (ticket,) = [held.ticket for held in database.find("replaced", 1, retain=10.0).parts]
    database.publish(Commit("replaced", key="new"), SCHEMA, [part("new")])
    database.find_by_ticket(ticket)  # the ticket stays valid for as long as was promised
    clock.now += 20
    assert [version.number for version in database.versions("replaced")] == [3]
    assert database.unreferenced_parts("a") == ["replaced"]
    clock.now += 50
    assert kept() == ["replaced"]
    assert database.unreferenced_parts("a") == ["expired", "replaced"]


def test_what_a_node_has_lost_is_gone_but_not_what_it_made_since(database: Database) -> None:
    database.publish(Commit("old", key="1"), SCHEMA, [part("1", serial=5)])
    database.publish(Commit("two", key="2"), SCHEMA, [part("2", serial=6), part("3", "b", 1)])
    database.publish(Commit("new", key="4"), SCHEMA, [part("4", serial=8)])
    database.register(A, [], "", FOREVER, serial=7)
    assert [record.name for record in database.datasets()] == ["new"]
    assert database.unreferenced_parts("b") == ["3"]  # a dataset that lacks a part is not listed


def test_parts_prepared_for_a_commit_that_never_came_are_released_after_a_while(
    database: Database, clock: Clock
) -> None:
    mine = [announced("1", "d", prepared=True, created=clock.now)]
    database.register(A, mine, "", FOREVER, serial=9)
    assert database.datasets() == []
    assert database.unreferenced_parts("a", mine) == []
    clock.now += PREPARE_TIMEOUT + 1
    assert database.unreferenced_parts("a", mine) == ["1"]
    # Its node may have removed the part by now.
    with pytest.raises(CatalogError, match=r"the commit of 'd' came too late: .*; write them again"):
        database.publish(Commit("d", key="key 1"), SCHEMA, [mine[0].part])
    # The node has not heard of that yet, and prepares the part once more.
    mine = [replace(mine[0], created=clock.now, number=2)]
    assert database.unreferenced_parts("a", mine) == ["1"]
    later = announced("2", "d", 3, prepared=True, created=clock.now)
    database.publish(Commit("d", key=mine[0].key), SCHEMA, [later.part])
    assert tickets(database, "d") == [b"ticket 2"]
    assert database.unreferenced_parts("a", mine) == ["1"]


def test_a_node_is_told_what_is_published_and_whether_that_is_all(database: Database) -> None:
    database.publish(Commit("d", key="one"), SCHEMA, [part("1")])
    assert database.referenced_parts("a", ["1", "unknown"]) == {"1": True}
    assert database.referenced_parts("a", []) == {}
    database.publish(Commit("d", key="more", mode="append"), SCHEMA, [part("2", "b")])
    database.acknowledge_parts({"1": True})  # This was the answer before the append.
    assert database.referenced_parts("b", ["2"]) == {"2": False}
    for _ in range(2):  # repeated until the node confirms
        assert database.referenced_parts("a", []) == {"1": False}
    assert database.touch_node("a", "then", FOREVER, since="", announced=[replace(announced("1", "d"), whole=False)])
    assert database.referenced_parts("a", []) == {}
    database.publish(Commit("d", key="yet more", mode="append"), SCHEMA, [part("3", "b")])
    assert (database.referenced_parts("a", []), database.referenced_parts("b", [])) == ({}, {})
    database.publish(Commit("e", key="other"), SCHEMA, [part("4")])
    database.publish(Commit("e", key="more of it", mode="append"), SCHEMA, [part("5", "b")])
    database.touch_node("a", "later", FOREVER, since="then", removed=["4"])
    assert database.referenced_parts("a", []) == {}


def test_a_node_tells_what_has_changed_to_a_catalog_that_knows_the_rest(database: Database) -> None:
    database.register(A, [announced("1", "d"), announced("2", "e")], "first", FOREVER, serial=9)
    told = {"announced": [announced("3", "f"), announced("4", "g", prepared=True)], "removed": ["1"]}
    assert not database.touch_node("a", "second", FOREVER, since="another", **told)  # type: ignore[arg-type]
    assert [one.name for one in database.datasets()] == ["d", "e"]
    assert database.touch_node("a", "second", FOREVER, since="first", **told)  # type: ignore[arg-type]
    assert [one.name for one in database.datasets()] == ["e", "f"]
    assert not database.touch_node("a", "second", FOREVER, since="first", **told)  # type: ignore[arg-type]
    assert database.touch_node("a", "second", FOREVER)
    assert database.touch_node("b", "mine", FOREVER, since="", removed=["2"])  # the part belongs to another node
    assert [one.name for one in database.datasets()] == ["e", "f"]


# The file


def test_commits_are_over_when_they_were_done_or_aborted_for_as_long_as_is_remembered(
    database: Database, clock: Clock
) -> None:
    database.publish(Commit("d", key="done"), SCHEMA, [part("1")])
    for key in ("done", "aborted", "aborted"):
        database.abort(key)
    assert database.resolved_commits(["done", "aborted", "to come"]) == ["done", "aborted"]
    assert database.committed("aborted") is None
    assert tickets(database, "d") == [b"ticket 1"]
    clock.now += 31 * 86_400
    database.publish(Commit("d", key="another"), SCHEMA, [part("2")])
    assert database.resolved_commits(["done", "aborted", "another"]) == ["another"]


def test_a_version_of_a_node_whose_clock_is_ahead_ends_the_time_of_no_key(database: Database, clock: Clock) -> None:
    database.publish(Commit("d", key="done"), SCHEMA, [part("1")])
    database.abort("aborted")
    database.register(B, [announced("2", "e", created=clock.now + 40 * 86_400, node="b")], "", FOREVER, serial=9)
    assert database.resolved_commits(["done", "aborted", "key 2"]) == ["done", "aborted", "key 2"]
    clock.now += 31 * 86_400
    database.publish(Commit("d", key="another"), SCHEMA, [part("3")])
    assert database.resolved_commits(["done", "aborted", "key 2"]) == []


def test_a_key_belongs_to_one_dataset(database: Database) -> None:
    number = database.publish(Commit("d", key="k"), SCHEMA, [part("1")])
    for mode in ("append", "overwrite"):
        with pytest.raises(CatalogError, match="nothing was committed to 'e': its key 'k' is that of a commit of 'd'"):
            database.publish(Commit("e", key="k", mode=mode), SCHEMA, [part("2")])
    assert database.publish(Commit("d", key="k"), SCHEMA, [part("2")]) == number
    # A node that had another catalog before used the key for another dataset.
    other = replace(announced("3", "e", node="b"), key="k")
    database.register(B, [other], "", FOREVER, serial=9)
    assert database.unreferenced_parts("b", [other]) == []
    assert [(found.name, found.parts[0].id) for found in database.datasets()] == [("d", "1"), ("e", "3")]


def test_a_part_is_committed_once_although_its_key_is_forgotten(database: Database, clock: Clock) -> None:
    commit = Commit("d", key="k", mode="append")
    database.publish(commit, SCHEMA, [part("1")])
    database.publish(Commit("e", key="e"), SCHEMA, [part("2")])
    database.drop("e")  # Its node is told to delete the part.
    clock.now += 31 * 86_400
    database.publish(Commit("other", key="another"), SCHEMA, [part("3")])
    for repeated, parts in ((commit, [part("1")]), (Commit("e", key="e"), [part("2")])):
        with pytest.raises(CatalogError, match=r"the segments were committed before, .*; write them again"):
            database.publish(repeated, SCHEMA, parts)
    assert (tickets(database, "d"), database.unreferenced_parts("a")) == ([b"ticket 1"], ["2"])
    database.publish(commit, SCHEMA, [part("4")])
    assert tickets(database, "d") == [b"ticket 1", b"ticket 4"]


def test_a_part_prepared_for_an_aborted_commit_is_released_at_once(database: Database, clock: Clock) -> None:
    prepared = announced("1", "d", prepared=True, created=clock.now)
    assert database.unreferenced_parts("a", [prepared]) == []
    database.abort("key 1")
    assert database.unreferenced_parts("a", [prepared]) == ["1"]


def test_a_commit_is_in_the_file(tmp_path: Path) -> None:
    path = str(tmp_path / "catalog.db")
    with leaving_nothing():
        database = Database(path)
        database.register(A, [], "", FOREVER)
        database.publish(Commit("d", key="k"), SCHEMA, [part("1")])
        with pytest.raises(CatalogError, match="is another catalog using it"):
            Database(path)
        database.close()
        database = Database(path)
        assert tickets(database, "d") == [b"ticket 1"]
        database.publish(Commit("d", key="k"), SCHEMA, [part("1")])
        assert len(database.versions("d")) == 1
        database.close()


def test_no_placeholder_of_a_statement_has_a_number() -> None:
    # Python 3.14 refuses a sequence for such placeholders, 3.12 and 3.13 warn, and 3.11 takes it.
    statements = {path: path.read_text() for path in Path(inspect.getfile(Database)).parent.glob("*.py")}
    assert sum("SELECT" in text for text in statements.values()) > 2
    assert [path.name for path, text in statements.items() if re.search(r"\?\d", text)] == []


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_text("precious " * 1000)
    with leaving_nothing(), pytest.raises(CatalogError, match=r"catalog.db: file is not a database"):
        Database(str(path))
    with leaving_nothing(), pytest.raises(CatalogError, match=r"catalog\.db': No such file or directory"):
        Database(str(tmp_path / "no" / "catalog.db"))


def test_a_database_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    """Older libraries created the file with such permissions."""
    path = tmp_path / "catalog.db"
    umask = os.umask(0)
    try:
        Database(str(path)).close()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for left in (path, tmp_path / "catalog.db-wal"):
            left.touch()
            left.chmod(0o644)
        database = Database(str(path))
        database.register(A, [], "", FOREVER)
        for entry in tmp_path.iterdir():
            with case(entry):
                assert stat.S_IMODE(entry.stat().st_mode) == 0o600
        database.close()
    finally:
        os.umask(umask)


def test_a_database_that_others_could_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    Database(str(path)).close()
    for entry, mode, refused in (
        (path, 0o660, f"'{path}' can be written by other users"),
        (tmp_path, 0o777, f"'{tmp_path}' is open to other users"),
        (tmp_path, 0o1777, f"'{tmp_path}' is open to other users"),
    ):
        before = stat.S_IMODE(entry.stat().st_mode)
        entry.chmod(mode)
        with case(entry), pytest.raises(CatalogError, match=refused):
            Database(str(path))
        entry.chmod(before)
    link, log = tmp_path / "link.db", tmp_path / "catalog.db-wal"
    link.symlink_to(path)
    with pytest.raises(CatalogError, match=r"link\.db' is a symbolic link"):
        Database(str(link))
    log.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CatalogError, match=r"catalog\.db-wal' is a symbolic link"):
        Database(str(path))


COMMITTER = """
import itertools, sys
from dissociated.catalog.database import Database
from dissociated.catalog.versions import FOREVER
from dissociated.control.commit import Commit
from dissociated.control.version import NodeRecord, Part
database = Database(sys.argv[1])
database.register(NodeRecord("a", "h", "b", "f", ()), [], "", FOREVER, serial=-1)
for n in itertools.count(int(sys.argv[2])):
    parts = [Part(f"{n}-{k}", "a", f"{n}-{k}".encode(), 1, 1, k) for k in range(3)]
    database.publish(Commit("log", key=str(n), mode="append"), b"s", parts)
    print(n, flush=True)
"""


def test_a_catalog_killed_at_any_moment_has_whole_commits_only(tmp_path: Path, forks: None) -> None:
    path = str(tmp_path / "catalog.db")
    told = -1
    for _ in range(4):
        process = Fork("-c", textwrap.dedent(COMMITTER), path, str(told + 1), stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(5):
            told = int(process.stdout.readline())
        process.kill()
        printed = rest_of(process)
        told = max([told, *(int(line) for line in printed.splitlines(keepends=True) if line.endswith("\n"))])
        database = Database(path)
        found = tickets(database, "log")
        database.close()
        last = len(found) // 3 - 1
        assert found == [f"{n}-{k}".encode() for n in range(last + 1) for k in range(3)]
        assert last - told in (0, 1)  # the last commit may not have been reported before the kill
        told = last


def test_ctrl_c_between_any_two_lines_of_a_transaction_ends_that_one_alone(database: Database) -> None:
    tracing, code = sys.gettrace(), inspect.unwrap(Tables.transaction).__code__
    for number in range(100):
        left = number

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code is code:
                left -= event == "line"
                if left < 0 and event == "line":
                    sys.settrace(tracing)
                    frame.f_trace = None
                    raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            database.publish(Commit(f"d{number}", key=f"k{number}"), SCHEMA, [part(f"p{number}")])
        except KeyboardInterrupt:
            pass
        else:
            break
        finally:
            sys.settrace(tracing)
        assert len(database.datasets()) in (number, number + 1)
        database.publish(Commit(f"d{number}", key=f"k{number}"), SCHEMA, [part(f"p{number}")])
    assert number > 3
    assert len(database.datasets()) == number + 1

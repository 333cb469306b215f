"""Versions of datasets and their parts, as one transaction of a catalog's database finds and changes them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any

from dissociated.catalog.records import NodeRecord, Part, ReplicatedPart, VersionRecord
from dissociated.catalog.schemas import deserialize
from dissociated.catalog.tables import Tables
from dissociated.codec.difference import schema_difference
from dissociated.errors import CatalogError
from dissociated.monitoring.changes import Change

#: The versions of which this part has no other copy.
_SOLE_COPY = (
    "id IN (SELECT mine.version FROM version_parts mine WHERE mine.part = ? AND NOT EXISTS (SELECT 1"
    " FROM version_parts other WHERE other.version = mine.version AND other.number = mine.number"
    " AND other.part != mine.part))"
)
_COMMIT_KEY_TTL = 30 * 86_400.0  # seconds for which the key of a commit is known


class Versions:
    """What a transaction on `tables` sees at the moment `now`. `changes` is what has become of datasets in it."""

    def __init__(self, tables: Tables, now: float) -> None:
        self.now = now
        self.changes: list[Change] = []
        self._tables = tables

    def expire(self, now: float) -> None:
        """Forget what is over: datasets by their time to live, replaced versions when nobody was promised more."""
        for condition in (
            "name IN (SELECT name FROM versions WHERE replaced IS NULL AND expires <= ?)",
            "replaced IS NOT NULL AND promised <= ?",
        ):
            if self._tables.all(f"SELECT 1 FROM versions WHERE {condition} LIMIT 1", now):
                self.remove("expired", "its time to live is over", condition, now)

    def remove(self, kind: str, why: str, condition: str, *values: Any) -> None:
        """Delete the versions of which this is true. Those that had been replaced were not the dataset any more."""
        # The plus keeps SQLite from going through all versions in the order of their ids, in place of using an index.
        for row in self._tables.all(f"SELECT * FROM versions WHERE {condition} ORDER BY +id", *values):
            outcome = (kind, why) if row["replaced"] is None else ("retired", "it was replaced, and kept no longer")
            self._change(row, *outcome)
        self._tables.run(f"DELETE FROM versions WHERE {condition}", values)

    def _change(self, version: sqlite3.Row, kind: str, why: str) -> None:
        change = Change(kind, version["name"], version["id"], version["rows"], version["nbytes"], why)
        self.changes.append(change)

    def remove_missing(self, part: str, host: str) -> None:
        """A node does not hold this any more."""
        self.remove("evicted", f"{host} does not hold it any more", _SOLE_COPY, part)
        self.delete_part(part)

    def delete_part(self, part: str) -> None:
        """A part is gone; what has no other copy of it is gone with it."""
        self._tables.run(f"DELETE FROM versions WHERE {_SOLE_COPY}", (part,))
        self._tables.run("DELETE FROM parts WHERE id = ?", (part,))

    def record_commit(self, version: int, append: bool) -> None:
        """A version was committed just now, and not only learnt of."""
        (row,) = self._tables.all("SELECT * FROM versions WHERE id = ?", version)
        sql = "SELECT max(id) AS id FROM versions WHERE name = ? AND id < ?"
        (previous,) = self._tables.all(sql, row["name"], version)
        verb = "appends to" if append else "replaces"
        why = "it is new" if previous["id"] is None else f"it {verb} version {previous['id']}"
        self._change(row, "committed", why)

    def publish(
        self,
        name: str,
        key: str,
        append: bool,
        schema: bytes,
        parts: Sequence[Part],
        tags: Mapping[str, str],
        ttl: float | None,
        created: float,
        keys: Sequence[str] = (),
    ) -> int:
        """See `Database.publish`, whose `before` are `keys`. Raises CatalogError."""
        run = self._tables.run
        current = self._tables.all("SELECT * FROM versions WHERE name = ? AND replaced IS NULL", name)
        previous = current[0] if current else None
        rows, nbytes = _sum_known(part.rows for part in parts), _sum_known(part.nbytes for part in parts)
        lineage_id = [*keys, key][0]
        if append and previous is not None:
            if previous["schema"] != schema:
                difference = schema_difference(deserialize(previous["schema"]), deserialize(schema))
                raise CatalogError(f"all of {name!r} must have one schema, and in what is added {difference}")
            rows, nbytes = _sum_known((previous["rows"], rows)), _sum_known((previous["nbytes"], nbytes))
            tags, ttl = self.record(previous).merged_options(tags, ttl)
            lineage_id = previous["began"]
        expires = None if ttl is None else created + ttl
        if previous is not None:
            run("UPDATE versions SET replaced = ? WHERE id = ?", (created, previous["id"]))
        for part in parts:  # a ticket that whoever publishes has chosen stands for the latest alone
            sql = "SELECT id FROM parts WHERE ticket = ? AND id != ?"
            for other in self._tables.all(sql, part.ticket, part.id):
                condition = "id IN (SELECT version FROM version_parts WHERE part = ?)"
                self.remove("retired", "what replaced it has the same ticket", condition, other["id"])
        version = run(
            "INSERT INTO versions (name, schema, rows, nbytes, tags, created, expires, began)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (name, schema, rows, nbytes, json.dumps(dict(tags)), created, expires, lineage_id),
        ).lastrowid
        assert version is not None
        first = 0
        if append and previous is not None:
            run(
                "INSERT INTO version_parts SELECT ?, number, part FROM version_parts WHERE version = ?",
                (version, previous["id"]),
            )
            (row,) = self._tables.all("SELECT max(number) AS last FROM version_parts WHERE version = ?", version)
            first = row["last"] + 1
            if first == 1:  # so they were all of it
                run(
                    "INSERT OR IGNORE INTO unsettled SELECT part FROM version_parts WHERE version = ?",
                    (previous["id"],),
                )
        for part in parts:
            try:
                run(
                    "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
                    (part.id, part.node, part.ticket, part.rows, part.nbytes, part.serial),
                )
            except sqlite3.IntegrityError:
                raise CatalogError(f"no node {part.node!r} has registered at this catalog") from None
            run("INSERT INTO version_parts VALUES (?, ?, ?)", (version, first + part.number, part.id))
        for one in (*keys, key):
            run("INSERT OR IGNORE INTO commits VALUES (?, ?, ?)", (one, version, created))
        for table in ("commits", "aborts"):
            run(f"DELETE FROM {table} WHERE at < ?", (created - _COMMIT_KEY_TTL,))
        return version

    def record(self, row: sqlite3.Row) -> VersionRecord:
        """What a row of the table of versions says, with its parts."""
        parts_by_number: dict[int, tuple[sqlite3.Row, list[NodeRecord]]] = {}
        for part in self._tables.all(
            "SELECT number, ticket, rows, nodes.* FROM version_parts JOIN parts ON part = parts.id"
            " JOIN nodes ON node = nodes.id WHERE version = ? ORDER BY number, nodes.id",
            row["id"],
        ):
            parts_by_number.setdefault(part["number"], (part, []))[1].append(node_of(part, self.now))
        return VersionRecord(
            version=row["id"],
            name=row["name"],
            schema=row["schema"],
            rows=row["rows"],
            nbytes=row["nbytes"],
            tags=json.loads(row["tags"]),
            created=row["created"],
            expires=row["expires"],
            lineage_id=row["began"],
            current=row["replaced"] is None,
            parts=tuple(
                ReplicatedPart(part["ticket"], tuple(nodes), part["rows"]) for part, nodes in parts_by_number.values()
            ),
        )

    def extend_promise(self, version: sqlite3.Row, retain: float) -> None:
        """Keep a version for so many seconds from now on, even if it is replaced."""
        if retain and version["promised"] < self.now + retain:
            # Somewhat longer than was asked for, so that not every request has to write.
            until = self.now + 1.25 * retain
            self._tables.run("UPDATE versions SET promised = ? WHERE id = ?", (until, version["id"]))

    def is_single_part(self, version: int) -> bool:
        """Whether all parts of a version are copies of one."""
        first, last = (
            f"(SELECT number FROM version_parts WHERE version = :v ORDER BY number {order} LIMIT 1)"
            for order in ("ASC", "DESC")
        )
        return bool(self._tables.run(f"SELECT {first} = {last}", {"v": version}).fetchone()[0])

    def is_resolved(self, key: str) -> bool:
        """Whether a commit with this key has come, or never may."""
        sql = "SELECT 1 FROM commits WHERE key = ? UNION SELECT 1 FROM aborts WHERE key = ?"
        return bool(self._tables.all(sql, key, key))

    def abort(self, key: str) -> None:
        """No commit with this key may come."""
        self._tables.run("INSERT INTO aborts VALUES (?, ?)", (key, self.now))


def node_of(row: sqlite3.Row, now: float) -> NodeRecord:
    """What a row of the table of nodes says."""
    return NodeRecord(
        id=row["id"],
        host=row["host"],
        boot_id=row["boot_id"],
        flight=row["flight"],
        locations=tuple(json.loads(row["locations"])),
        seen=row["seen"],
        alive=row["lives_until"] > now,
    )


def _sum_known(numbers: Any) -> int | None:
    """Their sum; None where one of them is not known."""
    known = [*numbers]
    return None if None in known else sum(known)

"""Queries and changes of versions and their parts within one transaction of a catalog's database."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum, IntFlag
from typing import Any

from dissociated.catalog.commit_keys import CommitKeys
from dissociated.catalog.tables import Tables
from dissociated.codec.schemas import deserialize, schema_difference
from dissociated.control.version import NodeRecord, Part, Version, sum_known
from dissociated.errors import CatalogError
from dissociated.monitoring.changes import Change
from dissociated.store.numbers import ANY_NAME, Removal

_log = logging.getLogger(__name__)

#: A condition for versions of which the given part has no other copy.
_SOLE_COPY = (
    "id IN (SELECT mine.version FROM version_parts mine WHERE mine.part = ? AND NOT EXISTS (SELECT 1"
    " FROM version_parts other WHERE other.version = mine.version AND other.number = mine.number"
    " AND other.part != mine.part))"
)
#: A condition for versions that have not expired at the time `:now`. Expired versions are removed by the next
#: transaction that writes. If the current version has expired, so have those that it replaced.
_UNEXPIRED = (
    "(replaced IS NULL OR max(replaced, promised) > :now) AND NOT EXISTS (SELECT 1 FROM versions latest"
    " WHERE latest.name = versions.name AND latest.replaced IS NULL AND latest.expires <= :now)"
)
FOREVER = 1e18
_TTL_DIGITS = 6  # A time of this century has a resolution of 0.24 microseconds.


class Origin(IntFlag):
    """The way by which a catalog learned of a version. See `Versions.learn` for the precedence."""

    COMMITTED = 0  # This catalog published it.
    FOUND = 1  # It was in the store of a node, with its number.
    #: A store has a later number, which this database has not assigned: it is new, or was restored from a backup. The
    #: lost database may have appended other rows to the version, so the next append begins a new lineage.
    OVERTAKEN = 2


class Loss(IntEnum):
    """The way in which the last version of a dataset was lost. See `Database.register`."""

    DROPPED = -1  # It was dropped here, or expired. A node that reports it as lost has not heard of that.
    NONE = 0  # It is here or was replaced, or a node reports that it was dropped.
    MISSING = 1  # Its node no longer holds it. If the node holds it again later, it is shown again.
    FORGOTTEN = 2  # Its node was forgotten, and deletes it when it returns.


class Versions:
    """The versions of datasets as a transaction on `tables` sees them at the time `now`.

    Attributes:
        now: The time of the transaction, in seconds since the epoch.
        changes: The changes to datasets in this transaction.
        keys: The keys of commits.
    """

    def __init__(self, tables: Tables, now: float) -> None:
        self.now = now
        self.changes: list[Change] = []
        self.keys = CommitKeys(tables, now)
        self._tables = tables

    def available(self, condition: str, **values: object) -> list[sqlite3.Row]:
        """Return the rows of the versions that meet an SQL condition and have not expired.

        Args:
            condition: The condition, with named placeholders for `values`. The order of the rows may follow.
            values: The values of the placeholders.
        """
        sql = f"SELECT * FROM versions WHERE {_UNEXPIRED} AND {condition}"
        return self._tables.run(sql, {**values, "now": self.now}).fetchall()

    def expire(self, now: float) -> None:
        """Remove expired datasets, and replaced versions whose tickets are no longer guaranteed."""
        for condition in (
            "name IN (SELECT name FROM versions WHERE replaced IS NULL AND expires <= ?)",
            "replaced IS NOT NULL AND max(replaced, promised) <= ?",
        ):
            if self._tables.all(f"SELECT 1 FROM versions WHERE {condition} LIMIT 1", now):
                self.remove("expired", "its time to live has ended", condition, now)

    def remove(self, kind: str, why: str, condition: str, *values: Any) -> None:
        """Remove the versions that meet an SQL condition.

        Args:
            kind: The kind of the change. Versions that had been replaced before are recorded as retired.
            why: The reason of the change.
            condition: The condition, with placeholders for `values`.
            values: The values of the placeholders.
        """
        # The plus makes SQLite use an index, in place of scanning all versions in the order of their ids.
        for row in self._tables.all(f"SELECT * FROM versions WHERE {condition} ORDER BY +id", *values):
            outcome = (
                (kind, why) if row["replaced"] is None else ("retired", "it had been replaced, and was no longer kept")
            )
            self._change(row, *outcome)
            if outcome[0] == "evicted":
                self.mark_lost(row["name"])
            elif outcome[0] == "expired":
                self.mark_lost(row["name"], Loss.DROPPED)
        self._tables.run(f"DELETE FROM versions WHERE {condition}", values)

    def _change(self, version: sqlite3.Row, kind: str, why: str) -> None:
        change = Change(kind, version["name"], version["number"], version["rows"], version["nbytes"], why)
        self.changes.append(change)

    def remove_missing(self, part: str, host: str) -> None:
        """Remove a part that its node no longer holds, and record the versions without another copy as evicted."""
        self.remove("evicted", f"{host} does not hold it any more", _SOLE_COPY, part)
        self.delete_part(part)

    def delete_part(self, part: str) -> None:
        """Delete a part, and the versions without another copy of it."""
        for row in self._tables.all(f"SELECT name FROM versions WHERE replaced IS NULL AND {_SOLE_COPY}", part):
            self.mark_lost(row["name"])
        self._tables.run(f"DELETE FROM versions WHERE {_SOLE_COPY}", (part,))
        self._tables.run("DELETE FROM parts WHERE id = ?", (part,))

    # Version numbers

    def check_not_lost(self, name: str) -> None:
        """Raise CatalogError if the rows to append to are lost: the new rows alone would become the dataset.

        After the database was found damaged, this may be so for any name that no node has reported since.
        """
        lost = self._tables.run(
            "SELECT published FROM numbers WHERE name = :name AND lost > 0"
            " AND NOT EXISTS (SELECT 1 FROM versions WHERE name = :name AND replaced IS NULL)",
            {"name": name},
        ).fetchone()
        if lost:
            raise CatalogError(
                f"{name!r} cannot be appended to: version {lost['published']} was evicted, or lost with its node, "
                "so the new rows alone would become the dataset; put all rows again, with the mode overwrite"
            )
        sql = "SELECT 1 FROM numbers WHERE name = ? AND published > 0"
        if self._tables.replaces_damaged and not self._tables.all(sql, name):
            raise CatalogError(
                f"{name!r} cannot be appended to: the catalog's database was damaged, and a node that has not reported "
                "since may have rows of this dataset; put all rows with the mode overwrite, or restart the catalog "
                "once all nodes have reported"
            )

    def next_number(self, name: str) -> int:
        """Return a new number for a version of `name`, and reserve it."""
        numbers = self._tables.run(
            "SELECT coalesce((SELECT last FROM numbers WHERE name = :name),"
            " (SELECT last FROM numbers WHERE name = :any), 0) AS last",
            {"name": name, "any": ANY_NAME},
        ).fetchone()
        number = int(numbers["last"]) + 1
        self.use_number(name, number)
        return number

    def use_number(self, name: str, number: int) -> None:
        """Reserve this number and all lower ones, so that no later version of `name` gets one of them."""
        if number:
            self._tables.run(
                "INSERT INTO numbers (name, last) VALUES (?, ?)"
                " ON CONFLICT (name) DO UPDATE SET last = excluded.last WHERE excluded.last > last",
                (name, number),
            )

    def find_number(self, name: str, number: int) -> None:
        """Reserve a number that a store has. If this database has not assigned it, the current version is overtaken."""
        # The plus makes SQLite use the index of current versions, in place of all versions of the name.
        self._tables.run(
            "UPDATE versions SET origin = origin | :overtaken WHERE name = :name AND +number < :number"
            " AND replaced IS NULL AND (SELECT last FROM numbers WHERE name = :name) < :number",
            {"overtaken": Origin.OVERTAKEN, "name": name, "number": number},
        )
        self.use_number(name, number)

    def is_overtaken(self, name: str) -> bool:
        """Return whether the current version of `name` is overtaken: see `Origin`."""
        sql = "SELECT 1 FROM versions WHERE name = ? AND replaced IS NULL AND origin & ?"
        return bool(self._tables.all(sql, name, Origin.OVERTAKEN))

    def is_outdated(self, name: str, number: int, base: int | None) -> bool:
        """Return whether a node has reported another version since `number` was assigned to a commit.

        Args:
            name: The name of the dataset.
            number: The number of the version that the commit makes.
            base: The number of the version that the commit appends to; 0 if there was none, None if it replaces any.
        """
        sql = "SELECT 1 FROM numbers WHERE name = ? AND (last > ? OR published >= ?)"
        if self._tables.all(sql, name, number, number):
            return True
        sql = "SELECT 1 FROM versions WHERE name = ? AND replaced IS NULL AND number != ?"
        return base is not None and bool(self._tables.all(sql, name, base))

    def _publish_number(self, name: str, number: int, lost: bool) -> None:
        """Record the last published version of `name`, and whether it was lost.

        Nothing changes if a later version is known, or if this version was dropped or forgotten here.
        """
        self.use_number(name, number)
        self._tables.run(
            "UPDATE numbers SET published = :number, lost = :lost WHERE name = :name"
            " AND (published < :number OR published = :number AND lost NOT IN (:dropped, :forgotten))",
            {
                "name": name,
                "number": number,
                "lost": lost,
                "dropped": Loss.DROPPED,
                "forgotten": Loss.FORGOTTEN,
            },
        )

    def mark_lost(self, name: str, loss: Loss = Loss.MISSING) -> None:
        """Record whether the dataset is gone though no client dropped or replaced it."""
        self._tables.run("UPDATE numbers SET lost = ? WHERE name = ?", (loss, name))

    def is_missing(self, version: Version) -> bool:
        """Return whether a version has the number of the last one, which is missing: a node may bring it back.

        Only whole versions come back.
        """
        sql = "SELECT 1 FROM numbers WHERE name = ? AND lost = ? AND published = ?"
        return version.whole and bool(self._tables.all(sql, version.name, Loss.MISSING, version.number))

    def _is_missing_version(self, version: Version) -> bool:
        """Return whether a version with the number of the last one is that version, and is missing."""
        sql = "SELECT 1 FROM commits WHERE key = ? AND name = ? AND version = ?"
        committed = self._tables.all(sql, version.key, version.name, version.number)
        return self.is_missing(version) and (version.catalog == self._tables.id or bool(committed))

    def record_removed(self, name: str, removed: Removal) -> None:
        """Record a version that is gone from a store, and hide an older one that was found in a store."""
        self.find_number(name, removed.used)
        is_known = self._tables.all("SELECT 1 FROM numbers WHERE name = ? AND published >= ?", name, removed.version)
        # A version that is set aside is reported as lost, and is still listed.
        is_listed = self._tables.all("SELECT 1 FROM versions WHERE name = ? AND number = ?", name, removed.version)
        if not is_known or (removed.lost and not is_listed):
            self._publish_number(name, removed.version, removed.lost)
        self._hide_found(name, removed.version)

    def _hide_found(self, name: str, number: int) -> None:
        """Hide the current version of `name` if it was found in a store, and version `number`, which is gone, is later.

        It is kept and stays readable by its number until it expires or another version is published: it may be the only
        version that is left.
        """
        self._tables.run(
            "UPDATE versions SET replaced = coalesce(expires, :forever)"
            " WHERE name = :name AND number < :number AND replaced IS NULL AND origin & :found",
            {"forever": FOREVER, "name": name, "number": number, "found": Origin.FOUND},
        )

    # Publishing

    def record_commit(self, version: int, append: bool) -> None:
        """Record the change of a version that was committed now, as opposed to found in a store."""
        (row,) = self._tables.all("SELECT * FROM versions WHERE id = ?", version)
        sql = "SELECT max(number) AS number FROM versions WHERE name = ? AND number < ?"
        (previous,) = self._tables.all(sql, row["name"], row["number"])
        verb = "appends to" if append else "replaces"
        why = "it is new" if previous["number"] is None else f"it {verb} version {previous['number']}"
        self._change(row, "committed", why)

    def learn(self, version: Version) -> None:
        """Publish a version that was found in a store, with its number, unless a later version is known.

        If all later versions are lost, the version is hidden, as if it had been found before they were: see
        `_hide_found`. If the version itself was missing, it is shown again.

        A version with a number from another catalog does not replace a version that this catalog committed: the node
        has left the other catalog, or that catalog is lost. Numbers of this catalog may be unknown if its file was
        restored from a backup.
        """
        current = self._tables.all("SELECT origin FROM versions WHERE name = ? AND replaced IS NULL", version.name)
        committed_here = bool(current) and not current[0]["origin"] & Origin.FOUND
        foreign = committed_here and version.catalog != self._tables.id
        later = self._tables.run(
            "SELECT published, lost > 0 AND published > :number AND NOT EXISTS"
            " (SELECT 1 FROM versions WHERE name = :name AND (replaced IS NULL OR number >= :number)) AS is_last_left"
            " FROM numbers WHERE name = :name AND (published > :number OR published = :number AND NOT :is_missing)",
            {"name": version.name, "number": version.number, "is_missing": self._is_missing_version(version)},
        ).fetchone()
        if not version.number or foreign or (later and not later["is_last_left"]):
            _log.warning(
                "a version in a store is not shown, since it has no number, or later ones are known: "
                "dataset=%r version=%d node=%s part=%s",
                version.name,
                version.number,
                version.part.node,
                version.id,
            )
            return
        sql = "SELECT 1 FROM numbers WHERE name = ? AND last > ?"
        is_overtaken = bool(self._tables.all(sql, version.name, version.number))
        origin = Origin.FOUND | Origin.OVERTAKEN if is_overtaken else Origin.FOUND
        self.publish(version, origin=origin)
        if later:
            self._hide_found(version.name, later["published"])

    def publish(self, version: Version, append: bool = False, origin: Origin = Origin.COMMITTED) -> int:
        """Publish a version, which has a number.

        Args:
            version: The version. Its key and the keys in `before` count as committed from now on.
            append: Whether its parts follow those of the current version, whose options it takes over. It takes over
                the lineage, too, if this catalog has committed that version, and else begins a new one.
            origin: The way by which the catalog learned of the version.

        Returns:
            The id of the row.

        Raises:
            CatalogError: The schema differs from that of the version to append to, or a part is on an unknown node.
        """
        name, created = version.name, version.created
        self._publish_number(name, version.number, lost=False)
        current = self._tables.all("SELECT * FROM versions WHERE name = ? AND replaced IS NULL", name)
        replaced = current[0] if current else None
        previous = self.record(current[0]) if append and current else None
        rows, nbytes, tags, ttl = version.rows, version.nbytes, version.tags, version.ttl
        lineage_id = version.lineage_id
        if previous is not None:
            if current[0]["origin"] == Origin.COMMITTED:
                lineage_id = previous.lineage_id
            # Else the catalog that committed the previous version may have appended to it, too. A node that is away may
            # have those rows, under the same number.
            if previous.schema != version.schema:
                difference = schema_difference(deserialize(previous.schema), deserialize(version.schema))
                raise CatalogError(f"all of {name!r} must have one schema, and in the new rows {difference}")
            rows, nbytes = sum_known((previous.rows, rows)), sum_known((previous.nbytes, nbytes))
            tags, ttl = previous.merged_options(tags, ttl)
        self._tables.run(
            "UPDATE versions SET replaced = min(:created, :now)"
            " WHERE name = :name AND (replaced IS NULL OR replaced > :now)",
            {"name": name, "created": created, "now": self.now},
        )
        self._retire_tickets(version.parts)
        id = self._tables.run(
            "INSERT INTO versions (name, number, schema, rows, nbytes, tags, created, expires, began, origin)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                name,
                version.number,
                version.schema,
                rows,
                nbytes,
                json.dumps(dict(tags)),
                created,
                None if ttl is None else created + ttl,
                lineage_id,
                origin,
            ),
        ).lastrowid
        assert id is not None
        first = 0 if previous is None or replaced is None else self._copy_parts(replaced["id"], id)
        self._insert_parts(id, version.parts, first)
        self.keys.record(name, (*version.before, version.key), version.number)
        return id

    def _retire_tickets(self, parts: Sequence[Part]) -> None:
        """Remove the versions that have parts with the same tickets as new `parts`.

        If the publisher has chosen the ticket itself, the ticket is valid for the latest version only.
        """
        for part in parts:
            sql = "SELECT id FROM parts WHERE ticket = ? AND id != ?"
            for row in self._tables.all(sql, part.ticket, part.id):
                condition = "id IN (SELECT version FROM version_parts WHERE part = ?)"
                self.remove("retired", "its replacement has the same ticket", condition, row["id"])

    def _copy_parts(self, previous: int, version: int) -> int:
        """Give `version` the parts of the version that it appends to. Return the number of its next part."""
        self._tables.run(
            "INSERT INTO version_parts SELECT ?, number, part FROM version_parts WHERE version = ?",
            (version, previous),
        )
        (row,) = self._tables.all("SELECT max(number) AS last FROM version_parts WHERE version = ?", version)
        if row["last"] == 0:  # The previous version had one part.
            sql = "INSERT OR IGNORE INTO unsettled SELECT part FROM version_parts WHERE version = ?"
            self._tables.run(sql, (previous,))
        return int(row["last"]) + 1

    def _insert_parts(self, version: int, parts: Sequence[Part], first: int) -> None:
        for part in parts:
            try:
                self._tables.run(
                    "INSERT INTO parts (id, node, ticket, rows, nbytes, serial) VALUES (?, ?, ?, ?, ?, ?)"
                    " ON CONFLICT (id) DO NOTHING",
                    (part.id, part.node, part.ticket, part.rows, part.nbytes, part.serial),
                )
            except sqlite3.IntegrityError:
                raise CatalogError(f"no node {part.node!r} has registered at this catalog") from None
            self._tables.run("INSERT INTO version_parts VALUES (?, ?, ?)", (version, first + part.number, part.id))

    def record(self, row: sqlite3.Row) -> Version:
        """Return the version in a row of its table, with its parts. Raise CatalogDamaged if the checksum is wrong."""
        self._tables.check("versions", row)
        copies: dict[int, tuple[sqlite3.Row, list[NodeRecord]]] = {}
        set_aside: set[int] = set()
        for part in self._tables.all(
            "SELECT number, part, ticket, rows, nbytes, serial, set_aside, nodes.* FROM version_parts"
            " JOIN parts ON part = parts.id JOIN nodes ON node = nodes.id WHERE version = ? ORDER BY number, nodes.id",
            row["id"],
        ):
            node = self.node(part)
            if part["set_aside"]:
                set_aside.add(part["number"])
                node = replace(node, alive=False)  # It cannot serve this part.
            copies.setdefault(part["number"], (part, []))[1].append(node)
        parts = (
            Part(
                part["part"],
                part["id"],
                part["ticket"],
                part["rows"],
                part["nbytes"],
                part["number"],
                part["serial"],
                tuple(nodes),
                part["number"] in set_aside and not any(node.alive for node in nodes),
            )
            for part, nodes in copies.values()
        )
        ttl = None if row["expires"] is None else round(row["expires"] - row["created"], _TTL_DIGITS)
        return Version(
            row["name"],
            "",
            row["schema"],
            row["created"],
            tuple(parts),
            tags=json.loads(row["tags"]),
            ttl=ttl,
            before=(row["began"],),
            number=row["number"],
            current=row["replaced"] is None,
        )

    def node(self, row: sqlite3.Row) -> NodeRecord:
        """Return the node in a row of its table. Raise CatalogDamaged if the checksum is wrong."""
        self._tables.check("nodes", row)
        return NodeRecord(
            id=row["id"],
            host=row["host"],
            boot_id=row["boot_id"],
            flight=row["flight"],
            locations=tuple(json.loads(row["locations"])),
            seen=row["seen"],
            alive=row["lives_until"] > self.now,
        )

    def extend_promise(self, version: sqlite3.Row, retain: float) -> None:
        """Guarantee the tickets of a version for `retain` seconds from now, even if it is replaced."""
        if retain and version["promised"] < self.now + retain:
            # The guarantee is longer than requested, so that not every request has to write.
            until = self.now + 1.25 * retain
            self._tables.run("UPDATE versions SET promised = ? WHERE id = ?", (until, version["id"]))

    def is_single_part(self, version: int) -> bool:
        """Return whether the version has one part, of which there may be several copies."""
        first, last = (
            f"(SELECT number FROM version_parts WHERE version = :v ORDER BY number {order} LIMIT 1)"
            for order in ("ASC", "DESC")
        )
        return bool(self._tables.run(f"SELECT {first} = {last}", {"v": version}).fetchone()[0])

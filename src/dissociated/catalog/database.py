"""The database of a catalog: datasets, their versions, the parts of each version, and the nodes that hold them.

A commit is one transaction. Whichever process is killed, a dataset is replaced completely or not at all. Every search
uses an index, so the time for a commit does not grow with the number of datasets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dissociated.catalog.tables import Tables
from dissociated.catalog.versions import Loss, Versions
from dissociated.control.access import UNKNOWN_TICKET
from dissociated.control.change_counter import ChangeCounter
from dissociated.control.commit import Commit
from dissociated.control.version import NodeRecord, Part, Version
from dissociated.errors import CatalogError, DatasetNotFound
from dissociated.monitoring.changes import Change
from dissociated.store.keys import CommitKey
from dissociated.store.numbers import Removal

#: The number of seconds after which a prepared part is released if its commit never came.
PREPARE_TIMEOUT = 600.0
_MAX_NAMES = 10  # of unreadable datasets that are listed


class Database:
    """The state of a catalog, in one file. Its methods may be called from several threads.

    Args:
        path: The path of the file, or `:memory:`.
        clock: A function that returns the time in seconds since the epoch.

    Attributes:
        on_change: A callback that receives each change of a dataset after its transaction. The catalog sets it.

    Raises:
        CatalogError: The file cannot be used, or another catalog uses it.
    """

    def __init__(self, path: str = ":memory:", clock: Callable[[], float] = time.time) -> None:
        self.on_change: Callable[[Change], None] = lambda change: None
        #: Whether the database outlives this process.
        self.is_durable = path != ":memory:"
        self._clock = clock
        self._tables = Tables(path)

    @property
    def id(self) -> int:
        """The id of this database and of copies of its file. Other databases have other ids."""
        return self._tables.id

    @property
    def changes(self) -> int:
        """A number that grows with every change. A result is valid for as long as the number is the same."""
        return self._tables.changes

    @property
    def counter(self) -> ChangeCounter:
        """The same number in shared memory, without the changes of a transaction that is not committed."""
        return self._tables.counter

    def close(self) -> None:
        """Close the file."""
        self._tables.close()

    @contextmanager
    def _reading(self) -> Iterator[Versions]:
        """Open a transaction that reads at one moment in time. It may extend promises, but no version changes."""
        with self._tables.transaction():
            yield Versions(self._tables, self._clock())

    @contextmanager
    def _transaction(self) -> Iterator[Versions]:
        """Open a transaction that begins by removing what has expired.

        `on_change` is called afterwards, without the lock.
        """
        with self._reading() as versions:
            versions.expire(versions.now)
            yield versions
        for change in versions.changes:
            self.on_change(change)

    # Nodes

    def register(
        self,
        node: NodeRecord,
        announced: Sequence[Version],
        digest: str,
        lives_until: float,
        serial: int = 0,
        removed: Mapping[str, Removal] | None = None,
        set_aside: Collection[str] = (),
    ) -> None:
        """Register a node with all the parts that it holds.

        Parts that the node no longer holds are deleted. A version that the node stores and this catalog does not know
        becomes the current version of its dataset, unless a later version is known. So does a version that was missing:
        the node may have run for a while without its spill directory.

        Args:
            node: The record of the node.
            announced: Every version that the node holds.
            digest: A digest of the node's state, which the next heartbeat repeats.
            lives_until: The time until which the node is considered alive, in seconds since the epoch.
            serial: The serial up to which `announced` is complete.
            removed: The latest version that is gone from the node, for each dataset.
            set_aside: The ids of parts that the node holds and could not read at its start. They stay in their
                versions, which cannot be read meanwhile.
        """
        with self._transaction() as versions:
            self._tables.run(
                "INSERT INTO nodes (id, host, boot_id, flight, locations, seen, lives_until, digest)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET host = excluded.host,"
                " boot_id = excluded.boot_id, flight = excluded.flight, locations = excluded.locations,"
                " seen = excluded.seen, lives_until = excluded.lives_until, digest = excluded.digest",
                (
                    node.id,
                    node.host,
                    node.boot_id,
                    node.flight,
                    json.dumps(node.locations),
                    versions.now,
                    lives_until,
                    digest,
                ),
            )
            held_ids = {version.id for version in announced}
            self._tables.run("UPDATE parts SET set_aside = 0 WHERE node = ? AND set_aside", (node.id,))
            for part in {*set_aside} - held_ids:
                # Its spill directory may be that of an earlier store, which was another node.
                self._tables.run("UPDATE parts SET set_aside = 1, node = ? WHERE id = ?", (node.id, part))
            held_ids |= {*set_aside}
            for row in self._tables.all("SELECT id FROM parts WHERE node = ? AND serial <= ?", node.id, serial):
                if row["id"] not in held_ids:
                    versions.remove_missing(row["id"], node.host)
            self._record_removed(versions, removed or {}, announced)
            self._record_announced(versions, announced)
            versions.expire(versions.now)

    def _record_removed(
        self, versions: Versions, removed: Mapping[str, Removal], held_versions: Sequence[Version]
    ) -> None:
        """Record versions that are gone from a node, and those of `held_versions` that are unknown parts.

        Only a database that is lost knew the other parts of the latter.
        """
        for name, last in removed.items():
            versions.record_removed(name, last)
        for version in held_versions:
            if version.number and not version.whole and not version.prepared and not self._is_known(versions, version):
                versions.record_removed(version.name, Removal.of(version.number, lost=True, published=True))

    def _record_announced(self, versions: Versions, announced: Sequence[Version]) -> None:
        """Record versions that a node holds."""
        for version in sorted(announced, key=lambda version: (version.number, version.serial)):
            # A spill directory outlives its store: the next store has another id, and the same parts.
            sql = "UPDATE parts SET node = :node, set_aside = 0 WHERE id = :id AND node != :node"
            self._tables.run(sql, {"node": version.part.node, "id": version.id})
            if not version.whole:
                self._tables.run("DELETE FROM unsettled WHERE part = ?", (version.id,))
            elif not version.prepared and not self._is_known(versions, version):
                versions.learn(version)
            versions.find_number(version.name, version.number)

    def _is_known(self, versions: Versions, version: Version) -> bool:
        """Return whether the catalog knows a version, which it may have dropped or replaced since."""
        if self._tables.all("SELECT 1 FROM parts WHERE id = ?", version.id):
            return True
        return versions.keys.is_committed(version) and not versions.is_missing(version)

    def touch_node(
        self,
        node: str,
        digest: str,
        lives_until: float,
        *,
        since: str | None = None,
        announced: Sequence[Version] = (),
        removed: Sequence[str] = (),
    ) -> bool:
        """Record a heartbeat of a node, with its changes since the last one.

        Args:
            node: The id of the node.
            digest: The digest of the node's present state.
            lives_until: The time until which the node is considered alive, in seconds since the epoch.
            since: The digest of the state that the changes are relative to; by default `digest`.
            announced: The versions that were added or changed.
            removed: The ids of parts that the node no longer holds.

        Returns:
            False if the catalog does not know the node with that earlier digest. Nothing is recorded then, and the node
            must register.
        """
        with self._transaction() as versions:
            rows = self._tables.all(
                "SELECT host FROM nodes WHERE id = ? AND digest = ?", node, digest if since is None else since
            )
            if not rows:
                return False
            self._tables.run(
                "UPDATE nodes SET seen = ?, lives_until = ?, digest = ? WHERE id = ?",
                (versions.now, lives_until, digest, node),
            )
            self._remove_missing(versions, node, removed)
            self._record_announced(versions, announced)
            versions.expire(versions.now)
            return True

    def deregister(self, node: str, retiring: bool = False, gone_ids: Sequence[str] = ()) -> bool:
        """Record that a node shuts down. If it is `retiring`, delete it unless it still holds a part of a version.

        The node still prepares parts. A commit that comes before this is kept, and a later one finds no node.

        Args:
            node: The id of the node.
            retiring: Whether the node will not come back.
            gone_ids: The ids of the parts that end with the process of the node.

        Returns:
            Whether the node was deleted.
        """
        with self._transaction() as versions:
            self._remove_missing(versions, node, gone_ids)
            self._tables.run("UPDATE nodes SET lives_until = 0 WHERE id = ?", (node,))
            sql = "SELECT 1 FROM parts JOIN version_parts ON part = parts.id WHERE node = ? LIMIT 1"
            if not retiring or self._tables.all(sql, node):
                return False
            self._tables.run("DELETE FROM parts WHERE node = ?", (node,))
            self._tables.run("DELETE FROM nodes WHERE id = ?", (node,))
            return True

    def _remove_missing(self, versions: Versions, node: str, parts: Iterable[str]) -> None:
        for part in parts:
            sql = "SELECT host FROM parts JOIN nodes ON nodes.id = node WHERE parts.id = ? AND node = ?"
            for row in self._tables.all(sql, part, node):
                versions.remove_missing(part, row["host"])

    def forget(self, node: str) -> None:
        """Delete a node, its parts, and the versions that have no other copy of one of these parts.

        Raises:
            CatalogError: The node is unknown, or alive: its next report would bring everything back.
        """
        with self._transaction() as versions:
            rows = self._tables.all("SELECT * FROM nodes WHERE id = ?", node)
            if not rows:
                raise CatalogError(f"no node {node!r} has registered at this catalog")
            record = versions.node(rows[0])
            if record.alive:
                raise CatalogError(
                    f"the node on {record.host} at {record.flight} is alive: stop it before you forget it"
                )
            for row in self._tables.all("SELECT id FROM parts WHERE node = ?", node):
                versions.remove_missing(row["id"], record.host)
            for change in versions.changes:
                if change.kind == "evicted":
                    versions.mark_lost(change.dataset, Loss.FORGOTTEN)
            self._tables.run("DELETE FROM nodes WHERE id = ?", (node,))

    def unreadable(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of parts of current versions that no node can serve now, and names of their datasets."""
        with self._reading() as versions:
            rows = self._tables.all(
                "SELECT versions.name AS name FROM versions JOIN version_parts ON version = versions.id"
                " JOIN parts ON part = parts.id JOIN nodes ON node = nodes.id WHERE replaced IS NULL"
                " AND ifnull(expires > ?, 1) GROUP BY version, version_parts.number"
                " HAVING max(iif(set_aside, 0, lives_until)) <= ?"
                " ORDER BY versions.name",
                versions.now,
                versions.now,
            )
            return len(rows), tuple(dict.fromkeys(row["name"] for row in rows))[:_MAX_NAMES]

    def nodes(self) -> list[NodeRecord]:
        """Return every node that ever registered."""
        with self._reading() as versions:
            return [versions.node(row) for row in self._tables.all("SELECT * FROM nodes ORDER BY id")]

    def unreferenced_parts(self, node: str, announced: Sequence[Version] = ()) -> list[str]:
        """Return the parts of a node that belong to no version, or were prepared for a commit that never came.

        Versions that have expired are removed first.
        """
        with self._transaction() as versions:
            # CROSS JOIN makes SQLite start with the few unused parts, in place of all parts.
            rows = self._tables.all("SELECT id FROM unused CROSS JOIN parts ON id = part WHERE node = ?", node)
            unreferenced = {row["id"] for row in rows}
            for version in announced:
                if self._tables.all("SELECT 1 FROM parts WHERE id = ?", version.id):
                    continue
                if version.prepared and version.created + PREPARE_TIMEOUT < versions.now:
                    versions.keys.abandon(version.id)
                is_resolved = versions.keys.is_committed(version) or versions.keys.is_aborted(version.key)
                may_return = not version.prepared and versions.is_missing(version)
                if versions.keys.is_abandoned(version.id) or (is_resolved and not may_return):
                    unreferenced.add(version.id)
            return sorted(unreferenced)

    def referenced_parts(self, node: str, parts: Iterable[str]) -> dict[str, bool]:
        """Return the parts that belong to a version, each with whether it is the whole of the latest such version.

        The result also has parts of `node` that are no longer the whole of their version, until the node acknowledges
        that.
        """
        with self._reading() as versions:
            unsettled = self._tables.all("SELECT id FROM unsettled CROSS JOIN parts ON id = part WHERE node = ?", node)
            referenced = {}
            for part in {*parts, *(row["id"] for row in unsettled)}:
                (row,) = self._tables.all("SELECT max(version) AS latest FROM version_parts WHERE part = ?", part)
                if row["latest"] is not None:
                    referenced[part] = versions.is_single_part(row["latest"])
            return referenced

    def acknowledge_parts(self, referenced: Mapping[str, bool]) -> None:
        """Record that the node of these parts has received the result of `referenced_parts`."""
        with self._transaction():
            for part, whole in referenced.items():
                if not whole:  # A part that was whole may have become a part of a later version since.
                    self._tables.run("DELETE FROM unsettled WHERE part = ?", (part,))

    def delete_parts(self, parts: Sequence[str]) -> None:
        """Delete parts that are gone from their node."""
        with self._transaction() as versions:
            for part in parts:
                versions.delete_part(part)

    # Datasets

    def publish(
        self,
        commit: Commit,
        schema: bytes,
        parts: Sequence[Part],
        created: float | None = None,
        before: Sequence[str] = (),
        base: int = 0,
    ) -> int:
        """Publish parts as the version that a commit describes. A repeated commit changes nothing.

        Args:
            commit: The commit, with a key. Without a number, the version gets the next one.
            schema: The schema of the parts, serialized.
            parts: The parts of the version.
            created: The time of the commit in seconds since the epoch; by default now.
            before: The keys of earlier commits whose rows these parts contain too, oldest first. They count as
                committed, and the parts replace the current version.
            base: The number of the version that an append with a number was made for; 0 if the dataset did not exist.

        Returns:
            The number of the version.

        Raises:
            CatalogError: A part is on an unknown node, is abandoned or belongs to another version, the schema differs
                from that of the version to append to, that version was lost, a node has reported another version since
                the number was assigned, the commit was aborted, or its key is that of another dataset.
        """
        with self._transaction() as versions:
            committed = versions.keys.find_commit(commit.name, commit.key)
            if committed is not None:
                return committed
            versions.keys.check_new_parts(commit.name, parts)
            if commit.append and not before:  # The version may have been lost since the number was assigned.
                versions.check_not_lost(commit.name)
            extended = base if commit.append or commit.exists is False else None
            if commit.number and versions.is_outdated(commit.name, commit.number, extended):
                raise CatalogError(
                    f"nothing was committed to {commit.name!r}, since a node has just reported another version: put "
                    "the rows again"
                )
            number = commit.number or versions.next_number(commit.name)
            numbered = replace(commit, number=number)
            version = Version.of(numbered, schema, created or versions.now, parts, before=tuple(before))
            id = versions.publish(version, append=commit.append and not before)
            versions.record_commit(id, commit.append)
            versions.expire(versions.now)
            return number

    def next_version(self, name: str, append: bool = False) -> int:
        """Return a number for a version about to be written.

        The number is used up even if the version is not published.

        Raises:
            CatalogError: `append` is set and the current version was lost, so the new rows alone would become the
                dataset.
        """
        with self._transaction() as versions:
            if append:
                versions.check_not_lost(name)
            return versions.next_number(name)

    def is_overtaken(self, name: str) -> bool:
        """Return whether an append to the current version of `name` must begin a new lineage: see `Origin`."""
        with self._reading() as versions:
            return versions.is_overtaken(name)

    def learn(self, announced: Version) -> None:
        """Publish a version in the store of this process, unless it is known, aborted, replaced or dropped.

        The version keeps its number.
        """
        with self._transaction() as versions:
            if not self._is_known(versions, announced) and not versions.keys.is_aborted(announced.key):
                versions.learn(announced)
            versions.find_number(announced.name, announced.number)

    def record_removed(self, removed: Mapping[str, Removal], held_versions: Sequence[Version] = ()) -> None:
        """Record versions that left the store of this process, and `held_versions` in it. See `register`."""
        with self._transaction() as versions:
            self._record_removed(versions, removed, held_versions)

    def version_of(self, part: str) -> int | None:
        """Return the number of the latest version that has this part, or None."""
        with self._reading():
            sql = "SELECT number FROM versions WHERE id = (SELECT max(version) FROM version_parts WHERE part = ?)"
            rows = self._tables.all(sql, part)
            return int(rows[0]["number"]) if rows else None

    def find_commit(self, name: str, key: str) -> int | None:
        """Return the number of the version of `name` that was committed with this key, even if it is gone, or None.

        Raises:
            CatalogError: The commit was aborted, or another dataset was committed with this key.
        """
        with self._reading() as versions:
            return versions.keys.find_commit(name, key)

    def committed(self, key: str) -> int | None:
        """Return the number of the version committed with this key, of any dataset, even if it is gone, or None."""
        with self._reading():
            rows = self._tables.all("SELECT version FROM commits WHERE key = ?", key)
            return int(rows[0]["version"]) if rows else None

    def remember(self, keys: Iterable[CommitKey]) -> None:
        """Record keys that were used before there was this database. Known keys stay."""
        with self._transaction() as versions:
            for key in keys:
                versions.keys.remember(key)

    def abort(self, key: str) -> None:
        """Forbid a commit with this key, unless one was made."""
        with self._transaction() as versions:
            if not versions.keys.is_resolved(key):
                versions.keys.abort(key)

    def resolved_commits(self, keys: Sequence[str]) -> list[str]:
        """Return the members of `keys` whose commits were made or aborted."""
        with self._reading() as versions:
            return [key for key in keys if versions.keys.is_resolved(key)]

    def drop(self, name: str) -> None:
        """Remove all versions of the dataset `name`. Raise DatasetNotFound if it does not exist."""
        with self._transaction() as versions:
            if not self._tables.all("SELECT 1 FROM versions WHERE name = ? AND replaced IS NULL", name):
                raise DatasetNotFound(f"no dataset {name!r} is published here")
            versions.remove("dropped", "by request", "name = ?", name)
            versions.mark_lost(name, Loss.DROPPED)  # also if files of it were missing: nobody misses its rows any more

    def datasets(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> list[Version]:
        """Return the datasets whose names begin with `prefix` and that have all of `tags`, sorted by name."""
        with self._reading() as versions:
            rows = versions.available("replaced IS NULL ORDER BY name")
            matching = (versions.record(row) for row in rows if row["name"].startswith(prefix))
            return [version for version in matching if (tags or {}).items() <= version.tags.items()]

    def names(self, limit: int) -> list[str]:
        """Return the names of at most `limit` datasets, sorted."""
        with self._reading() as versions:
            return [
                row["name"] for row in versions.available("replaced IS NULL ORDER BY name LIMIT :limit", limit=limit)
            ]

    def find(self, name: str, version: int | None = None, retain: float = 0.0) -> Version:
        """Return the dataset `name`, or an earlier version that still exists.

        Args:
            name: The name of the dataset.
            version: The number of a version; by default the current one.
            retain: The minimum number of seconds for which its tickets must stay valid, even if it is replaced.

        Raises:
            DatasetNotFound: There is no such dataset or version.
        """
        with self._reading() as versions:
            condition = "replaced IS NULL" if version is None else "number = :number"
            rows = versions.available(f"name = :name AND {condition}", name=name, number=version)
            if not rows:
                missing = f"no dataset {name!r}" if version is None else f"no version {version} of the dataset {name!r}"
                raise DatasetNotFound(f"{missing} is published here")
            versions.extend_promise(rows[0], retain)
            return versions.record(rows[0])

    def current(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the identity of the datasets of these names that exist, all at one moment: see `Catalog.current`."""
        with self._reading() as versions:
            rows = [row for name in names for row in versions.available("name = :name AND replaced IS NULL", name=name)]
            for row in rows:
                self._tables.check("versions", row)
        return {
            row["name"]: {"version": row["number"], "created": row["created"], "began": row["began"]} for row in rows
        }

    def versions(self, name: str) -> list[Version]:
        """Return all versions of `name` that can still be read, oldest first."""
        with self._reading() as versions:
            rows = versions.available("name = :name ORDER BY number", name=name)
            return [versions.record(row) for row in rows]

    def find_by_ticket(self, ticket: bytes, retain: float = 0.0) -> tuple[Version, Part]:
        """Return the latest version that has a part with this ticket, and the part. Raise DatasetNotFound."""
        with self._reading() as versions:
            rows = versions.available(
                "id IN (SELECT version FROM version_parts JOIN parts ON part = parts.id WHERE ticket = :ticket)"
                " ORDER BY id DESC",
                ticket=ticket,
            )
            if not rows:
                raise DatasetNotFound(UNKNOWN_TICKET)
            versions.extend_promise(rows[0], retain)
            version = versions.record(rows[0])
            return version, next(part for part in version.parts if part.ticket == ticket)

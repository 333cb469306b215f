"""What the catalog knows: datasets, their versions, the parts of each, and the nodes that hold them.

A commit is one transaction: a dataset is replaced whole or not at all, whatever is killed. Nothing that a commit does
takes longer the more there is: every search has its index.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from dissociated.catalog.tables import Tables
from dissociated.catalog.versions import Versions
from dissociated.control.records import AnnouncedVersion, NodeRecord, Part, ReplicatedPart, VersionRecord
from dissociated.errors import CatalogError, DatasetNotFound
from dissociated.monitoring.changes import Change
from dissociated.store.numbers import Removed

#: Seconds after which a part that was prepared for a commit which never came is released.
PREPARE_TIMEOUT = 600.0
FOREVER = 1e18


class Database:
    """The catalog's state, in the file `path`. Safe to use from many threads. `clock` gives seconds since the epoch.

    `on_change` is told what has become of datasets, after it has; whoever serves the database sets it.
    Raises CatalogError where the file cannot be used, or another catalog uses it.
    """

    def __init__(self, path: str = ":memory:", clock: Callable[[], float] = time.time) -> None:
        self.on_change: Callable[[Change], None] = lambda change: None
        #: Whether it outlives this process.
        self.is_durable = path != ":memory:"
        self._clock = clock
        self._tables = Tables(path)

    @property
    def id(self) -> int:
        """Tells this database, and copies of its file, from all others."""
        return self._tables.id

    def close(self) -> None:
        """Close the file."""
        self._tables.close()

    @contextmanager
    def _transaction(self) -> Iterator[Versions]:
        """One transaction, at one moment. `on_change` is called after it, without the lock."""
        with self._tables.transaction():
            versions = Versions(self._tables, self._clock())
            versions.expire(versions.now)
            yield versions
        for change in versions.changes:
            self.on_change(change)

    # Nodes

    def register(
        self,
        node: NodeRecord,
        announced: Sequence[AnnouncedVersion],
        digest: str,
        lives_until: float,
        serial: int = 0,
        removed: Mapping[str, Removed] | None = None,
    ) -> None:
        """A node says who it is and everything that it holds, of the parts with serials up to `serial`.

        What it does not hold any more is gone. What it published itself and this catalog does not know yet becomes a
        dataset, unless later versions of that are known. `removed` says which versions of each dataset are gone there.
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
            present = {one.part.id for one in announced}
            for row in self._tables.all("SELECT id FROM parts WHERE node = ? AND serial <= ?", node.id, serial):
                if row["id"] not in present:
                    versions.remove_missing(row["id"], node.host)
            self._record_removed(versions, removed or {})
            self._record_announced(versions, announced)
            versions.expire(versions.now)

    def _record_removed(self, versions: Versions, removed: Mapping[str, Removed]) -> None:
        """Record versions that are gone from a node."""
        for name, last in removed.items():
            versions.record_removed(name, last)

    def _record_announced(self, versions: Versions, announced: Sequence[AnnouncedVersion]) -> None:
        """A node holds these."""
        for one in sorted(announced, key=lambda one: (one.version, one.part.serial)):
            if not one.whole:
                self._tables.run("DELETE FROM unsettled WHERE part = ?", (one.part.id,))
            elif one.schema and not one.prepared and not self._is_known(one):
                versions.learn(one)
            versions.use_number(one.name, one.version)

    def _is_known(self, one: AnnouncedVersion) -> bool:
        return bool(
            self._tables.all("SELECT 1 FROM parts WHERE id = ?", one.part.id)
            or self._tables.all("SELECT 1 FROM commits WHERE key = ?", one.key)
        )

    def touch_node(
        self,
        node: str,
        digest: str,
        lives_until: float,
        *,
        since: str | None = None,
        announced: Sequence[AnnouncedVersion] = (),
        gone: Sequence[str] = (),
    ) -> bool:
        """A node lives until `lives_until`, unless it says so again, and holds what `digest` stands for.

        Since it held what the digest `since` stood for, the versions that are `announced` have come or changed, and the
        parts that are `gone` have gone. Returns False where the node is not known with that digest: then nothing is
        recorded, and it must register.
        """
        with self._transaction() as versions:
            known = self._tables.all(
                "SELECT host FROM nodes WHERE id = ? AND digest = ?", node, digest if since is None else since
            )
            if not known:
                return False
            self._tables.run(
                "UPDATE nodes SET seen = ?, lives_until = ?, digest = ? WHERE id = ?",
                (versions.now, lives_until, digest, node),
            )
            for part in gone:
                if self._tables.all("SELECT 1 FROM parts WHERE id = ? AND node = ?", part, node):
                    versions.remove_missing(part, known[0]["host"])
            self._record_announced(versions, announced)
            versions.expire(versions.now)
            return True

    def deregister(self, node: str) -> None:
        """A node says that it ends."""
        with self._transaction():
            self._tables.run("UPDATE nodes SET lives_until = 0 WHERE id = ?", (node,))

    def nodes(self) -> list[NodeRecord]:
        """Every node that ever registered."""
        with self._transaction() as versions:
            return [versions.node(row) for row in self._tables.all("SELECT * FROM nodes ORDER BY id")]

    def unreferenced_parts(self, node: str, announced: Sequence[AnnouncedVersion] = ()) -> list[str]:
        """The parts of a node that no version has any more, or that were prepared for a commit that never came."""
        with self._transaction() as versions:
            # CROSS: the few unused ones first, and not all parts
            rows = self._tables.all("SELECT id FROM unused CROSS JOIN parts ON id = part WHERE node = ?", node)
            unreferenced = {row["id"] for row in rows}
            for one in announced:
                if self._tables.all("SELECT 1 FROM parts WHERE id = ?", one.part.id):
                    continue
                if not versions.is_resolved(one.key) and one.prepared and one.created + PREPARE_TIMEOUT < versions.now:
                    versions.abort(one.key)  # should its commit come after all, it must not find nothing
                if versions.is_resolved(one.key):
                    unreferenced.add(one.part.id)
            return sorted(unreferenced)

    def referenced_parts(self, node: str, parts: Iterable[str]) -> dict[str, bool]:
        """Those of these parts that some version has, each with whether it is all of the latest such version.

        There are also those of the `node` that are not all of their version any more, until it acknowledges that.
        """
        with self._transaction() as versions:
            unsettled = self._tables.all("SELECT id FROM unsettled CROSS JOIN parts ON id = part WHERE node = ?", node)
            referenced = {}
            for part in {*parts, *(row["id"] for row in unsettled)}:
                (row,) = self._tables.all("SELECT max(version) AS latest FROM version_parts WHERE part = ?", part)
                if row["latest"] is not None:
                    referenced[part] = versions.is_single_part(row["latest"])
            return referenced

    def acknowledge_parts(self, parts: Iterable[str]) -> None:
        """The node of these parts knows what `referenced_parts` said of them."""
        with self._transaction():
            for part in parts:
                self._tables.run("DELETE FROM unsettled WHERE part = ?", (part,))

    def delete_parts(self, parts: Sequence[str]) -> None:
        """These parts are gone from their node."""
        with self._transaction() as versions:
            for part in parts:
                versions.delete_part(part)

    # Datasets

    def publish(
        self,
        name: str,
        key: str,
        schema: bytes,
        parts: Sequence[Part],
        *,
        append: bool = False,
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
        created: float | None = None,
        before: Sequence[str] = (),
        version: int | None = None,
    ) -> int:
        """Make these parts the dataset `name`, or with `append` more of it. A repeated `key` changes nothing.

        `created` is when that was, if not now; `ttl` counts from then. `before` are the keys of commits that these
        parts have in them too, the first one first: they are not repeated either. `version` is the number that
        `next_version` gave for it; left out, it is the next now.
        Returns the number of the version. Raises CatalogError for parts of unknown nodes, for another schema than that
        of what is appended to, and for an append to what was lost.
        """
        with self._transaction() as versions:
            committed = self._tables.all("SELECT version FROM commits WHERE key = ?", key)
            if committed:
                return int(committed[0]["version"])
            if versions.is_resolved(key):
                raise CatalogError(f"what was to be published as {name!r} has been aborted: write it again")
            number = versions.next_number(name, append) if version is None else version
            id = versions.publish(
                name, number, key, append, schema, parts, tags or {}, ttl, created or versions.now, before
            )
            versions.record_commit(id, append or bool(before))
            versions.expire(versions.now)
            return number

    def next_version(self, name: str, append: bool = False) -> int:
        """Take the number of a version that is about to be written: it is used up, whatever becomes of that.

        Raises CatalogError for an append to what was lost: it would be all that there is.
        """
        with self._transaction() as versions:
            return versions.next_number(name, append)

    def learn(self, announced: AnnouncedVersion) -> int | None:
        """Make a version in the store of this process the dataset, unless it is known, aborted, replaced or dropped.

        It keeps its number. Returns the number of the version where it is shown.
        """
        with self._transaction() as versions:
            if not self._is_known(announced) and not versions.is_resolved(announced.key):
                versions.learn(announced)
            versions.use_number(announced.name, announced.version)
        return self.version_of(announced.part.id)

    def record_removed(self, removed: Mapping[str, Removed]) -> None:
        """Record versions that are gone from the store of this process: see `register`."""
        with self._transaction() as versions:
            self._record_removed(versions, removed)

    def version_of(self, part: str) -> int | None:
        """The number of the latest version that has this part."""
        return self.versions_of([part]).get(part)

    def versions_of(self, parts: Iterable[str]) -> dict[str, int]:
        """Return the number of the latest version that has each of these parts, if there is one."""
        with self._transaction():
            sql = "SELECT number FROM versions WHERE id = (SELECT max(version) FROM version_parts WHERE part = ?)"
            found = {part: self._tables.all(sql, part) for part in parts}
            return {part: int(rows[0]["number"]) for part, rows in found.items() if rows}

    def committed(self, key: str) -> int | None:
        """The number of the version that was committed with this key, whatever became of it."""
        with self._transaction():
            rows = self._tables.all("SELECT version FROM commits WHERE key = ?", key)
            return int(rows[0]["version"]) if rows else None

    def abort(self, key: str) -> None:
        """There shall be no commit with this key, unless there was one."""
        with self._transaction() as versions:
            if not versions.is_resolved(key):
                versions.abort(key)

    def resolved_commits(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that were committed or aborted."""
        with self._transaction() as versions:
            return [key for key in keys if versions.is_resolved(key)]

    def drop(self, name: str) -> None:
        """Forget the dataset `name`, all versions. Raises DatasetNotFound."""
        with self._transaction() as versions:
            if not self._tables.all("SELECT 1 FROM versions WHERE name = ? AND replaced IS NULL", name):
                raise DatasetNotFound(f"no dataset {name!r} is published here")
            versions.remove("dropped", "it was asked for", "name = ?", name)

    def datasets(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> list[VersionRecord]:
        """The datasets whose names begin with `prefix` and that have all of `tags`, by name."""
        with self._transaction() as versions:
            rows = self._tables.all("SELECT * FROM versions WHERE replaced IS NULL ORDER BY name")
            found = (versions.record(row) for row in rows if row["name"].startswith(prefix))
            return [record for record in found if (tags or {}).items() <= record.tags.items()]

    def find(self, name: str, version: int | None = None, retain: float = 0.0) -> VersionRecord:
        """The dataset `name`, or a version of it that is still there. Raises DatasetNotFound.

        `retain` is for how many seconds its tickets shall stay good at least, even if it is replaced.
        """
        with self._transaction() as versions:
            if version is None:
                rows = self._tables.all("SELECT * FROM versions WHERE name = ? AND replaced IS NULL", name)
            else:
                rows = self._tables.all("SELECT * FROM versions WHERE name = ? AND number = ?", name, version)
            if not rows:
                which = f"no dataset {name!r}" if version is None else f"no version {version} of the dataset {name!r}"
                raise DatasetNotFound(f"{which} is published here")
            versions.extend_promise(rows[0], retain)
            return versions.record(rows[0])

    def versions(self, name: str) -> list[VersionRecord]:
        """All versions of `name` that can still be read, the oldest first."""
        with self._transaction() as versions:
            rows = self._tables.all("SELECT * FROM versions WHERE name = ? ORDER BY number", name)
            return [versions.record(row) for row in rows]

    def find_by_ticket(self, ticket: bytes, retain: float = 0.0) -> tuple[VersionRecord, ReplicatedPart]:
        """The version that has a part with this ticket, and that part. Raises DatasetNotFound."""
        with self._transaction() as versions:
            rows = self._tables.all(
                "SELECT versions.* FROM versions JOIN version_parts ON version = versions.id"
                " JOIN parts ON part = parts.id WHERE ticket = ? ORDER BY versions.id DESC",
                ticket,
            )
            if not rows:
                raise DatasetNotFound(
                    "no dataset has this ticket: it may have been replaced or dropped; look it up again"
                )
            versions.extend_promise(rows[0], retain)
            record = versions.record(rows[0])
            return record, next(part for part in record.parts if part.ticket == ticket)

"""What the catalog knows: datasets, their versions, the parts of each, and the nodes that hold them.

A commit is one transaction: a dataset is replaced whole or not at all, whatever is killed. Nothing that a commit does
takes longer the more there is: every search has its index.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from dissociated.catalog.records import Announced, Held, Node, Part, Record
from dissociated.catalog.tables import Tables
from dissociated.errors import CatalogError, DatasetNotFound
from dissociated.monitoring.changes import Change

#: The versions of which this part has no other copy.
_ALONE = (
    "id IN (SELECT mine.version FROM version_parts mine WHERE mine.part = ? AND NOT EXISTS (SELECT 1"
    " FROM version_parts other WHERE other.version = mine.version AND other.number = mine.number"
    " AND other.part != mine.part))"
)
_REMEMBERED = 30 * 86_400.0  # seconds for which the key of a commit is known
#: Seconds after which a part that was prepared for a commit which never came is released.
ABANDONED = 600.0
FOR_EVER = 1e18


class Database:
    """The catalog's state, in the file `path`. Safe to use from many threads. `clock` gives seconds since the epoch.

    `changed` is told what has become of datasets, after it has; whoever serves the database sets it.
    Raises CatalogError where the file cannot be used, or another catalog uses it.
    """

    def __init__(self, path: str = ":memory:", clock: Callable[[], float] = time.time) -> None:
        self.changed: Callable[[Change], None] = lambda change: None
        self._changes: list[Change] = []  # of the transaction that runs
        self._clock = clock
        self._tables = Tables(path)
        self._connection = self._tables.connection

    def close(self) -> None:
        """Close the file."""
        self._tables.close()

    @contextmanager
    def _transaction(self) -> Iterator[float]:
        """All or nothing, at one moment, which it gives. What has changed is told when it is done, without the lock."""
        changes: list[Change] = []
        with self._tables.transaction():
            self._changes = changes
            now = self._clock()
            self._expire(now)
            yield now
        for change in changes:
            self.changed(change)

    def _remove(self, kind: str, why: str, which: str, *values: Any) -> None:
        """Delete the versions of which this is true. Those that had been replaced were not the dataset any more."""
        for row in self._all(f"SELECT * FROM versions WHERE {which} ORDER BY id", *values):
            was = (kind, why) if row["replaced"] is None else ("retired", "it was replaced, and kept no longer")
            self._change(row, *was)
        self._connection.execute(f"DELETE FROM versions WHERE {which}", values)

    def _change(self, version: sqlite3.Row, kind: str, why: str) -> None:
        change = Change(kind, version["name"], version["id"], version["rows"], version["nbytes"], why)
        self._changes.append(change)

    def _all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self._connection.execute(sql, values).fetchall()

    def _expire(self, now: float) -> None:
        """Forget what is over: datasets by their time to live, replaced versions when nobody was promised more."""
        for over in (
            "name IN (SELECT name FROM versions WHERE replaced IS NULL AND expires <= ?)",
            "replaced IS NOT NULL AND promised <= ?",
        ):
            if self._all(f"SELECT 1 FROM versions WHERE {over} LIMIT 1", now):
                self._remove("expired", "its time to live is over", over, now)

    # Nodes

    def register(
        self, node: Node, announced: Sequence[Announced], digest: str, lives_until: float, serial: int = 0
    ) -> None:
        """A node says who it is and everything that it holds, of the parts with serials up to `serial`.

        What it does not hold any more is gone. What it published itself and this catalog does not know yet becomes a
        dataset, unless one of that name was published later.
        """
        with self._transaction() as now:
            self._connection.execute(
                "INSERT INTO nodes VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET host = excluded.host,"
                " boot_id = excluded.boot_id, flight = excluded.flight, locations = excluded.locations,"
                " seen = excluded.seen, lives_until = excluded.lives_until, digest = excluded.digest",
                (
                    node.id,
                    node.host,
                    node.boot_id,
                    node.flight,
                    json.dumps(node.locations),
                    now,
                    lives_until,
                    digest,
                ),
            )
            there = {one.part.id for one in announced}
            for row in self._all("SELECT id FROM parts WHERE node = ? AND serial <= ?", node.id, serial):
                if row["id"] not in there:
                    self._miss(row["id"], node.host)
            self._take(announced)
            self._expire(now)

    def _miss(self, part: str, host: str) -> None:
        """A node does not hold this any more."""
        self._remove("evicted", f"{host} does not hold it any more", _ALONE, part)
        self._lose(part)

    def _take(self, announced: Sequence[Announced]) -> None:
        """A node holds these."""
        for one in sorted(announced, key=lambda one: one.created):
            if one.prepared:
                continue
            if not one.whole:
                self._connection.execute("DELETE FROM unsettled WHERE part = ?", (one.part.id,))
            elif one.schema and not self._known(one):
                newer = self._all(
                    "SELECT 1 FROM versions WHERE name = ? AND replaced IS NULL AND created > ?", one.name, one.created
                )
                if not newer:
                    self._publish(
                        one.name, one.key, False, one.schema, [one.part], one.tags, one.ttl, one.created, one.before
                    )

    def _known(self, one: Announced) -> bool:
        return bool(
            self._all("SELECT 1 FROM parts WHERE id = ?", one.part.id)
            or self._all("SELECT 1 FROM commits WHERE key = ?", one.key)
        )

    def _lose(self, part: str) -> None:
        """A part is gone; what has no other copy of it is gone with it."""
        self._connection.execute(f"DELETE FROM versions WHERE {_ALONE}", (part,))
        self._connection.execute("DELETE FROM parts WHERE id = ?", (part,))

    def heard(
        self,
        node: str,
        digest: str,
        lives_until: float,
        *,
        since: str | None = None,
        announced: Sequence[Announced] = (),
        gone: Sequence[str] = (),
    ) -> bool:
        """A node lives, and holds what `digest` stands for.

        What it held when that was `since` has changed by what is `announced`, as it is now, and by the parts that are
        `gone`. False where this catalog knows the node otherwise: then nothing is taken of that, and it must register.
        """
        with self._transaction() as now:
            known = self._all(
                "SELECT host FROM nodes WHERE id = ? AND digest = ?", node, digest if since is None else since
            )
            if not known:
                return False
            self._connection.execute(
                "UPDATE nodes SET seen = ?, lives_until = ?, digest = ? WHERE id = ?", (now, lives_until, digest, node)
            )
            for part in gone:
                if self._all("SELECT 1 FROM parts WHERE id = ? AND node = ?", part, node):
                    self._miss(part, known[0]["host"])
            self._take(announced)
            self._expire(now)
            return True

    def left(self, node: str) -> None:
        """A node says that it ends."""
        with self._transaction():
            self._connection.execute("UPDATE nodes SET lives_until = 0 WHERE id = ?", (node,))

    def nodes(self) -> list[Node]:
        """Every node that ever registered."""
        with self._transaction() as now:
            return [_node(row, now) for row in self._all("SELECT * FROM nodes ORDER BY id")]

    def unwanted(self, node: str, announced: Sequence[Announced] = ()) -> list[str]:
        """The parts of a node that no version has any more, or that were prepared for a commit that never came."""
        with self._transaction() as now:
            rows = self._all(  # CROSS: the few that are unused first, and not all parts, which SQLite would take else
                "SELECT id FROM unused CROSS JOIN parts ON id = part WHERE node = ?",
                node,
            )
            unwanted = {row["id"] for row in rows}
            for one in announced:
                if self._all("SELECT 1 FROM parts WHERE id = ?", one.part.id):
                    continue
                if not self._over(one.key) and one.prepared and one.created + ABANDONED < now:
                    self._abort(one.key, now)  # should its commit come after all, it must not find nothing
                if self._over(one.key):
                    unwanted.add(one.part.id)
            return sorted(unwanted)

    def wanted(self, node: str, parts: Iterable[str]) -> dict[str, bool]:
        """Those of these parts that some version has, and whether one of them is all of its version, the latest.

        Also those of the `node` that are not all of it any more, unless it has said that it knows.
        """
        with self._transaction():
            unsettled = self._all("SELECT id FROM unsettled CROSS JOIN parts ON id = part WHERE node = ?", node)
            found = {}
            for part in {*parts, *(row["id"] for row in unsettled)}:
                (row,) = self._all("SELECT max(version) AS latest FROM version_parts WHERE part = ?", part)
                if row["latest"] is not None:
                    found[part] = self._is_one(row["latest"])
            return found

    def _is_one(self, version: int) -> bool:
        """Whether all parts of a version are copies of one."""
        first, last = (
            f"(SELECT number FROM version_parts WHERE version = :v ORDER BY number {order} LIMIT 1)"
            for order in ("ASC", "DESC")
        )
        return bool(self._connection.execute(f"SELECT {first} = {last}", {"v": version}).fetchone()[0])

    def settled(self, parts: Iterable[str]) -> None:
        """The node of these parts knows what `wanted` said of them."""
        with self._transaction():
            self._connection.executemany("DELETE FROM unsettled WHERE part = ?", [(part,) for part in parts])

    def released(self, parts: Sequence[str]) -> None:
        """These parts are gone from their node."""
        with self._transaction():
            for part in parts:
                self._lose(part)

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
    ) -> int:
        """Make these parts the dataset `name`, or with `append` more of it. A repeated `key` changes nothing.

        `created` is when that was, if not now; `ttl` counts from then. `before` are the keys of commits that these
        parts have in them too, the first one first: they are not repeated either.
        Returns the number of the version. Raises CatalogError for parts of unknown nodes, and for another schema than
        that of what is appended to.
        """
        with self._transaction() as now:
            done = self._all("SELECT version FROM commits WHERE key = ?", key)
            if done:
                return int(done[0]["version"])
            if self._over(key):
                raise CatalogError(f"what was to be published as {name!r} has been aborted: write it again")
            version = self._publish(name, key, append, schema, parts, tags or {}, ttl, created or now, before)
            if created is None:
                self._tell_committed(version, append or bool(before))
            self._expire(created or now)
            return version

    def _tell_committed(self, version: int, append: bool) -> None:
        (row,) = self._all("SELECT * FROM versions WHERE id = ?", version)
        sql = "SELECT max(id) AS id FROM versions WHERE name = ? AND id < ?"
        (before,) = self._all(sql, row["name"], version)
        doing = "appends to" if append else "replaces"
        why = "it is new" if before["id"] is None else f"it {doing} version {before['id']}"
        self._change(row, "committed", why)

    def _publish(
        self,
        name: str,
        key: str,
        append: bool,
        schema: bytes,
        parts: Sequence[Part],
        tags: Mapping[str, str],
        ttl: float | None,
        now: float,
        keys: Sequence[str] = (),
    ) -> int:
        run = self._connection.execute
        before = next(iter(self._all("SELECT * FROM versions WHERE name = ? AND replaced IS NULL", name)), None)
        rows, nbytes = _total(part.rows for part in parts), _total(part.nbytes for part in parts)
        began = [*keys, key][0]
        if append and before is not None:
            if before["schema"] != schema:
                raise CatalogError(
                    f"what is to be appended to {name!r} has another schema: the columns are not the same"
                )
            rows, nbytes = _total((before["rows"], rows)), _total((before["nbytes"], nbytes))
            tags, ttl = self._record(before, now).more(tags, ttl)
            began = before["began"]
        if before is not None:
            run("UPDATE versions SET replaced = ? WHERE id = ?", (now, before["id"]))
        version = run(
            "INSERT INTO versions (name, schema, rows, nbytes, tags, created, expires, began)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (name, schema, rows, nbytes, json.dumps(dict(tags)), now, None if ttl is None else now + ttl, began),
        ).lastrowid
        assert version is not None
        first = 0
        if append and before is not None:
            run(
                "INSERT INTO version_parts SELECT ?, number, part FROM version_parts WHERE version = ?",
                (version, before["id"]),
            )
            (row,) = self._all("SELECT max(number) AS last FROM version_parts WHERE version = ?", version)
            first = row["last"] + 1
            if first == 1:  # so they were all of it
                run("INSERT OR IGNORE INTO unsettled SELECT part FROM version_parts WHERE version = ?", (before["id"],))
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
            run("INSERT OR IGNORE INTO commits VALUES (?, ?, ?)", (one, version, now))
        for table in ("commits", "aborts"):
            run(f"DELETE FROM {table} WHERE at < ?", (now - _REMEMBERED,))
        return version

    def version_of(self, part: str) -> int | None:
        """The number of the latest version that has this part."""
        with self._transaction():
            (row,) = self._all("SELECT max(version) AS version FROM version_parts WHERE part = ?", part)
            return None if row["version"] is None else int(row["version"])

    def committed(self, key: str) -> int | None:
        """The number of the version that was committed with this key, whatever became of it."""
        with self._transaction():
            rows = self._all("SELECT version FROM commits WHERE key = ?", key)
            return int(rows[0]["version"]) if rows else None

    def abort(self, key: str) -> None:
        """There shall be no commit with this key, unless there was one."""
        with self._transaction() as now:
            if not self._over(key):
                self._abort(key, now)

    def _abort(self, key: str, now: float) -> None:
        self._connection.execute("INSERT INTO aborts VALUES (?, ?)", (key, now))

    def over(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` that were committed or aborted."""
        with self._transaction():
            return [key for key in keys if self._over(key)]

    def _over(self, key: str) -> bool:
        return bool(self._all("SELECT 1 FROM commits WHERE key = ? UNION SELECT 1 FROM aborts WHERE key = ?", key, key))

    def drop(self, name: str) -> None:
        """Forget the dataset `name`, all versions. Raises DatasetNotFound."""
        with self._transaction():
            if not self._all("SELECT 1 FROM versions WHERE name = ? AND replaced IS NULL", name):
                raise DatasetNotFound(f"no dataset {name!r} is published here")
            self._remove("dropped", "it was asked for", "name = ?", name)

    def datasets(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> list[Record]:
        """The datasets whose names begin with `prefix` and that have all of `tags`, by name."""
        with self._transaction() as now:
            found = [
                row
                for row in self._all("SELECT * FROM versions WHERE replaced IS NULL ORDER BY name")
                if row["name"].startswith(prefix) and (tags or {}).items() <= json.loads(row["tags"]).items()
            ]
            return [self._record(row, now) for row in found]

    def find(self, name: str, version: int | None = None, promise: float = 0.0) -> Record:
        """The dataset `name`, or a version of it that is still there. Raises DatasetNotFound.

        `promise` is for how many seconds its tickets shall stay good at least, even if it is replaced.
        """
        with self._transaction() as now:
            if version is None:
                rows = self._all("SELECT * FROM versions WHERE name = ? AND replaced IS NULL", name)
            else:
                rows = self._all("SELECT * FROM versions WHERE name = ? AND id = ?", name, version)
            if not rows:
                which = f"no dataset {name!r}" if version is None else f"no version {version} of the dataset {name!r}"
                raise DatasetNotFound(f"{which} is published here")
            self._promise(rows[0], now, promise)
            return self._record(rows[0], now)

    def versions(self, name: str) -> list[Record]:
        """All versions of `name` that can still be read, the oldest first."""
        with self._transaction() as now:
            return [
                self._record(row, now) for row in self._all("SELECT * FROM versions WHERE name = ? ORDER BY id", name)
            ]

    def _promise(self, version: sqlite3.Row, now: float, promise: float) -> None:
        if promise and version["promised"] < now + promise:
            # Somewhat longer than was asked for, so that not every request has to write.
            until = now + 1.25 * promise
            self._connection.execute("UPDATE versions SET promised = ? WHERE id = ?", (until, version["id"]))

    def by_ticket(self, ticket: bytes, promise: float = 0.0) -> tuple[Record, Held]:
        """The version that has a part with this ticket, and that part. Raises DatasetNotFound."""
        with self._transaction() as now:
            rows = self._all(
                "SELECT versions.* FROM versions JOIN version_parts ON version = versions.id"
                " JOIN parts ON part = parts.id WHERE ticket = ? ORDER BY versions.id DESC",
                ticket,
            )
            if not rows:
                raise DatasetNotFound(
                    "no dataset has this ticket: it may have been replaced or dropped; look it up again"
                )
            self._promise(rows[0], now, promise)
            record = self._record(rows[0], now)
            return record, next(part for part in record.parts if part.ticket == ticket)

    def _record(self, row: sqlite3.Row, now: float) -> Record:
        held: dict[int, tuple[sqlite3.Row, list[Node]]] = {}
        for part in self._all(
            "SELECT number, ticket, rows, nodes.* FROM version_parts JOIN parts ON part = parts.id"
            " JOIN nodes ON node = nodes.id WHERE version = ? ORDER BY number, nodes.id",
            row["id"],
        ):
            held.setdefault(part["number"], (part, []))[1].append(_node(part, now))
        return Record(
            version=row["id"],
            name=row["name"],
            schema=row["schema"],
            rows=row["rows"],
            nbytes=row["nbytes"],
            tags=json.loads(row["tags"]),
            created=row["created"],
            expires=row["expires"],
            began=row["began"],
            current=row["replaced"] is None,
            parts=tuple(Held(part["ticket"], tuple(nodes), part["rows"]) for part, nodes in held.values()),
        )


def _node(row: sqlite3.Row, now: float) -> Node:
    return Node(
        id=row["id"],
        host=row["host"],
        boot_id=row["boot_id"],
        flight=row["flight"],
        locations=tuple(json.loads(row["locations"])),
        seen=row["seen"],
        alive=row["lives_until"] > now,
    )


def _total(numbers: Any) -> int | None:
    """Their sum; None where one of them is not known."""
    known = [*numbers]
    return None if None in known else sum(known)

"""The keys of commits, and the parts that waited for commits in vain, in one transaction of a catalog's database."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dissociated.catalog.tables import Tables
from dissociated.control.version import Part, Version
from dissociated.errors import CatalogError
from dissociated.store.keys import KEY_TTL, CommitKey


class CommitKeys:
    """The keys that were used until the time `now`, as a transaction on `tables` sees them.

    A key is that of one commit, of one dataset. A commit can have several attempts, each with parts of its own. If the
    parts of an attempt wait too long, that attempt is given up, and a later one can be made with the same key.
    """

    def __init__(self, tables: Tables, now: float) -> None:
        self._tables = tables
        self._now = now

    def find_commit(self, name: str, key: str) -> int | None:
        """Return the number of the version of `name` that was committed with this key, even if it is gone, or None.

        The number is 0 if the database has never known the version: see `remember`.

        Raises:
            CatalogError: The commit was aborted, or another dataset was committed with this key.
        """
        for row in self._tables.all("SELECT name, version FROM commits WHERE key = ?", key):
            if row["name"] != name:
                raise CatalogError(
                    f"nothing was committed to {name!r}: its key {key!r} is that of a commit of {row['name']!r}; use "
                    "another key"
                )
            return int(row["version"])
        if self.is_aborted(key):
            raise CatalogError(f"the commit of {name!r} was aborted: write its segments again, and use another key")
        return None

    def is_committed(self, version: Version) -> bool:
        """Return whether the commit of a version in a store was made, and this database has known the version."""
        sql = "SELECT 1 FROM commits WHERE key = ? AND name = ? AND version"
        return bool(self._tables.all(sql, version.key, version.name))

    def is_resolved(self, key: str) -> bool:
        """Return whether a commit with this key was made, of any dataset, or aborted."""
        return bool(self._tables.all("SELECT 1 FROM commits WHERE key = ?", key)) or self.is_aborted(key)

    def is_aborted(self, key: str) -> bool:
        """Return whether any commit with this key is forbidden."""
        return bool(self._tables.all("SELECT 1 FROM aborts WHERE key = ?", key))

    def record(self, name: str, keys: Iterable[str], version: int) -> None:
        """Record the keys of a version. Known keys stay, and those that are too old are deleted."""
        for key in keys:
            sql = "INSERT OR IGNORE INTO commits (key, name, version, at) VALUES (?, ?, ?, ?)"
            self._tables.run(sql, (key, name, version, self._now))
        for table in ("commits", "aborts", "abandoned"):
            self._tables.run(f"DELETE FROM {table} WHERE at < ?", (self._now - KEY_TTL,))

    def remember(self, key: CommitKey) -> None:
        """Record a key that was used before there was this database. A known key stays."""
        if key.name:
            sql = "INSERT OR IGNORE INTO commits (key, name, version, at) VALUES (?, ?, 0, ?)"
            self._tables.run(sql, (key.key, key.name, key.at))
        else:
            self._tables.run("INSERT OR IGNORE INTO aborts (key, at) VALUES (?, ?)", (key.key, key.at))

    def abort(self, key: str) -> None:
        """Forbid any commit with this key."""
        self._tables.run("INSERT INTO aborts (key, at) VALUES (?, ?)", (key, self._now))

    def is_abandoned(self, part: str) -> bool:
        """Return whether `abandon` was called for a part."""
        return bool(self._tables.all("SELECT 1 FROM abandoned WHERE part = ?", part))

    def abandon(self, part: str) -> None:
        """Forbid any version with this part. A later attempt of its commit has another part."""
        self._tables.run("INSERT OR IGNORE INTO abandoned (part, at) VALUES (?, ?)", (part, self._now))

    def check_new_parts(self, name: str, parts: Sequence[Part]) -> None:
        """Raise CatalogError if a part of a commit is abandoned, or known: its node may be about to delete it."""
        for part in parts:
            if self.is_abandoned(part.id):
                raise CatalogError(
                    f"the commit of {name!r} came too late: a node has waited for it, and deletes its segments; write "
                    "them again"
                )
            if self._tables.all("SELECT 1 FROM parts WHERE id = ?", part.id):
                raise CatalogError(
                    f"nothing was committed to {name!r}: the segments were committed before, so long ago that the "
                    "catalog has forgotten the key; write them again to commit them once more"
                )

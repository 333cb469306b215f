"""The keys of the commits that were made in a store or aborted, so that no restart of its node forgets them.

The manifest of a version has its keys, too, but an older version is removed, and an aborted commit has none. A node
without an upstream records its keys here. An upstream catalog has them in its own database.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dissociated.store.manifest import is_seconds
from dissociated.store.records import RecordFile

#: The number of seconds for which the key of a commit is kept.
KEY_TTL = 30 * 86_400.0
#: The most keys in the file. If there would be more, half as many are kept: the last ones.
MAX_KEYS = 100_000


@dataclass(frozen=True)
class CommitKey:
    """The key of a commit that was made or aborted.

    Attributes:
        key: The key.
        at: The time of the commit, in seconds since the epoch.
        name: The name of the dataset; empty if the commit was aborted.
    """

    key: str
    at: float
    name: str = ""

    @classmethod
    def parse(cls, plain: Any) -> CommitKey:
        """Return the key in a record. Raise KeyError, TypeError or ValueError if it is damaged."""
        key, at, name = plain["key"], plain["at"], plain["name"]
        texts = all(isinstance(text, str) and text.encode() is not None for text in (key, name))
        if not (texts and is_seconds(at)):
            raise TypeError("a value of another type")
        return cls(key, at, name)


class Keys:
    """The keys in the file `path`. Not thread-safe: the lock of the store protects it.

    Raises OSError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)
        self._records: dict[str, CommitKey] = {}  # in the order of the file: the oldest first
        self._file.read(self._parse)

    def _parse(self, plain: Any) -> None:
        record = CommitKey.parse(plain)
        self._records.pop(record.key, None)  # A key that was too old may be used again.
        self._records[record.key] = record

    def records(self) -> Sequence[CommitKey]:
        """Return the keys that are not too old."""
        oldest = time.time() - KEY_TTL
        return [record for record in self._records.values() if record.at >= oldest]

    def record(self, keys: Iterable[CommitKey], earlier: bool = False) -> None:
        """Record keys, durably, except those that are known or too old.

        Args:
            keys: The keys, in the order of their commits.
            earlier: Whether they are earlier than the keys in the file. Then they displace none of these, and only the
                last ones are recorded if there would be too many.

        Raises:
            OSError: The file cannot be written.
        """
        oldest = time.time() - KEY_TTL
        new: dict[str, CommitKey] = {}
        for record in keys:
            existing = self._records.get(record.key)
            if record.at >= oldest and (existing is None or existing.at < oldest):
                new.setdefault(record.key, record)
        if earlier:
            room = max(MAX_KEYS - self._file.lines, 0)
            new = dict([*new.items()][max(len(new) - room, 0) :])
        if not new and self._file.whole:
            return
        is_full = self._file.lines + len(new) > MAX_KEYS
        for key in new:  # A key that was too old may be used again.
            self._records.pop(key, None)
        if earlier:
            self._records = {**new, **self._records}
        else:
            self._records.update(new)
        if self._file.whole and not is_full and not earlier:
            self._file.append([asdict(record) for record in new.values()])
            return
        records = self.records()[-(MAX_KEYS // 2) if is_full else 0 :]
        self._records = {record.key: record for record in records}
        self._file.rewrite([asdict(record) for record in records])

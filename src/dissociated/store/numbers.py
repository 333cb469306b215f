"""The highest version number of each dataset in a store, or formerly in it, so that no number is assigned twice.

The manifest of a version has its number. It is recorded in the file `numbers`, too, when the version is published, and
before the last manifest of a dataset is removed. A store that spills records it in both of its directories, because the
memory may be lost while the disk stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dissociated.store.records import RecordFile

#: The name of the record that stands for all datasets without a record: see `MAX_NAMES`.
ANY_NAME = ""
#: The most datasets with records. Beyond it, the older half is merged into the record of `ANY_NAME`; the versions of a
#: new dataset then begin above the numbers in it.
MAX_NAMES = 100_000
#: Outdated lines in the file before it is rewritten, in addition to one for each dataset.
SPARE_LINES = 1_000


class Removal(NamedTuple):
    """The record of a dataset's versions that are no longer in a store.

    - `version`: the number of the last published version; 0 if none was published.
    - `lost`: whether that version was neither dropped nor replaced: it was evicted, or its memory ended with the
      process.
    - `used`: the highest number of all versions, including prepared ones that were never published.
    """

    version: int
    lost: bool
    used: int

    @classmethod
    def of(cls, version: int, lost: bool, published: bool) -> Removal:
        """Return the record of one version."""
        return cls(version, lost, version) if published else cls(0, False, version)

    def merge(self, other: Removal) -> Removal:
        """Return the combination of this record and `other`, which is the later one."""
        last = self if self.version > other.version else other
        return Removal(last.version, last.lost, max(self.used, other.used))


class Numbers:
    """The records in the file `path`, one line of JSON each. Not thread-safe: the lock of the store protects it.

    Raises OSError if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._file = RecordFile(path)
        self._records: dict[str, Removal] = {}
        #: The highest serial number of a recorded version (`Version.serial`).
        self.serial = 0
        self._file.read(self._parse)

    def _parse(self, plain: Any) -> None:
        removed = Removal(int(plain["version"]), bool(plain["lost"]), int(plain["used"]))
        self._merge(str(plain["name"]), removed, int(plain["serial"]))

    def _merge(self, name: str, removed: Removal, serial: int) -> bool:
        """Merge a record into the known one. Return whether that changes it."""
        self.serial = max(self.serial, serial)
        record = self._records.pop(name, None)
        self._records[name] = removed if record is None else record.merge(removed)  # oldest records come first
        return self._records[name] != record

    def records(self) -> Mapping[str, Removal]:
        """Return the record of each dataset. The record of `ANY_NAME` applies to all other datasets."""
        return self._records

    def record(self, name: str, removed: Removal, serial: int) -> None:
        """Record a removed version, durably. A repeated call changes nothing. Raises OSError."""
        if not self._merge(name, removed, serial) and self._file.whole:
            return
        if len(self._records) > MAX_NAMES:
            self._merge_oldest()
        if not self._file.whole or self._file.lines > 2 * len(self._records) + SPARE_LINES:
            self._rewrite()
        else:
            self._file.append([self._plain(name, self._records[name])])

    def merge(self, other: Numbers) -> None:
        """Record all records of `other`, which are the later ones, durably. Raises OSError."""
        changed = [self._merge(name, removed, other.serial) for name, removed in other.records().items()]
        if any(changed):
            while len(self._records) > MAX_NAMES:
                self._merge_oldest()
            self._rewrite()

    def _merge_oldest(self) -> None:
        """Replace the older half of the records by one record for all datasets that have none."""
        names = [name for name in self._records if name != ANY_NAME][: MAX_NAMES // 2]
        highest = max(self._records.pop(name).used for name in (*names, ANY_NAME) if name in self._records)
        self._records[ANY_NAME] = Removal.of(highest, lost=False, published=False)
        self._file.whole = False

    def _rewrite(self) -> None:
        self._file.rewrite([self._plain(*item) for item in self._records.items()])

    def _plain(self, name: str, removed: Removal) -> dict[str, object]:
        return {"name": name, **removed._asdict(), "serial": self.serial}

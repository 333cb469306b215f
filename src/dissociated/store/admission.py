"""Admission of writes to a store: they have to fit under its limit and into its file system."""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from dissociated.base.descriptors import owned
from dissociated.base.oserrors import store_errors
from dissociated.errors import StoreError, StoreFull
from dissociated.memory.region import pages
from dissociated.store.eviction import Eviction, Missing, Policy
from dissociated.store.files import PARTIAL_SUFFIX, copy_file, open_regular
from dissociated.store.layout import commit_key_of
from dissociated.store.places import Places, Usage

_log = logging.getLogger(__name__)

_MAX_PURPOSES = 1 << 10  # commits whose evictions are remembered
_MAX_TOLD = 20  # names of evicted datasets in an error
_LIMIT_TOLERANCE = 1 << 20  # bytes that a file system may allocate in addition to the requested ones
_ALL_USED = (
    "the rest is being read, is mapped by a process, or is not committed yet: wait for that, or give it a higher limit"
)
_WHEN_FULL = {
    Policy.REFUSE: "drop datasets that are not needed, or give it a higher limit, or the policy evict or spill",
    Policy.EVICT: _ALL_USED,
    Policy.SPILL: _ALL_USED,
}


class Quota:
    """The limit of a store, in bytes: admits writes under it, and evicts versions if there is no room for them.

    Not thread-safe: the lock of the store protects it.
    """

    def __init__(self, places: Places, eviction: Eviction, limit: int | None) -> None:
        self.limit = limit
        self._places = places
        self._eviction = eviction
        self._evicted: OrderedDict[str, list[str]] = OrderedDict()  # evicted datasets, by the `_purpose` of the write

    def usage(self) -> Usage:
        """Return the bytes that the store takes now."""
        return self._places.usage(self.limit)

    def reserve(self, name: str, size: int, wish: int, appends_to: str = "") -> int:
        """See `Store.reserve`."""
        path = self._places.directory.staged_path(name)
        with store_errors(f"reserving room for {path}"), owned(open_regular(path, os.O_WRONLY)) as descriptor:
            has = os.fstat(descriptor).st_blocks * 512
            size = pages(size)
            if wish > size and self._fits(wish - has) and _allocate(descriptor, wish):
                return wish
            self._grow(descriptor, name, size, size - has, appends_to)
            return size

    def ensure_room(self, name: str, size: int, appends_to: str = "") -> None:
        """See `Store.ensure_room`."""
        with store_errors(f"making room in {self._places.directory.path}"):
            self.admit(repr(name), size, size, in_files=True, appends_to=appends_to)
            if size > self._places.free():
                self._make_room(repr(name), size, in_files=True, appends_to=appends_to)
            if size > self._places.free():
                raise self._no_space(repr(name), size)

    def settle(self, names: Iterable[str]) -> None:
        """Discard the record of evictions that made room for these segments, which are now committed or discarded."""
        for name in names:
            self._evicted.pop(_commit_key(name), None)

    def copy(self, source: Path, target: Path, appends_to: str) -> None:
        """Reserve room for a segment and copy it to `target`. See `Store.reserve`."""
        part = self._places.directory.staged_path(f"{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
        try:
            part.touch(0o600)
            self.reserve(part.name, source.stat().st_size, 0, appends_to)
            copy_file(source, part)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)

    def admit(self, segment_name: str, size: int, missing: int, in_files: bool = False, appends_to: str = "") -> None:
        """Make room under the limit for a write, by evictions if necessary.

        Args:
            segment_name: The name of the write, for errors.
            size: The size of all of the write, in bytes.
            missing: The bytes of it that the store does not hold yet.
            in_files: Whether the write needs room in the file system of the store, too. The evicted versions are
                then chosen so that it fits there as well.
            appends_to: See `Store.reserve`.

        Raises:
            StoreFull: There is no room now, or none beside the rows that the write appends to.
            StoreError: The write is larger than the limit, and can never fit.
        """
        if self.limit is not None and size > self.limit:
            raise StoreError(
                f"{self._full(missing)}; the write exceeds the limit, and can never fit"
                f"{self._describe_evicted(segment_name)}"
            )
        if not self._fits(missing):
            base_size = self._eviction.base_size(appends_to) if appends_to else 0
            if self.limit is not None and size + base_size > self.limit:
                raise StoreFull(  # not StoreError, since the catalog may have dropped the dataset
                    f"{self._full(missing)}; with the {base_size:,} bytes of {appends_to!r}, to which it appends, the "
                    f"write exceeds the limit, and can never fit{self._describe_evicted(segment_name)}"
                )
            self._make_room(segment_name, missing, in_files, appends_to)
        if not self._fits(missing):
            remedy = _WHEN_FULL[self._eviction.policy]
            raise StoreFull(f"{self._full(missing)}: {remedy}{self._describe_evicted(segment_name)}")

    def check(self, name: str) -> None:
        """Raise StoreError if the store is over its limit, because a writer has not reserved its room."""
        if self.limit is not None and (total := self.usage().total) > self.limit + _LIMIT_TOLERANCE:
            raise StoreError(
                f"{name!r} was not committed: the store {str(self._places.directory.path)!r} holds {total:,} bytes, "
                f"and its limit is {self.limit:,}: drop datasets that are not needed; writers must reserve room "
                "before they write"
            )

    def _make_room(self, segment_name: str, missing: int, in_files: bool, appends_to: str) -> None:
        evicted = self._evicted.setdefault(_commit_key(segment_name), [])
        if len(self._evicted) > _MAX_PURPOSES:
            self._evicted.popitem(last=False)

        def count_missing() -> Missing:
            excess = 0 if self.limit is None else self.usage().total + missing - self.limit
            return Missing(excess, missing - self._places.free() if in_files else 0)

        self._eviction.make_room(count_missing, lambda version: evicted.append(version.name), appends_to)

    def _describe_evicted(self, segment_name: str) -> str:
        """Return the end of a StoreFull message: the datasets that were already evicted for the refused write."""
        names = self._evicted.get(_commit_key(segment_name), [])
        if not names:
            return ""
        listed = ", ".join(map(repr, names[:_MAX_TOLD])) + (", and others" if len(names) > _MAX_TOLD else "")
        _log.warning("write refused after evictions: segment=%s evicted=%s", segment_name, listed)
        plural = "" if len(names) == 1 else "s"
        return f"; evicted for the write before: {len(names):,} dataset{plural}, {listed}"

    def _fits(self, missing: int) -> bool:
        return self.limit is None or missing <= 0 or self.usage().total + missing <= self.limit

    def _grow(self, descriptor: int, name: str, size: int, missing: int, appends_to: str) -> None:
        self.admit(name, size, missing, in_files=True, appends_to=appends_to)
        if not _allocate(descriptor, size):
            self._make_room(name, missing, in_files=True, appends_to=appends_to)
            if not _allocate(descriptor, size):
                raise self._no_space(name, missing)

    def _no_space(self, name: str, missing: int) -> StoreFull:
        return StoreFull(
            f"the file system of {str(self._places.directory.path)!r} is full: the write needs {missing:,} bytes "
            f"more, and {self._places.free():,} are free: drop datasets that are not needed, enlarge the file system "
            f"(in Docker, --shm-size), or choose another directory{self._describe_evicted(name)}"
        )

    def _full(self, missing: int) -> str:
        usage = self.usage()
        return (
            f"the store {str(self._places.directory.path)!r} is full: it holds {usage.total:,} bytes of at most "
            f"{self.limit:,}, and the write needs {missing:,} more"
        )


def _commit_key(segment_name: str) -> str:
    """Return the key at the beginning of a segment's name, which all segments of one commit share."""
    return commit_key_of(segment_name) or segment_name.removesuffix(PARTIAL_SUFFIX)


def _allocate(descriptor: int, size: int) -> bool:
    """Allocate the blocks of a file, opened for writing only, up to `size` bytes. Return False if the disk is full."""
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            # The file system cannot allocate, so glibc writes a zero into each new block. It would read the others.
            end = os.fstat(descriptor).st_size
            if end < size:
                os.posix_fallocate(descriptor, end, size - end)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return False
        raise
    return True

"""A file of records, one line of JSON each, that grows by a line for each new record."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dissociated.base.descriptors import owned
from dissociated.memory.shared import write_parts
from dissociated.store.files import sync, write_atomically

_log = logging.getLogger(__name__)


class RecordFile:
    """The file `path`, which only this user can read. Records are durable when they are written. Not thread-safe.

    A file with damaged lines gets a second name, `path` with ".damaged", before it is replaced by the other records.

    Attributes:
        lines: The number of lines in the file.
        whole: Whether the next record can be appended: every line is complete and could be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines = 0
        self.whole = True

    def read(self, parse: Callable[[Any], None]) -> None:
        """Call `parse` with each record. Leave out the lines for which it raises. Raises OSError."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return
        self.whole = not content or content.endswith(b"\n")  # else the process was killed while it wrote the last line
        damaged = []
        for line in content.splitlines():
            self.lines += 1
            try:
                parse(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged.append(self.lines)
                _log.warning("unreadable line left out: path=%s line=%d", self._path, self.lines)
        if damaged and (self.whole or damaged[0] < self.lines):
            with suppress(OSError):
                os.link(self._path, self._path.with_name(f"{self._path.name}.damaged"))
        self.whole = self.whole and not damaged

    def append(self, records: Sequence[Mapping[str, object]]) -> None:
        """Add records, if the file is `whole`. Raises OSError."""
        self.whole = False  # until the last line is written
        new = not self._path.exists()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with owned(os.open(self._path, flags, 0o600)) as descriptor:
            write_parts(descriptor, [_encode(records)])
            os.fsync(descriptor)
        if new:
            sync(self._path.parent)
        self.whole = True
        self.lines += len(records)

    def rewrite(self, records: Sequence[Mapping[str, object]]) -> None:
        """Replace all records. Raises OSError."""
        self.whole = False
        write_atomically(self._path, _encode(records))
        sync(self._path.parent)
        self.whole, self.lines = True, len(records)


def _encode(records: Iterable[Mapping[str, object]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)

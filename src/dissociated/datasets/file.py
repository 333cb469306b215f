"""An Arrow IPC file or stream that is served from where it lies, as long as nobody writes to it.

One that is replaced by another of its name is served as it was. One that is written anew in its place has other bytes
where its metadata said that columns lie: nobody is given these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from dissociated.base.buffers import Buffer
from dissociated.codec.split import BatchAndMetadata
from dissociated.codec.statistics import is_statistics
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import SourceError
from dissociated.format.encapsulated import FILE_MAGIC
from dissociated.format.index import Index
from dissociated.store.segment import Segment


class FileDataset(SegmentsDataset):
    """The file at `path`. Raises StoreError where it holds no IPC stream or file, or cannot be read.

    A stream without its end-of-stream marker, which it may do without, is a SourceError: nobody could tell it from what
    a writer has left that died, or that still writes. So is one that anything but its statistics follows, as another
    stream: nobody would read that. So are several files after each other: the footer of the last would be taken for
    that of the first.
    """

    def __init__(self, name: str, path: Path) -> None:
        state = file_state(path.stat())  # before anything is read of it
        segment = Segment.open(path)
        if not segment.index.is_ended:
            raise SourceError(
                f"{path} breaks off: it has no end-of-stream marker, which a writer of Arrow adds when it is closed. "
                "Where it is whole all the same, publish a reader of it, pyarrow.ipc.open_stream(path)"
            )
        check_alone(str(path), segment.index)
        super().__init__(name, [segment])
        self._path, self._descriptor, self._published = path, segment.descriptor, state

    def check_unchanged(self) -> None:
        if file_state(os.fstat(self._descriptor)) != self._published:
            raise SourceError(
                f"{self._path} has been written to since it was published: publish it anew. To have the old one served "
                "meanwhile, write another file and rename it"
            )

    def _batches(self) -> Iterator[BatchAndMetadata]:
        self.check_unchanged()
        pairs = super()._batches()
        while True:
            try:
                pair = next(pairs, None)
            finally:
                self.check_unchanged()  # else it may fail in any way
            if pair is None:
                return
            yield pair


#: Of a file: where it lies, its size, and when it was written last.
FileState: TypeAlias = tuple[int, int, int, int]


def file_state(found: os.stat_result) -> FileState:
    """What is another if the file is another, or has been written to."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def check_alone(where: str, index: Index) -> None:
    """Raise SourceError where more follows an Arrow IPC stream or file: nobody would read that."""
    if index.is_file and re.search(FILE_MAGIC * 2, index.rest):  # the end of one, and the beginning of the next
        raise SourceError(
            f"{where} holds several Arrow IPC files after each other, where the footer of the last counts for "
            "all of it: publish each file by itself"
        )
    if not index.is_file:
        check_rest(where, index.rest)


def check_rest(where: str, rest: Buffer) -> None:
    """Raise SourceError where this follows the end-of-stream marker, and is no statistics of the stream."""
    if len(rest) and not is_statistics(rest):
        raise SourceError(
            f"{where} goes on after its end-of-stream marker, where a reader of Arrow stops: publish each stream by "
            "itself"
        )

"""Published files, which are served for as long as they are not modified.

Arrow IPC files and streams are mapped and served in place. If another file is renamed over such a file, the old file is
still served. If it is modified in place, its metadata no longer matches its bytes. Readings then fail, so that no
client receives wrong data. Files of other formats are read anew for each client, by an `unchanged_reader`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import pyarrow as pa

from dissociated.base.buffers import Buffer
from dissociated.codec.filter.statistics import is_statistics
from dissociated.datasets.static import SegmentsDataset
from dissociated.errors import SourceError
from dissociated.format.encapsulated import FILE_MAGIC
from dissociated.format.index import Index
from dissociated.store.segment import Segment, is_alone

#: The first bytes of a Parquet file, and the name of its kind.
PARQUET_MAGIC, PARQUET = b"PAR1", "a Parquet file"
_KIND_BY_MAGIC = {
    PARQUET_MAGIC: PARQUET,
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip archive",
}


def file_dataset(name: str, path: Path) -> SegmentsDataset:
    """Make a dataset of the Arrow IPC stream or file at a path, which is served in place.

    Raises:
        StoreError: The path holds no IPC stream or file, or cannot be read.
        SourceError: The file is not whole: see `check_whole`.
    """
    state = file_state(path.stat())  # taken before reading, so that later changes are noticed
    segment = Segment.open(path)
    check_whole(repr(str(path)), segment.index)
    segment.modification_check = partial(_check_unchanged, path, segment.descriptor, state)
    dataset = SegmentsDataset(name, [segment])
    dataset.check_unchanged()  # after everything was read that is kept
    return dataset


#: The device, inode, size in bytes, and modification time in nanoseconds of a file.
FileState: TypeAlias = tuple[int, int, int, int]


def _check_unchanged(path: Path, descriptor: int, published: FileState) -> None:
    if file_state(os.fstat(descriptor)) != published:
        changed = (
            "was modified after it was published: publish the file anew; to serve the old content meanwhile, write a "
            "new file and rename it"
        )
        raise SourceError.for_peer(f"{str(path)!r} {changed}", f"the file {changed}")


def file_state(status: os.stat_result) -> FileState:
    """Return a state that differs if the file was replaced or modified."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_T = TypeVar("_T")


def unchanged_reader(
    path: Path, is_unchanged: Callable[[], bool], open_reader: Callable[[], pa.RecordBatchReader]
) -> pa.RecordBatchReader:
    """Open a reader of a published file or directory that fails if this was modified before or during the reading.

    Args:
        path: The path, for errors.
        is_unchanged: Returns whether the state is that at publication. An OSError counts as a change.
        open_reader: Opens the reader.

    Raises:
        SourceError: The file was modified or deleted. Another error may only follow from that, and is its context.
    """

    def check() -> None:
        if not _is_true(is_unchanged):
            changed = "was modified after it was published: publish the file anew"
            raise SourceError.for_peer(f"{str(path)!r} {changed}", f"the file {changed}")

    def attempt(read: Callable[[], _T]) -> _T:
        try:
            result = read()
        except Exception:  # not an interrupt, which must not be replaced
            check()
            raise
        check()
        return result

    def batches() -> Iterator[pa.RecordBatch]:
        while (batch := attempt(lambda: next(reader, None))) is not None:
            yield batch

    reader = attempt(open_reader)
    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def _is_true(is_unchanged: Callable[[], bool]) -> bool:
    try:
        return is_unchanged()
    except OSError:  # a file is gone
        return False


def check_whole(where: str, index: Index) -> None:
    """Raise SourceError unless the content is one Arrow IPC stream or file, with an end.

    Arrow allows streams without an end-of-stream marker, but such a stream looks the same as one whose writer has died
    or is still writing. No reader would read data that follow a stream. If several files follow one another, the footer
    of the last would be taken for that of the first.
    """
    if not index.is_ended:
        raise SourceError(
            f"{where} has no end-of-stream marker, so it may be incomplete: write it anew; if it is complete, add the "
            r"marker (printf '\377\377\377\377\0\0\0\0' >> FILE), or publish a reader, pyarrow.ipc.open_stream(...)"
        )
    if index.is_file and not is_alone(index):
        raise SourceError(
            f"{where} holds several Arrow IPC files in a row, of which readers see the last footer only: publish each "
            "file by itself"
        )
    if not index.is_file:
        check_rest(where, index.trailing_bytes)


def check_rest(where: str, trailing_bytes: Buffer) -> None:
    """Raise SourceError if `trailing_bytes`, after the end-of-stream marker, is not the stream's statistics."""
    if len(trailing_bytes) and not is_statistics(trailing_bytes):
        raise SourceError(
            f"{where} has data after its end-of-stream marker, where Arrow readers stop: publish each stream by "
            "itself (with --append, dissociated put adds one to another)"
        )


def foreign_kind(path: Path) -> str | None:
    """Return the kind of a file by its first bytes, such as "text". Return None if it may be Arrow IPC."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        begin = file.read(64)
    for magic, kind in _KIND_BY_MAGIC.items():
        if begin.startswith(magic):
            return kind
    return "text" if begin and not begin.startswith(FILE_MAGIC) and _is_text(begin) else None


def _is_text(begin: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in begin) and begin[:1] != b"\xff"

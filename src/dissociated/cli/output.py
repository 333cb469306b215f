"""The output of the commands that read: a file, which is replaced when it is complete, or the standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from dissociated.cli.formats import FileFormat
from dissociated.cli.signals import EndingSignals
from dissociated.cli.terminal import Advance
from dissociated.codec.columns import values_size
from dissociated.codec.split import batches
from dissociated.codec.validation import Validator
from dissociated.errors import OptionError
from dissociated.store.files import NewFile

#: Seconds after a signal in which the output can be made invalid, before the process ends.
MAX_ENDING = 5.0


def is_irreplaceable(path: Path) -> bool:
    """Return whether the file at `path` must not be replaced: a device, a FIFO, or an open file (/dev/stdout)."""
    if path.exists() and not path.is_file():
        return True
    parent = path.parent.resolve()
    return path.is_symlink() and (parent == Path("/dev") or parent.is_relative_to("/proc"))


@contextmanager
def atomic_file(path: Path) -> Iterator[Any]:
    """Yield a new file that replaces `path` when it is complete.

    Until then it has no name if the file system allows, so that a killed process leaves nothing behind. It has the
    owner, the group and the permissions of the file that it replaces.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with EndingSignals() as signals:  # the file has a name before it replaces `path`, on some file systems always
        try:
            file = NewFile(part)
            if not part.exists():  # the file has no name, so an abrupt end leaves nothing behind
                signals.release()
            try:
                with pa.OSFile(f"/proc/self/fd/{file.descriptor}", "wb") as sink:
                    yield sink
                _keep_access(file.descriptor, path)
            except BaseException:
                file.abort()
                raise
            signals.catch()
            file.commit(0)
            part.replace(path)
        except FileExistsError:  # the file belongs to another process
            raise
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _keep_access(descriptor: int, path: Path) -> None:
    """Give a new file the owner, the group and the permissions of the file at `path`, if there is one.

    If this process may not change the group, or an access control list has further permissions, the permissions of the
    group are left out.
    """
    try:
        replaced = path.stat()
    except FileNotFoundError:
        os.fchmod(descriptor, 0o666 & ~_umask())
        return
    mode = replaced.st_mode & 0o777
    try:
        os.fchown(descriptor, -1, replaced.st_gid)
    except OSError:
        mode &= ~0o070
    with suppress(OSError):  # of a file system without such lists
        os.getxattr(path, "system.posix_acl_access")
        mode &= ~0o070  # they were those of any user in the list
    with suppress(OSError):  # Then the file belongs to this user, who has the data anyway.
        os.fchown(descriptor, replaced.st_uid, -1)
    os.fchmod(descriptor, mode)


def _umask() -> int:
    """Return the umask. `os.umask` would change it, for a moment and for all threads."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1], 8) for line in lines if line.startswith("Umask:"))


def write_batches(
    reader: pa.RecordBatchReader, sink: Any, file_format: FileFormat, advance: Advance = lambda more, nbytes: None
) -> tuple[int, int]:
    """Write all batches of a reader to a sink.

    After an error, the output is made invalid, so that it cannot be taken for complete. Text cannot be made invalid.

    Args:
        reader: The batches, which are validated.
        sink: A binary file.
        file_format: The format.
        advance: Called with the rows and bytes of each batch.

    Returns:
        The number of rows and of bytes.
    """
    rows = nbytes = 0
    validator = Validator(reader.schema)
    with file_format.open(sink, reader.schema, file_format.choose) as writer:
        for batch, metadata in batches(reader):
            if file_format.is_ipc:
                writer.write_batch(validator.check(batch), custom_metadata=metadata)
            else:
                validator.check_values(batch)
                writer.write_batch(batch)
            size = values_size(batch)
            advance(batch.num_rows, size)
            rows, nbytes = rows + batch.num_rows, nbytes + size
    return rows, nbytes


def stream_batches(
    reader: pa.RecordBatchReader, sink: Any, file_format: FileFormat, advance: Advance = lambda more, nbytes: None
) -> tuple[int, int]:
    """Write all batches to a sink that another process may be reading: see `write_batches`.

    The output is made invalid after a signal that ends this process, too, unless the other process does not read it.
    """
    if file_format.is_text:
        return write_batches(reader, sink, file_format, advance)
    with EndingSignals(MAX_ENDING) as signals:

        def advance_unless_ended(more: int, nbytes: int) -> None:
            advance(more, nbytes)
            signals.check()

        return write_batches(reader, sink, file_format, advance_unless_ended)


def write_stdout(
    reader: pa.RecordBatchReader, file_format: FileFormat, advance: Advance = lambda more, nbytes: None
) -> tuple[int, int]:
    """Write all batches to the standard output: see `stream_batches`.

    Raises OptionError if the format is no text, and the standard output is a terminal.
    """
    if not file_format.is_text and sys.stdout.isatty():
        raise OptionError("this format is binary, and the standard output is a terminal: redirect it into a file")
    return stream_batches(reader, sys.stdout.buffer, file_format, advance)

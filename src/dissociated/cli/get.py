"""dissociated get: copy a dataset into a file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from dissociated.cli import formats, reading, text
from dissociated.cli.ending import EndingSignals
from dissociated.cli.formats import FILE_FORMATS
from dissociated.cli.progress import progress
from dissociated.errors import OptionError
from dissociated.store.files import NewFile

DESCRIPTION = """\
Copy a dataset into a file, in the format that --format or the file's ending says:

  arrow    .arrow .feather  Arrow IPC file
  arrows   .arrows          Arrow IPC stream
  parquet  .parquet         Parquet
  csv      .csv             CSV
  jsonl    .jsonl .ndjson   JSON, an object a line

The file appears when it is whole; a device or a FIFO is written to as it is. "-" writes to the standard output, an
Arrow IPC stream if --format says nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `get`."""
    reading.add_arguments(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help='where to write, "-" for standard output')
    reading.add_rows_argument(parser)
    reading.add_format_argument(
        parser, [name for name in FILE_FORMATS if name != "table"], "what the ending of FILE says"
    )


def run(arguments: argparse.Namespace) -> None:
    """Copy, and say on stderr what was copied how fast."""
    path = None if arguments.output == "-" else Path(arguments.output)
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"there is no directory {path.parent}")
    if path is not None and path.is_dir():
        raise OptionError(f"{path} is a directory: give a file in it")
    if arguments.format:
        written = FILE_FORMATS[arguments.format]
    else:
        written = FILE_FORMATS["arrows"] if path is None else formats.of_file(path)
    started = time.perf_counter()
    with reading.opened(arguments, arguments.rows) as found, progress(found.info.name, found.rows) as advance:
        if path is None:
            rows, nbytes = reading.to_stdout(found.reader, written, advance)
        elif _stays(path):
            with path.open("ab") as sink:
                rows, nbytes = reading.write_away(found.reader, sink, written, advance)
        else:
            with _atomic_file(Path(os.path.realpath(path))) as sink:
                rows, nbytes = reading.write_batches(found.reader, sink, written, advance)
    seconds = time.perf_counter() - started
    rate = text.size(nbytes / seconds)
    print(
        f"{found.info.name}: {text.plural(rows, 'row')}, {text.size(nbytes)} in {seconds:.2f} s, {rate}/s",
        file=sys.stderr,
    )


def _stays(path: Path) -> bool:
    """Whether what is there is not to be replaced: a device, a FIFO, what this process has open (/dev/stdout)."""
    if path.exists() and not path.is_file():
        return True
    parent = path.parent.resolve()
    return path.is_symlink() and (parent == Path("/dev") or parent.is_relative_to("/proc"))


@contextmanager
def _atomic_file(path: Path) -> Iterator[Any]:
    """A file for `path`, which it replaces when it is whole. Before, it has no name: who is killed leaves nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with EndingSignals() as signals:  # for a moment, or always, it does have a name
        try:
            file = NewFile(part)
            if not part.exists():  # it ends with the process, which may then be ended at once
                signals.release()
            try:
                os.fchmod(file.descriptor, 0o666 & ~_umask())
                with pa.OSFile(f"/proc/self/fd/{file.descriptor}", "wb") as sink:
                    yield sink
            except BaseException:
                file.abort()
                raise
            signals.catch()
            file.commit(0)
            part.replace(path)
        except FileExistsError:  # it is another's
            raise
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

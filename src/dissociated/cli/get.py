"""dissociated get: copy a dataset into a file."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from dissociated.cli import access, text
from dissociated.codec.split import Validator, batches
from dissociated.errors import DissociatedError, UriError
from dissociated.store.files import NewFile

SUMMARY = "copy a dataset into a file"
DESCRIPTION = """\
Copy a dataset into a file, whose ending says the format:
  .arrow, .feather  Arrow IPC file
  .arrows           Arrow IPC stream
  .parquet          Parquet
  .csv              CSV
The file appears when it is whole. "-" writes an Arrow IPC stream to the standard output."""

#: Opens a file for batches of a schema.
_Open: TypeAlias = Callable[[Any, pa.Schema], AbstractContextManager[Any]]


def _parquet(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    import pyarrow.parquet

    writer: AbstractContextManager[Any] = pyarrow.parquet.ParquetWriter(sink, schema)
    return writer


def _csv(sink: Any, schema: pa.Schema) -> AbstractContextManager[Any]:
    import pyarrow.csv

    writer: AbstractContextManager[Any] = pyarrow.csv.CSVWriter(sink, schema)
    return writer


_FORMATS: dict[str, _Open] = {
    ".arrow": pa.ipc.new_file,
    ".feather": pa.ipc.new_file,
    ".arrows": pa.ipc.new_stream,
    ".parquet": _parquet,
    ".csv": _csv,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `get`."""
    parser.add_argument("uri", metavar="URI/NAME", help="grpc://HOST:PORT/NAME")
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help='where to write, "-" for standard output')
    parser.add_argument("--columns", metavar="A,B,…", help="only these columns")
    parser.add_argument("--transport", metavar="SCHEME", help="shm, tcp, tls or grpc (default: the nearest that works)")
    access.add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Copy, and say on stderr what was copied how fast."""
    catalog, name = text.split_name(arguments.uri)
    if not name:
        raise UriError(f"{arguments.uri} names no dataset: grpc://HOST:PORT/NAME; dissociated ls {catalog} lists them")
    open_format = pa.ipc.new_stream if arguments.output == "-" else _FORMATS.get(Path(arguments.output).suffix)
    if not Path(arguments.output).parent.is_dir():
        raise DissociatedError(f"there is no directory {Path(arguments.output).parent}")
    if open_format is None:
        raise DissociatedError(f"{arguments.output} has none of the endings {', '.join(_FORMATS)}")
    columns = arguments.columns.split(",") if arguments.columns else None
    started = time.perf_counter()
    with access.client(catalog, arguments) as client:
        rows, nbytes = _copy(client.read(name, arguments.transport, columns), arguments.output, open_format)
    seconds = time.perf_counter() - started
    rate = text.size(nbytes / seconds)
    print(f"{name}: {rows:,} rows, {text.size(nbytes)} in {seconds:.2f} s, {rate}/s", file=sys.stderr)


def _copy(reader: pa.RecordBatchReader, output: str, open_format: _Open) -> tuple[int, int]:
    rows = nbytes = 0
    validator = Validator(reader.schema)
    is_ipc = open_format in (pa.ipc.new_file, pa.ipc.new_stream)
    with ExitStack() as stack:
        sink = sys.stdout.buffer if output == "-" else stack.enter_context(_atomic_file(Path(output)))
        with open_format(sink, reader.schema) as writer:
            for batch, metadata in batches(reader):
                (validator.check if is_ipc else validator.check_values)(batch)
                writer.write_batch(batch, **({"custom_metadata": metadata} if is_ipc else {}))
                rows += batch.num_rows
                nbytes += batch.get_total_buffer_size()  # nbytes crashes on an empty sparse union
    return rows, nbytes


@contextmanager
def _atomic_file(path: Path) -> Iterator[Any]:
    """A file for `path`, which it replaces when it is whole. Before, it has no name: who is killed leaves nothing."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    file = NewFile(part)
    if part.exists():  # this file system knows no files without a name
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        os.fchmod(file.descriptor, 0o666 & ~_umask())
        with pa.OSFile(f"/proc/self/fd/{file.descriptor}", "wb") as sink:
            yield sink
    except BaseException:
        file.abort()
        raise
    file.commit(0)
    part.replace(path)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""Benchmarks of `dissociated.ipc` and of the index, compared with pyarrow.ipc, and of the memory to serve a file.

The data are batches of 10 columns with 1 MB and with 100 kB, and batches of 4 columns with 1,000 rows, in tmpfs and in
memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import dissociated as dis
from benchmarks.rounds import medians
from dissociated import ipc
from dissociated.cli import text
from dissociated.format.index import Index

#: Goals: the batches, a measurement, the measurement that it is compared with, and the largest ratio of their times.
GOALS = [
    ("1 MB", "decode a file: StreamDecoder", "decode a file: pa.ipc.open_stream", 1.2),
    ("1 MB", "decode memory: StreamDecoder", "decode memory: pa.ipc.open_stream", 1.2),
    ("1,000 rows", "index of the file", "read a file: pa.ipc.open_file", 0.1),
    ("100 kB", "index of the file", "read a file: pa.ipc.open_file", 0.1),
]


class _Nothing(ipc.Listener):
    """A listener that drops all batches."""

    def on_record_batch_decoded(self, batch: pa.RecordBatch) -> None: ...


class Case:
    """Batches of one shape, and a stream and a file of them in a directory."""

    def __init__(self, name: str, directory: Path, columns: int, rows: int, batches: int) -> None:
        self.name = name
        random = np.random.default_rng(1)
        self.batches = [
            pa.record_batch({f"c{column}": random.random(rows) for column in range(columns)})
            for _ in range(min(batches, 64))
        ]
        self.schema = self.batches[0].schema
        self.count = batches
        self.stream, self.file, self.out = (directory / f"{name}.{ending}" for ending in ("arrows", "arrow", "out"))
        for path, opened in ((self.stream, pa.ipc.new_stream), (self.file, pa.ipc.new_file)):
            with opened(path, self.schema) as writer:
                self.write(writer)
        self.nbytes = batches * columns * rows * 8

    def write(self, writer: Any) -> None:
        for number in range(self.count):
            writer.write_batch(self.batches[number % len(self.batches)])


def run(gigabytes: float, rounds: int) -> None:
    """Measure, and print the tables."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        cases = [
            Case("1 MB", Path(directory), 10, 13_107, round(500 * gigabytes)),
            Case("1,000 rows", Path(directory), 4, 1_000, round(10_000 * gigabytes)),
            Case("100 kB", Path(directory), 10, 1_280, round(10_000 * gigabytes)),
        ]
        took = {case.name: medians(_calls(case), rounds) for case in cases}
        growth = [(scheme, _growth(cases[0], scheme)) for scheme in ("shm", "tcp")]
    rows = [
        (
            case.name,
            what,
            f"{seconds * 1e3:.2f}",
            f"{case.nbytes / seconds / 1e9:.2f}",
            f"{seconds / case.count * 1e6:.2f}",
        )
        for case in cases
        for what, seconds in took[case.name].items()
    ]
    print(f"median of {rounds} rounds; {', '.join(f'{c.name}: {c.count:,} batches' for c in cases)}\n")
    print(text.table(("BATCHES OF", "WHAT", "MS", "GB/S", "US/BATCH"), rows, right=(2, 3, 4)))
    print()
    reached = []
    for name, ours, theirs, goal in GOALS:
        ratio = took[name][ours] / took[name][theirs]
        reached.append(
            (f"{ours} against {theirs}, {name}", f"{ratio:.2f}x", f"{goal:g}x", "" if ratio <= goal else "missed")
        )
    print(text.table(("TIME OF", "MEASURED", "GOAL", ""), reached, right=(1, 2)))
    for scheme, grown in growth:
        print(f"\nserving a file of {text.size(cases[0].nbytes)} over {scheme} took {text.size(grown)} of memory")


def _growth(case: Case, scheme: str) -> int:
    """Return the growth, in bytes, of a server's resident memory while a file is read from it. Mapped pages count."""
    command = [sys.executable, "-m", "dissociated", "serve", str(case.file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        catalog = next(line.split()[1] for line in process.stdout if line.startswith("catalog"))
        with dis.connect(catalog) as client:
            client.read(case.file.stem, transport=scheme).read_next_batch()
            before = resident(process.pid)
            client.read(case.file.stem, transport=scheme).read_all()
            grown = resident(process.pid) - before
        process.terminate()
        return max(0, grown)


def resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def _calls(case: Case) -> dict[str, Callable[[], Any]]:
    content = pa.py_buffer(case.stream.read_bytes())

    def decode() -> None:
        decoder = ipc.StreamDecoder(_Nothing())
        decoder.consume(content)

    def decode_by_libarrow() -> None:
        for _ in pa.ipc.open_stream(content):
            pass

    def decode_from_file() -> None:
        decoder = ipc.StreamDecoder(_Nothing())
        with pa.OSFile(str(case.stream)) as source:
            while size := decoder.next_required_size:
                decoder.consume(source.read_buffer(size))

    def decode_from_file_by_libarrow() -> None:
        with pa.OSFile(str(case.stream)) as source:
            for _ in pa.ipc.open_stream(source):
                pass

    def read_file() -> Any:
        with pa.OSFile(str(case.file)) as source:
            return pa.ipc.open_file(source).read_all()

    return {
        "decode a file: StreamDecoder": decode_from_file,
        "decode a file: pa.ipc.open_stream": decode_from_file_by_libarrow,
        "decode memory: StreamDecoder": decode,
        "decode memory: pa.ipc.open_stream": decode_by_libarrow,
        "encode: StreamWriter": lambda: _write(ipc.StreamWriter, case),
        "encode: pa.ipc.new_stream": lambda: _write(pa.ipc.new_stream, case),
        "encode a file: FileWriter": lambda: _write(ipc.FileWriter, case),
        "encode a file: pa.ipc.new_file": lambda: _write(pa.ipc.new_file, case),
        "read a file: open_file, mapped": lambda: ipc.open_file(case.file).to_table(),
        "read a file: pa.ipc.open_file": read_file,
        "index of the file": lambda: Index(_mapped(case.file)),
        "index of the stream": lambda: Index(_mapped(case.stream)),
    }


def _write(opened: Callable[[Any, pa.Schema], Any], case: Case) -> None:
    with opened(str(case.out), case.schema) as writer:
        case.write(writer)


def _mapped(path: Path) -> pa.Buffer:
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()

"""Helpers for tests of stores and nodes: writers, readers, and a check that everything is released."""

from __future__ import annotations

import os
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pyarrow as pa

import dissociated as dis
from dissociated.errors import DatasetNotFound
from support.helpers import Child, rest_of, wait_until
from support.machine import UNSHARED
from support.processes import Fork, Process

SCHEMA = pa.schema([("n", pa.int64())])
MIB = 1 << 20

T = TypeVar("T")


@contextmanager
def file_system(root: Path, kind: str, options: str) -> Iterator[int]:
    """Mount a private file system at `root`, and yield the id of a process that sees it: see `Fork`."""
    script = f'mount -t {kind} -o {options} {kind} "$0" && echo mounted && read line'
    command = [*UNSHARED, "sh", "-c", script, str(root)]
    with Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        yield process.pid
        process.stdin.close()


def small_file_system(root: Path) -> AbstractContextManager[int]:
    """Mount a private tmpfs of 8 MiB at `root`. Docker's /dev/shm has 64 MiB."""
    return file_system(root, "tmpfs", "size=8m,mode=700")


def table(*numbers: int) -> pa.Table:
    return pa.table({"n": pa.array(numbers, pa.int64())})


def put(uri: str, name: str, data: pa.Table, **options: object) -> None:
    with dis.connect(uri) as client:
        client.put(name, data.to_reader(), **options)  # type: ignore[arg-type]


def read(uri: str, name: str, transport: str | None = None) -> list[int]:
    with dis.connect(uri) as client:
        numbers: list[int] = client.read(name, transport=transport).read_all()["n"].to_pylist()
    return numbers


def until_expired(client: dis.Client, name: str, read: Callable[[], T]) -> Iterator[T]:
    """Yield the results of `read`, again and again until the dataset is gone. No read after its expiry may succeed."""
    expires = client.describe(name).expires
    assert expires is not None
    with suppress(DatasetNotFound):
        while True:
            now = time.time()
            result = read()
            assert now < expires
            yield result


def segments(store: Path) -> list[str]:
    walked = os.walk(store)  # Unlike Path.rglob, os.walk tolerates renames.
    found = [os.path.join(parent, name) for parent, _, names in walked for name in names if name.endswith(".arrows")]
    return sorted(os.path.relpath(path, store) for path in found)


def staged(store: Path) -> list[str]:
    return sorted(os.listdir(store / "staging"))


def nothing_is_left_of(node: Process, store: Path) -> None:
    """Drop all datasets of a node, and wait until their files, descriptors, mappings and leases are gone."""
    with dis.connect(node.uri) as client:
        for info in client.list():
            client.drop(info.name)
    wait_until(lambda: node.leases() == 0, "nobody holds anything")
    wait_until(lambda: segments(store / "segments") == [], "no files are left")
    wait_until(lambda: not node.open_files(store / "segments"), "nothing is open or mapped")


READER = """
import sys, dissociated as dis
with dis.connect(sys.argv[1]) as client:
    reader = client.read(sys.argv[2], transport="shm")
    held = [reader.read_next_batch()]
    print("reached", flush=True)
    sys.stdin.readline()
    held += reader
    print(sum(batch.num_rows for batch in held), held[-1]["n"][-1], flush=True)
"""

WRITER = """
import sys, pyarrow as pa, dissociated as dis
from dissociated.store.segment import SegmentWriter
with dis.connect(sys.argv[1]) as client:
    place = client.stage()
    writer = SegmentWriter(place.directory + "/w", pa.schema([("n", pa.int64())]), reserve=client.reserve)
    writer.write(pa.record_batch({"n": pa.array([5], pa.int64())}))
    if sys.argv[2] == "whole":
        writer.close()
    print("reached", flush=True)
    sys.stdin.readline()
"""


def spawn(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start a process, and wait until it prints "reached". The test must use the fixture `forks`."""
    process = Fork("-c", textwrap.dedent(script), *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "reached\n"
    return process


def kill(process: subprocess.Popen[str]) -> str:
    """Kill a process, and return its remaining output."""
    process.kill()
    return rest_of(process)

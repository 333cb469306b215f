"""Benchmarks of very many small datasets: the cost of a commit by the number of datasets, and of other calls.

A writer in this process commits datasets of one row under new names, to a node that keeps files, to a node that keeps
memfds, and to a node with an upstream catalog. For each block of commits, the elapsed time and the processor time of
the node and of the catalog are printed. Then all datasets are listed, and some are described, read, replaced and
dropped. At last, the node is restarted; a node with an upstream then reports all of its datasets to it.

With `--filled`, the store is filled with datasets beforehand, and only the commits on top of these are measured.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

import dissociated as dis
from dissociated.client.client import Client
from dissociated.client.request import TIMEOUT
from dissociated.control.commit import StagedSegment
from dissociated.memory.shared import Backing, create_memfd, seal
from dissociated.store.handover import hand_over
from dissociated.store.manifest import MANIFEST
from dissociated.store.store import Store

KINDS = ("files", "memfds", "upstream")
_BLOCKS = 20
_TABLE = pa.table({"n": [1]})
_BEAT = 1.0  # seconds
_CALLS = 1000  # number of calls of each kind after all commits
_MORE = 2000  # number of commits to a node whose store was filled beforehand
_PATIENCE = 600.0  # seconds, the timeout of every call
_SPARE = 256  # descriptors that a node needs besides those of its memfds
_TICKS = os.sysconf("SC_CLK_TCK")


class _Process:
    """A process of a node or a catalog, which ends with its `with` block."""

    def __init__(self, *command: str) -> None:
        arguments = [sys.executable, "-m", "dissociated", *command, "--log-level", "error"]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.uri = next(line.split()[1] for line in self._process.stdout if line.startswith("catalog"))

    @property
    def cpu(self) -> float:
        """The processor time that the process has used, in seconds."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def run(datasets: int, kinds: Sequence[str], filled: bool) -> None:
    """Measure each kind of node, and print the tables."""
    for kind in kinds:
        if kind == "memfds":
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            if datasets > most - _SPARE:
                print(f"a process may have {most:,} descriptors here, and each memfd is one: so many memfds\n")
            _measure(kind, min(datasets, most - _SPARE), False)
        else:
            _measure(kind, datasets, filled)


def _measure(kind: str, datasets: int, filled: bool) -> None:
    print(f"{kind}: {datasets:,} datasets of one row\n", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as running:
        node = ["node", "--store", f"{directory}/store", "--listen", "shm:", "--heartbeat", str(_BEAT)]
        processes = []
        if kind == "upstream":
            command = ("catalog", "--db", f"{directory}/catalog.db", "--listen", "grpc://127.0.0.1:0")
            processes.append(running.enter_context(_Process(*command)))
            node += ["--catalog", processes[0].uri]
        if filled:
            _fill(Path(f"{directory}/store"), datasets)
        started = time.perf_counter()
        with _Process(*node) as served:
            _print("start", time.perf_counter() - started, sum(process.cpu for process in (served, *processes)))
            numbers = range(datasets, datasets + _MORE) if filled else range(datasets)
            _commits(kind, [served, *processes], numbers)
            _calls([served, *processes], datasets)
        if kind != "memfds":
            started = time.perf_counter()
            with _Process(*node) as served:
                _print("start again", time.perf_counter() - started, served.cpu)
    print(flush=True)


def _fill(directory: Path, datasets: int) -> None:
    """Fill a store with datasets that are all hard links of one file, without committing each of them."""
    with Store(directory) as store:
        with store.writer("one", _TABLE.schema) as writer:
            writer.write_batch(_TABLE.to_batches()[0])
        first = store.commit(dis.Commit("one", [StagedSegment("one")], key="one"))
        (segment,) = store.directory.glob("segments/*/*.arrows")
        plain = json.loads((segment.parent / MANIFEST).read_text())
        for number in range(datasets):
            id = f"{first.number - datasets + number:014}-{number:012x}"
            ticket = base64.b64encode(f"{number:016}".encode()).decode()
            about = {"id": id, "number": first.number - datasets + number, "name": _name(number), "key": id}
            version = segment.parent.parent / id
            version.mkdir()
            (version / segment.name).hardlink_to(segment)
            (version / MANIFEST).write_text(json.dumps({**plain, **about, "ticket": ticket}))


def _name(number: int) -> str:
    return f"d{number:08}"


def _commits(kind: str, processes: Sequence[_Process], numbers: range) -> None:
    heads = ("DATASETS", "MS/COMMIT", "NODE CPU MS", *(["CATALOG CPU MS"] if len(processes) > 1 else []))
    print("  ".join(heads))
    block = max(1, len(numbers) // _BLOCKS)
    with dis.connect(processes[0].uri) as client:
        put = _handed_over(client) if kind == "memfds" else lambda name: client.put(name, _TABLE)
        for first in range(0, len(numbers), block):
            some = numbers[first : first + block]
            before, started = [process.cpu for process in processes], time.perf_counter()
            for number in some:
                put(_name(number))
            took = time.perf_counter() - started
            cpu = [process.cpu - was for process, was in zip(processes, before, strict=True)]
            row = (f"{some.stop:,}", *(f"{seconds / len(some) * 1e3:.2f}" for seconds in (took, *cpu)))
            print("  ".join(cell.rjust(len(head)) for cell, head in zip(row, heads, strict=True)), flush=True)


def _handed_over(client: Client) -> Callable[[str], object]:
    """Return a function that puts a dataset by handing its memory over to the node."""
    place = client.stage()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _TABLE.schema) as writer:
        writer.write_table(_TABLE)
    content = sink.getvalue()

    def put(name: str) -> None:
        descriptor = create_memfd("many")
        try:
            os.write(descriptor, content)
            seal(descriptor, Backing.SEALED)
            segment = hand_over(place.handover, descriptor, TIMEOUT)
        finally:
            os.close(descriptor)
        client.commit(dis.Commit(name, [StagedSegment(segment, place.node)], _TABLE.schema))

    return put


def _calls(processes: Sequence[_Process], datasets: int) -> None:
    names = [_name(number) for number in range(0, datasets, max(1, datasets // _CALLS))]
    with dis.connect(processes[0].uri, timeout=_PATIENCE) as client:

        def quiet() -> None:
            time.sleep(10 * _BEAT)

        def each(call: Callable[[str], object]) -> Callable[[], object]:
            return lambda: [call(name) for name in names]

        calls: dict[str, tuple[Callable[[], object], int]] = {
            "nothing for 10 s": (quiet, 1),
            "list all": (client.list, 1),
            "describe one": (each(client.describe), len(names)),
            "read one": (each(lambda name: client.read(name, transport="shm").read_all()), len(names)),
            "replace one": (each(lambda name: client.put(name, _TABLE)), len(names)),
            "drop one": (each(client.drop), len(names)),
        }
        print()
        for what, (call, times) in calls.items():
            before, started = sum(process.cpu for process in processes), time.perf_counter()
            call()
            took = time.perf_counter() - started
            _print(what, took / times, (sum(process.cpu for process in processes) - before) / times)


def _print(what: str, seconds: float, cpu: float) -> None:
    print(f"{what:20}{seconds * 1e3:>12,.2f} ms, processor {cpu * 1e3:,.2f} ms", flush=True)

"""Commands that fail or are killed: they leave nothing behind that looks like complete output."""

from __future__ import annotations

import fcntl
import io
import os
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet
import pytest

import dissociated as dis
from dissociated.base.buffers import Buffer
from dissociated.cli.formats import FILE_FORMATS
from dissociated.cli.output import stream_batches
from dissociated.cli.serving import stop_with_starter
from dissociated.cli.signals import StopSignal
from dissociated.node.launch import running
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.arrow_cases import corrupt_parquet
from support.helpers import PATIENCE, wait_until
from support.processes import Fork

pytestmark = pytest.mark.usefixtures("forks")

BATCH = pa.record_batch({"n": pa.array(range(1000), pa.int64())})
# Larger than the buffer of a writer to a pipe.
LARGE_BATCH = pa.record_batch({"n": pa.array(range(1 << 16), pa.int64())})

#: The `dissociated` command, also on file systems without unnamed files, with `nohup`, with PYTHONUNBUFFERED, and with
#: little time to end.
COMMAND = """
import io, os, signal, sys
from dissociated.cli import main, output

if "HASTY" in os.environ:
    output.MAX_ENDING = 0.2
if "NOHUP" in os.environ:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
if "NAMED" in os.environ:
    os.O_TMPFILE = os.O_DIRECTORY  # so that open says EISDIR, as there
if "UNBUFFERED" in os.environ:
    sys.stdout = io.TextIOWrapper(open(1, "wb", buffering=0, closefd=False), write_through=True)
raise SystemExit(main())
"""


def command(
    *arguments: str | Path,
    named: bool = False,
    nohup: bool = False,
    unbuffered: bool = False,
    hasty: bool = False,
    **streams: int,
) -> subprocess.Popen[str]:
    switches = {"NAMED": named, "NOHUP": nohup, "UNBUFFERED": unbuffered, "HASTY": hasty}
    chosen = {name: "1" for name, wanted in switches.items() if wanted}
    return Fork("-c", COMMAND, *arguments, **streams, stderr=subprocess.PIPE, env={**os.environ, **chosen})


def output(process: subprocess.Popen[str]) -> IO[bytes]:
    """Return the output of a process as a binary stream."""
    assert isinstance(process.stdout, io.TextIOWrapper)
    return process.stdout.buffer


def ended(process: subprocess.Popen[str]) -> str:
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode
    return said


@pytest.mark.parametrize("named", [False, True], ids=["nameless", "named"])
def test_get_that_is_killed_leaves_what_was_there(tmp_path: Path, named: bool) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        yield BATCH
        asked.set()
        go_on.wait(PATIENCE)
        yield BATCH

    output = tmp_path / "out.arrow"
    output.write_text("old")
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("slow", lambda: pa.RecordBatchReader.from_batches(BATCH.schema, slow()))
        for number in (signal.SIGTERM, signal.SIGHUP) if named else (signal.SIGTERM, signal.SIGKILL):
            asked.clear()
            with command("get", f"{server.catalog_uri}/slow", "-o", output, named=named) as process:
                assert asked.wait(PATIENCE)
                if named:
                    wait_until(lambda: len(os.listdir(tmp_path)) == 2, "it has made its file")
                process.send_signal(number)
                ended(process)
            assert os.listdir(tmp_path) == ["out.arrow"]
            assert output.read_text() == "old"
        go_on.set()
        with command("get", f"{server.catalog_uri}/slow", "-o", output, named=named) as process:
            process.communicate(timeout=PATIENCE)
        assert pa.ipc.open_file(output).read_all() == pa.Table.from_batches([BATCH] * 2)
        assert os.listdir(tmp_path) == ["out.arrow"]
        mask = os.umask(0)
        os.umask(mask)
        assert output.stat().st_mode & 0o777 == 0o666 & ~mask


def first_of_stream() -> bytes:
    """Return a stream with one batch and without its end."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, LARGE_BATCH.schema) as writer:
        writer.write_batch(LARGE_BATCH)
    return sink.getvalue()[:-8]  # without the end-of-stream marker


def test_what_a_killed_command_wrote_to_a_pipe_is_no_whole_stream() -> None:
    go_on = threading.Event()

    def slow() -> Iterator[pa.RecordBatch]:
        yield LARGE_BATCH
        go_on.wait(PATIENCE)
        yield LARGE_BATCH

    first = first_of_stream()
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("slow", lambda: pa.RecordBatchReader.from_batches(LARGE_BATCH.schema, slow()))
        client.put("copy", pa.table({"n": [7]}))
        get = ("get", f"{server.catalog_uri}/slow", "-o", "-")
        cat = ("cat", f"{server.catalog_uri}/slow", "--format", "arrows")
        for arguments, number in ((get, signal.SIGTERM), (cat, signal.SIGHUP), (get, signal.SIGKILL)):
            with command(*arguments, stdout=subprocess.PIPE) as process:
                written = output(process).read(len(first))
                assert written == first
                process.send_signal(number)
                written += output(process).read()
                ended(process)
            if number == signal.SIGKILL:  # a process cannot report SIGKILL
                assert written == first
            else:
                with pytest.raises(OSError, match="Invalid IPC message"):
                    pa.ipc.open_stream(written).read_all()
            with command("put", "-", f"{server.catalog_uri}/copy", stdin=subprocess.PIPE) as put:
                assert isinstance(put.stdin, io.TextIOWrapper)
                put.stdin.buffer.write(written)
                assert ended(put)
            assert client.read("copy").read_all() == pa.table({"n": [7]})
        with command(*get, nohup=True, stdout=subprocess.PIPE) as process:
            written = output(process).read(len(first))
            process.send_signal(signal.SIGHUP)
            go_on.set()
            written += output(process).read()
            assert process.wait(PATIENCE) == 0
        assert pa.ipc.open_stream(written).read_all() == pa.Table.from_batches([LARGE_BATCH] * 2)


@pytest.mark.parametrize("kind", ["arrows", "jsonl", "table"])
def test_a_command_without_a_buffer_that_is_stopped_meanwhile_goes_on(kind: str) -> None:
    """The system then reports a short write. In containers, Python often runs unbuffered."""
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("data", pa.table({"n": pa.array(["x" * (1 << 20)] * 2)}))
        arguments = ("cat", f"{server.catalog_uri}/data", "--format", kind)
        read: list[bytes] = []
        for stopped in (False, True):
            with command(*arguments, unbuffered=True, stdout=subprocess.PIPE) as process:
                content = output(process).read(1)
                if stopped:
                    wait_until(partial(is_full, process), "the pipe is full")
                    process.send_signal(signal.SIGSTOP)
                    wait_until(lambda: state(process) == "T", "it is stopped")
                    process.send_signal(signal.SIGCONT)
                content += output(process).read()
                assert process.wait(PATIENCE) == 0
            read.append(content)
    assert read[0] == read[1]


def test_an_interrupted_output_is_the_beginning_of_the_complete_one() -> None:
    """The signal comes while a buffer is written, of which the pipe takes a part."""
    batches = [pa.record_batch({"n": pa.array(range(first, first + 100))}) for first in range(0, 40_000, 100)]
    complete = b'"n"\n' + b"".join(b"%d\n" % number for number in range(40_000))
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("data", pa.Table.from_batches(batches))
        for unbuffered in (False, True):
            arguments = ("cat", f"{server.catalog_uri}/data", "--format", "csv")
            with command(*arguments, unbuffered=unbuffered, stdout=subprocess.PIPE) as process:
                wait_until(partial(is_full, process), "the pipe is full")
                content = os.read(output(process).fileno(), 5_000)
                process.send_signal(signal.SIGINT)
                content += output(process).read()
                ended(process)
            assert len(content) < len(complete)
            assert complete.startswith(content)


def test_a_command_whose_output_is_not_read_can_be_ended() -> None:
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("data", pa.table({"n": range(1 << 16)}))
        for arguments in (("get", "-o", "-"), ("cat", "-f", "parquet")):
            with command(*arguments, f"{server.catalog_uri}/data", hasty=True, stdout=subprocess.PIPE) as process:
                wait_until(partial(is_full, process), "the pipe is full")
                process.send_signal(signal.SIGTERM)
                try:
                    assert process.wait(PATIENCE) == 128 + signal.SIGTERM
                finally:
                    process.kill()


def state(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]


def is_full(process: subprocess.Popen[str]) -> bool:
    """Return whether the pipe is full. It has 16 pages, some of which may be cut."""
    return int.from_bytes(fcntl.ioctl(output(process), termios.FIONREAD, bytes(4)), sys.byteorder) > 14 * 4096


class Pipe(io.RawIOBase):
    """A pipe that takes a page at a time, and signals this process before some of the pages."""

    def __init__(self, signals: dict[int, int]) -> None:
        self._signals = signals
        self._count = 0
        self.taken = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        self._count += 1
        if self._count in self._signals:
            signal.raise_signal(self._signals.pop(self._count))
        page = bytes(memoryview(data)[:4096])
        self.taken += page
        return len(page)


READ = {
    "arrows": lambda content: pa.ipc.open_stream(content).read_all(),
    "arrow": lambda content: pa.ipc.open_file(content).read_all(),
    "parquet": lambda content: pyarrow.parquet.read_table(io.BytesIO(content)),
}


@pytest.mark.parametrize("kind", READ)
@pytest.mark.parametrize("fails", [False, True], ids=["", "fails"])
def test_whenever_signals_come_what_was_written_to_a_pipe_is_whole_or_refused(kind: str, fails: bool) -> None:
    """Batches end with a page: readers would take such an end for the end of the data."""
    some = [pa.record_batch({"n": pa.array(range(rows), pa.int64())}) for rows in (2048, 2048, 10)]
    whole = pa.Table.from_batches(some)

    def given() -> Iterator[pa.RecordBatch]:
        yield from some[: 2 if fails else 3]
        if fails:
            raise OSError("failed")

    for numbers in ([signal.SIGTERM], [signal.SIGINT, signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]):
        came, first = True, 0
        while came:
            first += 1
            signals: dict[int, int] = {first + number: one for number, one in enumerate(numbers)}
            pipe = Pipe(signals)
            sink = io.BufferedWriter(pipe)
            reader = pa.RecordBatchReader.from_batches(whole.schema, given())
            with suppress(OSError, KeyboardInterrupt, SystemExit):
                stream_batches(reader, sink, FILE_FORMATS[kind])
            came = len(signals) < len(numbers)
            signals.clear()
            if not came and kind != "arrows":  # harmless after a failure: the footer is missing
                sink.flush()
            taken = pipe.taken  # all that a reader would get if this process were killed now
            try:
                found = READ[kind](taken)
            except (pa.ArrowException, OSError):
                assert came or fails
            else:
                assert found == whole
                assert not fails
        assert first > 3


def test_a_signal_that_comes_within_a_finalizer_is_not_lost() -> None:
    """Python drops exceptions that are raised in finalizers. The second signal comes because of the first."""
    script = """
import io, signal, weakref
import pyarrow as pa
from dissociated.cli import output
from dissociated.cli.formats import FILE_FORMATS

class Collected: pass

def batches():
    for number in range(100):
        one = Collected()
        weakref.finalize(one, signal.raise_signal, signal.SIGTERM)
        del one
        print(number, flush=True)
        yield pa.record_batch({"n": [number]})

schema = pa.schema({"n": pa.int64()})
output.stream_batches(pa.RecordBatchReader.from_batches(schema, batches()), io.BytesIO(), FILE_FORMATS["arrows"])
"""
    with Fork("-c", script, stdout=subprocess.PIPE) as process:
        printed, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert 0 < len(printed.split()) < 10


@pytest.mark.usefixtures("forked_nodes")
def test_put_that_fails_leaves_no_node(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with command("put", tmp_path / "nowhere.parquet", "d", "--store", store) as process:
        assert "the file does not exist" in ended(process)
    assert not store.exists()
    with command("put", corrupt_parquet(tmp_path / "corrupt.parquet"), "d", "--store", store) as process:
        assert "the source of 'd' failed" in ended(process)
    wait_until(lambda: not (store / "node.json").exists(), "the node that was started for nothing has ended")
    assert running(store) is None
    with command("put", "-", "d", "--store", store, stdin=subprocess.PIPE) as process:
        assert isinstance(process.stdin, io.TextIOWrapper)
        process.stdin.buffer.write(first_of_stream())
        process.stdin.buffer.flush()
        wait_until(lambda: (store / "staging").exists() and os.listdir(store / "staging"), "it has begun to write")
        process.kill()
        ended(process)
    wait_until(lambda: not (store / "node.json").exists(), "the node that was started for nothing has ended")
    assert running(store) is None


class Stop(StopSignal):
    """A stop signal that comes when it is set, and does not install signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


def test_a_node_that_somebody_else_uses_meanwhile_stays(tmp_path: Path) -> None:
    """The thread of the test runs the check, so the test knows when it is done."""
    starter, written = os.pipe()
    with closing(Stop()) as stop, Node(Store(tmp_path / "store"), []) as node:
        before = node.store.versions()
        with dis.connect(node.uri) as client:
            client.put("d", pa.Table.from_batches([BATCH]))
        os.close(written)
        stop_with_starter(starter, node, before, stop)
        assert not stop.wait(0)


def test_a_node_that_another_client_has_called_stays_until_that_client_is_closed(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISSOCIATED_STORE", str(memory / "store"))
    monkeypatch.delenv("DISSOCIATED_CATALOG", raising=False)
    starter, written = os.pipe()
    os.close(written)
    checked = 0

    class Checks(Stop):
        """The signal of a node that is checked without pauses."""

        def wait(self, timeout: float | None = None) -> bool:
            nonlocal checked
            checked += 1
            if checked == 10:
                client.close()
                wait_until(lambda: not node.has_clients, "the client is disconnected")
            return super().wait(0)

    with closing(Checks()) as stop, Node(Store(memory / "store"), []) as node:
        client = dis.connect()
        client.list()
        stop_with_starter(starter, node, [], stop)
        assert checked >= 10
        assert stop.wait(0)

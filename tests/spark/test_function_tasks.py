"""Functions of `map_in_arrow` whose task is this process: their memory, their threads and their forks."""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.base.fork import ProcessBound
from dissociated.node.node import Node
from dissociated.spark.functions import MappedFunction
from dissociated.spark.sidecar import Sidecar
from dissociated.store.store import Store
from support.helpers import PATIENCE, connections_left, wait_until

T = TypeVar("T")

Batches = Iterator[pa.RecordBatch]
SCHEMA = pa.schema({"s": pa.string()})


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(PATIENCE)
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        yield listener


def run(function: Callable[[Batches], Batches], schema: pa.Schema, listener: socket.socket, **start: Any) -> None:
    """Run a function whose task accepts a connection from `listener`."""
    conversation = pa.record_batch(
        {"dissociated.conversation": [json.dumps({"socket": listener.getsockname(), **start})]}
    )
    assert [*MappedFunction(function, schema, schema)(iter([conversation]))] == []


def run_with(
    task: Callable[[], T],
    function: Callable[[Batches], Batches],
    schema: pa.Schema,
    listener: socket.socket,
    **start: Any,
) -> T:
    """Run a function as `run` does, and its task in a thread. Return the result of the task. Its error comes first."""
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(task)
        try:
            run(function, schema, listener, **start)
        finally:
            result = running.result(PATIENCE)
    return result


def reading_ahead(threads: list[threading.Thread]) -> Callable[[Batches], Batches]:
    """Return a function that yields its first batch and ends, while a thread that it adds to `threads` reads on."""

    def function(batches: Batches) -> Batches:
        first = next(batches)
        threads.append(threading.Thread(target=lambda: [*batches]))
        threads[0].start()
        yield first

    return function


def last_text(listener: socket.socket, texts: list[str], is_ended: bool) -> str:
    """Be the task of a function: give it batches of one text, and return its last one after it has closed its memory.

    If not `is_ended`, the task asks for no more batches than there are, as for a limit.
    """
    regions: list[mmap.mmap] = []
    last = (0, 0, 0)
    unwritten = [pa.record_batch({"s": [text]}).serialize() for text in texts]
    with listener.accept()[0] as connection, connection.makefile("rw") as lines:

        def answer(**message: Any) -> dict[str, Any]:
            lines.write(json.dumps(message) + "\n")
            lines.flush()
            answered: dict[str, Any] = json.loads(lines.readline())
            return answered

        for _ in range(len(texts) + is_ended):
            answered = answer(next=True)
            while "write" in answered:
                if unwritten:
                    with open(answered["write"], "r+b") as file:
                        size = file.write(unwritten.pop(0))
                else:
                    size = 0
                answered = answer(size=size)
            for path in answered["regions"]:
                with open(path, "rb") as region:
                    regions.append(mmap.mmap(region.fileno(), 0, prot=mmap.PROT_READ))
            for batch in answered["batches"]:
                last = batch["columns"][0][3][6:]  # region, offset and size of the text
        connection.shutdown(socket.SHUT_WR)
        assert lines.readline() == ""  # the function has ended
    number, offset, size = last
    return regions[number][offset : offset + size].decode()


@pytest.mark.parametrize("is_ended", [True, False])
def test_the_last_batch_stays_as_it_is_after_the_function_has_ended(listener: socket.socket, is_ended: bool) -> None:
    def keep(batches: Batches) -> Batches:
        yield from [*batches]

    assert run_with(lambda: last_text(listener, ["a", "b", "c", "d"], is_ended), keep, SCHEMA, listener) == "d"


class ChildError(Exception):
    """The end of a forked child."""


class EarlyError(Exception):
    """The failure of a function."""


def test_a_forked_child_leaves_the_batches_and_the_task_to_its_parent(listener: socket.socket) -> None:
    def fork(batches: Batches) -> Batches:
        kept = [*batches]
        if not (child := os.fork()):
            kept.clear()
            assert next(batches, None) is None
            raise ChildError
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        yield from kept

    with ThreadPoolExecutor(1) as executor:
        task = executor.submit(last_text, listener, ["a", "b", "c", "d"], True)
        parent = os.getpid()
        try:
            run(fork, SCHEMA, listener)
        except ChildError:
            os._exit(0)
        finally:
            if os.getpid() != parent:
                os._exit(1)
        assert task.result(PATIENCE) == "d"


@pytest.mark.parametrize("end", ["returns", "fails", "interrupted"])
def test_a_function_that_ends_waits_until_the_task_has_written_the_batch_it_requested(
    listener: socket.socket, end: str
) -> None:
    threads: list[threading.Thread] = []
    read: list[pa.RecordBatch] = []

    def early(batches: Batches) -> Batches:
        yield next(batches)
        if end == "interrupted":
            with pytest.raises(TimeoutError):
                next(batches)
            return
        threads.append(threading.Thread(target=lambda: read.extend(batches)))
        threads[0].start()
        assert is_requested.wait(PATIENCE)
        if end == "fails":
            raise EarlyError

    is_requested = threading.Event()

    def task() -> None:
        """Give the function one batch, and write the next one late."""
        with listener.accept()[0] as connection, connection.makefile() as lines:

            def send(**message: Any) -> None:
                connection.sendall(json.dumps(message).encode() + b"\n")

            def write(path: str) -> int:
                with open(path, "r+b") as file:
                    return file.write(pa.record_batch({"s": ["a"]}).serialize())

            send(next=True)
            send(size=write(json.loads(lines.readline())["write"]))
            assert json.loads(lines.readline())["batches"]
            send(next=True)
            path = json.loads(lines.readline())["write"]
            is_requested.set()
            if end == "interrupted":
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            if end != "fails":
                assert json.loads(lines.readline())["ended"]
            assert select.select([connection], [], [], 0.1)[0] == []  # the function waits
            send(size=write(path))
            assert lines.readline() == ""

    def interrupt(*_: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(EarlyError) if end == "fails" else nullcontext():
            run_with(task, early, SCHEMA, listener)
    finally:
        signal.signal(signal.SIGALRM, previous)
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert read == []


def test_a_function_ends_if_its_task_ends_before_it_has_written_a_batch(listener: socket.socket) -> None:
    threads: list[threading.Thread] = []

    def task() -> None:
        with listener.accept()[0] as connection, connection.makefile() as lines:
            connection.sendall(b'{"next": true}\n')
            with open(json.loads(lines.readline())["write"], "r+b") as file:
                size = file.write(pa.record_batch({"s": ["a"]}).serialize())
            connection.sendall(b'{"size": %d}\n' % size)
            messages = [json.loads(lines.readline()) for _ in range(2)]  # in any order
            assert {key for message in messages for key in message} == {"write", "regions", "batches", "ended"}

    run_with(task, reading_ahead(threads), SCHEMA, listener)
    threads[0].join(PATIENCE)
    assert not threads[0].is_alive()


def test_a_child_marks_what_it_inherits_although_a_failed_function_is_referenced(listener: socket.socket) -> None:
    def fail(batches: Batches) -> Batches:
        raise EarlyError

    def task() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(b'{"next": true}\n')
            assert connection.recv(1) == b""

    with pytest.raises(EarlyError) as failure:
        run_with(task, fail, SCHEMA, listener)
    others = [ProcessBound() for _ in range(20)]
    for other in others:
        other.bind_to_process()
    if not (child := os.fork()):
        os._exit(not all(other.is_inherited for other in others))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    del failure


def test_a_function_may_end_while_a_thread_of_its_own_reads_a_dataset(listener: socket.socket, memory: Path) -> None:
    threads: list[threading.Thread] = []
    count = 5_000

    def task() -> None:
        with listener.accept()[0] as connection, connection.makefile("rw") as lines:
            for _ in range(2):
                lines.write('{"next": true}\n')
                lines.flush()
                answer = json.loads(lines.readline())
            assert answer["ended"]

    with Node(Store(memory / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        batch = pa.record_batch({"n": [1]})
        client.put("data", pa.RecordBatchReader.from_batches(batch.schema, [batch] * count))
        sidecar, options = Sidecar(), {"path": "data", "catalog": node.uri}
        described = sidecar.describe(options)
        schema = described["schema"]
        plan = sidecar.plan(options, schema, schema, described["version"], described["lineage"], [], 1.0, 1)
        (partition,) = plan["partitions"]
        start = {"reader": plan["reader"], "partition": partition["partition"], "max_rows": 1 << 20}
        run_with(task, reading_ahead(threads), batch.schema, listener, **start)
        threads[0].join(PATIENCE)
        assert not threads[0].is_alive()
        wait_until(lambda: connections_left(node.server) == 0, "nothing is held")

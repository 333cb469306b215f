"""Datasets of several parts: the parts after the one that is read are received meanwhile, within limits."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from subprocess import PIPE

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from client.test_parts import in_parts
from dissociated.client import readahead
from dissociated.client.dataset import DatasetHandle
from dissociated.errors import ForkedError, StoreError
from support.helpers import PATIENCE, wait_until
from support.processes import Fork

SMALL = pa.Table.from_batches(pa.table({"n": [-1, -2, -3]}).to_batches(1))
# More bytes than sockets hold.
LARGE = pa.Table.from_batches(pa.table({"n": np.arange(4_000_000)}).to_batches(50_000))


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        yield server


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    with dis.connect(str(server.catalog_uri)) as client:
        yield client


def open_parts(client: dis.Client, server: dis.Server, *parts: pa.Table) -> pa.RecordBatchReader:
    """Open a dataset of these parts, and read two batches, after which reading ahead has begun."""
    reader = DatasetHandle(client, in_parts(client, server, [*parts]), "tcp").to_reader()
    assert [reader.read_next_batch()["n"][0].as_py() for _ in range(2)] == [-1, -2]
    return reader


def test_parts_are_received_while_the_first_is_read(server: dis.Server, client: dis.Client) -> None:
    reader = open_parts(client, server, SMALL, LARGE, LARGE)
    wait_until(lambda: server.status().totals.done == 3, "all parts are received")
    assert pa.Table.from_batches([*reader]) == pa.concat_tables([SMALL.slice(2), LARGE, LARGE])


def test_what_is_received_ahead_is_limited(
    server: dis.Server, client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readahead, "MAX_BYTES", 1 << 20)
    reader = open_parts(client, server, SMALL, LARGE, LARGE)
    wait_until(lambda: all(one.bytes > 1 << 20 for one in server.status().consumers), "some batches of each part")
    assert [one.state for one in server.status().consumers] == ["reading", "reading"]
    assert reader.read_all() == pa.concat_tables([SMALL.slice(2), LARGE, LARGE])


def test_one_part_at_a_time_is_received_if_the_client_wants_that(server: dis.Server) -> None:
    with dis.connect(str(server.catalog_uri), max_parallel=1) as client:
        reader = open_parts(client, server, SMALL, LARGE)
        assert reader.read_next_batch()["n"].to_pylist() == [-3]
        wait_until(lambda: server.status().totals.done == 1, "the server knows that the first part is read")
        assert [one.state for one in server.status().consumers] == ["reading"]
        assert reader.read_all() == LARGE


def test_a_limit_needs_no_parts_ahead(server: dis.Server, client: dis.Client) -> None:
    data = DatasetHandle(client, in_parts(client, server, [SMALL, LARGE]), "tcp")
    assert data.head(2)["n"].to_pylist() == [-1, -2]
    wait_until(lambda: not server.status().consumers, "the end of the streams")
    assert server.status().totals.done < 2


def test_a_reader_that_is_closed_before_its_first_batch_ends_the_parts(server: dis.Server, client: dis.Client) -> None:
    reader = DatasetHandle(client, in_parts(client, server, [LARGE, LARGE]), "tcp").to_reader()
    wait_until(lambda: len(server.status().consumers) == 2, "the streams of both parts")
    reader.close()
    wait_until(lambda: not server.status().consumers, "the end of the streams")
    with pytest.raises(StoreError):
        reader.read_next_batch()


@pytest.mark.parametrize("end", ["close", "drop"])
def test_a_reader_that_ends_early_ends_the_parts(server: dis.Server, client: dis.Client, end: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readahead, "MAX_BYTES", 1 << 20)
        reader = open_parts(client, server, SMALL, LARGE, LARGE)
    if end == "close":
        reader.close()
        with pytest.raises(StoreError, match="closed before its end"):
            reader.read_next_batch()
    else:
        del reader
        gc.collect()
    wait_until(lambda: not server.status().consumers, "the end of the streams")


def test_the_error_of_a_part_comes_after_the_batches_before_it(server: dis.Server, client: dis.Client) -> None:
    def failing() -> pa.RecordBatchReader:
        def batches() -> Iterator[pa.RecordBatch]:
            yield from pa.table({"n": [4, 5]}).to_batches(1)
            raise ValueError("the source is broken")

        return pa.RecordBatchReader.from_batches(SMALL.schema, batches())

    reader = open_parts(client, server, SMALL, failing, SMALL)
    assert [reader.read_next_batch()["n"][0].as_py() for _ in range(3)] == [-3, 4, 5]
    for _ in range(2):
        with pytest.raises(dis.DissociatedError, match="the source of 'part 1' failed"):
            reader.read_next_batch()


def test_a_forked_child_does_not_wait_for_a_thread_that_it_lacks(server: dis.Server, client: dis.Client) -> None:
    reader = open_parts(client, server, SMALL, SMALL, SMALL)
    wait_until(lambda: server.status().totals.done == 3, "all parts are received")
    assert reader.read_next_batch()["n"].to_pylist() == [-3]
    child = os.fork()
    if not child:
        refused = False
        with suppress(BaseException):
            try:
                reader.read_next_batch()
            except ForkedError:
                refused = True
        os._exit(0 if refused else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert reader.read_all() == pa.concat_tables([SMALL, SMALL])


# The main thread ends while another thread waits for the rest of a dataset, after `count` batches of it.
EXITING = """
import atexit, sys, threading
from dataclasses import replace

ready, ended = threading.Event(), threading.Event()
atexit.register(ended.wait, 30)  # before dissociated's own, so that it runs after that

import dissociated as dis
from dissociated.client.dataset import DatasetHandle

uri, count, *names = sys.argv[1:]
client = dis.connect(uri)
infos = [client.describe(name) for name in names]
endpoints = tuple(endpoint for info in infos for endpoint in info.endpoints)
reader = DatasetHandle(client, replace(infos[0], version=None, rows=None, endpoints=endpoints), "grpc").to_reader()

def read():
    try:
        for number, batch in enumerate(reader, 1):
            print(batch["n"][0].as_py(), flush=True)
            if number == int(count):
                ready.set()
        print("regular", flush=True)
    except dis.DissociatedError as error:
        print(type(error).__name__, flush=True)
    ended.set()

threading.Thread(target=read, daemon=True).start()
ready.wait(30)
"""


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("names", [["rest"], ["first", "rest"]])
def test_a_read_that_the_exit_of_the_process_cuts_off_does_not_look_complete(
    server: dis.Server, names: list[str]
) -> None:
    finish = threading.Event()

    def rest() -> pa.RecordBatchReader:
        def batches() -> Iterator[pa.RecordBatch]:
            yield from SMALL.to_batches()
            assert finish.wait(PATIENCE)

        return pa.RecordBatchReader.from_batches(SMALL.schema, batches())

    server.publish("first", SMALL)
    server.publish("rest", rest)
    batches = ["-1", "-2", "-3"] * len(names)
    try:
        with Fork("-c", EXITING, server.catalog_uri, str(len(batches)), *names, stdout=PIPE) as process:
            assert process.communicate(timeout=PATIENCE)[0].split() == [*batches, "ConnectionClosed"]
    finally:
        finish.set()

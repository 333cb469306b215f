"""Puts: they are published whole and at once, or not at all, and a failed put leaves the previous dataset."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.flight as flight
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.catalog import service, upstream
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.members import Peer
from dissociated.catalog.service import CatalogService
from dissociated.cli import main
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded, OptionError, SourceError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.arrow_cases import corrupt_parquet
from support.helpers import PATIENCE, wait_until
from support.processes import Fork

pytestmark = pytest.mark.usefixtures("forks")

OLD = pa.table({"n": pa.array([7, 8, 9], pa.int64())})
BATCH = pa.record_batch({"n": pa.array(range(100), pa.int64())})


@pytest.fixture(params=["node", "catalog"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """Yield the URI of a node or of its catalog, with a dataset in it, and the staging directory."""
    # Sweep the leftovers of killed writers within a second instead of ten.
    monkeypatch.setattr(service, "SWEEP_TICKS", 1)
    with ExitStack() as running:
        store = tmp_path / "store"
        catalog = None
        if request.param == "catalog":
            catalog = running.enter_context(closing(CatalogService("grpc://127.0.0.1:0"))).uri
        node = running.enter_context(Node(Store(store), catalog=catalog))
        uri = catalog or node.uri
        with dis.connect(uri) as client:
            client.put("d", OLD)
        yield uri, store / "staging"


def nothing_has_changed(uri: str, stage: Path) -> None:
    wait_until(lambda: not os.listdir(stage), "nothing is left in the stage")
    with dis.connect(uri) as client:
        assert client.read("d").read_all() == OLD
        assert client.describe("d").version == 1
        assert len(client.list()) == 1


#: A writer that puts batches without end, until it ends in the requested way.
WRITER = """
import signal, sys, time
import pyarrow as pa, pyarrow.flight as flight
import dissociated as dis

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
uri, kind, end = sys.argv[1:]
BATCH = pa.record_batch({"n": pa.array(range(100), pa.int64())})

def batches():
    for number in range(4):
        yield BATCH
    print("reached", flush=True)
    while end == "wait":
        time.sleep(0.1)  # not forever: a signal that came just before it would not end it
    if end == "exit":
        sys.exit(1)
    if end == "raise":
        raise ValueError("no more")

if kind in ("shm", "grpc"):
    with dis.connect(uri) as client:
        client.put("d", pa.RecordBatchReader.from_batches(BATCH.schema, batches()), transport=kind)
else:
    client = flight.FlightClient(uri)
    asked = flight.FlightDescriptor.for_command(kind)
    writer, _ = client.do_put(asked, BATCH.schema)
    if end == "wait":
        for batch in batches():
            writer.write_batch(batch)
    else:
        with writer:  # which says, when it is left, that this was all
            for batch in batches():
                writer.write_batch(batch)
"""


#: The `dissociated` command, also when the shell ignores Ctrl-C.
COMMAND = """
import signal
from dissociated.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)
raise SystemExit(main())
"""


MARKED = '{"name": "d", "end": true}'
#: The client, and how it ends: by a signal while it writes, or by itself. An exception in a put by plain Flight without
#: the marker is left out: to the server such a put looks complete.
ENDS: list[tuple[str, str, int | None]] = [
    ("shm", "wait", signal.SIGKILL),
    ("shm", "wait", signal.SIGINT),
    ("grpc", "wait", signal.SIGKILL),
    ("grpc", "wait", signal.SIGINT),
    ("grpc", "exit", None),
    ("d", "wait", signal.SIGKILL),
    ("d", "wait", signal.SIGTERM),
    (MARKED, "wait", signal.SIGKILL),
    (MARKED, "raise", None),
    (MARKED, "exit", None),
]


def test_a_writer_that_fails_or_is_killed_publishes_nothing(place: tuple[str, Path]) -> None:
    uri, stage = place
    with ExitStack() as running:
        writers = [
            running.enter_context(Fork("-c", WRITER, uri, kind, end, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            for kind, end, _ in ENDS
        ]
        for writer, (_, _, number) in zip(writers, ENDS, strict=True):
            assert writer.stdout is not None
            assert writer.stdout.readline() == "reached\n"
            if number is not None:
                writer.send_signal(number)
            writer.communicate(timeout=PATIENCE)
            assert writer.returncode
    nothing_has_changed(uri, stage)


def test_a_plain_writer_that_says_the_end_publishes_what_it_wrote(place: tuple[str, Path]) -> None:
    def put(end: dict[str, int]) -> None:
        with flight.FlightClient(place[0]) as client:
            asked = flight.FlightDescriptor.for_command(MARKED)
            writer, _ = client.do_put(asked, BATCH.schema)
            with writer:
                writer.write_batch(BATCH)
                writer.write_metadata(json.dumps({"dissociated.end": end}).encode())

    for wrong in ({"batches": 2, "rows": 100}, {"batches": 1, "rows": 99}, {}):
        with pytest.raises(flight.FlightServerError, match="broke off after 100 rows: nothing was published"):
            put(wrong)
        nothing_has_changed(*place)
    put({"batches": 1, "rows": 100})
    with dis.connect(place[0]) as client:
        assert client.read("d").read_all() == pa.Table.from_batches([BATCH])


def raising() -> Iterator[pa.RecordBatch]:
    yield from [BATCH] * 3
    raise RuntimeError("no more")


def test_a_put_that_is_repeated_with_its_key_leaves_nothing_on_the_stage(place: tuple[str, Path]) -> None:
    uri, stage = place
    command = flight.FlightDescriptor.for_command(json.dumps({"name": "d", "key": "nightly"}))
    with flight.FlightClient(uri) as plain, dis.connect(uri) as client:
        for _ in range(2):
            writer, answers = plain.do_put(command, BATCH.schema)
            with writer:
                writer.write_batch(BATCH)
                writer.done_writing()
                answers.read()
            assert os.listdir(stage) == []
        assert client.describe("d").version == 2


def test_a_source_that_fails_is_named_and_publishes_nothing(place: tuple[str, Path], tmp_path: Path) -> None:
    broken = pa.RecordBatchReader.from_batches(BATCH.schema, raising())
    with dis.connect(place[0]) as client:
        for source, why in (
            (broken, "the source of 'd' failed: RuntimeError: no more"),
            (corrupt_parquet(tmp_path / "broken.parquet"), "the source of 'd' failed: "),
            (tmp_path / "nowhere.parquet", "the file does not exist"),
            (object(), "cannot publish a object"),
            (pa.Tensor.from_numpy(BATCH["n"].to_numpy()), "for which Flight has no messages"),
        ):
            with pytest.raises(SourceError, match=why):
                client.put("d", source)
            nothing_has_changed(*place)
        for transport in ("shm", "grpc"):
            with pytest.raises(SourceError, match="no more"):
                client.put("d", raising(), transport=transport)
            nothing_has_changed(*place)
        (tmp_path / "differ").mkdir()
        pq.write_table(OLD, tmp_path / "differ" / "1.parquet")
        pq.write_table(OLD.append_column("more", OLD["n"]), tmp_path / "differ" / "2.parquet")
        for wrong, why in (
            (tmp_path / "differ", "2.parquet' and .*1.parquet' have different schemas: there is a new column 'more'"),
            (iter(()), "give schema="),
            ([BATCH, pa.record_batch({"n": ["text"]})], "column 'n' is string, not int64"),
            (iter([BATCH, 7]), "the source gave a int instead of a record batch"),
            (b"no Arrow IPC at all", "the source of 'd' failed"),
        ):
            with pytest.raises(SourceError, match=why):
                client.put("d", wrong)
        nothing_has_changed(*place)


def test_a_put_that_is_published_says_so_although_its_answer_is_lost(
    place: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is told of a failure tries again, and would append the rows twice."""
    commit = LocalCatalog.commit

    def lost(catalog: LocalCatalog, requested: dis.Commit) -> None:
        is_repeated = catalog.committed(requested.key)
        commit(catalog, requested)
        if not is_repeated:
            raise CatalogError("nobody hears what this says")

    monkeypatch.setattr(LocalCatalog, "commit", lost)
    with dis.connect(place[0]) as client:
        for number, transport in enumerate(("shm", "grpc")):
            assert client.put("d", OLD, mode="append", transport=transport) == 3
            assert client.describe("d").rows == 3 * (number + 2)
        with pytest.raises(CatalogError, match="must have one schema"):
            client.put("d", pa.table({"other": [1]}), mode="append")
        assert client.describe("d").rows == 9


#: A node that dies between a commit and its answer.
GONE = """
import os, sys
from dissociated.catalog.local import LocalCatalog
from dissociated.node.node import Node
from dissociated.store.store import Store

original = LocalCatalog.commit

def commit(self, *arguments):
    original(self, *arguments)
    os._exit(1)

LocalCatalog.commit = commit
with Node(Store(sys.argv[1])) as node:
    print(node.uri, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_an_error_says_if_a_put_may_have_been_published(tmp_path: Path, transport: str) -> None:
    with Fork("-c", GONE, str(tmp_path / "store"), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        unknown = pytest.raises(CatalogError, match="nor did it say whether 'd' was published in the end")
        with dis.connect(process.stdout.readline().strip()) as client, unknown:
            client.put("d", OLD, transport=transport)
    with Node(Store(tmp_path / "store")) as node, dis.connect(node.uri) as client:
        assert client.describe("d").rows == 3


#: A catalog that is killed or stopped between a commit and its answer to the node that forwarded it.
GONE_UPSTREAM = """
import os, signal, sys, threading
from contextlib import closing
from dissociated.catalog.local import LocalCatalog
from dissociated.catalog.service import CatalogService

original = LocalCatalog.commit

def commit(self, *arguments):
    original(self, *arguments)
    os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "gone" else signal.SIGSTOP)
    threading.Event().wait()  # another thread may take the signal, and this one would go on for a moment

LocalCatalog.commit = commit
with closing(CatalogService("grpc://127.0.0.1:0")) as catalog:
    print(catalog.uri, flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("ending", ["gone", "silent"])
def test_a_put_through_a_node_is_not_said_to_be_refused_where_its_catalog_may_have_published_it(
    tmp_path: Path, transport: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream, "Peer", lambda uri, security, timeout=2.0: Peer(uri, security, timeout))
    with Fork("-c", GONE_UPSTREAM, ending, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        catalog = process.stdout.readline().strip()
        unknown = pytest.raises(
            (CatalogUnreachable, DeadlineExceeded), match="nor did it say whether 'd' was published"
        )
        with Node(Store(tmp_path / "store"), catalog=catalog) as node, dis.connect(node.uri) as client, unknown:
            client.put("d", OLD, transport=transport)
        process.kill()


@pytest.mark.parametrize("place", ["node"], indirect=True)
def test_what_is_dropped_is_dropped_although_its_files_cannot_be_removed(place: tuple[str, Path]) -> None:
    trash = place[1].parent / "trash"
    with dis.connect(place[0]) as client:
        shutil.rmtree(trash)
        client.drop("d")
        assert client.list() == []
        trash.mkdir(mode=0o700)


@pytest.mark.parametrize("place", ["catalog"], indirect=True)
def test_the_command_put_that_fails_or_is_killed_publishes_nothing(place: tuple[str, Path], tmp_path: Path) -> None:
    uri, stage = place
    put = ("-c", COMMAND, "put")
    broken = corrupt_parquet(tmp_path / "broken.parquet")
    with Fork(*put, broken, f"{uri}/d", stderr=subprocess.PIPE) as failed:
        _, told = failed.communicate(timeout=PATIENCE)
    assert failed.returncode == 1
    assert "the source of 'd' failed" in told
    nothing_has_changed(uri, stage)
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, BATCH.schema) as writer:
        writer.write_batch(BATCH)
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT):
        with Fork(*put, "-", f"{uri}/d", stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert isinstance(process.stdin, io.TextIOWrapper)
            process.stdin.buffer.write(sink.getvalue()[:-8])  # without the end-of-stream marker
            process.stdin.buffer.flush()
            wait_until(lambda: os.listdir(stage), "it has begun to write")
            process.send_signal(number)
            process.wait(PATIENCE)
            assert process.returncode
        nothing_has_changed(uri, stage)


def test_whatever_a_server_publishes_can_be_put(place: tuple[str, Path], tmp_path: Path) -> None:
    table = pa.table({"n": [1, 2, 3], "s": ["a", None, "c"]})
    with pa.ipc.new_stream(tmp_path / "some.arrows", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(tmp_path / "some.arrow", table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, tmp_path / "some.parquet")
    (tmp_path / "directory").mkdir()
    pq.write_table(table[:2], tmp_path / "directory" / "1.parquet")
    pq.write_table(table[2:], tmp_path / "directory" / "2.parquet")
    (tmp_path / "directory" / "_SUCCESS").touch()
    stream, file = ((tmp_path / f"some.{ending}").read_bytes() for ending in ("arrows", "arrow"))
    sources: dict[str, Any] = {
        "table": table,
        "batch": table.to_batches()[0],
        "reader": table.to_reader(),
        "stream": tmp_path / "some.arrows",
        "file": str(tmp_path / "some.arrow"),
        "parquet": tmp_path / "some.parquet",
        "callable": lambda: table,
        "frame": table.to_pandas(),
        "batches": table[:2].to_batches() + table[2:].to_batches(),
        "generator": (batch for batch in table.to_batches()),
        "directory": tmp_path / "directory",
        "dataset": ds.dataset(tmp_path / "some.parquet"),
        "scanner": ds.dataset(tmp_path / "some.parquet").scanner(),
        "buffer": pa.py_buffer(stream),
        "bytes": file,
        "file reader": pa.ipc.open_file(file),
    }
    with dis.connect(place[0]) as client:
        for name, source in sources.items():
            assert client.put(name, source) == 3, name
            assert client.read(name).read_all().to_pylist() == table.to_pylist(), name
        assert client.put("dataset", client["file"], transport="grpc") == 3
        assert client.put("dataset", iter(table.to_batches()), transport="shm", mode="append") == 3
        assert client.read("dataset").read_all() == pa.concat_tables([table, table])
        nothing: list[Any] = [[], iter(())]
        for empty in nothing:
            assert client.put("empty", empty, schema=table.schema) == 0
            assert client.read("empty").read_all() == table.schema.empty_table()
        assert client.put("d", table.schema.empty_table()) == 0
        assert client.read("d").read_all() == table.schema.empty_table()


def test_what_makes_no_sense_is_refused_before_anything_moves(place: tuple[str, Path]) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"ttl": -1}, "the ttl -1 is not a positive number of seconds"),
        ({"ttl": 0}, "is not a positive number of seconds"),
        ({"ttl": float("nan")}, "is not a positive number of seconds"),
        ({"ttl": float("inf")}, "is not a positive number of seconds"),
        ({"ttl": "7"}, "is not a positive number of seconds"),
        ({"ttl": 1e300}, "is not a positive number of seconds up to 10000000000"),
        ({"ttl": 10**400}, "is not a positive number of seconds"),
        ({"mode": "sideways"}, "neither overwrite nor append"),
        ({"tags": {"": "x"}}, "are not plain texts by name"),
        ({"tags": {"team": 7}}, "are not plain texts by name"),
        ({"tags": ["team"]}, "are not plain texts by name"),
        ({"tags": {"team": "\udcff"}}, "are not plain texts by name"),
        ({"tags": {"\ud800": "x"}}, "are not plain texts by name"),
        ({"tags": {"team": "a\0b"}}, "are not plain texts by name"),
        ({"name": ""}, "is not a non-empty text"),
        ({"name": 7}, "the dataset name 7 is not a non-empty text"),
        ({"name": "\ud800"}, "has characters that other programs cannot write"),
    ]
    with dis.connect(place[0]) as client, flight.FlightClient(place[0]) as plain:
        for options, why in wrong:
            asked: dict[str, Any] = {"name": "d", **options}
            with pytest.raises(OptionError, match=why):
                client.put(source=unreadable, **asked)
            with pytest.raises(OptionError, match=why):
                dis.Commit(schema=OLD.schema, **asked)
            if isinstance(asked["name"], str):
                writer, _ = plain.do_put(flight.FlightDescriptor.for_command(json.dumps(asked)), BATCH.schema)
                not_json = "a command is a name, or JSON"  # NaN, infinity and 10**400 are known to Python's JSON
                with pytest.raises(flight.FlightServerError, match=f"{why}|{not_json}"):
                    writer.close()
        nothing_has_changed(*place)
        client.put("longest", OLD, ttl=1e10)  # the end of this lifetime can still be printed
        assert "\nuntil " in repr(client.describe("longest"))
        client.drop("longest")


def test_the_command_put_refuses_what_makes_no_sense_before_it_looks_for_a_catalog(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.parquet"
    pq.write_table(OLD, file)
    for arguments, why in (
        (["--ttl", "0"], "is not a positive number of seconds"),
        (["--ttl", "1e999"], "is not a positive number of seconds"),
        (["--tag", "team"], "--tag 'team' has no value: give KEY=VALUE"),
        (["--tag", "=x"], "are not plain texts by name"),
        (["--tag", "team=\udcff"], "are not plain texts by name"),  # Python's form of a byte that is not text
    ):
        for place in ("grpc://127.0.0.1:1/d", "d"):
            assert main(["put", str(file), place, "--store", str(tmp_path / "store"), *arguments]) == 1
            assert why in capsys.readouterr().err
    assert main(["put", str(file), "", "--store", str(tmp_path / "store")]) == 1
    for ttl in ("-1", "nan", "soon"):
        with pytest.raises(SystemExit):
            main(["put", str(file), "d", "--store", str(tmp_path / "store"), "--ttl", ttl])
        assert f"{ttl!r} is not a duration: give 90s, 15m, 1h, 2d" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def unreadable() -> pa.Table:
    raise AssertionError("it was read")


def test_a_server_takes_no_name_that_is_none() -> None:
    with dis.Server(["shm:"], catalog=None) as server:
        with pytest.raises(OptionError, match="name is a Table, and is not a non-empty text: give the name before"):
            server.publish(OLD, "d")
        with pytest.raises(OptionError, match="is not a non-empty text"):
            server.publish("", OLD)
        with pytest.raises(OptionError, match="is not a non-empty text"):
            server.writer("", OLD.schema)
        assert server.names() == []


def test_a_put_says_how_far_it_is_and_can_be_ended_so(place: tuple[str, Path]) -> None:
    told: list[tuple[int, int, int | None]] = []

    def progress(*so_far: Any) -> None:
        told.append(so_far)
        if told[-1][0] == 200 and told[-1][2] is None:
            raise failure

    with dis.connect(place[0]) as client:
        for transport, failure in product(
            ("shm", "grpc"), (KeyboardInterrupt(), ValueError(), OSError(5, "mine"), pa.ArrowInvalid())
        ):
            told.clear()
            with pytest.raises(type(failure)) as caught:
                client.put("d", iter([BATCH] * 3), transport=transport, progress=progress)
            assert caught.value is failure
            assert told == [(100, 800, None), (200, 1600, None)]
            nothing_has_changed(*place)
        client.put("new", [BATCH.slice(0, 50)] * 6, progress=progress)
        assert told[-1] == (300, 2400, 300)
        client.put("copy", client["new"], progress=progress)
        assert told[-1] == (300, 2400, 300)
        assert client.read("copy").read_all().num_rows == 300
        with pytest.raises(OptionError, match="transport is"):
            client.put("d", OLD, transport="tcp")

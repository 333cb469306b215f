"""Streams that Spark's JVM reads over TCP by itself: any server that follows docs/framing.md will do."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from pyspark import InheritableThread
from pyspark.errors import PySparkException

import dissociated as dis
from dissociated.format.encapsulated import END_OF_STREAM
from dissociated.spark import read
from porter.double import ABORT, REGION, RUN, TAGGED, UNTAGGED, Server, Wire, buffers, encode, end, metadata, split
from porter.test_porter import STREAMS, packed
from support.helpers import PATIENCE, connections_left, descriptors, wait_until
from support.jvm import jvm

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TICKET = b"ticket"
BATCH = pa.record_batch({"n": range(1000), "s": [f"{n:05}" for n in range(1000)]})
SCHEMA, MESSAGE = split([BATCH])
assert MESSAGE.body is not None
BODY = MESSAGE.body
OTHER = split([BATCH.select(["n"])])[1]


class Catalog(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A Flight server that knows where one dataset is."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.uri = f"grpc://127.0.0.1:{self.port}"
        self.schema = BATCH.schema
        self.location = ""

    def get_flight_info(self, context: object, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        return flight.FlightInfo(self.schema, descriptor, [flight.FlightEndpoint(TICKET, [self.location])])


@pytest.fixture(scope="module")
def catalog() -> Iterator[Catalog]:
    with Catalog() as catalog:
        yield catalog


def who_asks(sock: socket.socket) -> str:
    """Return the program at the other end of a connection."""
    ports = [f"{place[1]:04X}" for place in (sock.getpeername(), sock.getsockname())]
    # Java's sockets appear in both tables, some of them twice while a table changes. Ended ones have inode 0.
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    lines = [line.split() for line in tables.splitlines() if ":" in line]
    (inode,) = {line[9] for line in lines if [place[-4:] for place in line[1:3]] == ports} - {"0"}
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # the process has ended
            if f"socket:[{inode}]" in descriptors(process).values():
                return os.readlink(f"/proc/{process}/exe")
    raise AssertionError("nobody does")


@contextmanager
def serving(catalog: Catalog, schema: pa.Schema, answer: Callable[[Wire], Any]) -> Iterator[list[str]]:
    """Run a server of the framing that answers with `answer`, and yield a list of the programs that asked it."""
    asked: list[str] = []

    def answered(server: Server, wire: Wire) -> None:
        asked.append(who_asks(wire.socket))
        with suppress(OSError):  # the client has read enough
            answer(wire)

    server = Server("tcp", "", TICKET, answered)
    catalog.location, catalog.schema = server.uri, schema
    try:
        yield asked
    finally:
        server.close()


def held(spark: SparkSession) -> int:
    """Return the bytes of native memory that streams and writers hold."""
    return int(jvm(spark).org.apache.spark.sql.dissociated.Memory.allocated())


def test_the_jvm_reads_by_itself_whatever_the_order_of_the_frames(spark: SparkSession, catalog: Catalog) -> None:
    orders = [("numbers", order) for order in ("as usual", "metadata first", "bodies first")]
    for name, order in [*orders, ("small", "runs"), ("empty", "as usual")]:
        batches = STREAMS[name]
        frames = packed(batches, order)
        with serving(catalog, batches[0].schema, lambda wire, frames=frames: wire.send(*frames)) as asked:  # type: ignore[misc]
            found = read(spark, "any", catalog.uri).toArrow()
        assert found == pa.Table.from_batches(batches), (name, order)
        assert [Path(program).name for program in asked] == ["java"], (name, order)
    assert held(spark) == 0


def test_what_the_jvm_does_not_read_is_read_in_python(spark: SparkSession, catalog: Catalog) -> None:
    batches = STREAMS["words"]  # with dictionaries, which later ones replace
    with serving(catalog, batches[0].schema, lambda wire: wire.send(*packed(batches, "as usual"))) as asked:
        assert (
            read(spark, "any", catalog.uri).toArrow()["u"].to_pylist()
            == pa.Table.from_batches(batches)["u"].to_pylist()
        )
    assert ["java" in program for program in asked] == [True, False]


def mixed(rows: pa.RecordBatch, *pieces: tuple[int, str | None]) -> bytes:
    """Return an IPC stream of these rows in batches of the given lengths, each with its own codec."""
    parts: list[bytes] = []
    at = 0
    for count, codec in pieces:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(rows.slice(at, count))
        schema, batch = (one.serialize().to_pybytes() for one in pa.ipc.MessageReader.open_stream(sink.getvalue()))
        parts += [batch] if parts else [schema, batch]
        at += count
    return b"".join([*parts, END_OF_STREAM])


@pytest.mark.usefixtures("plans")
def test_compressed_batches_among_others_are_decompressed(
    spark: SparkSession, catalog: Catalog, tmp_path: Path
) -> None:
    rows = pa.record_batch(
        {"n": range(3900), "s": [f"{n:05}" for n in range(3900)], "l": [[n] * (n % 3) for n in range(3900)]}
    )
    path = tmp_path / "mixed.arrows"
    path.write_bytes(
        mixed(rows, (700, None), (1100, "zstd"), (0, None), (1200, None), (900, "lz4"), (0, None), (0, "lz4"))
    )
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("mixed", path)
        for partitions in (1, 2, 3, 7):  # some partitions begin or end within a batch
            df = read(spark, "mixed", server.catalog_uri, partitions=partitions)
            before = server.status().totals.streams
            assert df.toArrow() == pa.Table.from_batches([rows]), partitions
            if partitions == 1:
                assert server.status().totals.streams - before == 1
            assert df.where("n > 2000").selectExpr("sum(n)").first() == (sum(range(2001, 3900)),)
        assert df.limit(750).count() == 750
        wait_until(lambda: connections_left(server) == 0, "all have left")
    messages = [*pa.ipc.MessageReader.open_stream(mixed(BATCH, (400, None), (350, "zstd"), (250, "lz4")))]
    headers = [encode(UNTAGGED, metadata(at, one.metadata.to_pybytes())) for at, one in enumerate(messages)]
    bodies = [encode(TAGGED, one.body.to_pybytes(), at) for at, one in enumerate(messages) if at]
    with serving(catalog, BATCH.schema, lambda wire: wire.send(*headers, *bodies, end(4))) as asked:
        assert read(spark, "any", catalog.uri).toArrow() == pa.Table.from_batches([BATCH])
    bodies[1] = encode(TAGGED, bytes(len(messages[2].body)), 2)
    with (
        serving(catalog, BATCH.schema, lambda wire: wire.send(*headers, *bodies, end(4))),
        pytest.raises(PySparkException, match="RemoteProtocolError"),
    ):
        read(spark, "any", catalog.uri).collect()
    assert {Path(program).name for program in asked} == {"java"}
    assert held(spark) == 0


def lying(here: tuple[int, int], there: tuple[int, int]) -> bytes:
    """Return batch metadata with one pair of numbers replaced.

    The pair is the length and null count of an array, or the offset and size of a buffer.
    """
    old = struct.pack("<qq", *here)
    assert MESSAGE.header.count(old) == 1
    return encode(UNTAGGED, metadata(1, MESSAGE.header.replace(old, struct.pack("<qq", *there))))


def head(kind: int, length: int, tag: int = 0) -> bytes:
    return struct.pack("<QQ", kind << 56 | length, tag)


HEADER = encode(UNTAGGED, metadata(1, MESSAGE.header))
PLACED = encode(TAGGED, BODY, 1)
_, NUMBERS, _, OFFSETS, STRINGS = buffers(MESSAGE.header)[1]
BROKEN: dict[str, tuple[Sequence[bytes], str]] = {
    "ends": ([], "ended the connection before the end of the stream"),
    "ends between messages": ([HEADER, PLACED], "ended the connection before the end of the stream"),
    "ends within": ([HEADER, PLACED[:-2000]], "ended the connection within a message"),
    "gives up": (
        [HEADER, encode(ABORT, "the disk \x07 is full, señor".encode())],
        "gave up: the disk   is full, señor",
    ),
    "unknown kind": ([encode(9, b"")], "a frame of kind 9"),
    "region": ([encode(REGION, bytes(24))], "a frame of kind 3"),
    "tag": ([encode(UNTAGGED, bytes(5), 1)], "a frame of kind 1 has the tag 1"),
    "metadata without end": ([head(UNTAGGED, 1 << 40)], "a frame of kind 1 has 1099511627776 bytes"),
    "body without end": ([head(TAGGED, 1 << 40, 1)], "a frame of kind 2 has 1099511627776 bytes"),
    "body that does not come": ([head(TAGGED, 1 << 33, 1)], "ended the connection within a message|no memory"),
    "body of another length": ([HEADER, encode(TAGGED, BODY + b"x", 1)], "a frame of kind 2 has"),
    "body that is short": ([HEADER, encode(TAGGED, BODY[:-8], 1)], "the body of message 1 differs in length"),
    "body by address": ([HEADER, encode(TAGGED, bytes(16), 1 << 56 | 1)], "a body has the invalid tag 100000000000001"),
    "reserved bits": ([HEADER, encode(TAGGED, BODY, 1 << 40 | 1)], "a body has the invalid tag 10000000001"),
    "twice": ([HEADER, HEADER], "message 1 was sent twice"),
    "late": ([HEADER, PLACED, PLACED], "message 1 is out of sequence"),
    "after the end": ([end(2), encode(TAGGED, BODY, 2)], "message 2 is out of sequence"),
    "two ends": ([end(2), end(2)], "metadata of an unknown kind"),
    "no end": ([end(0)], "metadata of an unknown kind"),
    "metadata of an unknown kind": ([encode(UNTAGGED, bytes([7] * 9))], "metadata of an unknown kind"),
    "run": ([encode(RUN, struct.pack("<QQQ", 2**61, 8, 8) + bytes(8))], "the sizes in a run are inconsistent"),
}
DAMAGED: dict[str, tuple[bytes, str]] = {
    "buffer beyond": (lying(OFFSETS, (1 << 40, 4004)), "a buffer of 4004 bytes at 1099511627776 of"),
    "buffer before": (lying(OFFSETS, (-8, 4004)), "a buffer of 4004 bytes at -8 of"),
    "buffer too small": (lying(STRINGS, (STRINGS[0], 4999)), "column 's' is damaged: a buffer of 4999 bytes"),
    "numbers for offsets": (lying(OFFSETS, (0, 4004)), "column 's' is damaged: its offsets do not ascend"),
    "other schema": (encode(UNTAGGED, metadata(1, OTHER.header)), "a batch has fewer arrays than its schema"),
}


def read_all(
    spark: SparkSession, address: tuple[str, int], timeout: float = PATIENCE, connect_timeout: float = PATIENCE
) -> None:
    """Read all messages of a stream with the classes of Spark's JVM."""
    classes = jvm(spark)
    ours = classes.org.apache.spark.sql.dissociated
    told = {"host": address[0], "port": address[1], "timeout": timeout, "connect_timeout": connect_timeout}
    told |= {"want_data": str(Server.WANT), "identifier": base64.b64encode(TICKET).decode()}
    told |= {"max_metadata": 1 << 28, "max_body": 1 << 34}
    messages = ours.Messages(
        ours.Server(classes.com.fasterxml.jackson.databind.ObjectMapper().readTree(json.dumps(told)))
    )
    try:
        messages.request()
        while messages.receive().isDefined():
            pass
    finally:
        messages.close()


def test_a_peer_that_breaks_the_protocol_gets_the_reason(spark: SparkSession, catalog: Catalog) -> None:
    for frames, message in BROKEN.values():
        sent = b"".join([encode(UNTAGGED, metadata(0, SCHEMA.header)), *frames])
        with serving(catalog, BATCH.schema, lambda wire, sent=sent: wire.send(sent)):  # type: ignore[misc]
            address = urlsplit(catalog.location)
            with pytest.raises(PySparkException, match=f"the server at tcp://127.0.0.1:{address.port} .*{message}"):
                read_all(spark, ("127.0.0.1", int(address.port or 0)))
    assert held(spark) == 0


def test_a_server_that_sends_damaged_batches_fails_the_task_and_nothing_else(
    spark: SparkSession, catalog: Catalog
) -> None:
    for name, (header, message) in DAMAGED.items():
        placed = encode(TAGGED, (OTHER if name == "other schema" else MESSAGE).body or b"", 1)
        sent = b"".join([encode(UNTAGGED, metadata(0, SCHEMA.header)), header, placed, end(2)])
        with (
            serving(catalog, BATCH.schema, lambda wire, sent=sent: wire.send(sent)) as asked,  # type: ignore[misc]
            pytest.raises(PySparkException, match=message),
        ):
            read(spark, "any", catalog.uri).collect()
        assert {Path(program).name for program in asked} == {"java"}, name
    assert held(spark) == 0


def test_a_server_that_is_killed_fails_the_task(spark: SparkSession, catalog: Catalog) -> None:
    def answer(wire: Wire) -> None:
        wire.send(encode(UNTAGGED, metadata(0, SCHEMA.header)), HEADER, PLACED, PLACED[:100])
        # Reset the connection, as when a host fails.
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    message = r"ended the connection within a message|cannot be read: .*reset"
    with serving(catalog, BATCH.schema, answer), pytest.raises(PySparkException, match=message):
        read(spark, "any", catalog.uri).collect()
    assert held(spark) == 0


def test_a_server_that_is_silent_is_not_waited_for(spark: SparkSession) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(PySparkException, match=r"has been silent for 0\.1 s"),
    ):
        read_all(spark, silent.getsockname(), 0.1)
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        closing(socket.create_connection(full.getsockname())),  # it takes the only place
        pytest.raises(PySparkException, match=r"127\.0\.0\.1:\d+: no answer in time; open that port"),
    ):
        read_all(spark, full.getsockname(), connect_timeout=0.1)


def test_a_task_that_is_killed_does_not_wait_for_its_server(spark: SparkSession, catalog: Catalog) -> None:
    """The task does not spin until the server answers, either."""
    over, failures = threading.Event(), []

    def answer(wire: Wire) -> None:
        wire.send(encode(UNTAGGED, metadata(0, SCHEMA.header)), HEADER, PLACED)
        over.wait(PATIENCE)

    def run() -> None:
        spark.sparkContext.setJobGroup("silent", "its server says no more", interruptOnCancel=True)
        try:
            read(spark, "any", catalog.uri).collect()
        except Exception as error:
            failures.append(str(error))

    with serving(catalog, BATCH.schema, answer) as asked:
        job = InheritableThread(target=run)
        job.start()
        wait_until(lambda: asked and held(spark), "it reads")
        spark.sparkContext.cancelJobGroup("silent")
        wait_until(lambda: held(spark) == 0, "the task has ended")
        over.set()
        job.join(PATIENCE)
    assert "cancelled" in failures[0]


def test_a_task_that_reads_many_partitions_holds_no_more_than_two(spark: SparkSession, tmp_path: Path) -> None:
    consumed, seen = tmp_path / "consumed", tmp_path / "seen"

    def consume(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Count the rows in a worker process of Spark, which shares nothing with the test."""
        rows = sum(batch.num_rows for batch in batches)
        consumed.touch()
        for _ in range(60_000):
            if seen.exists():
                break
            time.sleep(0.001)
        yield pa.record_batch({"rows": [rows]})

    parts = [pa.record_batch({"n": range(100_000)})] * 10
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("data", pa.Table.from_batches(parts))
        df = read(spark, "data", server.catalog_uri, partitions=len(parts)).coalesce(1).mapInArrow(consume, "rows long")
        found: list[Any] = []
        job = InheritableThread(target=lambda: found.extend(df.collect()))
        job.start()
        wait_until(consumed.exists, "all have been read", 60)
        assert server.connections <= 1
        assert 0 < held(spark) < 4 * parts[0].nbytes  # two bodies, each with a quarter more
        seen.touch()
        job.join(PATIENCE)
    assert found == [(1_000_000,)]
    assert held(spark) == 0


@pytest.mark.usefixtures("plans")
def test_a_limit_leaves_nothing_behind(spark: SparkSession, catalog: Catalog) -> None:
    ended = []

    def answer(wire: Wire) -> None:
        """Send batches without end."""
        wire.send(encode(UNTAGGED, metadata(0, SCHEMA.header)))
        try:
            for number in range(1, 1 << 20):
                wire.send(encode(UNTAGGED, metadata(number, MESSAGE.header)), encode(TAGGED, BODY, number))
        except OSError as error:
            ended.append(error)

    with serving(catalog, BATCH.schema, answer):
        assert read(spark, "any", catalog.uri).limit(1500).selectExpr("sum(n)").first() == (499_500 + 124_750,)
        wait_until(lambda: ended, "it has left")
    assert held(spark) == 0

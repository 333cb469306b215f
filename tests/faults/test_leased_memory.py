"""Memory stays until it is freed: the held bytes equal the sent bytes, whatever happens to the connection.

The tests compute checksums of the published data. Consumers in their own processes report checksums of their batches.
"""

from __future__ import annotations

import json
import mmap
import signal
import socket
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.store.segment import MemfdSink, Segment, SegmentWriter
from memory.maps import shared_bytes
from support.helpers import PATIENCE, serving, wait_until

from . import peer
from .conftest import Good, Serve, Spawn

COLUMNS, ROWS = 64, 64
ROUNDS = 3
CONSUMER = """
import atexit, json, os, sys, zlib

ended, held = "", []

def look():
    print(json.dumps([ended, [checksum(one) for one in held]]), flush=True)

@atexit.register  # before dissociated's own, so that it runs after that
def at_the_end():
    look()
    sys.stdin.readline()
    look()

import dissociated as dis

def checksum(batch):
    total = 0
    for column in batch.columns:
        total = zlib.crc32(column.to_numpy(), total)
    return total

for line in iter(sys.stdin.readline, ""):
    word, *rest = line.split()
    try:
        if word == "open":
            ended, held, reader = "", [], dis.open_stream(rest[0], bytes.fromhex(rest[1]), timeout=30)
        elif word == "hold":
            held.extend(reader.read_next_batch() for _ in range(int(rest[0])))
        elif word == "rest":
            held.extend(reader)
            ended = "the end"
        elif word == "let":
            del reader
            held.clear()
        elif word == "fork":  # the child answers from now on; the parent lets go of everything, and ends with it
            child = os.fork()
            if child:
                held.clear()
                sum(1 for _ in reader)
                del reader
                os._exit(os.waitpid(child, 0)[1])
        elif word == "leave":
            break
    except dis.errors.DissociatedError as error:
        ended = f"{type(error).__name__}: {error}"
    look()
"""


def batches(count: int) -> list[pa.RecordBatch]:
    """Return batches of random content, so that checksums differ, with much metadata and few rows."""
    values = np.random.default_rng(count)
    return [
        pa.record_batch({f"c{column}": values.integers(1, 1 << 60, ROWS) for column in range(COLUMNS)})
        for _ in range(count)
    ]


def checksum(batch: pa.RecordBatch) -> int:
    total = 0
    for column in batch.columns:
        total = zlib.crc32(column.to_numpy(), total)
    return total


def reader(some: list[pa.RecordBatch]) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(some[0].schema, iter(some))


class Child:
    """A consumer in its own process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, word: str) -> tuple[str, list[int]]:
        """Send a command. Return how the stream ended, if it did, and the checksums of the held batches."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        return self.look()

    def look(self) -> tuple[str, list[int]]:
        assert self.process.stdout is not None
        ended, held = json.loads(self.process.stdout.readline())
        return ended, held

    def open(self, good: Good) -> None:
        assert self(f"open {good.server.locations('live')[0]} {good.server.ticket('live').hex()}") == ("", [])


class Holder:
    """A client that breaks rules: it maps the bodies it receives, and frees none."""

    def __init__(self, good: Good) -> None:
        uri = good.server.locations("live")[0]
        self.free_tag = peer.free_of(uri)
        self.connection = peer.connect(uri)
        self.connection.send(peer.want(good.server.ticket("live"), peer.want_of(uri)))
        self.extents: list[list[tuple[int, int]]] = []
        self.inline: list[int] = []  # the checksums of later bodies, which arrived inline

    def hold(self, count: int) -> Holder:
        while len(self.extents) < count:
            self._take(self.connection.read_frame())
        return self

    def _take(self, frame: peer.Frame) -> None:
        if frame.kind == peer.REGION:
            self.base, size, _ = struct.unpack("<QQQ", frame.payload)
            self.memory = mmap.mmap(self.connection.descriptors[0], size, prot=mmap.PROT_READ)
        elif frame.kind == peer.TAGGED:
            if frame.tag >> 56 == peer.ADDRESSES:
                self._hold(frame.payload)
            else:
                self.inline.append(zlib.crc32(frame.payload))  # These bodies have no padding.
        elif frame.kind == peer.RUN:
            count, untagged, tagged = struct.unpack_from("<QQQ", frame.payload)
            at = 24 + 8 * count + (count * untagged + 7 & ~7)
            for start in range(at, at + count * tagged, tagged):
                self._take(peer.Frame(peer.TAGGED, frame.payload[31] << 56, frame.payload[start : start + tagged]))

    def _hold(self, listed: bytes) -> None:
        _, count, *flat = struct.unpack(f"<{len(listed) // 8}Q", listed)
        pairs = [*zip(flat[::2], flat[1::2], strict=True)]
        assert len(pairs) == count
        self.extents.append([(address, length) for address, length in pairs if length])

    def end_sending(self) -> None:
        """Shut down the sending side. The server accepts that, so that later silence ends the stream."""
        self.connection.socket.shutdown(socket.SHUT_WR)
        self.connection.socket.settimeout(1.0)

    def to_the_end(self) -> str:
        """Return why the stream ended, after reading the remaining frames."""
        while True:
            try:
                frame = self.connection.read_frame()
            except (EOFError, OSError):
                return "closed"
            if frame.kind == peer.ABORT:
                return frame.payload.decode()
            self._take(frame)

    def look(self) -> list[int]:
        found = []
        for pairs in self.extents:
            total = 0
            for address, length in pairs:
                at = address - self.base
                total = zlib.crc32(self.memory[at : at + length], total)
            found.append(total)
        return found + self.inline

    def let_go(self) -> None:
        self.memory.close()
        self.connection.close()


@pytest.fixture
def child(spawn: Spawn) -> Child:
    return Child(spawn("-c", CONSUMER))


def publish_shared(good: Good, some: list[pa.RecordBatch], consumers: int = 1) -> None:
    good.server.publish("live", reader(some), live=dis.Live(consumers=consumers, stall_timeout=60))


def publish_own(good: Good, some: list[pa.RecordBatch], consumers: int = 1) -> None:
    good.server.publish("live", lambda: reader(some))


def is_sent_away(good: Good) -> bool:
    """Return whether the server has given up its only client."""
    return all(consumer.state == "cut off" for consumer in good.server.status().consumers)


def pause(good: Good, child: Child) -> None:
    """Stop the only client until the server gives it up."""
    child.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_sent_away(good), "the server has given up on it")
    child.process.send_signal(signal.SIGCONT)


def is_over(good: Good) -> None:
    wait_until(good.alone, "the connection is over")
    wait_until(lambda: not shared_bytes("live"), "all memory has gone back")


def each_time(good: Good, child: Child, sent: list[pa.RecordBatch]) -> Iterator[None]:
    """Publish and open the batches a few times in each way. All memory must be freed after each time."""
    for publish in (publish_shared, publish_own) * ROUNDS:
        publish(good, sent)
        child.open(good)
        yield
        assert child("let go")[1] == []
        is_over(good)


def test_a_pause_beyond_stall_timeout(serve: Serve, child: Child) -> None:
    """Pause a client whose socket is full of small messages. It still reads them, and then the reason for the end."""
    good = serve("shm:", stall_timeout=0.3)
    sent = batches(400)
    expected = [*map(checksum, sent)]
    for _ in each_time(good, child, sent):
        assert child("hold 3") == ("", expected[:3])
        pause(good, child)
        assert child("look") == ("", expected[:3])
        ended, held = child("rest")
        assert held == expected[: len(held)]
        assert 3 < len(held) < len(sent)
        assert "took nothing for 0.3 s" in ended
        assert child("look") == (ended, held)


def test_a_pause_beyond_stall_timeout_while_memory_is_shared(serve: Serve) -> None:
    """Take nothing of a dataset with so many segments that their announcements alone fill the socket."""
    good = serve("shm:", stall_timeout=0.2)
    segments: list[Segment] = []
    for _ in range(400):
        with SegmentWriter(partial(MemfdSink, "live", segments.append), pa.schema({"n": pa.int64()}), None):
            pass
    good.server.publish_segments("live", segments)
    uri = good.server.locations("live")[0]
    with peer.connect(uri) as client:
        client.send(peer.want(good.server.ticket("live"), peer.want_of(uri)))
        wait_until(lambda: good.server.connections, "the server has the request")
        wait_until(good.alone, "the server has given up on it")


def test_a_pause_beyond_lease_timeout(serve: Serve, child: Child) -> None:
    good = serve("shm:", lease_timeout=0.2)
    sent = batches(20)
    expected = [*map(checksum, sent)]
    for _ in each_time(good, child, sent):
        assert child("rest") == ("the end", expected)
        pause(good, child)
        assert child("look") == ("the end", expected)


def test_whatever_a_client_does_it_keeps_what_it_holds_until_it_closes_its_connection(serve: Serve) -> None:
    good = serve("shm:", stall_timeout=0.3)
    # A server that has sent everything when half a message comes waits for freed memory, up to the lease timeout.
    soon_over = serve("shm:", stall_timeout=0.3, lease_timeout=2.0)
    sent = batches(15)  # A socket holds all of their metadata, so only a client that stops within a message is late.
    expected = [*map(checksum, sent)]
    steps: dict[str, tuple[Callable[[Holder], object], str]] = {
        "noise": (lambda one: one.connection.send(b"\xff" * 64), "unknown kind 255"),
        "a free of what is not its own": (lambda one: one.connection.send(peer.free(1, tag=one.free_tag)), "not hold"),
        "a request within the stream": (lambda one: one.connection.send(peer.frame(2, b"", 5)), "unknown tag"),
        "half a message": (lambda one: one.connection.send(peer.head(2, 8, one.free_tag)), "was silent"),
        "an end of what it sends": (lambda one: one.end_sending(), ""),
    }
    for publish in (publish_shared, publish_own):
        for what, (step, reason) in steps.items():
            server = soon_over if what == "half a message" else good
            publish(server, sent)
            holder = Holder(server).hold(5)
            step(holder)
            assert reason in holder.to_the_end(), what
            assert holder.look() == expected[: len(holder.look())], what
            assert shared_bytes("live")
            holder.let_go()
            is_over(server)


def test_a_client_that_breaks_a_rule_while_the_server_waits_to_send_is_told(serve: Serve) -> None:
    good = serve("shm:")
    sent = batches(120)  # A socket holds the metadata of a third of them.
    publish_shared(good, sent)
    holder = Holder(good).hold(5)
    wait_until(lambda: good.leases > 30 * COLUMNS, "the socket is full, or nearly")
    holder.connection.send(peer.free(1, tag=holder.free_tag))
    assert "not hold" in holder.to_the_end()
    assert holder.look() == [*map(checksum, sent[: len(holder.look())])]
    holder.let_go()
    is_over(good)


def test_whatever_becomes_of_a_live_stream_its_readers_keep_what_they_hold(serve: Serve) -> None:
    sent = batches(30)
    expected = [*map(checksum, sent)]

    def drop_and_close(server: dis.Server) -> None:
        server.drop("live")
        server.close()

    ends: dict[str, Callable[[dis.Server], object]] = {
        "dropped": lambda server: server.drop("live"),
        "replaced": lambda server: server.publish("live", sent[0]),
        "the server closes": lambda server: server.close(),
        "dropped before the server closes": drop_and_close,
    }
    for publish in (publish_shared, publish_own):
        for what, end in ends.items():
            with dis.Server(["shm:"], catalog=None) as server:
                good = Good(server, pa.table({}))
                publish(good, sent, consumers=2)
                holders = [Holder(good), Holder(good)]
                for holder, count in zip(holders, (2, 9), strict=True):
                    holder.hold(count)
                end(server)
                server.close()
                for holder in holders:
                    holder.to_the_end()
                    assert holder.look() == expected[: len(holder.look())], what
                    holder.let_go()


def test_what_a_forked_child_holds_as_well(serve: Serve, spawn: Spawn) -> None:
    """Fork a reader. The parent releases its batches, reads the rest of the stream, and releases that, too."""
    good = serve("shm:")
    sent = batches(50)
    expected = [*map(checksum, sent)]
    for publish in (publish_shared, publish_own):
        publish(good, sent)
        child = Child(spawn("-c", CONSUMER))
        child.open(good)
        assert child("hold 5") == ("", expected[:5])
        assert child("fork") == ("", expected[:5])
        wait_until(lambda: all(consumer.leases <= 320 for consumer in good.server.status().consumers), "let go")
        assert child("look") == ("", expected[:5])
        assert child("leave") == child("bye") == ("", expected[:5])
        assert child.process.wait(PATIENCE) == 0
        is_over(good)


def test_what_is_held_until_the_interpreter_ends(serve: Serve, child: Child) -> None:
    good = serve("shm:")
    sent = batches(10)
    expected = [*map(checksum, sent)]
    publish_shared(good, sent)
    child.open(good)
    assert child("rest") == ("the end", expected)
    assert child("leave") == ("the end", expected)
    for thread in serving(good.server):
        thread.join(0.3)
    assert child("look") == ("the end", expected)
    assert child.process.wait(PATIENCE) == 0
    is_over(good)


def test_memory_of_those_who_were_cut_off_is_told_and_bounded(serve: Serve) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", live_limit=1 << 20, kept_limit=1 << 19)
    sent = batches(30)
    expected = [*map(checksum, sent)]
    publish_own(good, sent)
    assert good.server.status().kept == 0
    holder = Holder(good).hold(20)
    holder.connection.send(b"\xff" * 64)
    holder.to_the_end()
    wait_until(lambda: good.server.status().kept, "it is told")
    now = good.server.status()
    assert now.kept == now.consumers[0].kept == shared_bytes("live") >= 20 * 64 * 512
    assert now.consumers[0].state == "cut off"
    shm, tcp = good.server.locations("live")
    with pytest.raises(dis.errors.RemoteError, match=r"readers that were cut off still hold [\d,]+ bytes"):
        dis.open_stream(shm, good.server.ticket("live")).read_all()
    assert [checksum(one) for one in dis.open_stream(tcp, good.server.ticket("live"))] == expected
    holder.let_go()
    wait_until(lambda: not good.server.status().kept, "it has let go")
    assert [checksum(one) for one in dis.open_stream(shm, good.server.ticket("live"))] == expected


def test_memory_of_what_is_served_no_more_is_told_and_bounded(serve: Serve) -> None:
    """Disconnect a reader of a static dataset that keeps holding memory which is replaced meanwhile."""
    good = serve("shm:", "tcp://127.0.0.1:0", lease_timeout=0.05, kept_limit=1 << 20)
    server = good.server
    table = pa.table({"n": np.arange(1 << 18)})

    def written() -> None:
        with server.writer("data", table.schema) as writer:
            writer.write(table)

    for publish in (lambda: server.publish("data", table), written):
        publish()
        held = dis.open_stream(server.locations("data")[0], server.ticket("data")).read_all()
        wait_until(lambda: not server.connections, "it is cut off")
        wait_until(lambda: not server.status().kept, "nothing counts: what it holds is served")
        server.publish("data", table.slice(1))
        wait_until(lambda: server.status().kept >= table.nbytes, "it is told")
        shm, tcp = server.locations("data")
        with pytest.raises(dis.errors.RemoteError, match=r"readers that were cut off still hold [\d,]+ bytes"):
            dis.open_stream(shm, server.ticket("data")).read_all()
        assert dis.open_stream(tcp, server.ticket("data")).read_all() == table.slice(1)
        assert held == table
        del held
        wait_until(lambda: not server.status().kept, "it has let go")
        assert dis.open_stream(shm, server.ticket("data")).read_all() == table.slice(1)

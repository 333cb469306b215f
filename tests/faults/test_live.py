"""Consumers of one live stream in processes that are killed, stopped, late, or disappointed by the source."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from memory.maps import shared_bytes
from support.helpers import location, wait_until

from .conftest import Good, Serve, Spawn
from .peer import PATIENCE

Policy: TypeAlias = Literal["drop_oldest", "latest"]

MB = 1 << 20
LIMIT = 8 * MB
CONSUMER = """
import sys
import dissociated as dis

uri, ticket = sys.argv[1], bytes.fromhex(sys.argv[2])
reader = dis.open_stream(uri, ticket, timeout=30)
print("open", flush=True)
held = []
for line in sys.stdin:
    try:
        if line == "hold\\n":
            held.append(reader.read_next_batch())
            print(held[-1]["n"][0].as_py(), flush=True)
        elif line == "check\\n":
            print(all(len(one["n"].unique()) == 1 for one in held), [one["n"][0].as_py() for one in held], flush=True)
        elif line == "rest\\n":
            numbers = [one["n"].unique().to_pylist() for one in reader]
            print(numbers[0], numbers[-1], len(numbers), flush=True)
        elif line == "let go\\n":
            held.clear()
            print("gone", flush=True)
    except dis.errors.DissociatedError as error:
        print(type(error).__name__, error, flush=True)
"""


class Paced:
    """A source of numbered batches of 1 MB. Each waits until the test releases it. The last may be an error."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self._allowed = threading.Semaphore(0)
        self._count = count
        self._error = error
        self.given = 0
        schema = pa.schema([("n", pa.int64())])
        self.reader = pa.RecordBatchReader.from_batches(schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for number in range(self._count):
            self._allowed.acquire()
            self.given = number + 1
            yield pa.record_batch({"n": np.full(MB // 8, number)})
        self._allowed.acquire()
        if self._error is not None:
            raise self._error

    def allow(self, count: int) -> None:
        for _ in range(count):
            self._allowed.release()


class Child:
    """A consumer in its own process that reads commands and answers in lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def __call__(self, word: str) -> str:
        self.say(word)
        return self.answer()


Start = Callable[..., Child]


@pytest.fixture
def consumer(spawn: Spawn) -> Start:
    """Return a function that starts a consumer in its own process."""

    def start(good: Good, scheme: str = "shm") -> Child:
        uri = location(good.server, "live", scheme)
        process = spawn("-c", CONSUMER, uri, good.server.ticket("live").hex())
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        return Child(process)

    return start


def hold(source: Paced, count: int, keeper: Child, *others: Child) -> None:
    """Let all consumers take the first batches, and let one of them keep these."""
    source.allow(count)
    for number in range(count):
        assert {one("hold") for one in (keeper, *others)} == {str(number)}
    assert {one("let go") for one in others} == {"gone"}


def rest_of(*consumers: Child) -> list[str]:
    """Let all consumers read to the end at the same time."""
    for one in consumers:
        one.say("rest")
    return [one.answer() for one in consumers]


@pytest.mark.parametrize("times", range(3))
def test_a_consumer_that_is_killed_gives_everything_back(serve: Serve, consumer: Start, times: int) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", live_limit=LIMIT)
    source = Paced(20)
    good.server.publish("live", source.reader, live=dis.Live(consumers=3, stall_timeout=60))
    victim, other, inline = consumer(good), consumer(good), consumer(good, "tcp")
    hold(source, 4, victim, other, inline)
    assert shared_bytes("live") // MB == 4  # held by the victim
    victim.process.kill()
    wait_until(lambda: shared_bytes("live") <= LIMIT // 4, "all but a share of its memory has gone back to the system")
    wait_until(lambda: good.server.connections == 2, "its connection is over")
    source.allow(20)
    # More data than the limit passes, so its memory no longer counts against the limit.
    assert rest_of(other, inline) == ["[4] [19] 16"] * 2
    wait_until(lambda: shared_bytes("live") == 0, "nothing is left")


def test_a_consumer_that_is_stopped_is_cut_off_and_no_other(serve: Serve, consumer: Start) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", live_limit=LIMIT, stall_timeout=60)
    source = Paced(40)
    good.server.publish("live", source.reader, live=dis.Live(consumers=3, stall_timeout=1.0))
    stopped, other, inline = consumer(good), consumer(good), consumer(good, "tcp")
    hold(source, 2, stopped, other, inline)
    stopped.process.send_signal(signal.SIGSTOP)
    source.allow(40)
    assert rest_of(other, inline) == ["[2] [39] 38"] * 2
    wait_until(lambda: shared_bytes("live") <= LIMIT, "the others have given back what they held")
    assert shared_bytes("live") >= 2 * MB  # Its batches stay until it releases them.
    stopped.process.send_signal(signal.SIGCONT)
    assert stopped("check") == "True [0, 1]"
    assert "held up the others for 1 s: it was cut off" in stopped("rest")
    assert stopped("check") == "True [0, 1]"
    assert stopped("let go") == "gone"
    wait_until(lambda: shared_bytes("live") == 0, "what it held is given back")


@pytest.mark.parametrize("policy", ["drop_oldest", "latest"])
def test_a_consumer_that_is_stopped_continues_with_the_present(
    serve: Serve, consumer: Start, policy: Literal["drop_oldest", "latest"]
) -> None:
    good = serve("shm:", live_limit=LIMIT)
    source = Paced(40)
    live = dis.Live(consumers=2, stall_timeout=60, policy=policy)
    good.server.publish("live", source.reader, live=live)
    stopped, other = consumer(good), consumer(good)
    for number in range(2):
        source.allow(1)
        assert (stopped("hold"), other("hold")) == (str(number), str(number))
    assert other("let go") == "gone"
    stopped.process.send_signal(signal.SIGSTOP)
    for number in range(2, 40):
        source.allow(1)
        assert (other("hold"), other("let go")) == (str(number), "gone")
    missed = sorted(one.missed for one in good.server.status().consumers)
    assert missed[0] == 0
    stopped.process.send_signal(signal.SIGCONT)
    source.allow(1)
    _, last, count = stopped("rest").split()
    assert (last, int(count)) == ("[39]", 38 - missed[1])
    assert stopped("check") == "True [0, 1]"
    assert stopped("let go") == "gone"
    wait_until(lambda: shared_bytes("live") == 0, "nothing is left")


def test_a_consumer_over_tcp_that_is_stopped_is_cut_off(serve: Serve, consumer: Start) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", live_limit=LIMIT, stall_timeout=60)
    source = Paced(60)
    good.server.publish("live", source.reader, live=dis.Live(consumers=2, stall_timeout=1.0))
    stopped, other = consumer(good, "tcp"), consumer(good)
    stopped.process.send_signal(signal.SIGSTOP)
    source.allow(61)
    assert other("rest") == "[0] [59] 60"
    wait_until(lambda: good.server.connections == 0, "it is disconnected")
    wait_until(lambda: shared_bytes("live") == 0, "nothing is held for it")
    stopped.process.send_signal(signal.SIGCONT)
    assert "closed" in stopped("rest")


def test_a_late_consumer_begins_where_the_stream_is(serve: Serve, consumer: Start) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", live_limit=LIMIT)
    source = Paced(30)
    good.server.publish("live", source.reader, live=dis.Live())
    first = consumer(good)
    source.allow(5)
    for number in range(5):
        assert first("hold") == str(number)
    late = [consumer(good), consumer(good, "tcp")]
    assert first("let go") == "gone"
    source.allow(30)
    assert rest_of(first, *late) == ["[5] [29] 25"] * 3


def test_every_consumer_learns_that_the_source_failed(serve: Serve, consumer: Start) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0", live_limit=LIMIT)
    source = Paced(3, ValueError("the sensor is on fire"))
    good.server.publish("live", source.reader, live=dis.Live(consumers=3))
    everybody = [consumer(good), consumer(good), consumer(good, "tcp")]
    source.allow(4)
    for number in range(3):
        assert {one("hold") for one in everybody} == {str(number)}
    for one in everybody:
        told, _, reference = one("rest").partition(" [source_failed ")
        assert told == "SourceError the source of 'live' failed (ValueError): the log of its server says more"
        assert len(reference) == 13
        assert one("check") == "True [0, 1, 2]"
    assert shared_bytes("live") // MB == 3
    for one in everybody:
        assert one("let go") == "gone"
    wait_until(lambda: shared_bytes("live") == 0, "nothing is left", 2 * PATIENCE)

"""Peers that are really killed or stopped at each stage of a stream."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import textwrap

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteProtocolError, TransportError
from support.helpers import location, open_over_flight, wait_until

from .clients import CLIENT, COUNTING, ENDING, failure_by, line, stop_and_go_on
from .conftest import PEER, Serve, Spawn
from .content import BASE, BODY, GOOD, META, SCHEMA
from .peer import (
    ADDRESSES,
    LIVE,
    PATIENCE,
    PREAMBLE,
    SEALED,
    addresses,
    body,
    end,
    want,
    want_of,
)
from .stages import server_stages

SILENCE = 0.2  # seconds


# Servers

BY_ADDRESS = SCHEMA + META + body(1, addresses((0, 0), (BASE, 8000)), ADDRESSES)


def _send(content: bytes) -> list[object]:
    return ["send", content.hex()]


def _shared(backing: int) -> list[list[object]]:
    return [["read", 1], _send(PREAMBLE), ["region", BASE, 8192, backing]]


#: Steps of `peer.play` up to each stage at which a server ends, also within messages and with shared memory.
SERVER_STAGES = {
    **server_stages(["read", 1], _send(PREAMBLE + SCHEMA), _send(META), _send(body(1, BODY)), _send(end(2))),
    "before want_data": [_send(PREAMBLE)],
    "after its greeting": [["read", 1], _send(PREAMBLE)],
    "within the schema": [["read", 1], _send(PREAMBLE + SCHEMA[:50])],
    "within a body": [["read", 1], _send(PREAMBLE + SCHEMA + META + body(1, BODY)[:4000])],
    "within the end of stream": [["read", 1], _send(GOOD[:-3])],
    "with its memory shared": _shared(SEALED),
    "with leases": [*_shared(SEALED), _send(BY_ADDRESS)],
    "with leases of live memory": [*_shared(LIVE), _send(BY_ADDRESS)],
}


def start_server(spawn: Spawn, scheme: str, runtime: str, stage: str) -> tuple[subprocess.Popen[str], str]:
    steps = [*SERVER_STAGES[stage], ["reached"], ["hold"]]
    process = spawn(PEER, "server", scheme, f"{runtime}/peer.sock", say=json.dumps(steps))
    return process, line(process)


@pytest.mark.parametrize("stage", SERVER_STAGES)
def test_server_is_killed(spawn: Spawn, runtime: str, stage: str) -> None:
    process, uri = start_server(spawn, "shm", runtime, stage)
    failure = failure_by(process, uri, signal.SIGKILL, PATIENCE)
    assert type(failure) in (ConnectionClosed, RemoteProtocolError), failure
    assert "the peer closed the" in str(failure)
    os.unlink(f"{runtime}/peer.sock")


@pytest.mark.parametrize("stage", SERVER_STAGES)
def test_server_is_stopped(spawn: Spawn, runtime: str, stage: str) -> None:
    process, uri = start_server(spawn, "shm", runtime, stage)
    failure = failure_by(process, uri, signal.SIGSTOP, SILENCE)
    assert type(failure) is DeadlineExceeded, failure
    assert f"silent for {SILENCE:g} s" in str(failure)
    os.unlink(f"{runtime}/peer.sock")


def test_server_is_killed_after_the_end_of_stream(spawn: Spawn, runtime: str) -> None:
    # Bodies by address stay readable, because the mapping belongs to the client.
    steps = [*SERVER_STAGES["with leases"], ["send", end(2).hex()], ["hold"]]
    process = spawn(PEER, "server", "shm", f"{runtime}/peer.sock", say=json.dumps(steps))
    table = dis.open_stream(line(process), b"ticket", timeout=PATIENCE).read_all()
    process.kill()
    process.wait(PATIENCE)
    assert table["n"].to_pylist() == [0] * 1000
    del table  # No server frees it any more.
    os.unlink(f"{runtime}/peer.sock")


SERVER = textwrap.dedent(
    """
    import os, sys, threading
    import numpy as np
    import pyarrow as pa
    import dissociated as dis

    numbers = pa.table({"n": pa.array(np.arange(1 << 20))})
    stuck = threading.Event()

    def source():
        yield numbers.to_batches(max_chunksize=1 << 16)[0]
        os.write(1, b"reached\\n")  # whole, beside another thread's
        stuck.wait()

    server = dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None)
    server.publish("numbers", numbers)
    server.publish("stuck", lambda: pa.RecordBatchReader.from_batches(numbers.schema, source()))
    for name in "numbers", "stuck":
        print(server.ticket(name).hex(), *server.locations(name), flush=True)
    sys.stdin.read()
    """
)


def real_server(spawn: Spawn) -> tuple[subprocess.Popen[str], tuple[bytes, list[str]], tuple[bytes, list[str]]]:
    process = spawn("-c", SERVER)

    def dataset() -> tuple[bytes, list[str]]:
        ticket, *uris = line(process).split()
        return bytes.fromhex(ticket), uris

    return process, dataset(), dataset()


FLIGHT_SERVER = """
import sys, numpy as np, pyarrow as pa, dissociated as dis
numbers = pa.table({"n": np.arange(1 << 24)})  # more than sockets and gRPC hold
with dis.Server([], catalog="grpc://127.0.0.1:0") as server:
    server.publish("numbers", pa.Table.from_batches(numbers.to_batches(1 << 16)))
    print(server.catalog_uri, flush=True)
    sys.stdin.read()
"""


def test_a_flight_server_is_stopped(spawn: Spawn) -> None:
    """A read ends by its deadline, within a stream and before its first message. Later reads work again."""
    process = spawn("-c", FLIGHT_SERVER)
    with dis.connect(line(process), timeout=2) as client:
        ticket = client.describe("numbers").endpoints[0].ticket
        reader = open_over_flight(client, ticket)
        rows = reader.read_next_batch().num_rows
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded, match="silent for 2 s"):
            rows += sum(batch.num_rows for batch in reader)
        assert rows < 1 << 24
        with pytest.raises(DeadlineExceeded, match="silent for 2 s"):
            open_over_flight(client, ticket)
        process.send_signal(signal.SIGCONT)
        assert open_over_flight(client, ticket).read_all().num_rows == 1 << 24


def test_real_server_is_killed(spawn: Spawn, runtime: str) -> None:
    process, (ticket, (shm, tcp)), (stuck, stuck_uris) = real_server(spawn)
    held = dis.open_stream(shm, ticket, timeout=PATIENCE).read_all()
    readers = [dis.open_stream(uri, stuck, timeout=PATIENCE) for uri in stuck_uris]
    batches = [reader.read_next_batch() for reader in readers]
    for _ in readers:
        assert line(process) == "reached"
    process.kill()
    process.wait(PATIENCE)
    for reader in readers:
        with pytest.raises((ConnectionClosed, RemoteProtocolError), match="the peer closed the"):
            reader.read_next_batch()
        with pytest.raises((ConnectionClosed, RemoteProtocolError)):  # The stream did not end normally.
            reader.read_next_batch()
    for uri in shm, tcp:
        with pytest.raises(TransportError, match="refused"):
            dis.open_stream(uri, ticket, timeout=PATIENCE)
    assert held["n"].to_pylist() == list(range(1 << 20))
    for batch in batches:
        assert batch["n"].to_pylist() == list(range(1 << 16))
    del held, readers, reader, batches, batch
    shutil.rmtree(f"{runtime}/dissociated")  # The next server would remove it.


def test_what_a_killed_server_leaves_is_removed_by_the_next(spawn: Spawn, runtime: str, serve: Serve) -> None:
    process, _, _ = real_server(spawn)
    sockets = os.listdir(f"{runtime}/dissociated")
    assert len(sockets) == 1
    good = serve("shm:")
    assert len(os.listdir(f"{runtime}/dissociated")) == 2, "that of a server that lives is left alone"
    process.kill()
    process.wait(PATIENCE)
    assert os.path.exists(f"{runtime}/dissociated/{sockets[0]}")
    good = serve("shm:")
    good.check()
    assert not os.path.exists(f"{runtime}/dissociated/{sockets[0]}")
    assert len(os.listdir(f"{runtime}/dissociated")) == 2


def test_path_of_a_killed_server_can_be_used_again(spawn: Spawn, runtime: str, serve: Serve) -> None:
    path = f"{runtime}/own.sock"
    script = f"import dissociated, sys; s = dissociated.Server(['shm://{path}'], catalog=None); print('up', flush=True)"
    process = spawn("-c", script + "; sys.stdin.read()")
    assert line(process) == "up"
    with pytest.raises(TransportError, match="in use"):
        dis.Server([f"shm://{path}"], catalog=None)
    process.kill()
    process.wait(PATIENCE)
    serve(f"shm://{path}").check()


def test_real_server_is_stopped(spawn: Spawn, runtime: str) -> None:
    process, (ticket, uris), _ = real_server(spawn)
    process.send_signal(signal.SIGSTOP)
    for uri in uris:  # The kernel still accepts connections.
        with pytest.raises(DeadlineExceeded, match="silent"):
            dis.open_stream(uri, ticket, timeout=SILENCE)
    process.send_signal(signal.SIGCONT)
    for uri in uris:
        assert dis.open_stream(uri, ticket, timeout=PATIENCE).read_all().num_rows == 1 << 20
    process.kill()
    process.wait(PATIENCE)
    shutil.rmtree(f"{runtime}/dissociated")


# Clients


def client_stages(uri: str, ticket: bytes) -> dict[str, list[list[object]]]:
    request = want(ticket, want_of(uri))
    return {
        "before a word": [],
        "within the handshake": [["send", request[:5].hex()]],
        "before want_data": [["send", request[:8].hex()]],
        "within want_data": [["send", request[:30].hex()]],
        "after want_data": [["send", request.hex()]],
        "within the stream": [["send", request.hex()], ["read", 1]],
    }


STAGES = list(client_stages("?want_data=1", b""))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_client_is_killed(serve: Serve, spawn: Spawn, scheme: str, stage: str) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0")
    good.server.publish("large", pa.table({"n": pa.array(np.arange(1 << 20))}))
    uri = location(good.server, "large", scheme, bodies="packed")
    steps = [*client_stages(uri, good.server.ticket("large"))[stage], ["reached"], ["hold"]]
    if stage in ("after want_data", "within the stream"):
        steps[-1] = ["sleep"]
    process = spawn(PEER, "client", scheme, uri.partition("://")[2].partition("?")[0], say=json.dumps(steps))
    assert line(process) == "reached"
    wait_until(lambda: good.server.connections == 1, "the server has accepted")
    good.check()
    process.kill()
    process.wait(PATIENCE)
    wait_until(good.alone, "the server has noticed")
    good.check()


@pytest.mark.parametrize("stage", STAGES)
def test_client_is_stopped(serve: Serve, spawn: Spawn, stage: str) -> None:
    good = serve("tcp://127.0.0.1:0", handshake_timeout=1.0, stall_timeout=1.0)
    good.server.publish("large", pa.table({"n": pa.array(np.arange(1 << 20))}))
    (uri,) = good.server.locations("large")
    steps = [*client_stages(uri, good.server.ticket("large"))[stage], ["reached"], ["sleep"]]
    process = spawn(PEER, "client", "tcp", uri.partition("://")[2].partition("?")[0], say=json.dumps(steps))
    assert line(process) == "reached"
    process.send_signal(signal.SIGSTOP)
    good.check()
    wait_until(good.alone, "the server has given up")
    good.check()


def test_client_is_killed_while_it_holds_leases(serve: Serve, spawn: Spawn) -> None:
    good = serve("shm:")
    (uri,) = good.server.locations("good")
    request = want(good.server.ticket("good"), want_of(uri))
    steps = [["send", request.hex()], ["stream"], ["reached"], ["sleep"]]
    process = spawn(PEER, "client", "shm", uri.partition("://")[2].partition("?")[0], say=json.dumps(steps))
    assert line(process) == "reached"
    good.check()
    wait_until(lambda: good.server.connections == 1, "the good client has gone")
    assert good.leases == 3 * 4  # three batches of integers and of strings with validity and offsets
    process.kill()
    process.wait(PATIENCE)
    wait_until(lambda: good.leases == 0, "its leases have ended")
    wait_until(good.alone, "the server has noticed")


@pytest.mark.parametrize("bodies", ["any", "packed"])
def test_real_clients_are_killed_within_a_live_stream(serve: Serve, spawn: Spawn, bodies: str) -> None:
    # The stream is endless. Its region is full until the client frees memory.
    batch = pa.record_batch({"n": pa.array(range(1 << 17), pa.int64())})

    def for_ever() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in iter(int, 1)))

    good = serve("shm:", live_limit=1 << 22)
    good.server.publish("live", for_ever)
    (uri,) = good.server.locations("live", bodies=bodies)
    ticket = good.server.ticket("live")
    processes = [spawn("-c", CLIENT, uri, ticket.hex(), "3") for _ in range(2)]
    for process in processes:
        assert line(process) == "reached"
    good.check()
    wait_until(lambda: good.server.connections == 2, "the good client has gone")

    def held() -> list[int]:
        return [one.leases for one in good.server.status().consumers]

    if bodies == "any":
        wait_until(lambda: held() == [4, 4], "each holds all that fits")
    processes[0].kill()
    processes[0].wait(PATIENCE)
    wait_until(lambda: held() == ([4] if bodies == "any" else [0]), "its leases have ended, and no others")
    good.check()
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait(PATIENCE)
    wait_until(good.alone, "the server has noticed")


def test_client_is_stopped_and_goes_on(serve: Serve, spawn: Spawn) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0")
    good.server.publish(
        "large", pa.Table.from_batches([pa.record_batch({"n": pa.array(range(1 << 16), pa.int64())})] * 40)
    )
    for uri in good.server.locations("large", bodies="packed"):
        process = spawn("-c", COUNTING, uri, good.server.ticket("large").hex(), "1")
        stop_and_go_on(good, process, 39 << 16)


def test_interpreter_ends_while_a_stream_is_open(serve: Serve, spawn: Spawn) -> None:
    good = serve("shm:", "tcp://127.0.0.1:0")
    for uri in good.server.locations("good"):
        process = spawn("-c", ENDING, uri, good.server.ticket("good").hex(), "1")
        assert line(process) == "reached"
        assert process.wait(PATIENCE) == 0
        wait_until(good.alone, "the server has noticed")


#: A script whose memory takes long to unmap, in the last thread that holds it, after the main thread has ended.
SLOW = textwrap.dedent(
    """
    import mmap, sys, threading, time
    import pyarrow as pa
    import dissociated as dis
    import dissociated.transport.framed.shm as shm

    class Slow(mmap.mmap):
        def __del__(self):
            begun.set()
            for _ in range(300):  # coming back to the interpreter again and again, to find it gone
                time.sleep(0.001)

    begun = threading.Event()

    shm.map_received = lambda descriptor, size, *_: pa.py_buffer(
        Slow(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    )

    uri, ticket, batches = sys.argv[1:]
    dis.open_stream(uri, bytes.fromhex(ticket)).read_all()
    begun.wait()
    """
)


def test_interpreter_ends_while_memory_is_given_back(serve: Serve, spawn: Spawn) -> None:
    good = serve("shm:")
    (uri,) = good.server.locations("good")
    process = spawn("-c", SLOW, uri, good.server.ticket("good").hex(), "0")
    assert process.wait(PATIENCE) == 0


#: A script with user threads that read as long as the process lives, batch by batch and also within libarrow. A module
#: deleted during interpreter shutdown sleeps, so that other threads run.
READING_ON = textwrap.dedent(
    """
    import sys, threading, time
    import dissociated as dis

    class Slow:
        def __del__(self, sleep=time.sleep):
            sleep(0.1)

    def read(name, whole):
        waiting = begun
        while True:
            reader = dis.open_stream(uri, bytes.fromhex(tickets[name]))
            reader.read_next_batch()
            if waiting is not None:
                waiting = waiting.wait() and None
            if whole:
                reader.read_all()
            else:
                for batch in reader:
                    pass

    uri, *tickets = sys.argv[1:]
    ways = [(name, whole) for name in range(len(tickets)) for whole in (False, True)]
    begun = threading.Barrier(len(ways) + 1)
    for way in ways:
        threading.Thread(target=read, args=way, daemon=True).start()
    sys.slow = Slow()
    del Slow
    begun.wait()
    """
)


@pytest.mark.parametrize("medium", ["shm", "tcp"])
def test_interpreter_ends_while_threads_of_the_user_read(serve: Serve, spawn: Spawn, medium: str) -> None:
    good = serve("shm:" if medium == "shm" else "tcp://127.0.0.1:0")
    batch = pa.record_batch({"n": pa.array(range(1 << 12), pa.int64())})
    good.server.publish("endless", lambda: itertools.repeat(batch), schema=batch.schema)
    good.server.publish("static", pa.Table.from_batches([batch] * 40))
    (uri,) = good.server.locations("endless")
    tickets = [good.server.ticket(name).hex() for name in ("endless", "static")]
    children = [spawn("-c", READING_ON, uri, *tickets) for _ in range(10)]
    assert [child.wait(PATIENCE) for child in children] == [0] * 10


@pytest.mark.parametrize("bodies", ["any", "packed"])
def test_interpreter_ends_while_two_connections_are_open(serve: Serve, spawn: Spawn, bodies: str) -> None:
    good = serve("shm:")
    good.server.publish("large", pa.Table.from_batches([pa.record_batch({"n": range(1 << 16)})] * 400))
    uris = [good.server.locations("large", streams=one, bodies=bodies)[0] for one in ("metadata", "bodies")]
    script = ENDING.replace("(uri,", "(uri.split(),")
    process = spawn("-c", script, " ".join(uris), good.server.ticket("large").hex(), "1")
    assert line(process) == "reached"
    assert process.wait(PATIENCE) == 0

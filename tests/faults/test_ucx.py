"""Peers over UCX that are really killed or stopped at each stage of a stream, and peers that break the rules."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteProtocolError, TransportError
from dissociated.store.files import claim_unused
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.ucx.libucp import ucp
from support import ucx_peer
from support.helpers import wait_until

from .clients import CLIENT, COUNTING, ENDING, Reading, end_by, failure_by, line, stop_and_go_on
from .conftest import Serve, Spawn
from .content import BATCH_HEADER, BODY, SCHEMA_HEADER
from .peer import PATIENCE
from .stages import server_stages

pytestmark = pytest.mark.needs("ucx")


PEER = str(Path(ucx_peer.__file__))
SILENCE = 2.0  # seconds, in which a loaded machine still connects
MODES = ["peer", "none"]
#: Stages at which servers end in both modes, and by both signals.
FEWER_STAGES = ["accepted", "between metadata and body", "before the end of stream"]

LARGE = pa.table({"n": pa.array(np.arange(1 << 21))})


#: Functions of UCX that create an object, and the functions that release it.
OWED = {
    "ucp_worker_create": "ucp_worker_destroy",
    "ucp_listener_create": "ucp_listener_destroy",
    "ucp_mem_map": "ucp_mem_unmap",
    "ucp_ep_rkey_unpack": "ucp_rkey_destroy",
}


class Counted:
    """UCX's library with a record of the objects that this process has not released."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.owed: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.library, name)
        if name in OWED:
            return partial(self._make, name, call)
        if name in OWED.values():
            return partial(self._give_back, name, call)
        return call

    def _make(self, name: str, call: Any, *arguments: Any) -> int:
        status: int = call(*arguments)
        self.owed[OWED[name]] += status == 0
        return status

    def _give_back(self, name: str, call: Any, *arguments: Any) -> None:
        call(*arguments)
        self.owed[name] -= 1


@pytest.fixture(autouse=True)
def _nothing_is_owed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail unless all workers, requests, listeners, registered memory and keys were released."""
    counted = Counted(ucp().lib)
    monkeypatch.setattr(ucp(), "lib", counted)
    yield
    wait_until(lambda: not +counted.owed, f"given back is {counted.owed}")


def metadata(sequence: int, header: bytes) -> list[object]:
    return ["am", (struct.pack("<BI", 1, sequence) + header).hex()]


SCHEMA, META, END = metadata(0, SCHEMA_HEADER), metadata(1, BATCH_HEADER), ["am", struct.pack("<BI", 0, 2).hex()]

#: Steps of `ucx_peer.play` up to each stage at which a server ends.
SERVER_STAGES = server_stages(["read", 1], SCHEMA, META, ["tag", 1, BODY.hex()], END)


def start_server(spawn: Spawn, mode: str, steps: list[list[object]]) -> tuple[subprocess.Popen[str], str]:
    process = spawn(PEER, "server", mode, say=json.dumps([*steps, ["reached"], ["hold"]]))
    return process, line(process)


CONNECTING = """
import sys
import dissociated as dis
try:
    dis.open_stream(sys.argv[1], b"ticket", timeout=float(sys.argv[2])).read_all()
except dis.errors.DissociatedError as error:
    print(type(error).__name__, error)
"""


def connecting_fails(spawn: Spawn, process: subprocess.Popen[str], uri: str) -> None:
    """Connect in a separate process: UCX 1.22 crashes in mode none when it checks too late, about once in 100 runs."""
    client = spawn("-c", CONNECTING, uri, str(PATIENCE))
    assert line(process) == "reached"
    end_by(process, signal.SIGKILL)
    said, _ = client.communicate(timeout=2 * PATIENCE)
    if client.returncode == -signal.SIGSEGV:
        pytest.xfail("UCX crashed, as docs/ucx.md says that it may")
    assert said.startswith(("TransportError connecting to", "ConnectionClosed", "RemoteProtocolError")), said


@pytest.mark.parametrize(("stage", "mode"), [*product(SERVER_STAGES, ["peer"]), *product(FEWER_STAGES, ["none"])])
def test_server_is_killed(spawn: Spawn, stage: str, mode: str) -> None:
    process, uri = start_server(spawn, mode, SERVER_STAGES[stage])
    if (stage, mode) == ("accepted", "none"):
        connecting_fails(spawn, process, uri)
        return
    failure = failure_by(process, uri, signal.SIGKILL, PATIENCE)
    if stage == "accepted" and type(failure) is TransportError:  # in time to end the connection attempt
        assert "connecting to" in str(failure)
    else:
        assert type(failure) in (ConnectionClosed, RemoteProtocolError), failure
        assert "closed the" in str(failure)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", FEWER_STAGES)
def test_server_is_stopped(spawn: Spawn, stage: str, mode: str) -> None:
    process, uri = start_server(spawn, mode, SERVER_STAGES[stage])
    failure = failure_by(process, uri, signal.SIGSTOP, SILENCE)
    assert type(failure) is DeadlineExceeded, failure
    assert f"{SILENCE:g} s" in str(failure)


SERVER = """
import sys
import numpy as np
import pyarrow as pa
import dissociated as dis
server = dis.Server([sys.argv[1]], catalog=None)
server.publish("large", pa.table({"n": pa.array(np.arange(1 << 21))}))
print(server.ticket("large").hex(), server.locations("large")[0], flush=True)
sys.stdin.readline()
"""


class Slow:
    """A patch that ends the server when the client allocates memory for a body, before any of the body arrives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
        from dissociated.client.bodies import Bodies

        allocate = Bodies.allocate

        def allocating(bodies: Bodies, length: int) -> object:
            then()
            return allocate(bodies, length)

        monkeypatch.setattr(Bodies, "allocate", allocating)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_real_server_ends_inside_a_body(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, mode: str, by: signal.Signals
) -> None:
    process = spawn("-c", SERVER, f"ucx:?err_mode={mode}")
    ticket, uri = line(process).split()
    Slow(monkeypatch, lambda: end_by(process, by))
    timeout = PATIENCE if by is signal.SIGKILL else SILENCE
    failure: Exception | None = None
    try:
        read = dis.open_stream(uri, bytes.fromhex(ticket), timeout=timeout).read_all()
    except (ConnectionClosed, RemoteProtocolError, DeadlineExceeded) as error:
        failure = error
    # Shared memory stays readable while its owner is stopped, and the server may have sent the end of the stream
    # before.
    else:
        assert (by, mode) == (signal.SIGSTOP, "none")
        assert np.array_equal(read["n"], np.arange(1 << 21))
    if by is signal.SIGKILL:
        assert not isinstance(failure, DeadlineExceeded)
    elif mode == "peer":
        assert isinstance(failure, DeadlineExceeded)


def test_what_a_client_still_reads_is_right_or_an_error_when_the_server_closes() -> None:
    """Close a server during a stream whose client copies bodies out of the server's memory over shared memory lanes."""
    for _ in range(3):
        close_within_a_stream()


def close_within_a_stream() -> None:
    sent: list[np.ndarray[Any, Any]] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in count():
            sent.append(np.full(1 << 17, number))
            yield pa.record_batch({"n": sent[-1]})

    with dis.Server(["ucx:?err_mode=none"], catalog=None) as server:
        server.publish("data", pa.RecordBatchReader.from_batches(pa.schema({"n": pa.int64()}), batches()))
        reader = dis.open_stream(server.locations("data")[0], server.ticket("data"))
        reader.read_next_batch()
        wait_until(lambda: len(sent) > 50, "much is under way")
        reader.read_next_batch()  # The client now knows all messages in flight.
    for array in sent:
        array[:] = -1
    got: list[tuple[int, int]] = []
    with pytest.raises((ConnectionClosed, RemoteProtocolError), match="closed"):
        got.extend((batch["n"].to_numpy().min(), batch["n"].to_numpy().max()) for batch in reader)
    assert got == [(number, number) for number in range(2, len(got) + 2)]


#: A script that prints the minimum and maximum of each batch, and then the error that ended the stream.
FETCHING = """
import sys
import dissociated as dis

reader = dis.open_stream(sys.argv[1], bytes.fromhex(sys.argv[2]), allow_rma=True)
print("reached", flush=True)
sys.stdin.readline()
try:
    for batch in reader:
        print(batch["n"].to_numpy().min(), batch["n"].to_numpy().max(), flush=True)
except dis.errors.DissociatedError as error:
    print(type(error).__name__, flush=True)
"""


@pytest.mark.parametrize("rma", [True, False], ids=["fetched", "sent"])
def test_what_a_stopped_client_may_still_read_is_not_written_over(memory: Path, spawn: Spawn, rma: bool) -> None:
    """Stop a client that reads a file over shared memory lanes, which it may do also after the server has closed."""
    path = memory / "data.arrows"
    batches = [pa.record_batch({"n": np.full(1 << 17, number)}) for number in range(4)]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        writer.write_table(pa.Table.from_batches(batches))
    with dis.Server(["ucx:?err_mode=none"], catalog=None, allow_rma=rma) as server:
        server.publish("data", path)
        client = spawn("-c", FETCHING, server.locations("data")[0], server.ticket("data").hex())
        assert line(client) == "reached"
        client.send_signal(signal.SIGSTOP)
    if (descriptor := claim_unused(path)) is not None:  # The client reads nothing yet, or it will notice the change.
        os.pwrite(descriptor, b"\xff" * path.stat().st_size, 0)
        os.close(descriptor)
    client.send_signal(signal.SIGCONT)
    said, _ = client.communicate("\n", PATIENCE)
    got = [one for one in said.splitlines() if one not in ("ConnectionClosed", "RemoteProtocolError")]
    assert got == [f"{number} {number}" for number in range(len(got))]

    def unused() -> bool:
        descriptor = claim_unused(path)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None

    wait_until(unused, "nobody has it any more")


def client_stages(uri: str, ticket: bytes) -> dict[str, list[list[object]]]:
    want = dict(one.split("=") for one in uri.partition("?")[2].split("&"))["want_data"]
    request = ["tag", int(want), ticket.hex()]
    return {"before want_data": [], "after want_data": [request], "within the stream": [request, ["read", 1]]}


STAGES = list(client_stages("ucx:?want_data=1", b""))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("stage", "mode"), [*product(STAGES, ["peer"]), ("before want_data", "none"), ("within the stream", "none")]
)
def test_client_ends(serve: Serve, spawn: Spawn, mode: str, stage: str, by: signal.Signals) -> None:
    limit = 60.0 if by is signal.SIGKILL else SILENCE
    good = serve(f"ucx:?err_mode={mode}", handshake_timeout=max(limit, 1.0), stall_timeout=limit)
    good.server.publish("large", LARGE)
    (uri,) = good.server.locations("large")
    steps = [*client_stages(uri, good.server.ticket("large"))[stage], ["reached"], ["sleep"]]
    process = spawn(PEER, "client", uri, say=json.dumps(steps))
    assert line(process) == "reached"
    process.send_signal(by)
    if by is signal.SIGKILL:
        process.wait(PATIENCE)
    wait_until(good.alone, "the server has noticed")


@pytest.mark.parametrize("mode", MODES)
def test_real_client_is_killed_within_a_live_stream(serve: Serve, spawn: Spawn, mode: str) -> None:
    batch = pa.record_batch({"n": np.arange(1 << 17)})
    good = serve(f"ucx:?err_mode={mode}")
    good.server.publish("live", lambda: pa.RecordBatchReader.from_batches(batch.schema, (batch for _ in iter(int, 1))))
    (uri,) = good.server.locations("live")
    process = spawn("-c", CLIENT, uri, good.server.ticket("live").hex(), "3")
    assert line(process) == "reached"
    good.check()
    assert good.server.connections >= 1
    process.kill()
    process.wait(PATIENCE)
    wait_until(good.alone, "the server has noticed")


@pytest.mark.parametrize("mode", MODES)
def test_client_is_killed_before_it_gives_addresses_back(serve: Serve, spawn: Spawn, mode: str) -> None:
    good = serve(f"ucx:?err_mode={mode}", allow_rma=True)
    (uri,) = good.server.locations("good")
    request = client_stages(uri, good.server.ticket("good"))["after want_data"]
    process = spawn(PEER, "client", uri, say=json.dumps([*request, ["stream"], ["reached"], ["sleep"]]))
    assert line(process) == "reached"
    assert good.server.connections == 1, "the server waits for its addresses"
    process.kill()
    process.wait(PATIENCE)
    wait_until(good.alone, "the server has noticed")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_server_ends_before_its_memory_is_fetched(
    spawn: Spawn, monkeypatch: pytest.MonkeyPatch, mode: str, by: signal.Signals
) -> None:
    process = spawn("-c", SERVER, f"ucx:?err_mode={mode}&rma=allow")
    ticket, uri = line(process).split()
    fetch = NativeConnection.fetch

    def fetching(*arguments: object) -> None:
        end_by(process, by)
        fetch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeConnection, "fetch", fetching)
    # Over lanes that need no help from the memory's owner, the client reads on after the server has sent all addresses.
    reachable = mode == "none" and by is signal.SIGSTOP
    gone = (ConnectionClosed, RemoteProtocolError)
    silent = suppress(DeadlineExceeded) if reachable else pytest.raises(DeadlineExceeded)
    with pytest.raises(gone) if by is signal.SIGKILL else silent:
        timeout = PATIENCE if by is signal.SIGKILL else SILENCE
        dis.open_stream(uri, bytes.fromhex(ticket), timeout=timeout, allow_rma=True).read_all()


def test_addresses_outside_of_what_the_uri_names_are_not_fetched(serve: Serve) -> None:
    good = serve("ucx:", allow_rma=True)
    (uri,) = good.server.locations("good")
    before, _, spans = uri.partition("remote_memory=")
    base, _, rest = spans.partition("-")
    moved = f"{before}remote_memory={int(base, 16) + (1 << 20):x}-{rest}"
    with pytest.raises(RemoteProtocolError, match="is in no memory that its URI names"):
        dis.open_stream(moved, good.server.ticket("good"), allow_rma=True).read_all()


def test_client_is_stopped_and_goes_on(serve: Serve, spawn: Spawn) -> None:
    good = serve("ucx:")
    good.server.publish("large", pa.Table.from_batches([pa.record_batch({"n": range(1 << 16)})] * 40))
    (uri,) = good.server.locations("large")
    stop_and_go_on(good, spawn("-c", COUNTING, uri, good.server.ticket("large").hex(), "1"), 39 << 16)


@pytest.mark.parametrize("mode", MODES)
def test_interpreter_ends_while_a_stream_is_open(serve: Serve, spawn: Spawn, mode: str) -> None:
    good = serve(f"ucx:?err_mode={mode}")
    (uri,) = good.server.locations("good")
    process = spawn("-c", ENDING, uri, good.server.ticket("good").hex(), "1")
    assert line(process) == "reached"
    assert process.wait(PATIENCE) == 0
    wait_until(good.alone, "the server has noticed")


#: A script that prints its number of connections for each input line.
COUNTED = SERVER.replace("sys.stdin.readline()", "for _ in sys.stdin: print(server.connections, flush=True)").replace(
    'pa.table({"n": pa.array(np.arange(1 << 21))})',
    'pa.Table.from_batches([pa.record_batch({"n": np.arange(n << 16, n + 1 << 16)}) for n in range(32)])',
)


@pytest.mark.parametrize(
    ("listen", "settings"),
    [("ucx:", ()), ("ucx:", ("UCX_RCACHE_ENABLE=y",)), ("ucx:?err_mode=none", ())],
    ids=["ours", "memory is registered for all", "a server of mode none"],
)
def test_streams_that_are_closed_early_beside_one_that_goes_on(
    spawn: Spawn, listen: str, settings: tuple[str, ...]
) -> None:
    """Close streams early. The server's sends to them may complete only together with its sends to the last stream.

    MALLOC_PERTURB_ fills freed memory, so that the server crashes if UCX writes to a worker that has been destroyed.
    """
    process = spawn("-c", COUNTED, listen, prefix=("env", "MALLOC_PERTURB_=165", *settings))
    ticket, uri = line(process).replace("err_mode=none&", "").split()
    reader = dis.open_stream(uri, bytes.fromhex(ticket), timeout=PATIENCE)
    first = reader.read_next_batch()
    for _ in range(3):
        early = dis.open_stream(uri, bytes.fromhex(ticket), timeout=PATIENCE)
        assert early.read_next_batch() == first
        del early

    def connections() -> int:
        print("how many?", file=process.stdin)
        return int(line(process))

    wait_until(lambda: connections() == 1, "the server has noticed")
    numbers = pa.concat_tables([pa.Table.from_batches([first]), reader.read_all()])["n"]
    assert np.array_equal(numbers, np.arange(1 << 21))
    assert connections() <= 1, "it is there"


def test_server_ends_while_clients_read(spawn: Spawn) -> None:
    process = spawn("-c", SERVER, "ucx:")
    ticket, uri = line(process).split()
    reader = dis.open_stream(uri, bytes.fromhex(ticket), timeout=PATIENCE)
    assert process.stdin is not None
    process.stdin.write("end\n")
    assert process.wait(PATIENCE) == 0
    with pytest.raises((ConnectionClosed, RemoteProtocolError), match="closed the"):
        reader.read_all()


# Servers that break the rules: tests/faults/test_server_misbehaves.py has all cases

BAD: dict[str, tuple[list[list[object]], str]] = {
    "reserved bits": ([SCHEMA, META, ["tag", 1 << 40 | 1, BODY.hex()]], "reserved bits"),
    "a body of another length": ([SCHEMA, META, ["tag", 1, BODY[:-8].hex()]], "7992 bytes"),
    "addresses": ([SCHEMA, META, ["tag", 1 << 56 | 1, struct.pack("<6Q", 8000, 2, 0, 0, 64, 8000).hex()]], "address"),
    "an unknown kind of metadata": ([["am", "0200000000"]], "unknown kind 2"),
    "half a prefix": ([["am", "0100"]], "the prefix alone needs 5"),
}


@pytest.mark.parametrize("what", BAD)
def test_server_breaks_a_rule(spawn: Spawn, what: str) -> None:
    steps, complaint = BAD[what]
    process, uri = start_server(spawn, "peer", [["read", 1], *steps])
    reading = Reading(uri, PATIENCE)
    failure = reading.failure()
    assert type(failure) is RemoteProtocolError, failure
    assert complaint in str(failure)
    assert line(process) == "reached"


# Clients that break the rules


# Connections of our own that break them: tests/faults/test_native_clients.py


def test_client_sends_too_much_before_it_is_served(serve: Serve, spawn: Spawn) -> None:
    good = serve("ucx:")
    (uri,) = good.server.locations("good")
    for steps in ([["tag", 1, bytes(1 << 20).hex()]], [["am", bytes(1 << 18).hex()]]):
        process = spawn(PEER, "client", uri, say=json.dumps([*steps, ["reached"], ["hold"]]))
        wait_until(good.alone, "the server has closed the connection")
        process.wait(PATIENCE)


def test_many_connections_that_say_nothing_keep_nobody_out(serve: Serve, spawn: Spawn) -> None:
    good = serve("ucx:", handshake_timeout=5.0)  # a limit that a good client must keep on a busy machine, too
    (uri,) = good.server.locations("good")
    processes = [spawn(PEER, "client", uri, say=json.dumps([["reached"], ["hold"]])) for _ in range(4)]
    for process in processes:
        assert line(process) == "reached"
    good.check()
    for process in processes:
        assert process.wait(PATIENCE) == 0
    assert threading.active_count() < 20

from __future__ import annotations

import gc
import os
import resource
import shutil
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteProtocolError, TransportError, UriError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span, with_spans
from dissociated.protocol.message import Incoming, Message
from dissociated.transport.base import Listener
from dissociated.transport.native import threads
from dissociated.transport.native.connection import NativeConnection
from dissociated.transport.native.fabric import channel as channels
from dissociated.transport.native.fabric import endpoint as endpoints
from dissociated.transport.native.fabric import libfabric as libraries
from dissociated.transport.native.fabric import memory as memories
from dissociated.transport.native.fabric.channel import FabricChannel
from dissociated.transport.native.fabric.endpoint import FabricEndpoint
from dissociated.transport.native.fabric.libfabric import installed_library, ofi
from dissociated.transport.native.fabric.memory import RMA_KEY, Completion
from dissociated.transport.native.fabric.messages import LARGE, Kind
from dissociated.transport.native.fabric.transport import PROVIDER, open_endpoint
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.fabric_peer import CONTROL, FabricPeer, FabricServer, fabric_client, progress_until
from support.helpers import PATIENCE, Interruption, case, complaints, leaving_nothing, no_threads, wait_until

pytestmark = pytest.mark.needs("libfabric")

SERVE = "dis.Server(['fabric:'], catalog=None)"
OPEN = "dis.open_stream('fabric://127.0.0.1:1?want_data=1', b'')"


IMPORT = f"from {libraries.__package__} import libfabric"
#: Programs that cannot use libfabric, with their environment variables.
PROGRAMS = {
    "no library": (SERVE, {"DISSOCIATED_FABRIC_LIBRARY": "/nowhere/libfabric.so.1"}),
    "no libfabric": (OPEN, {"DISSOCIATED_FABRIC_LIBRARY": "libc.so.6"}),
    "too old": (f"{IMPORT}\nlibfabric.OLDEST_LIBFABRIC = (99, 0)\n{SERVE}", {}),
    "other structures": (f"{IMPORT}\nlibfabric.SIZES['struct fi_msg'] += 8\n{SERVE}", {}),
    "no wheel": (
        f"{IMPORT}\nlibfabric.installed_library = lambda: None\n{SERVE}",
        {"DISSOCIATED_FABRIC_LIBRARY": ""},
    ),
    "no cffi": (f"sys.modules['cffi'] = None\n{SERVE}", {}),
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Return the errors of `PROGRAMS`."""
    return complaints(PROGRAMS)


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("no library", "let DISSOCIATED_FABRIC_LIBRARY name a libfabric.so.1, or unset it"),
        ("no libfabric", "'libc.so.6' is not libfabric: set DISSOCIATED_FABRIC_LIBRARY"),
    ],
)
def test_a_missing_requirement_is_named_in_one_sentence(said: dict[str, str], program: str, sentence: str) -> None:
    assert sentence in said[program]
    assert "\n" not in said[program]


def test_a_library_that_is_too_old_is_refused(said: dict[str, str]) -> None:
    assert "is too old: install 99.0 or later, or pip install 'dissociated[fabric]'" in said["too old"]


def test_a_library_with_other_structures_is_refused(said: dict[str, str]) -> None:
    assert "has another layout of struct fi_msg than versions 1.17 to 2.5" in said["other structures"]


def test_without_the_wheel_it_is_said_what_to_install(said: dict[str, str]) -> None:
    assert said["no wheel"] == (
        "fabric: libfabric is not installed: pip install 'dissociated[fabric]', or install libfabric and let "
        "DISSOCIATED_FABRIC_LIBRARY name its libfabric.so.1"
    )


def test_without_cffi_it_is_said_what_to_install(said: dict[str, str]) -> None:
    assert said["no cffi"] == "fabric: needs cffi: pip install 'dissociated[fabric]'"


LOADED = """
from dissociated.transport.native.fabric.libfabric import ofi
ofi()
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libfabric.so" in line})
"""


@pytest.mark.parametrize("named", [False, True], ids=["nobody names it", "the variable names it"])
def test_the_systems_library_is_used_only_if_the_variable_names_it(tmp_path: Path, named: bool) -> None:
    """Let the dynamic loader find a copy of libfabric, as it would find a package of the system."""
    installed = installed_library()
    assert installed is not None
    system = shutil.copy(installed, tmp_path / "libfabric.so.1")
    environment = {key: value for key, value in os.environ.items() if key != "DISSOCIATED_FABRIC_LIBRARY"}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "FI_PROVIDER_PATH": str(tmp_path)}
    environment |= {"DISSOCIATED_FABRIC_LIBRARY": "libfabric.so.1"} if named else {}
    run = subprocess.run([sys.executable, "-c", LOADED], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == [str(system if named else installed)]


@pytest.mark.needs("libfabric 2")
def test_a_provider_that_shares_no_memory_is_refused_with_allow_rma_before_anybody_connects() -> None:
    with leaving_nothing(), pytest.raises(UriError, match="use tcp;ofi_rxm, or leave allow_rma out"):
        dis.Server(["fabric:?provider=tcp"], catalog=None, allow_rma=True)
    with leaving_nothing(), dis.Server(["fabric:?provider=tcp"], catalog=None) as server:
        server.publish("data", pa.table({"n": [1]}))
        uri = server.locations("data")[0]
        assert Uri.parse(uri).remote_handle is None
        # A client that allows remote reads still reads: the server sends the bodies.
        read = dis.open_stream(uri, server.ticket("data"), allow_rma=True).read_all()
        assert read == pa.table({"n": [1]})


def connected(listener: Listener, spans: Sequence[Span] = ()) -> tuple[NativeConnection, NativeConnection]:
    """Return the client's end, which may read from these spans, and the server's end."""
    uri = with_spans(listener.uri, spans) if spans else listener.uri
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(transport("fabric").connect, uri, PATIENCE)
        server = listener.accept()
        assert isinstance(server, NativeConnection)
        while not connecting.done():
            server.arrived()
        client = connecting.result()
        assert isinstance(client, NativeConnection)
        return client, server


@contextmanager
def joined(listener: Listener, rma: bool = False) -> Iterator[tuple[FabricPeer, NativeConnection]]:
    """Yield a client that sends what it likes, and the server's end."""
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        joining = pool.submit(stack.enter_context, fabric_client(listener.uri, rma))
        server = listener.accept()
        assert isinstance(server, NativeConnection)
        stack.enter_context(server)
        while not joining.done():
            server.arrived()
        yield joining.result(), server


@pytest.mark.parametrize(
    ("told", "more"), [([1 << 15, 1 << 14, 0], False), ([1 << 14, 1 << 40], True)], ids=["late", "too much"]
)
def test_a_peer_may_report_late_but_not_more_bytes_than_it_was_sent(told: list[int], more: bool) -> None:
    with (
        leaving_nothing(),
        closing(transport("fabric").listen(Uri.parse("fabric:"))) as listener,
        joined(listener) as (client, server),
    ):
        server.send([Message(1, (b"",))] * 2, PATIENCE)
        for consumed in told:
            client.tell(CONTROL | Kind.CREDIT, struct.pack("<Q", consumed))
        client.tell(2, b"said")
        with pytest.raises(RemoteProtocolError, match="received more bytes than were sent") if more else nullcontext():
            assert server.receive(PATIENCE, lambda tag, length: bytearray(length)) is not None
            server.send([Message(1, (b"",))], PATIENCE)


@pytest.fixture(params=["fabric:", pytest.param("fabric:?provider=tcp", marks=pytest.mark.needs("libfabric 2"))])
def where(request: pytest.FixtureRequest) -> Uri:
    return Uri.parse(request.param)


def test_large_untagged_messages_arrive_among_small_ones(where: Uri) -> None:
    """Receive large messages among small ones.

    libfabric 1.17 reports a buffer for many messages as used up while large ones are still fetched into it. Our servers
    therefore send large messages with a tag, but other peers may not.
    """
    sent = [bytes([number % 251]) * (9_000 if number % 2 else 60_000) for number in range(500)]

    def serve(server: FabricServer) -> None:
        client = server.accept()
        begun = [client.begin(None, message) for message in sent]
        assert progress_until(server.endpoint, lambda: all(begun)), "the client takes it all"

    with leaving_nothing(), closing(FabricServer(where)) as server, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve, server)
        with transport("fabric").connect(server.uri, PATIENCE) as client:
            arrived = [client.receive(PATIENCE, lambda tag, length: bytearray(length)) for _ in sent]
            serving.result()
            assert sorted(bytes(one.data) for one in arrived if isinstance(one, Incoming)) == sorted(sent)


def test_our_servers_send_large_untagged_messages_with_a_tag(where: Uri) -> None:
    most = 65_536 if "provider" in where.parameters else 16_384
    with leaving_nothing(), closing(transport("fabric").listen(where)) as listener:
        client, server = connected(listener)
        with client, server:
            prepared = server.prepare([Message(None, (bytes(size),)) for size in (most, most + 1)])
            assert [message.tag for message in prepared] == [None, LARGE]


@pytest.mark.needs("libfabric 2")
def test_messages_that_are_prepared_for_one_provider_are_not_sent_over_another() -> None:
    """Prepare messages anew for the other provider, which takes untagged messages of another size."""
    with leaving_nothing(), ExitStack() as stack:
        encodings = set()
        for where in ("fabric:", "fabric:?provider=tcp", "fabric:"):
            listener = stack.enter_context(closing(transport("fabric").listen(Uri.parse(where))))
            client, server = connected(listener)
            stack.enter_context(server)
            encodings.add(stack.enter_context(client).encoding)
        assert len(encodings) == 2


def talk(client: FabricPeer, count: int) -> None:
    """Send so many credit messages, each for nothing consumed, that more have arrived than receives were posted."""
    sent = [client.begin(CONTROL | Kind.CREDIT, struct.pack("<Q", 0)) for _ in range(count)]
    assert progress_until(client.endpoint, lambda: all(sent))


def test_control_messages_are_no_messages_however_many_come_at_once(where: Uri) -> None:
    """Ignore control messages when looking for a message. A server that counted them would wait for it forever."""
    with (
        leaving_nothing(),
        closing(transport("fabric").listen(where)) as listener,
        joined(listener) as (client, server),
    ):
        for _ in range(5):
            talk(client, 400)
            assert not any(server.arrived() for _ in range(500))
        client.tell(2, b"said")
        arrived = server.receive(PATIENCE, lambda tag, length: bytearray(length))
        assert isinstance(arrived, Incoming)
        assert bytes(arrived.data) == b"said"


@pytest.mark.parametrize("before", [0, 8], ids=["where it is waited for", "where nobody waits for it"])
@pytest.mark.parametrize("size", [5_000, 100_000], ids=["whole", "to be fetched"])
def test_too_much_said_beside_the_protocol_ends_the_connection(where: Uri, size: int, before: int) -> None:
    with (
        leaving_nothing(),
        closing(transport("fabric").listen(where)) as listener,
        joined(listener) as (client, server),
    ):
        talk(client, before)  # Receives for this number are posted.
        for _ in range(24 if before else 1):
            client.begin(CONTROL | Kind.CREDIT, bytes(size))
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            client.progress()  # All of it arrives at once.
        with ThreadPoolExecutor(1) as pool:
            receiving = pool.submit(server.receive, PATIENCE, lambda tag, length: bytearray(length))
            while not receiving.done():
                client.progress()
            if before and "provider" not in where.parameters:
                with pytest.raises(RemoteProtocolError, match=f"control message of {size} bytes"):
                    receiving.result()
            else:
                assert receiving.result() is None  # libfabric itself disconnects


class Memory(bytearray):
    """Memory that can be referenced weakly, to observe its release."""


def test_memory_that_is_read_into_stays_until_that_has_ended() -> None:
    source = pa.py_buffer(bytes(range(256)) * 4096)
    with leaving_nothing(), closing(transport("fabric").listen(Uri.parse("fabric:?rma=allow"))) as listener:
        region = Region(source.address, source)
        span = listener.expose(region)
        with joined(listener, rma=True) as (client, server):
            endpoint, ended = client.endpoint, list[Completion]()
            memory = Memory(source.size)
            kept, into = weakref.ref(memory), endpoint.ofi.ffi.from_buffer(memory, require_writable=True)
            virtual, key = RMA_KEY.unpack(span.key)
            while not endpoint.read(client.address, span.base * virtual, key, into, 0, source.size, ended.append):
                client.progress()
                server.arrived()  # libfabric makes progress here
            del memory, into
            while not ended:
                assert kept() is not None
                server.arrived()
                client.progress()
            assert ended[0].error == 0
            assert kept() is None
        del region


def test_nothing_is_read_into_memory_by_a_connection_that_was_interrupted() -> None:
    source = pa.py_buffer(bytes(range(1, 256)))
    with leaving_nothing(), closing(transport("fabric").listen(Uri.parse("fabric:?rma=allow"))) as listener:
        region = Region(source.address, source)
        span = listener.expose(region)
        client, server = connected(listener, [span])
        with client, server:
            memory = Memory(source.size)
            kept = weakref.ref(memory)
            client.interrupt()
            with pytest.raises(ConnectionClosed):
                client.memory.fetch([(span.base, source.size, 0)], memory, PATIENCE)
            assert not any(memory)
            del memory
            assert kept() is None
        del region


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Exhaust the descriptors of the process during the block."""
    limits, kept = resource.getrlimit(resource.RLIMIT_NOFILE), list[int]()
    most = max(map(int, os.listdir("/proc/self/fd"))) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with suppress(OSError):
            while True:
                kept.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in kept:
            os.close(descriptor)


def test_a_connection_without_a_descriptor_is_an_error_of_ours() -> None:
    """Raise TransportError, because the accepting thread tries again only after such errors."""
    with (
        leaving_nothing(),
        closing(open_endpoint(PROVIDER, "127.0.0.1", rma=False)) as endpoint,
        no_descriptors(),
        pytest.raises(TransportError, match="Too many open files"),
    ):
        FabricChannel(endpoint, "a client", 2.0, client=b"its name")


def test_a_connection_without_a_thread_for_its_heartbeats_leaves_nothing() -> None:
    with (
        closing(transport("fabric").listen(Uri.parse("fabric:"))) as listener,
        leaving_nothing(),
        no_threads(),
        pytest.raises(TransportError, match="cannot start the thread 'heartbeat'"),
    ):
        transport("fabric").connect(listener.uri, PATIENCE)


@contextmanager
def fetching(listener: Listener) -> Iterator[NativeConnection]:
    """Yield a client whose server disconnected while the client fetched a large message."""
    client, server = connected(listener)
    with client, server:
        client.send([Message(2, (b"I have joined",))], PATIENCE)
        assert server.receive(PATIENCE, lambda tag, length: bytearray(length)) is not None
        server.send([Message(7, (bytes(64 << 20),))], PATIENCE)
        begun = False

        def allocate(tag: int | None, length: int) -> bytearray:
            nonlocal begun
            begun = True
            server.interrupt()  # From now on, libfabric makes no progress in the server.
            return bytearray(length)

        while not begun:
            with pytest.raises(DeadlineExceeded):
                client.receive(0.1, allocate)
        yield client


def test_a_connection_that_fetches_can_be_closed_without_a_descriptor() -> None:
    """Close a connection without descriptors. libfabric 1 crashes unless its TCP socket is found and shut down."""
    with (
        leaving_nothing(),
        closing(transport("fabric").listen(Uri.parse("fabric:"))) as listener,
        fetching(listener) as client,
        no_descriptors(),
    ):
        client.close()


def test_an_interrupted_close_leaves_nothing() -> None:
    for module, function in ((threads, "remove"), (channels, "_say_goodbye"), (endpoints, "_cut")):
        with (
            case(function),
            leaving_nothing(),
            closing(transport("fabric").listen(Uri.parse("fabric:"))) as listener,
            fetching(listener) as client,
        ):
            with suppress(KeyboardInterrupt), Interruption(module, function) as interruption:
                client.close()
            assert interruption.came or (function == "_cut" and ofi().version.startswith("2."))


def test_ctrl_c_at_any_line_of_closing_an_endpoint_leaves_nothing_and_is_heard() -> None:
    lines = (
        (endpoints, ("_give_back", "_drain"), 6),
        (libraries, ("close",), 1),
        (memories, ("leave", "unregister"), 5),
    )
    for module, functions, least in lines:
        at, interrupted = 0, True
        while interrupted:
            with case((functions, at)), leaving_nothing():
                endpoint = open_endpoint(PROVIDER, "127.0.0.1", rma=False)
                endpoint.receive_untagged(endpoint.ofi.ffi.new("char[65536]"), lambda completion: None)
                with Interruption(module, *functions, at=at) as interruption:
                    raised = False
                    try:
                        endpoint.close()
                    except KeyboardInterrupt:
                        raised = True
                interrupted = interruption.came
                assert raised == interrupted
            at += 1
        assert at > least


class Counting(FabricEndpoint):
    """An endpoint that counts its progress calls."""

    looks = 0

    def progress(self) -> bool:
        self.looks += 1
        return super().progress()


def test_closing_does_not_wait_for_an_answer_that_a_signal_has_lost() -> None:
    with leaving_nothing(), closing(Counting(PROVIDER, "127.0.0.1", None)) as endpoint:
        with suppress(KeyboardInterrupt), Interruption(endpoints, "_on_peeked") as interruption:
            endpoint.peek()
        assert interruption.came
        endpoint.close()
        assert endpoint.looks < 5000


#: A server, and a client that cancels reads in progress. The script prints the growth of the process in MB after the
#: first.
CANCELLED = """
import asyncio, time
import pyarrow as pa
import dissociated as dis

def resident():
    rows = dict(row.split(":", 1) for row in open("/proc/self/status").read().splitlines())
    return int(rows["VmRSS"].split()[0]) >> 10

async def read(begun):
    async with await dis.open_stream_async(where, ticket) as reader:
        async for batch in reader:
            begun.release()
            await asyncio.Event().wait()

async def cancel(count):
    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(read(begun)) for _ in range(count)]
    for task in tasks:
        await begun.acquire()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while server.connections:
        time.sleep(0.01)

batches = [pa.record_batch({"x": pa.array(range(8192))})] * 128
with dis.Server(["fabric:"], catalog=None) as server:
    server.publish("data", pa.Table.from_batches(batches))
    where, ticket = server.locations("data")[0], server.ticket("data")
    asyncio.run(cancel(1))
    before = resident()
    asyncio.run(cancel(6))
    print(resident() - before)
"""


def test_memory_of_cancelled_reads_is_given_back_to_the_system() -> None:
    """Cancel reads of connections that take 66 MB each and more in flight. A leak adds 650 MB, against 100 to 200."""
    run = subprocess.run([sys.executable, "-c", CANCELLED], capture_output=True, text=True, timeout=100, check=True)
    assert int(run.stdout) < 400


def test_a_listener_keeps_no_connection_that_is_closed() -> None:
    """Release closed connections, which own the memory in which they joined the pieces of large messages."""
    with leaving_nothing(), closing(transport("fabric").listen(Uri.parse("fabric:"))) as listener:
        client, server = connected(listener)
        kept = weakref.ref(server)
        client.close()
        server.close()
        del server
        wait_until(lambda: gc.collect() >= 0 and kept() is None, "no thread holds the connection for a moment")

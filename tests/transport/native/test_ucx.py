from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pyarrow as pa
import pytest

from dissociated.errors import ConnectionClosed, DeadlineExceeded, RemoteProtocolError, TransportError, UriError
from dissociated.memory.region import Region
from dissociated.memory.remote import Span, with_spans
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection, Listener
from dissociated.transport.native.ucx import channel, endpoint, libucp
from dissociated.transport.native.ucx.closing import ClosingConnection, ClosingConnections
from dissociated.transport.native.ucx.worker import Worker
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE, Interruption, case, complaints, leaving_nothing, no_threads

pytestmark = pytest.mark.needs("ucx")

UCX = transport("ucx")


@contextmanager
def attended(
    listener: Listener, uri: Uri, answer: Callable[[Connection], object] = Connection.close
) -> Iterator[Connection]:
    """Yield a client's connection. The other end makes progress, as a server's does, until it answers a message."""

    def attend() -> None:
        accepted = listener.accept()
        assert accepted is not None
        with accepted:
            # The result is None if the client closes first.
            if accepted.receive(PATIENCE, lambda tag, length: bytearray(length)) is not None:
                answer(accepted)

    with ThreadPoolExecutor(1) as pool:
        attending = pool.submit(attend)
        with UCX.connect(uri, PATIENCE) as client:
            yield client
        attending.result(PATIENCE)


SERVE = "dis.Server(['ucx:'], catalog=None)"
OPEN = "dis.open_stream('ucx://127.0.0.1:1?want_data=1', b'')"


#: Programs that cannot use UCX, with their environment variables.
PROGRAMS = {
    "no library": (SERVE, {"DISSOCIATED_UCX_LIBRARY": "/nowhere/libucp.so.0"}),
    "no libucp": (OPEN, {"DISSOCIATED_UCX_LIBRARY": "libc.so.6"}),
    "no tcp": (SERVE, {"UCX_TLS": "sm,self"}),
    "tcp excluded": (OPEN, {"UCX_TLS": "^tcp"}),
    "too old": (f"from {libucp.__package__} import libucp\nlibucp.OLDEST_UCX = (99, 0)\n{SERVE}", {}),
    "no wheel": (
        f"from {libucp.__package__} import libucp\nlibucp.installed_library = lambda: None\n{SERVE}",
        {"DISSOCIATED_UCX_LIBRARY": ""},
    ),
    "no cffi": (f"sys.modules['cffi'] = None\n{SERVE}", {}),
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """Return the errors of `PROGRAMS`, for each of which the dynamic loader would find the library."""
    installed = libucp.installed_library()
    assert installed is not None
    return complaints(PROGRAMS, LD_LIBRARY_PATH=str(installed.parent))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no library", "let DISSOCIATED_UCX_LIBRARY name a libucp.so.0,"),
        ("no libucp", "'libc.so.6' is not libucp"),
        ("no tcp", "UCX_TLS=sm,self leaves out tcp, which connections over UCX need: add it"),
        ("tcp excluded", "UCX_TLS=^tcp leaves out tcp"),
    ],
)
def test_a_missing_requirement_is_named_in_one_sentence(said: dict[str, str], program: str, message: str) -> None:
    assert message in said[program]
    assert "\n" not in said[program]


def test_a_library_that_is_too_old_is_refused(said: dict[str, str]) -> None:
    assert "is too old: install 99.0 or later" in said["too old"]


def test_the_systems_library_is_not_used_unless_the_variable_names_it(said: dict[str, str]) -> None:
    """Find no library although the dynamic loader would find one."""
    assert said["no wheel"] == (
        "ucx: libucp is not installed: pip install 'dissociated[ucx]', or install UCX and let "
        "DISSOCIATED_UCX_LIBRARY name its libucp.so.0"
    )


def test_without_cffi_it_is_said_what_to_install(said: dict[str, str]) -> None:
    assert said["no cffi"] == "ucx: needs cffi: pip install 'dissociated[ucx]'"


def test_another_version_of_ucx_is_refused_before_it_crashes() -> None:
    with pytest.raises(TransportError, match=r"has UCX 1\.13\.1, and this process [0-9.]+, which do not work together"):
        UCX.connect(Uri.parse("ucx://127.0.0.1:1?ucx=1.13.1"), PATIENCE)


def test_connecting_has_a_deadline_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect while UCX always reports progress but never completes."""
    progress = Worker.progress
    monkeypatch.setattr(Worker, "progress", lambda worker: progress(worker) or True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = Uri("ucx", host="127.0.0.1", port=silent.getsockname()[1])
        with pytest.raises(DeadlineExceeded, match=r"no answer for 0\.3 s"):
            UCX.connect(uri, 0.3)


def test_loading_ucx_leaves_signals_and_environment_alone() -> None:
    script = """
        import os, signal
        before = dict(os.environ), [signal.getsignal(n) for n in (signal.SIGSEGV, signal.SIGHUP, signal.SIGINT)]
        from dissociated.transport.registry import transport
        from dissociated.uri import Uri
        transport("ucx").listen(Uri.parse("ucx:")).close()
        caught = open("/proc/self/status").read().partition("SigCgt:")[2].split()[0]
        assert not int(caught, 16) & (1 << 10 | 1 << 6 | 1 << 0), caught  # SEGV, BUS, HUP
        after = dict(os.environ), [signal.getsignal(n) for n in (signal.SIGSEGV, signal.SIGHUP, signal.SIGINT)]
        assert before == after
        """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_listener_names_the_real_port_and_its_version() -> None:
    with leaving_nothing(), closing(UCX.listen(Uri.parse("ucx:?err_mode=none"))) as listener:
        assert listener.uri.host == "127.0.0.1"
        assert listener.uri.port
        assert listener.uri.parameters["err_mode"] == "none"
        assert listener.uri.parameters["ucx"].startswith("1.")


def test_a_port_in_use_is_named() -> None:
    with closing(UCX.listen(Uri.parse("ucx:"))) as taken, leaving_nothing():
        place = f"127.0.0.1:{taken.uri.port}"
        with pytest.raises(TransportError, match=f"listening on {place}"):
            UCX.listen(Uri.parse(f"ucx://{place}"))


@pytest.mark.parametrize("mode", ["peer", "none"])
def test_a_port_where_nobody_listens_is_named(mode: str) -> None:
    with (
        leaving_nothing(),
        pytest.raises(TransportError, match=r"the ucx server 127\.0\.0\.1:1 failed: .* check that the server runs"),
    ):
        UCX.connect(Uri.parse(f"ucx://127.0.0.1:1?err_mode={mode}"), PATIENCE)


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(TransportError, match=r"'no-such-host\.invalid' cannot be found"):
        UCX.connect(Uri.parse("ucx://no-such-host.invalid:1"), PATIENCE)


@pytest.mark.parametrize("uri", ["ucx:", "ucx://127.0.0.1", "ucx://127.0.0.1:1?err_mode=some"])
def test_a_uri_that_cannot_be_used(uri: str) -> None:
    with pytest.raises(UriError, match=r"ucx://HOST:PORT|err_mode=some .* peer and none"):
        UCX.connect(Uri.parse(uri), PATIENCE)


@pytest.mark.parametrize("mode", ["peer", "none"])
def test_heap_and_mapped_memory_can_be_fetched_but_nothing_beside_it(mode: str) -> None:
    heap = pa.py_buffer(bytes(range(256)) * 4096)
    regions = [Region(heap.address, heap), Region((other := pa.py_buffer(b"0123456789abcdef")).address, other)]
    with leaving_nothing(), closing(UCX.listen(Uri.parse(f"ucx:?err_mode={mode}&rma=allow"))) as listener:
        spans = [listener.expose(region) for region in regions]
        assert [listener.expose(region) for region in regions] == spans
        assert [(span.base, span.size) for span in spans] == [(heap.address, 1 << 20), (other.address, 16)]
        with attended(listener, with_spans(listener.uri, spans)) as client:
            assert client.supports_rma
            into = bytearray(1 << 20)
            client.memory.fetch([(heap.address, 1000, 0), (heap.address + 256, 999_000, 1000)], into, PATIENCE)
            client.memory.fetch([(other.address + 1, 15, 1_000_001)], into, PATIENCE)
            assert into[:1000] == bytes(heap)[:1000]
            assert into[1000:1_000_000] == bytes(heap)[256 : 256 + 999_000]
            assert into[1_000_001:1_000_016] == b"123456789abcdef"
            for address, length in ((heap.address - 1, 8), (heap.address + (1 << 20) - 7, 8), (0, 1)):
                with pytest.raises(RemoteProtocolError, match="is in no memory that its URI names"):
                    client.memory.fetch([(address, length, 0)], into, PATIENCE)
        del regions


def test_memory_is_exposed_only_where_that_is_allowed() -> None:
    with closing(UCX.listen(Uri.parse("ucx:"))) as listener:
        assert not listener.exposes_memory
        memory = pa.py_buffer(b"12345678")
        with pytest.raises(TransportError, match="allow_rma"):
            listener.expose(Region(memory.address, memory))


def test_a_remote_handle_that_is_none_is_refused() -> None:
    with closing(UCX.listen(Uri.parse("ucx:?rma=allow"))) as listener:
        uri = with_spans(listener.uri, [Span(4096, 8, b"\xff")])
        with attended(listener, uri) as client, pytest.raises(TransportError):
            client.memory.fetch([(4096, 8, 0)], bytearray(8), PATIENCE)


def test_an_interruption_while_ucx_calls_reaches_the_caller_who_is_told_that_something_was_lost() -> None:
    told: dict[str, Callable[[Connection], object]] = {
        "on_metadata": lambda peer: (peer.send([Message(None, (b"metadata",))], PATIENCE), peer.close(linger=PATIENCE)),
        "on_abort": lambda peer: peer.close("because"),
        "on_lost": lambda peer: peer.close(),
    }
    for callback, tell in told.items():
        with (
            case(callback),
            leaving_nothing(),
            closing(UCX.listen(Uri.parse("ucx:"))) as listener,
            attended(listener, listener.uri, tell) as client,
        ):
            client.send([Message(1, (b"body",))], PATIENCE)
            with Interruption(endpoint, callback), pytest.raises(KeyboardInterrupt):
                client.receive(PATIENCE, lambda tag, length: bytearray(length))
            with pytest.raises(ConnectionClosed, match=r"lost what the ucx server .* sent: KeyboardInterrupt"):
                client.receive(PATIENCE, lambda tag, length: bytearray(length))


class Over(ClosingConnection):
    """A closing connection that has finished."""

    def __init__(self) -> None:
        self.looked_at = threading.Event()

    def advance(self) -> bool:
        self.looked_at.set()
        return True


def test_closed_connections_that_no_thread_was_to_be_had_for_are_looked_after_later() -> None:
    with leaving_nothing():
        connections, over = ClosingConnections(), Over()
        with no_threads():
            connections.add(over)
        connections.check_room()
        assert over.looked_at.wait(PATIENCE)


#: A script that connects to a port without a listener, with more descriptors available each time.
FEW_DESCRIPTORS = """
    import os, resource
    from dissociated.errors import TransportError
    from dissociated.transport.registry import transport
    from dissociated.uri import Uri

    def connect():
        try:
            transport("ucx").connect(Uri.parse("ucx://127.0.0.1:1"), 60)
        except TransportError as error:
            return str(error)

    connect()
    last = max(map(int, os.listdir("/proc/self/fd")))
    while os.dup(2) < last:
        pass
    last, (_, most) = os.dup(2), resource.getrlimit(resource.RLIMIT_NOFILE)
    for left in [*range(20), 40]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1 + left, most))
        print(connect())
    """


def test_where_descriptors_run_out_ucx_does_not_end_the_process() -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FEW_DESCRIPTORS)], capture_output=True, text=True, timeout=3 * PATIENCE
    )
    first, *_, last = run.stdout.splitlines()
    assert "needs 32 free descriptors" in first
    assert "check that the server runs" in last, run.stderr


@pytest.fixture
def no_eventfd(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes os.eventfd fail in this thread, as if other threads took the last descriptors."""
    here, eventfd = threading.current_thread(), os.eventfd

    def refuse(*arguments: int) -> int:
        if threading.current_thread() is here:
            raise OSError(errno.EMFILE, "Too many open files")
        return eventfd(*arguments)

    return lambda: monkeypatch.setattr(os, "eventfd", refuse)


@pytest.mark.parametrize("begin", [UCX.connect, lambda uri, timeout: UCX.listen(uri)], ids=["connecting", "listening"])
def test_a_connection_without_a_descriptor_to_wake_it_leaves_nothing(
    begin: Callable[[Uri, float], object], no_eventfd: Callable[[], None]
) -> None:
    no_eventfd()
    with leaving_nothing(), pytest.raises(TransportError, match="opening an eventfd: Too many open files"):
        begin(Uri.parse("ucx://127.0.0.1:1"), PATIENCE)


def test_a_client_for_which_there_is_no_descriptor_is_told_so_at_once(no_eventfd: Callable[[], None]) -> None:
    with (
        leaving_nothing(),
        closing(UCX.listen(Uri.parse("ucx:"))) as listener,
        ThreadPoolExecutor(1) as pool,
    ):
        connecting = pool.submit(UCX.connect, listener.uri, PATIENCE)
        connecting.add_done_callback(lambda _: listener.close())
        no_eventfd()
        assert listener.accept() is None
        with pytest.raises(TransportError, match="check that the server runs"):
            connecting.result()


def test_an_interrupted_close_leaves_nothing() -> None:
    for module, function in ((channel, "_let_arrive"), (endpoint, "advance_closing")):
        with (
            case(function),
            leaving_nothing(),
            closing(UCX.listen(Uri.parse("ucx:"))) as listener,
            attended(listener, listener.uri) as client,
            Interruption(module, function),
            pytest.raises(KeyboardInterrupt),
        ):
            client.close()

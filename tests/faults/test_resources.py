"""A machine that runs out of a resource: space, descriptors, threads, ports, memory."""

from __future__ import annotations

import logging
import os
import resource
import socket
import stat
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import (
    DeadlineExceeded,
    DissociatedError,
    RemoteError,
    SourceError,
    StoreError,
    TransportError,
    UriError,
)
from dissociated.store.segment import Segment, SegmentWriter
from support.helpers import rest_of
from support.machine import UNSHARED

from .conftest import Scripted, Serve, Spawn
from .peer import PATIENCE, connect, want, want_of

NUMBERS = pa.table({"n": pa.array(range(1 << 17), pa.int64())})  # 1 MiB


@contextmanager
def limit(which: int, soft: int) -> Iterator[None]:
    limits = resource.getrlimit(which)
    resource.setrlimit(which, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, limits)


def run(process: subprocess.Popen[str]) -> None:
    """Wait for a child process that makes its own assertions."""
    out, _ = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == 0, out


# Missing addresses


def nothing(path: str) -> str:
    return f"shm://{path}?want_data=1"


def test_paths_that_lead_nowhere(runtime: str) -> None:
    with pytest.raises(TransportError, match=r"the shm server .* does not exist: check that it runs on this host"):
        dis.open_stream(nothing(f"{runtime}/nobody.sock"), b"t")
    with pytest.raises(TransportError, match=r"the shm server .* does not exist"):
        dis.open_stream(nothing(f"{runtime}/no/such/directory.sock"), b"t")
    Path(runtime, "file").write_text("")
    with pytest.raises(TransportError, match="refused"):
        dis.open_stream(nothing(f"{runtime}/file"), b"t")
    with pytest.raises(TransportError, match="refused"):
        dis.open_stream(nothing(runtime), b"t")
    with pytest.raises(TransportError, match=r"not a directory|Not a directory"):
        dis.open_stream(nothing(f"{runtime}/file/deeper"), b"t")
    with pytest.raises(DissociatedError, match="too long"):
        dis.open_stream(nothing("/" + "x" * 200), b"t")
    with pytest.raises(DissociatedError, match="needs the path"):
        dis.open_stream(nothing("/a%00b"), b"t")
    with pytest.raises(UriError, match="needs the path"):
        dis.open_stream("shm:?want_data=1", b"t")
    with pytest.raises(UriError, match="needs the path"):
        dis.open_stream("shm://host/path?want_data=1", b"t")
    os.unlink(f"{runtime}/file")


def test_stale_socket(runtime: str) -> None:
    path = f"{runtime}/stale.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
    with pytest.raises(TransportError, match="refused"):
        dis.open_stream(nothing(path), b"t")
    with dis.Server([f"shm://{path}"], catalog=None):
        assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert not os.path.exists(path)


def test_ports_where_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with pytest.raises(TransportError, match=f"connecting to the tcp server 127.0.0.1:{port}: .*refused"):
        dis.open_stream(f"tcp://127.0.0.1:{port}?want_data=1", b"t")
    with pytest.raises(UriError, match="needs a host and a port"):
        dis.open_stream("tcp://127.0.0.1?want_data=1", b"t")
    with pytest.raises(UriError, match="Port out of range"):
        dis.open_stream("tcp://127.0.0.1:99999?want_data=1", b"t")
    with pytest.raises(TransportError, match=r"connecting to the tcp server no.such.host.invalid:1"):
        dis.open_stream("tcp://no.such.host.invalid:1?want_data=1", b"t")
    with pytest.raises(UriError, match="is not the name of a host"):
        dis.open_stream(f"tcp://{'x' * 70}:1?want_data=1", b"t")


def test_port_that_does_not_answer() -> None:
    # The queue of the socket is full, so the kernel drops connection requests.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as sock:
        host, port = sock.getsockname()
        waiting = []
        for _ in range(2):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex((host, port))
        with pytest.raises(DeadlineExceeded, match=f"connecting to the tcp server {host}:{port}: no answer in time"):
            dis.open_stream(f"tcp://{host}:{port}?want_data=1", b"t", timeout=0.3)
        for one in waiting:
            one.close()


def test_path_that_does_not_answer(runtime: str) -> None:
    path = f"{runtime}/full.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(path)
        sock.listen(0)
        waiting = [connect(f"shm://{path}")]
        with pytest.raises(DeadlineExceeded, match=r"connecting to the shm server .*: no answer in time"):
            dis.open_stream(nothing(path), b"t", timeout=0.3)

        # The client waits for a server that is only busy.
        def hang_up() -> None:
            for _ in range(2):
                sock.accept()[0].close()

        timer = threading.Timer(0.1, hang_up)
        timer.start()
        with pytest.raises(DissociatedError, match="the peer closed the connection"):
            dis.open_stream(nothing(path), b"t", timeout=PATIENCE)
        timer.join()
        for one in waiting:
            one.close()
    os.unlink(path)


# Servers that cannot listen release everything that they have opened


@pytest.mark.parametrize("catalog", [None, "grpc://127.0.0.1:0"])
def test_port_in_use(runtime: str, catalog: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(TransportError, match=f"listening on 127.0.0.1:{port}: Address already in use"):
            dis.Server(["shm:", "tcp://127.0.0.1:0", f"tcp://127.0.0.1:{port}"], catalog=catalog)
    assert os.listdir(f"{runtime}/dissociated") == []


def test_port_of_the_catalog_in_use(runtime: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(TransportError, match=f"the catalog cannot listen at grpc://127.0.0.1:{port}"):
            dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=f"grpc://127.0.0.1:{port}")
    with pytest.raises(UriError, match=r"nonsense|scheme"):
        dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog="nonsense")
    assert os.listdir(f"{runtime}/dissociated") == []


@pytest.mark.parametrize(
    ("uri", "error", "phrase"),
    [
        ("nonsense", UriError, "scheme"),
        ("carrier-pigeon://roof", UriError, "no transport for carrier-pigeon: here; there are"),
        ("shm://host/path", UriError, "names a host"),
        ("shm:///no/such/directory/x.sock", TransportError, "No such file or directory"),
        ("shm:///" + "x" * 200, TransportError, "at most 107 bytes"),
        ("shm:///a%00b", UriError, "listens on a path"),
        ("tcp://192.0.2.1:0", TransportError, "Cannot assign requested address"),
        ("tcp://no.such.host.invalid:0", TransportError, "listening on no.such.host.invalid:0"),
        (f"tcp://{'ü' * 70}:0", UriError, "is not the name of a host"),
        ("tcp://127.0.0.1:99999", UriError, "Port out of range"),
        ("tcp://127.0.0.1:0?want_data=-1", UriError, "want_data"),
        ("inproc://name/path", UriError, "needs a name alone"),
    ],
)
def test_listener_that_cannot_be(runtime: str, uri: str, error: type[Exception], phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        dis.Server(["shm:", "tcp://127.0.0.1:0", "inproc://faults", uri], catalog="grpc://127.0.0.1:0")
    assert os.listdir(f"{runtime}/dissociated") == []
    with dis.Server(["inproc://faults"], catalog=None):
        pass  # The name is free again.


def test_path_in_use(serve: Serve, runtime: str) -> None:
    good = serve(f"shm://{runtime}/own.sock")
    with pytest.raises(TransportError, match="Address already in use"):
        dis.Server(["tcp://127.0.0.1:0", f"shm://{runtime}/own.sock"], catalog=None)
    good.check()
    Path(runtime, "file").write_text("precious")
    with pytest.raises(TransportError, match="listening on"):
        dis.Server([f"shm://{runtime}/file"], catalog=None)
    assert Path(runtime, "file").read_text() == "precious"
    os.unlink(f"{runtime}/file")


def test_runtime_directory_is_open_to_others(runtime: str) -> None:
    os.mkdir(f"{runtime}/dissociated")
    os.chmod(f"{runtime}/dissociated", 0o755)
    with pytest.raises(TransportError, match="chmod 700"):
        dis.Server(["tcp://127.0.0.1:0", "shm:"], catalog=None)


def test_runtime_directory_cannot_be(runtime: str) -> None:
    Path(runtime, "dissociated").write_text("")
    with pytest.raises(TransportError, match="dissociated' is not a directory: move it away"):
        dis.Server(["tcp://127.0.0.1:0", "shm:"], catalog=None)
    os.unlink(f"{runtime}/dissociated")


# No space

FULL = textwrap.dedent(
    """
    import os, subprocess, sys
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"], check=True)

    import pyarrow as pa
    import dissociated as dis
    from dissociated.errors import StoreError, SourceError, RemoteError
    from dissociated.store.segment import Segment, SegmentWriter
    from dissociated.store.stage import Stage

    numbers = pa.table({"n": pa.array(range(1 << 17), pa.int64())})  # 1 MiB of bodies alone

    def attempt(*batches):
        with SegmentWriter(stage.directory / "segment", numbers.schema) as writer:
            for batch in batches:
                writer.write(batch)

    stage = Stage()
    assert str(stage.directory).startswith("/dev/shm")
    whole = numbers.to_batches()[0]
    for size in 1 << 17, 1000:  # one batch that does not fit, or many of which one does not
        try:
            attempt(*numbers.to_batches(max_chunksize=size))
        except StoreError as error:
            assert "no space is left for writing /dev/shm/" in str(error), error
            assert "enlarge the file system" in str(error), error
        else:
            raise AssertionError("it went in")
        assert os.listdir(stage.directory) == []
    # Not even for the end of the stream, or for the schema.
    fitting = whole.slice(0, 1000)
    for last in "end", "schema":
        filler = open("/dev/shm/filler", "wb", buffering=0)
        try:
            if last == "schema":
                fill(filler)
            with SegmentWriter(stage.directory / "segment", numbers.schema) as writer:
                writer.write_batch(fitting, {"x": "x" * 8})
                # Exactly to the end of a page, then no page more.
                before = writer.nbytes
                writer.write_batch(fitting, {"x": "x" * 8})
                size = writer.nbytes - before
                writer.write_batch(fitting, {"x": "x" * (8 + -(writer.nbytes + size) % 4096)})
                assert writer.nbytes % 4096 == 0
                fill(filler)
        except StoreError as error:
            assert "no space is left" in str(error)
        else:
            raise AssertionError("it went in")
        finally:
            filler.close()
            os.unlink("/dev/shm/filler")
        assert os.listdir(stage.directory) == []
    # What fits goes on being written and served. Datasets in memfds do not use /dev/shm.
    attempt(fitting)
    with dis.Server(["shm:"], catalog="grpc://127.0.0.1:0") as server:
        server.publish("small", stage.directory / "segment")
        server.publish("large", numbers)
        for name, rows in ("small", 1000), ("large", 1 << 17):
            assert dis.open_stream(server.locations(name)[0], server.ticket(name)).read_all().num_rows == rows
        # Through the catalog: the place where Spark's writers put their segments.
        with dis.connect(server.catalog_uri) as client:
            place = client.stage()
            fill(open("/dev/shm/filler", "wb", buffering=0))
            try:
                with SegmentWriter(place.directory + "/segment", numbers.schema) as writer:
                    writer.write(whole)
            except StoreError as error:
                assert "no space is left" in str(error)
            assert os.listdir(place.directory) == []
            assert [one.name for one in client.list()] == ["large", "small"]
    stage.close()
    os.unlink("/dev/shm/filler")
    left = [os.path.join(where, one) for where, _, files in os.walk("/dev/shm") for one in files]
    assert not left, left
    """
)
FILL = textwrap.dedent(
    """
    def fill(file):
        import errno
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    """
)


@pytest.mark.needs("tmpfs")
def test_full_shared_memory(spawn: Spawn) -> None:
    run(spawn("-c", FILL + FULL, prefix=UNSHARED))


@pytest.mark.parametrize(
    ("source", "reason"),
    [(NUMBERS, "no space is left for shared memory"), (lambda: NUMBERS.to_reader(), "shared memory for numbers")],
    ids=["table", "live"],
)
def test_memory_for_a_dataset_is_limited(serve: Serve, source: object, reason: str) -> None:
    good = serve("shm:")
    good.server.publish("numbers", source)
    (uri,) = good.server.locations("numbers")
    with limit(resource.RLIMIT_FSIZE, 1 << 18), pytest.raises(RemoteError, match=reason):
        dis.open_stream(uri, good.server.ticket("numbers"), timeout=PATIENCE).read_all()
    good.check()
    assert dis.open_stream(uri, good.server.ticket("numbers"), timeout=PATIENCE).read_all().equals(NUMBERS)


def test_live_memory_cannot_be_mapped(serve: Serve) -> None:
    good = serve("shm:")
    good.server.publish("numbers", lambda: NUMBERS.to_reader())
    (uri,) = good.server.locations("numbers")
    scarce = 4096 * int(Path("/proc/self/statm").read_text().split()[0]) + (1 << 28)
    with limit(resource.RLIMIT_AS, scarce), pytest.raises(TransportError, match=r"cannot map the .* bytes"):
        dis.open_stream(uri, good.server.ticket("numbers"), timeout=PATIENCE).read_all()
    good.check()
    # A client that cannot map so much memory can request packed bodies.
    (packed,) = good.server.locations("numbers", bodies="packed")
    with limit(resource.RLIMIT_AS, scarce):
        assert dis.open_stream(packed, good.server.ticket("numbers"), timeout=PATIENCE).read_all().equals(NUMBERS)


def test_segment_of_limited_size(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    with (
        limit(resource.RLIMIT_FSIZE, 1 << 18),
        pytest.raises(StoreError, match="no space is left for writing"),
        SegmentWriter(path, NUMBERS.schema) as writer,
    ):
        writer.write(NUMBERS.to_batches()[0])
    assert not path.exists()
    with limit(resource.RLIMIT_FSIZE, 8), pytest.raises(StoreError, match="no space is left for writing"):
        SegmentWriter(path, NUMBERS.schema)
    assert not path.exists()
    with pytest.raises(StoreError, match=r"creating .*: No such file"):
        SegmentWriter(tmp_path / "no" / "segment", NUMBERS.schema)
    path.write_text("precious")
    with pytest.raises(StoreError, match=r"creating .*: File exists"):
        SegmentWriter(path, NUMBERS.schema)
    assert path.read_text() == "precious"


# Invalid files


def ipc_file(tmp_path: Path, kind: str) -> bytes:
    sink = pa.BufferOutputStream()
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(sink, NUMBERS.schema) as writer:
        writer.write_table(NUMBERS.slice(0, 100))
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_every_truncation_of_a_file(tmp_path: Path, kind: str) -> None:
    whole = ipc_file(tmp_path, kind)
    path = tmp_path / "segment"
    refused = 0
    for size in range(0, len(whole), 3):
        path.write_bytes(whole[:size])
        try:
            rows = Segment.open(path).rows
        except StoreError as error:
            refused += str(path) in str(error)
        else:
            assert kind == "stream"  # Cut between two messages: the end-of-stream marker is optional.
            assert rows in (0, 100)
    assert refused > 0.9 * len(whole) / 3 or kind == "stream"


def test_files_that_hold_something_else(serve: Serve, tmp_path: Path) -> None:
    good = serve("shm:")
    publish = good.server.publish
    path = tmp_path / "thing"
    for content in (
        b"",
        b"hello, world",
        b"\xff" * 100,
        bytes(100),
        b"ARROW1",
        b"ARROW1\0\0" + bytes(100) + b"ARROW1",
        b"PAR1",
    ):
        path.write_bytes(content)
        with pytest.raises((StoreError, SourceError), match="thing"):
            publish("bad", path)
    with pytest.raises(SourceError, match="the file does not exist"):
        publish("bad", tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"empty': it has no files, and a directory must have Parquet files"):
        publish("bad", tmp_path / "empty")
    (tmp_path / "empty").rmdir()
    with pytest.raises(SourceError, match="thing"):  # It starts like Parquet.
        publish("bad", tmp_path)
    path.write_bytes(b"text")
    with pytest.raises(SourceError, match=r"must have Parquet files only.*'thing' is not a Parquet"):
        publish("bad", tmp_path)
    with pytest.raises((StoreError, SourceError), match="/proc/self/mem"):
        publish("bad", "/proc/self/mem")
    with pytest.raises(SourceError, match="cannot publish a int"):
        publish("bad", 3)
    with pytest.raises(dis.errors.DatasetNotFound):
        good.server.dataset("bad")
    good.check()


# No descriptors, no threads

EXHAUSTED = textwrap.dedent(
    """
    import logging, os, resource, sys, time
    import pyarrow as pa
    import dissociated as dis

    logging.basicConfig(stream=sys.stdout, format="log %(message)s")
    with dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None) as server:
        server.publish("numbers", pa.table({"n": [1, 2, 3]}))
        print(server.ticket("numbers").hex(), *server.locations("numbers", bodies="packed"), flush=True)
        sys.stdin.readline()
        while server.connections < 2:
            time.sleep(0.01)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, 4096))
        sys.stdout.write("limited\\n")  # at once, since others write there too
        sys.stdout.flush()
        sys.stdin.readline()
    """
)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def cpu(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_no_descriptors(spawn: Spawn) -> None:
    process = spawn("-c", EXHAUSTED)
    ticket_hex, *uris = line(process).split()
    ticket = bytes.fromhex(ticket_hex)
    before = [connect(uri) for uri in uris]
    say(process)
    assert line(process) == "limited"
    # A waiting listener has reserved a descriptor. The next connection gets none.
    during = [connect(uri) for uri in uris]
    spent = cpu(process)
    for uri in uris:
        with pytest.raises(DeadlineExceeded, match=r"silent for 0.4 s"):
            dis.open_stream(uri, ticket, timeout=0.4)
    assert cpu(process) - spent < 0.2, "the server runs hot"
    # Connections from before are served,
    for connections in before, during:
        for connection, uri in zip(connections, uris, strict=True):
            connection.send(want(ticket, want_of(uri)))
            assert [frame.kind for frame in connection.read_frames()] == [1, 1, 2, 1]
            connection.close()
    # and their descriptors serve later connections.
    for uri in uris:
        assert dis.open_stream(uri, ticket, timeout=PATIENCE).read_all().num_rows == 3
    say(process)
    said = rest_of(process).splitlines()
    assert process.returncode == 0
    assert 2 <= len(said) <= 12, said  # once for each listener, and again after it accepted a connection meanwhile
    assert all("accept failed, will retry" in one and "Too many open files" in one for one in said)


THREADS = textwrap.dedent(
    """
    import resource
    import pyarrow as pa
    import dissociated as dis
    from faults.peer import connect

    table = pa.table({"n": [1, 2, 3]})
    server = dis.Server(["shm:", "tcp://127.0.0.1:0"], catalog=None)
    server.publish("numbers", table)
    uris = server.locations("numbers", bodies="packed")
    read = lambda uri: dis.open_stream(uri, server.ticket("numbers"), timeout=5).read_all()
    for uri in uris:
        assert read(uri).equals(table)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = 4096 * int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), limits[1]))  # a thread's stack takes 8 MiB
    refused = 0
    clients = []
    for uri in uris * 4:
        client = connect(uri)
        clients.append(client)
        try:
            dis.open_stream(uri, server.ticket("numbers"), timeout=2).read_all()
        except dis.errors.RemoteError as error:
            assert "accepts no clients now" in str(error), error
            refused += 1
    assert refused, "there were threads enough"
    resource.setrlimit(resource.RLIMIT_AS, limits)
    for client in clients:
        client.close()
    for uri in uris:
        assert read(uri).equals(table)
    server.close()
    """
)


def test_no_threads(spawn: Spawn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run(spawn("-c", THREADS))


def test_client_has_no_memory_for_a_body(scripted: Scripted, table: pa.Table) -> None:
    from .content import GOOD
    from .peer import TAGGED, RawConnection, head

    def script(connection: RawConnection) -> None:
        connection.read_frame()
        connection.send(GOOD[:-8040] + head(TAGGED, 1 << 33, 7))
        connection.hold()

    server = scripted("tcp", script)
    with (
        limit(resource.RLIMIT_AS, 1 << 33),
        pytest.raises(TransportError, match="no memory for a body of 8589934592 bytes"),
    ):
        dis.open_stream(server.uri, b"ticket", timeout=PATIENCE).read_all()
    server.wait_done()


def test_accepting_goes_on_after_errors(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    # Connections that are reset before they are accepted
    good = serve("tcp://127.0.0.1:0")
    (uri,) = good.server.locations("good")
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            connection = connect(uri)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    assert not caplog.records
    good.check()

"""TLS: untrusted peers receive nothing, and altered data is refused."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import AccessDenied, ConnectionClosed, DeadlineExceeded, OptionError, RemoteProtocolError
from dissociated.transport.framed import tls
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.certificates import Certificates, certificates
from support.helpers import PATIENCE, Interruption, Serve, descriptors, leaving_nothing, wait_until

TLS = transport("tls")
TABLE = pa.table({"n": np.arange(1 << 18), "s": ["the secret of the day"] * (1 << 18)})


@pytest.fixture
def server(serve: Serve, certified: Certificates) -> dis.Server:
    made = serve("tls:", **certified.options)
    made.publish("data", TABLE)
    return made


def where(server: dis.Server, **parameters: str) -> str:
    return str(Uri.parse(server.locations("data")[0]).with_parameters(**parameters))


def read(server: dis.Server, **parameters: str) -> pa.Table:
    return dis.open_stream(where(server, **parameters), server.ticket("data"), timeout=PATIENCE).read_all()


def test_a_client_that_trusts_the_certificate_reads(server: dis.Server, certified: Certificates) -> None:
    assert read(server, roots=certified.roots) == TABLE


def test_locations_name_neither_certificate_nor_key(server: dis.Server, certified: Certificates) -> None:
    assert "pem" not in where(server)
    assert not {"cert", "key", "roots"} & Uri.parse(where(server)).parameters.keys()


def test_a_certificate_that_nobody_vouches_for_is_refused(server: dis.Server, tmp_path: Path) -> None:
    other = certificates(tmp_path)
    for parameters in ({}, {"roots": other.roots}):
        with pytest.raises(AccessDenied, match="is not trusted: unable to get local issuer certificate"):
            read(server, **parameters)


def test_a_certificate_for_another_host_is_refused(serve: Serve, tmp_path: Path) -> None:
    made = certificates(tmp_path, "elsewhere.example")
    server = serve("tls:", **made.options)
    server.publish("data", TABLE)
    with pytest.raises(AccessDenied, match="IP address mismatch"):
        read(server, roots=made.roots)


def test_another_transport_is_no_way_around_an_untrusted_certificate(certified: Certificates) -> None:
    """Keep a client whose server presents an untrusted certificate from falling back to plain text."""
    with dis.Server(["tcp:", "tls:"], **certified.options) as server, dis.connect(server.catalog_uri) as client:
        for table in (TABLE, TABLE[:3]):  # the catalog sends small datasets itself, but not these in clear text
            server.publish("data", table)
            assert [uri.partition(":")[0] for uri in server.locations("data")] == ["tcp", "tls"]
            with pytest.raises(AccessDenied):
                client.read("data")


def test_versions_of_tls_before_1_3_are_refused(server: dis.Server, certified: Certificates) -> None:
    context = ssl.create_default_context(cafile=certified.roots)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    uri = Uri.parse(where(server))
    with socket.create_connection((uri.host, uri.port), PATIENCE) as sock, pytest.raises(ssl.SSLError, match="VERSION"):
        context.wrap_socket(sock, server_hostname=uri.host)
    assert read(server, roots=certified.roots) == TABLE


def test_neither_side_speaks_without_tls(server: dis.Server, serve: Serve, certified: Certificates) -> None:
    with pytest.raises((RemoteProtocolError, ConnectionClosed)):  # an alert, or nothing
        dis.open_stream(where(server).replace("tls:", "tcp:"), server.ticket("data"), timeout=PATIENCE)
    plain = serve("tcp:")
    plain.publish("data", TABLE)
    with pytest.raises(RemoteProtocolError, match=r"does not agree on TLS 1\.3"):
        dis.open_stream(where(plain).replace("tcp:", "tls:"), plain.ticket("data"), timeout=PATIENCE)


# Attackers on the network


class Wire:
    """A proxy between client and server that records all bytes and passes the server's bytes through `alter`."""

    def __init__(self, port: int, alter: Callable[[bytes], bytes] = bytes) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.heard = bytearray()
        self._thread = threading.Thread(target=self._run, args=(port, alter))
        self._thread.start()

    def _run(self, port: int, alter: Callable[[bytes], bytes]) -> None:
        with (
            suppress(OSError),
            self._listening.accept()[0] as client,
            socket.create_connection(("127.0.0.1", port)) as server,
            ThreadPoolExecutor(2) as pool,
        ):
            pool.submit(self._pass_on, client, server, bytes)
            pool.submit(self._pass_on, server, client, alter)

    def _pass_on(self, source: socket.socket, sink: socket.socket, alter: Callable[[bytes], bytes]) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                sink.sendall(alter(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(PATIENCE)


def through(wire: Wire, server: dis.Server, certified: Certificates) -> pa.Table:
    uri = Uri.parse(where(server, roots=certified.roots))
    moved = str(uri).replace(f":{uri.port}", f":{wire.port}")
    return dis.open_stream(moved, server.ticket("data"), timeout=PATIENCE).read_all()


def test_an_eavesdropper_sees_neither_ticket_nor_data(server: dis.Server, certified: Certificates) -> None:
    with closing(Wire(Uri.parse(where(server)).port or 0)) as wire:
        assert through(wire, server, certified) == TABLE
    assert len(wire.heard) > TABLE.nbytes
    for secret in (server.ticket("data"), b"the secret of the day", b"DISSOC"):
        assert secret not in wire.heard


def test_bytes_altered_in_transit_are_refused(server: dis.Server, certified: Certificates) -> None:
    seen = 0

    def alter(data: bytes) -> bytes:
        nonlocal seen
        seen += len(data)
        return data if seen < 1 << 20 else data[:-1] + bytes([data[-1] ^ 1])

    wire = Wire(Uri.parse(where(server)).port or 0, alter)
    with closing(wire), pytest.raises(RemoteProtocolError, match="was altered in transit"):
        through(wire, server, certified)


def test_a_truncated_stream_is_not_taken_for_a_whole_one(server: dis.Server, certified: Certificates) -> None:
    seen = 0

    def alter(data: bytes) -> bytes:
        nonlocal seen
        seen += len(data)
        if seen > 1 << 20:
            raise OSError("cut")
        return data

    with closing(Wire(Uri.parse(where(server)).port or 0, alter)) as wire, pytest.raises(ConnectionClosed):
        through(wire, server, certified)


# Deadlines


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Provide a listening socket that neither accepts nor answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_a_server_that_does_not_shake_hands_exceeds_the_deadline(silent: socket.socket) -> None:
    with leaving_nothing(), pytest.raises(DeadlineExceeded, match=r"did not agree on TLS within 0\.05 s"):
        TLS.connect(Uri.parse(f"tls://127.0.0.1:{silent.getsockname()[1]}"), 0.05)


def test_a_server_that_hangs_up_instead_of_shaking_hands(silent: socket.socket) -> None:
    with leaving_nothing(), ThreadPoolExecutor(1) as pool:
        hanging_up = pool.submit(lambda: silent.accept()[0].close())
        with pytest.raises(ConnectionClosed):
            TLS.connect(Uri.parse(f"tls://127.0.0.1:{silent.getsockname()[1]}"), PATIENCE)
        hanging_up.result(PATIENCE)


@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00" + bytes(100)])
def test_clients_that_do_not_shake_hands_are_sent_away_and_hold_up_nobody(
    serve: Serve, certified: Certificates, said: bytes
) -> None:
    server = serve("tls:", handshake_timeout=1.0, **certified.options)  # a deadline for good clients, too
    server.publish("data", TABLE)
    uri = Uri.parse(where(server))
    silent = [socket.create_connection((uri.host, uri.port), PATIENCE) for _ in range(20)]
    for one in silent:
        one.sendall(said)
    assert read(server, roots=certified.roots) == TABLE
    for one in silent:
        with one, suppress(ConnectionResetError):
            while one.recv(1 << 16):
                pass


def test_a_client_that_drips_does_not_get_longer_than_the_deadline(serve: Serve, certified: Certificates) -> None:
    server = serve("tls:", handshake_timeout=0.3, **certified.options)
    server.publish("data", TABLE)
    uri = Uri.parse(where(server))
    with socket.create_connection((uri.host, uri.port), PATIENCE) as dripping:
        dripping.settimeout(0.02)
        dripping.sendall(b"\x16\x03\x01\x02\x00")
        for _ in range(500):
            try:
                dripping.sendall(b"\0")
                if not dripping.recv(1):
                    break
            except TimeoutError:
                pass
            except (ConnectionResetError, BrokenPipeError):
                break
        else:
            pytest.fail("a client got as long as it liked")


# Resources


def test_an_interrupted_close_leaves_nothing(server: dis.Server, certified: Certificates) -> None:
    before = descriptors()
    connection = TLS.connect(Uri.parse(where(server, roots=certified.roots)), PATIENCE)
    assert descriptors().items() - before.items()
    with pytest.raises(KeyboardInterrupt), Interruption(tls, "_say_goodbye"):
        connection.close()
    wait_until(lambda: not descriptors().items() - before.items(), "both ends are closed")


def test_files_that_cannot_be_used(certified: Certificates, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    other = certificates(tmp_path)
    for cert, key, sentence in [
        ("/nowhere", certified.key, "No such file"),
        (certified.cert, str(nonsense), "cannot use"),
        (str(nonsense), certified.key, "cannot use"),
        (certified.cert, other.key, "key values mismatch"),
    ]:
        with pytest.raises(OptionError, match=sentence):
            dis.Server(["tls:"], catalog=None, tls_cert=cert, tls_key=key)
    with pytest.raises(OptionError, match="needs a certificate and its key"):
        dis.Server(["tls:"], catalog=None)
    with pytest.raises(OptionError, match="cannot use /nowhere for TLS"):
        TLS.connect(Uri.parse("tls://127.0.0.1:1?roots=/nowhere"), PATIENCE)


def test_an_encrypted_key_is_refused_instead_of_asking_for_a_password(certified: Certificates, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key(Path(certified.key).read_bytes(), None)
    encrypted = tmp_path / "key.pem"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    with pytest.raises(OptionError, match="the key for TLS is encrypted"):
        dis.Server(["tls:"], catalog=None, tls_cert=certified.cert, tls_key=encrypted)


def test_one_listener_may_have_a_certificate_of_its_own(serve: Serve, certified: Certificates, tmp_path: Path) -> None:
    own = certificates(tmp_path)
    server = serve(str(Uri("tls").with_parameters(cert=own.cert, key=own.key)), **certified.options)
    server.publish("data", TABLE)
    assert read(server, roots=own.roots) == TABLE

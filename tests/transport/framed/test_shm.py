"""Unix sockets that other users cannot reach, and safe sharing of memory over them."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dissociated.errors import DeadlineExceeded, RemoteError, RemoteProtocolError, TransportError, UriError
from dissociated.memory.shared import Backing, create_memfd, reopen_read_only, seal
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection
from dissociated.transport.framed.shm import runtime_directory
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE, descriptors

SHM = transport("shm")
PAGE = 4096


def mode(path: Path | str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def allocate(tag: int | None, length: int) -> Any:
    return bytearray(length)


# Locations of sockets


def test_a_socket_of_its_own_lies_in_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with closing(SHM.listen(Uri.parse("shm:"))) as listener:
        path = Path(listener.uri.path)
        assert path.parent == tmp_path / "dissociated"
        assert mode(path.parent) == 0o700
        assert mode(path) == 0o600
        assert stat.S_ISSOCK(path.stat().st_mode)
    assert not path.exists()


def test_without_a_runtime_directory_there_is_a_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_directory() == tmp_path / f"dissociated-{os.geteuid()}"
    assert mode(runtime_directory()) == 0o700


def test_a_runtime_directory_that_is_not_this_users_alone_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, link, missing = tmp_path / "given", tmp_path / "link", tmp_path / "missing"
    given.mkdir(mode=0o700)
    link.symlink_to(given)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(given))
    assert runtime_directory() == given / "dissociated"
    given.chmod(0o770)
    for refused in (given, link, missing):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(refused))
        assert runtime_directory() == tmp_path / f"dissociated-{os.geteuid()}"
    assert not missing.exists()


def test_a_directory_that_is_open_to_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "dissociated").mkdir()
    (tmp_path / "dissociated").chmod(0o755)
    with pytest.raises(TransportError, match="open to other users"):
        SHM.listen(Uri.parse("shm:"))


def test_a_socket_is_private_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        with closing(SHM.listen(Uri.parse(f"shm://{tmp_path}/s"))):
            assert mode(tmp_path / "s") == 0o600
    finally:
        assert os.umask(previous) == 0, "the umask of the process was not put back"


def test_the_socket_of_a_server_that_died_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as died:
        died.bind(str(path))
    assert path.exists()
    with closing(SHM.listen(Uri.parse(f"shm://{path}"))) as listener:
        SHM.connect(listener.uri, PATIENCE).close()
    assert not path.exists()


def test_the_socket_of_a_server_that_lives_is_left_alone(tmp_path: Path) -> None:
    uri = Uri.parse(f"shm://{tmp_path}/s")
    with closing(SHM.listen(uri)):
        with pytest.raises(TransportError, match=r"/s: Address already in use"):
            SHM.listen(uri)
        SHM.connect(uri, PATIENCE).close()


def test_a_server_that_lives_does_not_see_who_looks_whether_it_does() -> None:
    """Probe a live server without connecting, because it would count a connection as a client and log it."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(runtime_directory() / "other.sock"))
        other.listen()
        other.setblocking(False)
        SHM.listen(Uri.parse("shm:")).close()
        with pytest.raises(BlockingIOError):
            other.accept()
    assert (runtime_directory() / "other.sock").exists()
    SHM.listen(Uri.parse("shm:")).close()  # The probe finds it dead now.
    assert not (runtime_directory() / "other.sock").exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(TransportError, match="in use"):
        SHM.listen(Uri.parse(f"shm://{tmp_path}/s"))
    assert (tmp_path / "s").read_text() == "precious"


def test_closing_removes_only_its_own_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    first = SHM.listen(Uri.parse(f"shm://{path}"))
    path.unlink()
    with closing(SHM.listen(Uri.parse(f"shm://{path}"))) as second:
        first.close()
        SHM.connect(second.uri, PATIENCE).close()


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    path = f"{tmp_path}/{'x' * 108}"
    with pytest.raises(TransportError, match="at most 107 bytes"):
        SHM.listen(Uri.parse(f"shm://{path}"))
    with pytest.raises(TransportError):
        SHM.connect(Uri.parse(f"shm://{path}"), PATIENCE)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"listening on .*/nowhere/s: No such file or directory"):
        SHM.listen(Uri.parse(f"shm://{tmp_path}/nowhere/s"))


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    uri = Uri.parse(f"shm://{tmp_path}/s")
    assert not SHM.reachable(uri)
    with pytest.raises(TransportError, match=r"the shm server .*/s does not exist"):
        SHM.connect(uri, PATIENCE)


@pytest.mark.parametrize("uri", ["shm:", "shm://host/path"])
def test_connecting_needs_a_path_alone(uri: str) -> None:
    with pytest.raises(UriError, match="shm:///PATH"):
        SHM.connect(Uri.parse(uri), PATIENCE)


def test_listening_on_another_host_is_refused() -> None:
    with pytest.raises(UriError, match="names a host"):
        SHM.listen(Uri.parse("shm://host/path"))


def test_a_socket_that_others_may_use_lies_where_they_can_enter(tmp_path: Path) -> None:
    with pytest.raises(UriError, match="cannot enter this user's own directory"):
        SHM.listen(Uri.parse("shm:?allow=12345"))
    for side in (SHM.listen, lambda uri: SHM.connect(uri, PATIENCE)):
        with pytest.raises(UriError, match="no user 'no such user'"):
            side(Uri.parse(f"shm://{tmp_path}/s?allow=no%20such%20user"))
    with closing(SHM.listen(Uri.parse(f"shm://{tmp_path}/s?allow=12345"))) as listener:
        assert mode(tmp_path / "s") == 0o666
        assert listener.uri.parameters == {}


# Memory


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Connection, Connection]]:
    with closing(SHM.listen(Uri.parse(f"shm://{tmp_path}/s"))) as listener:
        client = SHM.connect(listener.uri, PATIENCE)
        server = listener.accept()
        assert server is not None
        with client, server:
            yield client, server


@pytest.fixture
def memfd() -> Iterator[int]:
    """Provide a sealed memfd with a page of ones and a page of twos."""
    descriptor = create_memfd("test")
    os.write(descriptor, b"1" * PAGE + b"2" * PAGE)
    seal(descriptor, Backing.SEALED)
    yield descriptor
    os.close(descriptor)


def mapped(client: Connection, server: Connection) -> None:
    """Let the client map the shared memory, which it has done when the next message arrives."""
    server.send([Message(None, (b"next",))], PATIENCE)
    arrived = client.receive(PATIENCE, allocate)
    assert arrived is not None
    assert arrived[:2] == (None, b"next")


def test_a_region_arrives_with_its_addresses(ends: tuple[Connection, Connection], memfd: int) -> None:
    client, server = ends
    server.memory.share(memfd, 0x10000, 2 * PAGE, Backing.SEALED, PATIENCE)
    mapped(client, server)
    region = client.address_space.find(0x10000 + PAGE)
    assert (region.base, region.size, region.static) == (0x10000, 2 * PAGE, True)
    assert region.memory.to_pybytes() == b"1" * PAGE + b"2" * PAGE
    for address in (0xFFFF, 0x10000 + 2 * PAGE):
        with pytest.raises(RemoteProtocolError, match=f"{address:#x}, which is in no region"):
            client.address_space.find(address)


def test_part_of_a_file_can_be_shared(ends: tuple[Connection, Connection], tmp_path: Path) -> None:
    client, server = ends
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        server.memory.share(file.fileno(), PAGE, 4, Backing.FILE, PATIENCE)
    mapped(client, server)
    assert client.address_space.find(PAGE).memory.to_pybytes() == b"cont"


def test_an_empty_region_needs_no_mapping(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    descriptor = create_memfd("empty")
    seal(descriptor, Backing.SEALED)
    server.memory.share(descriptor, PAGE, 0, Backing.SEALED, PATIENCE)
    os.close(descriptor)
    mapped(client, server)
    with pytest.raises(RemoteProtocolError, match="no region"):
        client.address_space.find(PAGE)


def test_many_regions_arrive_each_with_its_own_memory(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    for number in range(100):
        descriptor = create_memfd(str(number))
        os.write(descriptor, bytes([number]) * 10)
        seal(descriptor, Backing.SEALED)
        server.memory.share(descriptor, PAGE * (number + 1), 10, Backing.SEALED, PATIENCE)
        os.close(descriptor)
    mapped(client, server)
    for number in range(100):
        assert client.address_space.find(PAGE * (number + 1)).memory.to_pybytes() == bytes([number]) * 10


def test_a_peer_that_takes_no_region_exceeds_the_deadline(ends: tuple[Connection, Connection], memfd: int) -> None:
    _, server = ends

    def share_many() -> None:
        for number in range(1, 2000):
            server.memory.share(memfd, 2 * PAGE * number, 2 * PAGE, Backing.SEALED, 0.01)

    with pytest.raises(DeadlineExceeded, match=r"took nothing for 0\.01 s"):
        share_many()


def test_a_peer_is_told_why_no_region_could_be_shared(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    with pytest.raises(TransportError, match="sharing memory"):
        server.memory.share(-1, PAGE, PAGE, Backing.SEALED, PATIENCE)
    server.close("the reason")
    with pytest.raises(RemoteError, match="the reason"):
        client.receive(PATIENCE, allocate)


def test_what_is_mapped_outlives_the_connection(ends: tuple[Connection, Connection], memfd: int) -> None:
    client, server = ends
    server.memory.share(memfd, PAGE, 2 * PAGE, Backing.SEALED, PATIENCE)
    mapped(client, server)
    memory = client.address_space.find(PAGE).memory
    client.close()
    server.close()
    assert memory.to_pybytes() == b"1" * PAGE + b"2" * PAGE


def test_what_is_mapped_cannot_be_written(ends: tuple[Connection, Connection], memfd: int) -> None:
    client, server = ends
    server.memory.share(memfd, PAGE, 2 * PAGE, Backing.SEALED, PATIENCE)
    mapped(client, server)
    memory = client.address_space.find(PAGE).memory
    assert not memory.is_mutable
    with pytest.raises(TypeError, match="read-only"):
        memoryview(memory)[0] = 0


@pytest.mark.parametrize(
    ("seals", "backing"),
    [
        (0, Backing.SEALED),
        (0, Backing.LIVE),
        (fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL, Backing.SEALED),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, Backing.SEALED),
        (fcntl.F_SEAL_GROW, Backing.LIVE),
    ],
)
def test_a_memfd_that_could_change_under_its_reader_is_refused(
    ends: tuple[Connection, Connection], seals: int, backing: Backing
) -> None:
    client, server = ends
    descriptor = create_memfd("unsealed")
    os.ftruncate(descriptor, PAGE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    server.memory.share(descriptor, PAGE, PAGE, backing, PATIENCE)
    os.close(descriptor)
    with pytest.raises(RemoteProtocolError, match="without the seals"):
        client.receive(PATIENCE, allocate)


def test_a_region_larger_than_its_file_is_refused(ends: tuple[Connection, Connection], memfd: int) -> None:
    client, server = ends
    server.memory.share(memfd, PAGE, 2 * PAGE + 1, Backing.SEALED, PATIENCE)
    with pytest.raises(RemoteProtocolError, match="announced a region of 8193 bytes and shared one of 8192"):
        client.receive(PATIENCE, allocate)


def test_a_descriptor_that_is_no_file_is_refused(ends: tuple[Connection, Connection]) -> None:
    client, server = ends
    read, write = os.pipe()
    server.memory.share(read, PAGE, 0, Backing.FILE, PATIENCE)
    os.close(read)
    os.close(write)
    with pytest.raises(RemoteProtocolError, match="neither a file nor a memfd"):
        client.receive(PATIENCE, allocate)


@pytest.mark.parametrize("base", [0x10000, 0x10000 - PAGE, 0x10000 + PAGE, 0x10000 + 2 * PAGE - 1])
def test_regions_that_overlap_are_refused(ends: tuple[Connection, Connection], memfd: int, base: int) -> None:
    client, server = ends
    server.memory.share(memfd, 0x10000, 2 * PAGE, Backing.SEALED, PATIENCE)
    mapped(client, server)
    before = descriptors()
    server.memory.share(memfd, base, 2 * PAGE, Backing.SEALED, PATIENCE)
    with pytest.raises(RemoteProtocolError, match="overlaps"):
        client.receive(PATIENCE, allocate)
    assert descriptors() == before


def test_read_only_descriptors_cannot_be_written(memfd: int) -> None:
    descriptor = reopen_read_only(memfd)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
    finally:
        os.close(descriptor)

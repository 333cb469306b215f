"""Files shared by another user's server, who could truncate them: clients map them only if the user allows it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import dissociated as dis
from dissociated.errors import TransportError, UnsafeMemory

from .conftest import Spawn, mappings
from .peer import PATIENCE

pytestmark = pytest.mark.needs("root")

ROWS = 100_000

SERVER = """
import os, sys
import dissociated as dis
import pyarrow as pa

path, user = sys.argv[1:]
table = pa.table({"n": range(100_000)})
with dis.Server(["tcp:"]) as server, dis.connect(server.catalog_uri) as client:
    server.publish("data", table)  # so that everything is imported: the other user may not read this library
    client.read("data").read_all()
os.setuid(int(user))
with pa.OSFile(f"{path}.arrows", "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
    writer.write_table(table)
server = dis.Server([f"shm://{path}?allow=0,65534", "tcp:"])
server.publish("file", f"{path}.arrows", ticket=b"ticket")
server.publish("memory", table, ticket=b"other")
print(server.locations("file")[0], server.catalog_uri, flush=True)
sys.stdin.readline()
os.truncate(f"{path}.arrows", 0)
print("cut short", flush=True)
sys.stdin.read()
"""


class Theirs:
    """A server of another user that can truncate its file."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.uri, self.catalog = process.stdout.readline().split()

    def cut_short(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        assert self._process.stdout.readline() == "cut short\n"


@pytest.fixture
def theirs(spawn: Spawn, runtime: str) -> Iterator[Theirs]:
    os.chmod(runtime, 0o777)
    process = spawn("-c", SERVER, f"{runtime}/own.sock", "65534")
    yield Theirs(process)
    process.kill()
    process.wait(PATIENCE)
    for name in os.listdir(runtime):
        os.unlink(f"{runtime}/{name}")


def mapped() -> bool:
    return "own.sock.arrows" in Path("/proc/self/maps").read_text()


def test_a_file_comes_packed_and_memory_that_is_sealed_is_mapped(theirs: Theirs) -> None:
    trusting = theirs.uri + "&allow=nobody"
    table = dis.open_stream(trusting, b"ticket").read_all()
    sealed = dis.open_stream(trusting, b"other").read_all()
    assert not mapped()
    assert any("memfd:" in path for path in mappings())
    theirs.cut_short()
    assert table["n"].to_pylist() == sealed["n"].to_pylist() == [*range(ROWS)]
    del sealed


def test_a_file_is_refused_where_there_is_no_other_way(theirs: Theirs) -> None:
    without = theirs.uri.replace("packed=", "unpacked=") + "&allow=nobody"
    with pytest.raises(UnsafeMemory, match="that user could truncate while it is mapped"):
        dis.open_stream(without, b"ticket")
    with pytest.raises(TransportError, match="trusted_users"):
        dis.open_stream(theirs.uri, b"ticket")


def test_a_file_is_mapped_where_its_owner_is_trusted_with_that(theirs: Theirs) -> None:
    table = dis.open_stream(theirs.uri + "&allow=nobody&files=allow", b"ticket").read_all()
    assert mapped()
    assert table["n"].to_pylist() == [*range(ROWS)]
    del table


def test_by_name_too_whatever_the_catalog_says(theirs: Theirs) -> None:
    for trusted, maps in ((False, False), (True, True)):
        with dis.connect(theirs.catalog, trusted_users=["nobody"], trusted_files=trusted) as client:
            for transport in ("shm", None):
                table = client.read("file", transport=transport).read_all()
                assert mapped() is maps
                assert table["n"].to_pylist() == [*range(ROWS)]
                del table
    with dis.connect(theirs.catalog) as client:  # without trust the client reads over tcp
        assert client.read("file").read_all().num_rows == ROWS
        assert not mapped()

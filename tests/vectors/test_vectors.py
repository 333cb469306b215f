"""The test vectors: both sides of the library keep to them, and a script makes them anew byte by byte."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import RemoteError, RemoteProtocolError
from faults.peer import FILE, LIVE, SEALED, TAGGED, RawConnection, RawServer
from porter import double
from support.helpers import PATIENCE, location
from support.tensor_cases import KINDS, dense, expected

HERE = Path(__file__).parent
INDEX = json.loads((HERE / "index.json").read_text())
NAMES: list[str] = INDEX["vectors"]
INVALID = [name for name in NAMES if name.startswith("invalid-")]
OF_CLIENTS = [name for name in INVALID if name.startswith("invalid-client-")]
ABORTED = [name for name in NAMES if name.startswith("abort-")]
TENSORS = [name for name in NAMES if name.startswith("tensor-")]
READABLE = [name for name in NAMES if name not in {*INVALID, *ABORTED, *TENSORS}]
SEALS = {
    FILE: 0,
    SEALED: fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL,
    LIVE: fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW,
}


class Vector:
    """A vector as docs/vectors.md describes its files."""

    def __init__(self, name: str) -> None:
        self.folder = HERE / name
        self.plain: dict[str, Any] = json.loads((self.folder / "vector.json").read_text())
        self.ticket = self.plain["ticket"].encode()

    def read(self, file: str) -> bytes:
        return (self.folder / file).read_bytes()

    @property
    def schemes(self) -> list[str]:
        return ["shm"] if self.plain["medium"] == "shm" else ["shm", "tcp"]

    def descriptor(self, region: dict[str, Any], scratch: Path) -> int:
        kind = region.get("made_as", region["backing"])
        if kind == FILE:
            path = scratch / region["file"]
            path.write_bytes(self.read(region["file"]))
            return os.open(path, os.O_RDONLY)
        descriptor = os.memfd_create("vector", os.MFD_ALLOW_SEALING)
        os.truncate(descriptor, int(region["size"]))
        os.pwrite(descriptor, self.read(region["file"]), 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS[kind])
        return descriptor

    def send(self, connection: RawConnection, scratch: Path) -> None:
        data, at = self.read("server"), 0
        for region in self.plain.get("regions", ()):
            connection.send(data[at : region["at"]])
            end = region["at"] + 16 + 24
            descriptor = self.descriptor(region, scratch)
            connection.send_with(data[region["at"] : end], [descriptor])
            os.close(descriptor)
            at = end
        connection.send(data[at:])


@contextmanager
def replayed(vector: Vector, scheme: str, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve a vector once. Yield its URI, and the list that gets the freed addresses."""
    freed: list[str] = []

    def script(connection: RawConnection) -> None:
        connection.expect(vector.read("client"))
        vector.send(connection, scratch)
        if vector.plain.get("broken_rule") == "stream-whole":
            return
        with suppress(EOFError, ConnectionResetError):
            while True:
                frame = connection.read_frame()
                if frame.kind == TAGGED and str(frame.tag) == vector.plain.get("free_data"):
                    freed.extend(map(str, struct.unpack(f"<{len(frame.payload) // 8}Q", frame.payload)))
                if len(freed) == len(vector.plain.get("frees", ())):
                    return

    with RawServer(scheme, str(scratch / "sock"), script) as server:
        tags = "".join(f"{name}={vector.plain[name]}&" for name in ("want_data", "free_data") if name in vector.plain)
        yield f"{server.uri.partition('?')[0]}?{tags.rstrip('&')}", freed
        server.wait_done()


def cases(names: list[str]) -> list[Any]:
    return [pytest.param(name, scheme, id=f"{name}-{scheme}") for name in names for scheme in Vector(name).schemes]


def table_of(stream: bytes) -> pa.Table:
    return pa.ipc.open_stream(stream).read_all()


@pytest.mark.parametrize(("name", "scheme"), cases(READABLE))
def test_our_client_reads_a_vector(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, scheme, tmp_path) as (uri, freed):
        read = dis.open_stream(uri, vector.ticket, timeout=PATIENCE).read_all()
        read.validate(full=True)
        content = table_of(vector.read("stream.arrows"))
        assert read.schema.equals(content.schema, check_metadata=True)
        assert [*map(str, read.to_batches())] == [*map(str, content.to_batches())]
        assert read.equals(content)
        del read
    assert Counter(freed) == Counter(vector.plain.get("frees", ()))


@pytest.mark.parametrize(("name", "scheme"), cases(TENSORS))
def test_our_client_reads_a_tensor(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, scheme, tmp_path) as (uri, _):
        (tensor,) = dis.open_tensors(uri, vector.ticket, timeout=PATIENCE)
    kind = name.removeprefix("tensor-")
    assert isinstance(tensor, KINDS[kind])
    content, _ = expected("dense" if kind == "dense" else f"{kind}_int64")
    assert np.array_equal(dense(tensor), content)


@pytest.mark.parametrize(("name", "scheme"), cases(ABORTED))
def test_our_client_reads_up_to_an_abort(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    codes = {None: "remote", 14: "source_failed", 27: "dataset_not_found"}
    with replayed(vector, scheme, tmp_path) as (uri, _):
        batches: list[pa.RecordBatch] = []
        with pytest.raises(RemoteError) as caught:
            batches.extend(dis.open_stream(uri, vector.ticket, timeout=PATIENCE))
    assert caught.value.code == codes[vector.plain["abort"]]
    if (vector.folder / "stream.arrows").exists():
        assert pa.Table.from_batches(batches).equals(table_of(vector.read("stream.arrows")))


@pytest.mark.parametrize(("name", "scheme"), cases([name for name in INVALID if name not in OF_CLIENTS]))
def test_our_client_names_the_rule_that_a_server_breaks(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, scheme, tmp_path) as (uri, _), pytest.raises(RemoteProtocolError) as caught:
        dis.open_stream(uri, vector.ticket, timeout=PATIENCE).read_all()
    assert caught.value.rule == vector.plain["broken_rule"]


# Our server


@pytest.mark.parametrize("name", READABLE)
def test_our_server_answers_the_request_of_a_vector(name: str, tmp_path: Path) -> None:
    vector = Vector(name)
    path = tmp_path / "stream.arrows"
    path.write_bytes(vector.read("stream.arrows"))
    content = table_of(vector.read("stream.arrows"))
    with dis.Server(["tcp:", "shm:"], catalog=None) as server:
        server.publish("data", path, ticket=vector.ticket)
        for scheme in ("tcp", "shm"):
            uri = location(server, "data", scheme)
            assert f"want_data={vector.plain['want_data']}" in uri
            client = double.Client(uri, vector.ticket)
            assert double.join(client.messages()).equals(content)
            client.close()


@pytest.mark.parametrize("name", OF_CLIENTS)
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_our_server_refuses_a_client_that_breaks_a_rule(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    path = tmp_path / "stream.arrows"
    path.write_bytes(vector.read("stream.arrows"))
    with dis.Server(["tcp:", "shm:"], catalog=None) as server:
        server.publish("data", path, ticket=vector.ticket)
        wire = double.dial(location(server, "data", scheme))
        with pytest.raises(double.Aborted) as caught:  # noqa: PT012
            wire.socket.sendall(vector.read("client"))
            wire.read_all()
        wire.close()
    assert str(caught.value).partition("\0")[2] == "5"


# The files


def test_the_files_are_those_that_the_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, HERE / "make.py", tmp_path / "made"], check=True)
    made = {
        path.relative_to(tmp_path / "made"): path.read_bytes()
        for path in (tmp_path / "made").rglob("*")
        if path.is_file()
    }
    kept = {path.relative_to(HERE): path.read_bytes() for name in NAMES for path in (HERE / name).iterdir()}
    kept[Path("index.json")] = (HERE / "index.json").read_bytes()
    assert sorted(made) == sorted(kept)
    assert [path for path in made if made[path] != kept[path]] == []
    assert sum(map(len, kept.values())) < 800_000


def test_every_broken_rule_is_on_the_page() -> None:
    page = (HERE.parents[1] / "docs/framing.md").read_text()
    rules = {Vector(name).plain["broken_rule"] for name in INVALID}
    assert rules <= {*re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)}
    assert len(rules) >= 20

"""The test vectors: both sides of the library keep to them, and a script makes them anew byte by byte."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import RemoteError, RemoteProtocolError
from dissociated.protocol.wire import unwrap
from porter import double
from support.helpers import PATIENCE, location
from support.tensor_cases import KINDS, dense, expected

from .replay import (
    ABORTED,
    HERE,
    INVALID,
    NAMES,
    NUMBERS,
    OF_CLIENTS,
    READABLE,
    REQUESTS,
    TENSORS,
    Vector,
    cases,
    replayed,
)


def table_of(stream: bytes) -> pa.Table:
    return pa.ipc.open_stream(stream).read_all()


@pytest.mark.parametrize(("name", "scheme"), cases([*READABLE, "request-frees"]))
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
    assert caught.value.number == {"abort-unknown-code": 99999}.get(name, vector.plain["abort"])
    if (vector.folder / "stream.arrows").exists():
        assert pa.Table.from_batches(batches).equals(table_of(vector.read("stream.arrows")))


@pytest.mark.parametrize(("name", "scheme"), cases([name for name in INVALID if name not in OF_CLIENTS]))
def test_our_client_names_the_rule_that_a_server_breaks(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, scheme, tmp_path) as (uri, _), pytest.raises(RemoteProtocolError) as caught:
        dis.open_stream(uri, vector.ticket, timeout=PATIENCE).read_all()
    assert caught.value.rule == vector.plain["broken_rule"]


def test_our_client_takes_a_number_for_the_message_of_the_vectors() -> None:
    for row in NUMBERS:
        message = unwrap(row["number"], int(row["next"]))
        assert (None if message < int(row["next"]) else str(message)) == row["message"]


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


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_our_server_answers_a_structured_request(name: str, scheme: str, tmp_path: Path) -> None:
    vector = Vector(name)
    path = tmp_path / "stream.arrows"
    path.write_bytes(vector.read("stream.arrows"))
    identifier = double.structured(vector.ticket, **vector.plain["request"])
    assert identifier in vector.read("client")
    with dis.Server(["tcp:", "shm:"], catalog=None) as server:
        server.publish("data", path, ticket=vector.ticket)
        client = double.Client(location(server, "data", scheme), identifier)
        if "abort" in vector.plain:
            with pytest.raises(double.Aborted) as caught:
                client.messages()
            assert str(caught.value).partition("\0")[2] == str(vector.plain["abort"])
        else:
            assert double.join(client.messages()).equals(table_of(vector.read("stream.arrows")))
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
    for name in ("index.json", "numbers.json"):
        kept[Path(name)] = (HERE / name).read_bytes()
    assert sorted(made) == sorted(kept)
    assert [path for path in made if made[path] != kept[path]] == []
    assert sum(map(len, kept.values())) < 800_000


def test_every_broken_rule_is_on_the_page() -> None:
    page = (HERE.parents[1] / "docs/framing.md").read_text()
    rules = {Vector(name).plain["broken_rule"] for name in INVALID}
    assert rules <= {*re.findall(r"^\| `([a-z-]+)` \|", page, re.MULTILINE)}
    assert len(rules) >= 20

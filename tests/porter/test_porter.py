"""A port of the framing from docs/framing.md alone: it works with both sides of this library."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import RemoteError
from support.helpers import location

from . import double
from .double import ABORT, RUN, TAGGED, UNTAGGED, Aborted, Client, Region, Server, Wire, encode, end, metadata

NUMBERS = [pa.record_batch({"n": np.arange(1000) + at, "s": [f"{n}" for n in range(1000)]}) for at in range(3)]
SMALL = [pa.record_batch({"n": [at, None], "f": [0.5, at]}) for at in range(600)]
WORDS = [
    pa.record_batch({"d": pa.array(words).dictionary_encode(), "u": pa.array(words, pa.string_view())})
    for words in (["a", "b"], ["c", "longer than twelve bytes"], ["a"])
]
STREAMS = {"numbers": NUMBERS, "small": SMALL, "words": WORDS, "empty": [NUMBERS[0].slice(0, 0)]}


def test_the_double_knows_nothing_of_the_library() -> None:
    imported = set()
    for node in ast.walk(ast.parse(Path(double.__file__).read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level
            imported.add(str(node.module).partition(".")[0])
    assert imported <= {*sys.stdlib_module_names, "pyarrow"}
    code = "import double, sys; assert not [name for name in sys.modules if 'dissociated' in name]"
    subprocess.run([sys.executable, "-c", code], cwd=Path(double.__file__).parent, check=True)


# The port's client, our server


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["tcp:", "shm:"], catalog=None) as made:
        for name, batches in STREAMS.items():
            made.publish(name, pa.Table.from_batches(batches))
            made.publish(f"{name} live", lambda batches=batches: pa.Table.from_batches(batches).to_reader())
        yield made


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
@pytest.mark.parametrize("name", STREAMS)
def test_their_client_reads_from_our_server(server: dis.Server, scheme: str, name: str) -> None:
    expected = pa.Table.from_batches(STREAMS[name])
    kinds = set()
    for what in (name, f"{name} live"):
        for bodies in ("any", "packed"):
            uri = location(server, what, scheme, bodies=bodies)
            ticket = server.ticket(what)
            frees_messages = double.structured(ticket, frees="messages")
            for identifier, half_close in ((ticket, False), (ticket, True), (frees_messages, False)):
                client = Client(uri, identifier)
                table = double.join(client.messages(half_close))
                kinds |= client.kinds
                client.close()
                assert table.num_rows == expected.num_rows
                assert table.equals(expected)
    assert (RUN in kinds) is (name == "small")
    assert (100 in kinds) is (scheme == "shm" and name != "empty")


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_our_server_says_why_it_refuses_them(server: dis.Server, scheme: str) -> None:
    uri = location(server, "numbers", scheme)
    with closing(Client(uri, b"no such ticket")) as client, pytest.raises(Aborted, match="no dataset has this ticket"):
        client.messages()
    request = encode(TAGGED, server.ticket("small"), int(double.address_of(uri)[2]["want_data"]))
    with closing(double.dial(uri)) as wire:
        wire.send(request, request)  # both at once: the first stream is not complete
        with pytest.raises(Aborted, match="a second stream"):
            wire.read_all()


@pytest.mark.parametrize("bodies", ["any", "packed"])
@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_a_connection_carries_one_stream_after_another(server: dis.Server, scheme: str, bodies: str) -> None:
    first, *others = [str(name) for name in (*STREAMS, "small live", "numbers")]
    client = Client(location(server, first, scheme, bodies=bodies), server.ticket(first), keep=True)
    with closing(client):
        assert double.join(client.messages()).equals(pa.Table.from_batches(STREAMS[first]))
        for name in others:
            client.ask(location(server, name, scheme, bodies=bodies), server.ticket(name), keep=True)
            assert double.join(client.messages()).equals(pa.Table.from_batches(STREAMS[name.removesuffix(" live")]))


def test_their_client_gives_up(server: dis.Server) -> None:
    client = Client(server.locations("numbers")[0], server.ticket("numbers"))
    client.wire.send(encode(ABORT, b"I have seen enough"))
    client.close()


# Our client, the port's server


def packed(batches: list[pa.RecordBatch], order: str) -> list[bytes]:
    """Return the frames of a stream with packed bodies."""
    messages = double.split(batches)
    headers = [encode(UNTAGGED, metadata(number, one.header)) for number, one in enumerate(messages)]
    bodies = [encode(TAGGED, one.body, number) for number, one in enumerate(messages) if one.body is not None]
    if order == "metadata first":
        return [*headers, end(len(messages)), *bodies]
    if order == "bodies first":
        return [*bodies[::-1], *headers[::-1], end(len(messages))]
    if order == "runs":
        pairs = [(metadata(number, one.header), number, one.body or b"") for number, one in enumerate(messages)][1:]
        return [headers[0], double.run_of(pairs), end(len(messages))]
    return [
        headers[0],
        *(frame for pair in zip(headers[1:], bodies, strict=True) for frame in pair),
        end(len(messages)),
    ]


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
def test_our_client_reads_from_their_server_in_any_order(tmp_path: Path, scheme: str) -> None:
    wanted: list[tuple[str, str]] = [
        (name, order) for name in STREAMS for order in ("as usual", "metadata first", "bodies first")
    ]
    for name, order in [*wanted, ("small", "runs")]:

        def answer(server: Server, wire: Wire, name: str = name, order: str = order) -> None:
            wire.send(*packed(STREAMS[name], order))

        server = Server(scheme, str(tmp_path / f"{name} {order}"), b"ticket", answer)
        try:
            read = dis.open_stream(server.uri.replace(" ", "%20"), b"ticket", timeout=10).read_all()
            assert read.equals(pa.Table.from_batches(STREAMS[name]))
            with pytest.raises(RemoteError, match="there is no such ticket"):
                dis.open_stream(server.uri.replace(" ", "%20"), b"other", timeout=10)
        finally:
            server.close()


@pytest.mark.parametrize("name", ["numbers", "words", "empty"])
def test_our_client_maps_what_their_server_shares_one_memfd_a_buffer(tmp_path: Path, name: str) -> None:
    messages = double.split(STREAMS[name])
    regions: list[Region] = []

    def answer(server: Server, wire: Wire) -> None:
        wire.send(encode(UNTAGGED, metadata(0, messages[0].header)))  # regions may come after this message
        lists = []
        for number, (header, body) in enumerate(messages):
            if body is not None:
                pairs = []
                for offset, size in double.buffers(header)[1]:
                    if size:
                        regions.append(Region(0x10000 * (1 + len(regions)), body[offset : offset + size]))
                    pairs.append((regions[-1].base, size) if size else (0, 0))
                lists.append(encode(TAGGED, server.lease(pairs, number), 1 << 56 | number))
        if regions:
            wire.send(*(one.frame for one in regions), descriptors=[one.descriptor for one in regions])
        wire.send(*(encode(UNTAGGED, metadata(number, one.header)) for number, one in enumerate(messages) if number))
        wire.send(*lists, end(len(messages)))

    server = Server("shm", str(tmp_path / "sock"), b"ticket", answer)
    try:
        read = dis.open_stream(server.uri, b"ticket", timeout=10).read_all()
        read.validate(full=True)
        assert read.equals(pa.Table.from_batches(STREAMS[name]))
        del read
    finally:
        server.close()
        for one in regions:
            os.close(one.descriptor)
    assert sorted(server.freed) == sorted(server.leased)


def test_our_client_says_what_their_server_gave_up_for(tmp_path: Path) -> None:
    def answer(server: Server, wire: Wire) -> None:
        wire.send(*packed(NUMBERS, "as usual")[:3], encode(ABORT, b"the disk is on fire"))

    server = Server("tcp", "", b"ticket", answer)
    try:
        reader = dis.open_stream(server.uri, b"ticket", timeout=10)
        assert reader.read_next_batch().equals(NUMBERS[0])
        with pytest.raises(RemoteError, match="the disk is on fire"):
            reader.read_next_batch()
    finally:
        server.close()


def test_tensors_both_ways(tmp_path: Path) -> None:
    dense = np.arange(24, dtype=np.float64).reshape(2, 3, 4)
    sparse = pa.SparseCSFTensor.from_dense_numpy(dense)
    with dis.Server(["tcp:", "shm:"], catalog=None) as ours:
        ours.publish("t", [sparse, pa.Tensor.from_numpy(dense)])
        packed_uri = ours.locations("t")[0]
        client = Client(packed_uri, ours.ticket("t"))
        client.bodies[-1] = 0, b""  # a stream of tensors has no schema: it has a body for each message
        (_, csf), (header, values) = client.messages()
        client.close()
        # CSF has indptr of each level except the last, indices of each level, and values; each buffer begins at a
        # multiple of 64.
        lengths = [array.nbytes for array in (*sparse.to_numpy()[1], *sparse.to_numpy()[2], sparse.to_numpy()[0])]
        assert csf is not None
        assert values is not None
        assert len(csf) == sum(length + -length % 64 for length in lengths[:-1]) + lengths[-1] + -lengths[-1] % 8
        assert np.frombuffer(values, np.float64)[:24].tolist() == dense.reshape(-1).tolist()
        uri = location(ours, "t", "shm")
        client = Client(uri, ours.ticket("t"))
        client.bodies[-1] = 0, b""
        while not client.complete:
            frame = client.wire.receive()
            assert frame is not None
            if frame.kind != double.REGION:
                client.take(frame)
        listed = np.frombuffer(client.bodies[0][1], np.uint64)
        assert listed[3::2].tolist() == lengths
        assert listed[:2].tolist() == [sum(lengths), len(lengths)]
        client.close()

    def answer(server: Server, wire: Wire) -> None:
        wire.send(encode(UNTAGGED, metadata(0, header)), encode(TAGGED, values, 0), end(1))

    server = Server("tcp", "", b"ticket", answer)
    try:
        (tensor,) = dis.open_tensors(server.uri, b"ticket", timeout=10)
        assert np.array_equal(tensor.to_numpy(), dense)
    finally:
        server.close()

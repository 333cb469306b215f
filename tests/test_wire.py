"""Whole conversations byte by byte over a plain socket, following docs/framing.md and the specification."""

from __future__ import annotations

import ast
import re
import socket
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.base.buffers import MAX_BODY, MAX_METADATA
from dissociated.client.request import TIMEOUT
from dissociated.format.message import MAX_BUFFERS
from dissociated.memory.region import MAX_REGIONS
from dissociated.protocol.receiver import MAX_WAITING_BYTES, MAX_WAITING_METADATA, WAITING_OVERHEAD
from dissociated.protocol.request import MAX_IDENTIFIER
from dissociated.transport.framed.framing import MAX_CONTROL
from dissociated.transport.runs import MAX_RUN
from ipc.vectors import BATCH, EMPTY, END, SCHEMA
from protocol.wire import address_list
from support.helpers import PATIENCE, Serve
from support.sources import nodes

TABLE = pa.table({"n": [1, 2, 3]}, pa.schema([pa.field("n", pa.int32(), nullable=False)]))

ROOT = Path(__file__).parents[1]

PREAMBLE = bytes.fromhex("444953534f43 00 01")  # "DISSOC", 0, version 1


def frame(head: str, payload: bytes) -> bytes:
    """Return a frame: a hexadecimal head (length of 7 bytes, kind, tag of 8 bytes), and a payload padded to 8 bytes."""
    return bytes.fromhex(head) + payload + bytes(-len(payload) % 8)


#: The reply of any server of SCHEMA, BATCH and EMPTY to a client that asks for both streams and packed bodies.
PACKED = [
    frame("7d000000000000 01  0000000000000000", b"\x01\x00\x00\x00\x00" + SCHEMA.header),  # metadata, number 0
    frame("8d000000000000 01  0000000000000000", b"\x01\x01\x00\x00\x00" + BATCH.header),  # metadata, number 1
    frame("10000000000000 02  0100000000000000", BATCH.body or b""),  # body, number 1, kind 0: packed
    frame("75000000000000 01  0000000000000000", b"\x01\x02\x00\x00\x00" + EMPTY.header),  # metadata, number 2
    frame("00000000000000 02  0200000000000000", b""),  # body, number 2: empty, and sent
    frame("05000000000000 01  0000000000000000", b"\x00\x03\x00\x00\x00"),  # end of stream: 3 messages
]


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    path = tmp_path / "stream"
    path.write_bytes(SCHEMA.whole + BATCH.whole + EMPTY.whole + END)
    return path


def read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := sock.recv(size - len(data))):
        data += piece
    return data


def test_the_capabilities_that_a_server_announces(serve: Serve, stream: Path) -> None:
    server = serve("tcp://127.0.0.1:0")
    server.publish("data", stream, ticket=b"abc")
    (uri,) = server.locations("data")
    # 0x4449535300000003: "DISS", and both streams
    assert uri.endswith("?want_data=4920555683826368515&request=1&filter=1")
    host, port = uri.removeprefix("tcp://").split("?")[0].split(":")
    with socket.create_connection((host, int(port)), PATIENCE) as sock:
        want = frame("03000000000000 02  0300000053534944", b"abc")  # TAGGED with want_data: the identifier
        sock.sendall(PREAMBLE + want)
        expected = PREAMBLE + b"".join(PACKED)
        assert read(sock, len(expected) + 1) == expected  # and not a byte more


def test_the_capabilities_of_a_server_that_shares_memory(serve: Serve, stream: Path) -> None:
    server = serve("shm:")
    server.publish("data", stream, ticket=b"abc")
    (uri,) = server.locations("data")
    path, parameters = uri.removeprefix("shm://").split("?")
    tags = "want_data=4920555683826368515&free_data=4920555683826368768"  # ...03, and ...0100
    packed = "packed=4920555683826368519"  # ...07 asks for packed bodies
    assert parameters == f"{tags}&request=1&filter=1&{packed}&frees=messages"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(path)
        sock.sendall(PREAMBLE + frame("03000000000000 02  0300000053534944", b"abc"))
        assert read(sock, 8) == PREAMBLE
        region = read(sock, 16 + 24)
        base = int.from_bytes(region[16:24], "little")
        size = stream.stat().st_size
        layout = region[16:24] + size.to_bytes(8, "little") + bytes(8)  # base, size, backing 0: a file
        assert region == frame("18000000000000 03  0000000000000000", layout)
        values = base + 8 + len(SCHEMA.header) + 8 + len(BATCH.header)  # each message has a prefix of 8 bytes
        expected = [
            *PACKED[:2],
            frame("30000000000000 02  0100000000000001", address_list((0, 0), (values, 12))),  # kind 1: by address
            PACKED[3],
            PACKED[4],  # An empty body has no address and may be sent packed.
            PACKED[5],
        ]
        assert read(sock, sum(map(len, expected))) == b"".join(expected)
        assert server.connections == 1  # The client holds a body.
        free = frame("08000000000000 02  0001000053534944", values.to_bytes(8, "little"))  # TAGGED with free_data
        sock.sendall(free)
        assert read(sock, 1) == b""  # The server has no pending lease.


def test_what_a_client_says_and_understands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        heard = []

        def play() -> None:
            sock, _ = listening.accept()
            with sock:
                sock.settimeout(PATIENCE)
                heard.append(read(sock, 8 + 24))
                sock.sendall(PREAMBLE + b"".join(PACKED))
                heard.append(read(sock, 1))  # The server sends no address, and nothing must be freed.

        server = threading.Thread(target=play)
        server.start()
        reader = dis.open_stream(f"tcp://127.0.0.1:{listening.getsockname()[1]}?want_data=7", b"abc", timeout=PATIENCE)
        assert [batch.to_pydict() for batch in reader] == [{"n": [1, 2, 3]}, {"n": []}]
        del reader
        server.join(PATIENCE)
    assert heard == [PREAMBLE + frame("03000000000000 02  0700000000000000", b"abc"), b""]


def test_every_rule_that_the_library_names_is_on_the_page() -> None:
    page = re.findall(
        r"^\| `([a-z-]+)` \| (?:server|client|both) \|", (ROOT / "docs/framing.md").read_text(), re.MULTILINE
    )
    named = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "rule":
                named |= {str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
            if isinstance(node, ast.Assign) and any(
                isinstance(one, ast.Name) and one.id == "_RULES" for one in node.targets
            ):
                assert isinstance(node.value, ast.Dict)
                named |= {str(one.value) for one in node.value.values if isinstance(one, ast.Constant)}
    assert sorted(page) == sorted(named)


def frames_of(uri: str, identifier: bytes) -> list[bytes]:
    """Request a stream at a location over TCP, and return the frames of the server, to the end of the connection."""
    place, _, query = uri.removeprefix("tcp://").partition("?")
    tag = int(query.removeprefix("want_data=").partition("&")[0])
    host, _, port = place.rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as sock:
        request = len(identifier).to_bytes(7, "little") + b"\x02" + tag.to_bytes(8, "little") + identifier
        sock.sendall(PREAMBLE + request + bytes(-len(request) % 8))
        assert read(sock, 8) == PREAMBLE
        frames = []
        while head := read(sock, 16):
            length = int.from_bytes(head[:7], "little")
            frames.append(head + read(sock, length + -length % 8))
        return frames


def test_a_structured_request_names_one_of_the_streams(serve: Serve, stream: Path) -> None:
    server = serve("tcp://127.0.0.1:0", catalog="grpc://127.0.0.1:0")
    server.publish("data", stream, ticket=b"abc")
    server.publish("live", iter(TABLE.to_batches()), live=dis.Live(consumers=1), ticket=b"xyz")
    (uri,) = server.locations("data")
    head = b"DISSREQ\x01\x03\x00\x00\x00"
    assert frames_of(uri, head + b"abc{}") == PACKED
    assert frames_of(uri, head + b'abc{"streams": "metadata"}') == [one for one in PACKED if one[7] == 1]
    assert frames_of(uri, head + b'abc{"streams": "bodies"}') == [one for one in PACKED if one[7] == 2]
    (metadata_alone,) = server.locations("data", streams="metadata")
    (abort,) = frames_of(metadata_alone, head + b'abc{"streams": "bodies"}')
    assert abort.rstrip(b"\0").endswith(b"\x005")
    *_, abort = frames_of(server.locations("live")[0], head + b'xyz{"streams": "metadata"}')
    assert b"request all of it over one" in abort


def test_the_limits_of_the_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs/framing.md").read_text()
    section = page[page.index("\n## Limits") : page.index("\n## Rules")]
    units = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "s": 1, "h": 3600}
    limits = {
        name: [
            int(digits.replace(",", "")) * units[unit]
            for digits, unit in re.findall(r"(\d[\d,]*) ?([KMG]iB|s|h)?", value)
        ]
        for name, value in re.findall(r"^\| ([^|]+) \| ([^|]*\d[^|]*) \|", section, re.M)
    }
    del limits["number of messages"]
    options = dis.ServerOptions()
    assert limits == {
        "identifier": [MAX_IDENTIFIER],
        "addresses, or messages, in one free": [MAX_IDENTIFIER // 8],
        "messages of a client that arrive while the server sends": [1 << 20, 256],
        "metadata of a message": [MAX_METADATA],
        "body": [MAX_BODY],
        "metadata that waits for its turn": [MAX_WAITING_METADATA],
        "bodies that wait for their turn": [MAX_WAITING_BYTES],
        "bytes that each waiting message counts in addition": [WAITING_OVERHEAD],
        "buffers of a message": [MAX_BUFFERS],
        "regions of a stream": [MAX_REGIONS],
        "descriptors in one `sendmsg`": [253],
        "payload of REGION and ABORT": [MAX_CONTROL],
        "payload of RUN": [MAX_RUN],
        "preamble and request of a client": [options.handshake_timeout],
        "a peer takes no bytes": [options.stall_timeout, options.lease_timeout, TIMEOUT],
        "a client holds memory and is silent": [options.lease_timeout],
        "the server is silent": [TIMEOUT],
        "no further request on a kept connection": [options.idle_timeout],
    }

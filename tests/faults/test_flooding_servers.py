"""Servers over UCX and libfabric that send without end: a client stops at a cap, and not only at a deadline."""

from __future__ import annotations

import json
import re

import pytest

from dissociated.transport.native.fabric.libfabric import ofi
from support.machine import media

from .clients import line
from .conftest import Spawn

WHERE = {"ucx": "ucx:", "fabric": "fabric:?heartbeat=0.1"}

#: Caps of these clients in MB, far below the default, so that a flood ends soon.
CAP = 4
#: MB that a flood may cost a client, including the connection. Each poll lets libfabric receive more than we see: up to
#: 564 MB were observed. Version 1.17 has smaller buffers.
ENOUGH = {"ucx": 200, "fabric 1.17": 200, "fabric": 800}

#: A script that floods one peer per input line for ten seconds, or until it is disconnected. It ignores its windows.
SERVER = """
import json, sys, time
from dissociated.errors import DissociatedError
from dissociated.protocol.message import Message
from dissociated.transport.native.fabric.channel import FabricChannel
from dissociated.transport.native.ucx.channel import UcxChannel
from dissociated.transport.registry import transport
from dissociated.uri import Uri

ignored = 0  # how often the window was asked for

def has_room(channel, size):
    global ignored
    ignored += 1
    return len(channel.traffic.under_way) < (1000 if uri.scheme == "ucx" else 100)

FabricChannel.has_room = UcxChannel.has_room = has_room

reads = True  # whether this server takes what its client sends

def reading(receive):
    return lambda channel, *arguments: reads and receive(channel, *arguments)

for kind in FabricChannel, UcxChannel:
    kind.receive = reading(kind.receive)
uri = Uri.parse(sys.argv[1])
listener, patience = transport(uri.scheme).listen(uri), 5 if uri.scheme == "ucx" else 1
print(f"{listener.uri}&want_data=7&free_data=9", flush=True)
for line in sys.stdin:
    asked, first, size = json.loads(line)
    reads = True
    connection = listener.accept()
    if asked:
        connection.receive(20, lambda tag, length: bytearray(length))
    reads = False
    end, number = time.monotonic() + 10, 1
    try:
        if first:
            connection.send([Message(1 << 20, (bytes(first),))], patience)
        while time.monotonic() < end:
            numbers = range(number, number := number + 16)
            connection.send([Message(one, (bytes(size),)) for one in numbers], patience)
    except DissociatedError:
        pass
    assert ignored
    connection.interrupt()
    connection.close()
    print("ended", flush=True)
"""

#: A script that for each input line sends a request of some size, and then pauses, or receives everything. It prints
#: its peak memory growth in MB and the resulting error.
CLIENT = """
import json, re, sys, time
import dissociated as dis
from dissociated.protocol.message import Message
from dissociated.protocol import receiver
from dissociated.transport.native import channel as native
from dissociated.transport.native.fabric import messages
from dissociated.transport.registry import transport
from dissociated.uri import Uri

cap = native.MAX_FROM_SERVER = messages.MAX_IN_FLIGHT = receiver.MAX_WAITING_BYTES = int(sys.argv[2]) << 20

def memory():
    return int(re.search(r"VmHWM:[^0-9]+([0-9]+)", open("/proc/self/status").read())[1]) // 1000

before = memory()
for line in sys.stdin:
    request, pause = json.loads(line)
    try:
        if pause is None:
            dis.open_stream(sys.argv[1], bytes(request), timeout=10, max_body=cap).read_all()
        else:
            uri = Uri.parse(sys.argv[1])
            with transport(uri.scheme).connect(uri, 20) as connection:
                connection.send([Message(uri.want_data, (bytes(request),))], 10)
                time.sleep(pause)
        said = "paused"
    except dis.errors.DissociatedError as error:
        said = f"{type(error).__name__}: {error}"
    print(json.dumps([memory() - before, said]), flush=True)
"""

#: Server: whether it waits for a request, the size of its first message (0: none), and the size of all others. Client:
#: the bytes of its request, and its pause in seconds (None: it receives everything).
FLOODS: dict[str, tuple[list[int], list[float | None]]] = {
    "before the request is out": ([False, 0, 4096], [1 << 22, 0]),
    "behind a message that is to be fetched": ([False, 20_000, 4096], [1 << 22, 0]),
    "messages that are to be fetched": ([False, 0, 20_000], [1 << 22, 0]),
    "empty bodies": ([True, 0, 0], [10, None]),
    "while the reader is away": ([True, 0, 4096], [10, 1.0]),
}
#: Errors of a client that reaches its cap before its request is sent, and afterwards. Over libfabric, messages to be
#: fetched hold up everything behind them at the server.
SAYS = {
    "ucx": (f"sent more than {CAP << 20} bytes before this side received any", f"the cap is {CAP << 20}"),
    "fabric": (
        "sent more bytes than this side allowed|the peer closed the connection",
        "sent more bytes than this side allowed",
    ),
}


@pytest.mark.parametrize("where", media(WHERE))
def test_a_server_that_sends_without_end_costs_its_client_no_more_than_a_cap(spawn: Spawn, where: str) -> None:
    server = spawn("-c", SERVER, WHERE[where])
    client = spawn("-c", CLIENT, line(server), str(CAP))
    enough = ENOUGH[f"{where} 1.17" if where == "fabric" and ofi().version == "1.17" else where]
    assert server.stdin is not None
    assert client.stdin is not None
    for name, (flood, asking) in FLOODS.items():
        server.stdin.write(json.dumps(flood) + "\n")
        client.stdin.write(json.dumps(asking) + "\n")
        cost, said = json.loads(line(client))
        assert cost < enough, (name, said)
        assert re.search("paused" if asking[1] else SAYS[where][flood[0]], said), (name, said)
        assert line(server) == "ended"

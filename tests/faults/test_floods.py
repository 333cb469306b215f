"""Clients over UCX and libfabric that send without end, or sleep. These media buffer messages that nobody receives."""

from __future__ import annotations

import json
import queue
import threading
from contextlib import suppress

import pytest

import dissociated as dis
from dissociated.transport.native.fabric.libfabric import ofi
from support.machine import media

from .clients import line
from .conftest import Spawn
from .peer import PATIENCE

WHERE = {"ucx": "ucx:", "ucx, none": "ucx:?err_mode=none", "fabric": "fabric:?heartbeat=0.1"}

#: kB that a client may cost until it is disconnected. This includes connections (70 MB each over libfabric), among them
#: connections of earlier stages that are still closing.
ENOUGH = {"ucx": 150_000, "ucx, none": 150_000, "fabric 1.17": 200_000, "fabric": 300_000}

#: A script that prints its peak memory in kB on request.
SERVER = """
import re, sys, threading
import numpy as np
import pyarrow as pa
import dissociated as dis

batch = pa.record_batch({"n": pa.array(np.arange(1 << 21))})
forever = threading.Event()

def paused():
    yield batch.slice(0, 1)
    forever.wait(20)

server = dis.Server([sys.argv[1]], catalog=None, stall_timeout=2, handshake_timeout=2)
server.publish("small", batch.slice(0, 1))
server.publish("large", pa.Table.from_batches([batch] * 4))
server.publish("paused", lambda: pa.RecordBatchReader.from_batches(batch.schema, paused()))
for name in ("small", "large", "paused"):
    print(server.ticket(name).hex(), server.locations(name)[0], flush=True)
for _ in sys.stdin:
    print(re.search(r"VmHWM:[^0-9]+([0-9]+)", open("/proc/self/status").read())[1], server.connections, flush=True)
forever.set()
server.close()
"""

#: A script that for each input line sends a request and then 400 MB or 100,000 messages, for a second at most, or until
#: it is disconnected. It ignores its window, receives nothing, and keeps the connection until the next line. All
#: stages share a process because starting it takes longest.
FLOOD = """
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
    return len(channel.traffic.under_way) < 100

for one in sys.stdin:
    place, ticket, tag, size = json.loads(one)
    uri = Uri.parse(place)
    for last in (False, False, True):  # On a loaded machine, the short heartbeats may end the connection at once.
        try:
            connection = transport(uri.scheme).connect(uri, 20)
            break
        except DissociatedError:
            if last:
                raise
    if ticket:
        connection.send([Message(uri.want_data, (bytes.fromhex(ticket),))], 20)

    own = FabricChannel.has_room, UcxChannel.has_room
    FabricChannel.has_room = UcxChannel.has_room = has_room
    end = time.monotonic() + 1
    left = min(100_000, 400_000_000 // max(size, 1))
    try:
        while time.monotonic() < end and left > 0:
            left -= 16
            connection.send([Message(tag if tag >= 0 else None, (bytes(size),))] * 16, 0.5)
    except DissociatedError:
        pass
    assert ignored
    print("ended", flush=True)
    sys.stdin.readline()
    FabricChannel.has_room, UcxChannel.has_room = own
    connection.interrupt()
    connection.close()
    print("closed", flush=True)
"""

#: The requested dataset, if any, and the tag and size of the messages that follow.
FLOODS = {
    "before want_data": ("", 1, 4096),
    "instead of want_data, without tags": ("", -1, 4096),
    "while nothing is left to be sent": ("small", 1, 4096),
    "while a large dataset is sent": ("large", 1, 4096),
    "while a large dataset is sent, without tags": ("large", -1, 4096),
    "large messages": ("large", 1, 1 << 20),
    "empty messages": ("large", 1, 0),
    "while the source takes its time": ("paused", 1, 4096),
    "while the source takes its time, without tags": ("paused", -1, 4096),
}


@pytest.mark.parametrize("where", media(WHERE))
def test_a_client_that_sends_without_end_costs_a_server_no_memory(spawn: Spawn, where: str) -> None:
    server = spawn("-c", SERVER, WHERE[where])
    assert server.stdin is not None
    enough = ENOUGH[f"{where} 1.17" if where == "fabric" and ofi().version == "1.17" else where]
    published = dict(zip(("small", "large", "paused"), (line(server).split() for _ in range(3)), strict=True))

    def memory() -> int:
        assert server.stdin is not None
        server.stdin.write("\n")
        return int(line(server).split()[0])

    before = memory()
    client = spawn("-c", FLOOD)
    assert client.stdin is not None
    for stage, (name, tag, size) in FLOODS.items():
        ticket, uri = published[name or "small"]
        client.stdin.write(json.dumps([uri, ticket if name else "", tag, size]) + "\n")
        assert line(client) == "ended", stage
        assert memory() - before < enough, stage
        client.stdin.write("close\n")
        assert line(client) == "closed", stage


#: A script that prints its progress, and at its end its peak memory in kB.
STREAMING = """
import re, sys
import numpy as np
import pyarrow as pa
import dissociated as dis

COUNT, ROWS = 40, 1 << 20

def source():
    for number in range(COUNT):
        print(number, flush=True)
        yield pa.record_batch({"n": np.full(ROWS, number)})

schema = pa.schema([("n", pa.int64())])
with dis.Server([sys.argv[1]], catalog=None) as server:
    server.publish("stream", lambda: pa.RecordBatchReader.from_batches(schema, source()))
    print(server.ticket("stream").hex(), server.locations("stream")[0], flush=True)
    sys.stdin.readline()
    print(re.search(r"VmHWM:[^0-9]+([0-9]+)", open("/proc/self/status").read())[1], flush=True)
"""


@pytest.mark.parametrize("where", media(WHERE))
def test_server_of_a_slow_client_stays_small(spawn: Spawn, where: str) -> None:
    # The stream has 330 MB. The server may have 64 MB in flight.
    process = spawn("-c", STREAMING, WHERE[where])
    assert process.stdout is not None
    assert process.stdin is not None
    ticket, uri = line(process).split()
    reader = dis.open_stream(uri, bytes.fromhex(ticket))
    first = reader.read_next_batch()
    numbers: queue.Queue[int] = queue.Queue()

    def listen() -> None:
        for _ in range(40):
            numbers.put(int(line(process)))

    listening = threading.Thread(target=listen)
    listening.start()
    produced = numbers.get(timeout=PATIENCE)
    with suppress(queue.Empty):
        while True:  # The client sleeps until the server stops producing.
            produced = numbers.get(timeout=0.5)
    assert 0 < produced < 20
    assert [first["n"][0].as_py(), *(batch["n"][0].as_py() for batch in reader)] == list(range(40))
    listening.join(PATIENCE)
    process.stdin.write("end\n")
    assert int(line(process)) < 350_000

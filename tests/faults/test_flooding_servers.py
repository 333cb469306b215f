"""Servers over UCX and libfabric that send without end: a client has a cap, and not only a deadline."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from machine import media

from .test_death import line

Spawn = Callable[..., subprocess.Popen[str]]

WHERE = {"ucx": "ucx:", "fabric": "fabric:?heartbeat=0.1"}

#: MB that it may cost a client, the connection included.
ENOUGH = 700

#: Floods whoever connects, without looking at what comes, for a second or until it is cut off.
SERVER = """
import json, sys, time
from dissociated.errors import DissociatedError
from dissociated.message import Message
from dissociated.transport.registry import transport
from dissociated.uri import Uri

uri = Uri.parse(sys.argv[1])
listener = transport(uri.scheme).listen(uri)
print(f"{listener.uri}&want_data=7&free_data=9", flush=True)
for line in sys.stdin:
    asked, size, tagged = json.loads(line)
    connection = listener.accept()
    if asked:
        connection.receive(20, lambda tag, length: bytearray(length))
    connection._has = lambda enough: enough()
    connection._has_room = lambda size: len(connection._under_way) < 100
    end, number = time.monotonic() + 1, 1
    try:
        while time.monotonic() < end:
            numbers = range(number, number := number + 16)
            connection.send([Message(one if tagged else None, (bytes(size),)) for one in numbers], 0.5)
    except DissociatedError:
        pass
    connection.interrupt()
    connection.close()
    print("ended", flush=True)
"""

#: Asks with a ticket, or waits first: says how many MB that took, and what came of it.
CLIENT = """
import json, re, sys, time
import dissociated as dis
from dissociated.message import Message
from dissociated.transport.registry import transport
from dissociated.uri import Uri

def memory():
    return int(re.search(r"VmHWM:[^0-9]+([0-9]+)", open("/proc/self/status").read())[1]) // 1000

ticket, pause = json.loads(sys.argv[2])
before = memory()
try:
    if pause:
        uri = Uri.parse(sys.argv[1])
        with transport(uri.scheme).connect(uri, 20) as connection:
            connection.send([Message(uri.want_data, (b"t",))], 20)
            time.sleep(pause)
    else:
        dis.open_stream(sys.argv[1], b"t" * ticket, timeout=1).read_all()
    said = "paused"
except dis.errors.DissociatedError as error:
    said = type(error).__name__
print(json.dumps([memory() - before, said]), flush=True)
"""

#: Whether the server waits for a request, the size of what it sends, and whether that is tagged; the bytes of the
#: client's ticket, and for how many seconds it receives nothing.
FLOODS = {
    "before the request is out": ([False, 4096, True], [60_000, 0]),
    "empty bodies": ([True, 0, True], [10, 0]),
    "while the reader is away": ([True, 4096, True], [10, 1.5]),
}


@pytest.mark.parametrize("where", media(WHERE))
def test_a_server_that_sends_without_end_costs_its_client_no_more_than_a_cap(spawn: Spawn, where: str) -> None:
    server = spawn("-c", SERVER, WHERE[where])
    uri = line(server)
    assert server.stdin is not None
    for name, (flood, client) in FLOODS.items():
        server.stdin.write(json.dumps(flood) + "\n")
        cost, said = json.loads(line(spawn("-c", CLIENT, uri, json.dumps(client))))
        assert cost < ENOUGH, (name, said)
        assert said in ("paused", "RemoteProtocolError", "ConnectionClosed", "DeadlineExceeded"), name
        assert line(server) == "ended"

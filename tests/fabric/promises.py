"""Transport promises over a given libfabric: `python -m fabric.promises`, in a process of its own.

DISSOCIATED_FABRIC_LIBRARY names the library. The promises are the tests of tests/contract and tests/transport that can
fail because of the library, called one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pyarrow as pa

import dissociated as dis
from contract import test_batches, test_clients, test_shapes, test_sources
from contract.conftest import WAYS, Route
from dissociated.errors import ConnectionClosed, RemoteProtocolError
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from faults import test_fabric as faults
from faults.clients import Reading, line
from faults.peer import PATIENCE
from support.arrow_cases import Celsius
from support.certificates import certificates
from support.helpers import connections_left, leaving_nothing
from support.machine import missing
from transport import test_connections

ROUTES: list[Callable[[Route], None]] = [
    test_shapes.test_many_small_batches,
    test_shapes.test_a_batch_of_64_mb,
    test_batches.test_over_every_way,
    test_sources.test_a_source_that_fails_in_the_middle_says_why,
    test_clients.test_many_clients_at_once,
    test_clients.test_a_client_that_stops_half_way_leaves_nothing,
    test_clients.test_a_client_that_stops_a_stream_without_end,
]
ENDS: list[Callable[[test_connections.Ends], None]] = [
    lambda ends: test_connections.test_messages_arrive_whole_and_in_order(ends, back=False),
    lambda ends: test_connections.test_messages_arrive_whole_and_in_order(ends, back=True),
    test_connections.test_an_abort_arrives_after_what_was_sent,
    lambda ends: test_connections.test_lingering_lets_everything_arrive(ends, "fabric"),
    test_connections.test_a_silent_peer_exceeds_the_deadline_and_may_speak_later,
    test_connections.test_waiting_takes_no_processor_time,
    test_connections.test_a_peer_that_takes_nothing_exceeds_the_deadline,
    test_connections.test_two_sides_that_both_send_do_not_block_each_other,
    test_connections.test_interrupting_ends_a_send_in_another_thread,
    test_connections.test_a_client_that_sends_and_does_not_receive_is_cut_off,
    test_connections.test_a_peer_that_stops_receiving_may_continue_to_send,
]


def over_routes(directory: Path) -> None:
    certified = certificates(directory)
    pa.register_extension_type(Celsius())
    for way in WAYS:
        if not way.medium.startswith("fabric") or (way.medium == "fabric, tcp" and missing("libfabric 2")):
            continue
        if way.arrangement == "two" or way.bodies == "mixed":  # a library cannot tell these ways from others
            continue
        with leaving_nothing(), closing(Route(way, certified)) as route:
            for check in ROUTES:
                print(way, check.__name__, flush=True)
                check(route)
                assert route.connections == 0


def between_ends() -> None:
    for medium, address in (test_connections.MEDIA | test_connections.NATIVE_6).items():
        if not medium.startswith("fabric"):
            continue
        if (medium == "fabric, tcp" and missing("libfabric 2")) or (medium == "fabric6" and missing("ipv6")):
            continue
        for check in ENDS:
            print(medium, check.__name__, flush=True)
            uri = Uri.parse(address)
            with leaving_nothing(), closing(transport(uri.scheme).listen(uri)) as listener:
                both = test_connections.connect(listener)
                with both.client, both.server:
                    check(both)


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def when_peers_are_killed() -> None:
    print("a server is killed", flush=True)
    steps = json.dumps(faults.SERVER_STAGES["between metadata and body"])
    with process(faults.PEER, faults.WHERE, steps) as running:
        reading = Reading(line(running), PATIENCE)
        assert line(running) == "reached"
        running.kill()
        failure = reading.failure()
        assert type(failure) in (ConnectionClosed, RemoteProtocolError), failure
    print("a client is killed", flush=True)
    with dis.Server([faults.WHERE], catalog=None) as server:
        server.publish("data", pa.table({"n": range(1000)}))
        with process(faults.PEER, server.locations("data")[0], "[]") as running:
            assert line(running) == "reached"
            assert server.connections == 1
            running.kill()
            assert connections_left(server) == 0


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        over_routes(Path(directory))
    between_ends()
    when_peers_are_killed()


if __name__ == "__main__":
    main()

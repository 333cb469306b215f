"""Frees of a client whose server takes nothing for a while."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest

from dissociated.client.leases import ClientLeases
from dissociated.errors import DeadlineExceeded
from dissociated.protocol.message import Message
from dissociated.transport.base import Connection
from dissociated.transport.registry import transport
from dissociated.uri import Uri
from support.helpers import PATIENCE, leaving_nothing, wait_until

FREE, OTHER = 77, 78
ADDRESSES = [*range(100_000)]  # 800 kB in 25 messages; a Unix socket holds a quarter of that


def allocate(tag: int | None, length: int) -> Any:
    return bytearray(length)


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    with leaving_nothing(), closing(transport("shm").listen(Uri.parse("shm:"))) as listener:
        client = transport("shm").connect(listener.uri, PATIENCE)
        server = listener.accept()
        assert server is not None
        with client, server:
            yield client, server


def fill(client: Connection) -> None:
    """Send messages until the socket takes none."""
    with suppress(DeadlineExceeded):
        while True:
            client.send([Message(OTHER, (bytes(8),))], 0.01)


@pytest.mark.parametrize("where", ["between messages", "within a message"])
def test_a_server_that_paused_gets_each_free_once(
    ends: tuple[Connection, Connection], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "dissociated.client.leases")
    client, server = ends
    if where == "between messages":
        fill(client)
    leases = ClientLeases(client, FREE, 0.02)
    leases.expect(len(ADDRESSES))
    leases.free(ADDRESSES)
    wait_until(lambda: caplog.records, "the server has taken nothing for the timeout")
    freed: list[int] = []
    while len(freed) < len(ADDRESSES):
        arrived = server.receive(PATIENCE, allocate)
        assert arrived is not None
        if arrived[0] == FREE:
            freed += np.frombuffer(arrived[1], "<u8").tolist()
    assert freed == ADDRESSES
    leases.finish(stopped=False)
    assert server.receive(PATIENCE, allocate) is None


def test_a_server_that_takes_nothing_keeps_no_client_whose_stream_is_over(ends: tuple[Connection, Connection]) -> None:
    client, _ = ends
    leases = ClientLeases(client, FREE, 0.02)
    leases.expect(len(ADDRESSES))
    leases.free(ADDRESSES)
    leases.finish(stopped=False)
    wait_until(lambda: not client.unread, "the client has closed the connection")

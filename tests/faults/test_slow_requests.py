"""Clients over UCX and libfabric that never send their request, and are never silent either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dissociated.transport.native.fabric.messages import Kind
from dissociated.uri import Uri
from support import ucx_binding, ucx_peer
from support.fabric_peer import CONTROL, fabric_client
from support.helpers import wait_until

from .conftest import Good, Serve

HANDSHAKE, PAUSE = 1.0, 0.05  # seconds


def until_it_is_cut_off(good: Good, say: Callable[[], Any]) -> None:
    """Repeat an action until the server closes the connection, while it serves other clients."""
    pause = threading.Event()

    def connected() -> int:
        say()
        pause.wait(PAUSE)
        return good.server.connections

    wait_until(connected, "the server waits for the request")
    good.check()
    # The deadline is for the whole request: other messages do not extend it.
    wait_until(lambda: not connected(), "the server has had enough")


@pytest.mark.needs("ucx")
def test_a_ucx_client_that_says_something_now_and_then_is_cut_off_in_time(serve: Serve) -> None:
    good = serve("ucx:", handshake_timeout=HANDSHAKE)
    place = good.server.locations("good")[0].partition("?")[0]
    context = ucx_peer.Context()
    worker = ucx_peer.Worker(context)
    worker.connect(int(place.rpartition(":")[2]), ucx_binding.ERR_MODE_PEER)
    nothing = worker.ffi.new("ucp_request_param_t *")

    def say() -> None:
        if not worker.lost:  # UCX drops an active message with an unregistered id.
            worker.lib.ucp_am_send_nbx(worker.endpoint, 7, worker.ffi.NULL, 0, worker.ffi.NULL, 0, nothing)
        while worker.progress():
            pass

    try:
        until_it_is_cut_off(good, say)
    finally:
        worker.close_endpoint(force=True)
        worker.close()
        context.close()


@pytest.mark.needs("libfabric")
def test_a_fabric_client_that_says_something_now_and_then_is_cut_off_in_time(serve: Serve) -> None:
    good = serve("fabric:", handshake_timeout=HANDSHAKE)
    with fabric_client(Uri.parse(good.server.locations("good")[0])) as client:

        def say() -> None:
            client.begin(CONTROL | Kind.BODIES_JOIN, b"", lambda: not good.server.connections)

        until_it_is_cut_off(good, say)

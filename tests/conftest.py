"""What every test may use: servers that are gone afterwards with all they had, and one way to wait."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import settings

import dissociated as dis
from dissociated.catalog import client as _catalog_client  # noqa: F401  # loaded here, so that no test pays for it

# Two loaded cores stretch an example past any deadline; pytest-timeout catches what hangs.
settings.register_profile("dissociated", deadline=None)
settings.load_profile("dissociated")

#: Seconds that anything awaited may take. Nothing waits this long but a test that fails.
PATIENCE = 30.0


def drained(server: dis.Server) -> int:
    """Wait until every connection of `server` has ended; how many have not."""
    end = monotonic() + PATIENCE
    for thread in list(server._connections.values()):
        thread.join(max(0.0, end - monotonic()))
    return server.connections


def descriptors() -> dict[int, str]:
    """The open descriptors of this process, and what they refer to."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except FileNotFoundError:
            pass  # the one that lists the directory
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a thread or a descriptor behind."""
    gc.collect()
    threads, before = set(threading.enumerate()), descriptors()
    yield
    gc.collect()
    end = monotonic() + PATIENCE
    for thread in set(threading.enumerate()) - threads:
        thread.join(max(0.0, end - monotonic()))
        assert not thread.is_alive(), f"{thread} is left behind"
    left = {number: target for number, target in descriptors().items() if number not in before}
    assert not left


@pytest.fixture
def serve(nothing_left: None) -> Iterator[Callable[..., dis.Server]]:
    """Makes servers, without a catalog unless it is asked for, and closes them."""
    servers = []

    def make(*listen: str, **options: Any) -> dis.Server:
        server = dis.Server(listen or ("shm:", "tcp://127.0.0.1:0"), **{"catalog": None, **options})
        servers.append(server)
        return server

    yield make
    for server in servers:
        server.close()

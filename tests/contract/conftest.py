"""Fixtures for every way from a source to a reader: each transport, arrangement of connections, and kind of bodies.

A new transport joins the suite by a line in MEDIA. A test runs over the ways that its subject depends on: `route` is
every way, `direct` every medium, `quick` each kind of bodies, `arranged` each arrangement of connections, `either`
bodies inline and by address.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.client.stream import TensorReader
from support.certificates import Certificates
from support.helpers import connections_left, leaving_nothing
from support.machine import media, missing

MEDIA = {
    "inproc": "inproc:",
    "tcp": "tcp://127.0.0.1:0",
    "tcp6": "tcp://[::1]:0",
    "tls": "tls://127.0.0.1:0",
    "shm": "shm:",
    "ucx": "ucx:",
    "ucx6": "ucx://[::1]:0",
    "ucx, none": "ucx:?err_mode=none",
    "fabric": "fabric:",
    "fabric, tcp": "fabric:?provider=tcp",
    "fabric6": "fabric://[::1]:0",
    "ucx, rma": "ucx:",
    "fabric, rma": "fabric:",
}

#: A single connection; two connections to one server; metadata from one server and bodies from another.
ARRANGEMENTS = ("one", "two", "apart")
#: Arrangements of media that are slow to connect. They cover the differences above the messages; tests/transport covers
#: all media, and the fixture `rest` reads one dataset over each remaining medium.
FEWER = {
    "tcp6": ("one",),
    "tls": ("one", "apart"),
    "ucx": ("one",),
    "ucx6": (),
    "ucx, none": ("two",),
    "ucx, rma": ("one",),
    "fabric": ("one",),
    "fabric6": (),
    "fabric, tcp": ("apart",),
    "fabric, rma": ("one",),
}
#: All bodies by address, all packed, or only bodies larger than MIXED_LIMIT bytes by address. Sizes are compared above
#: the media.
BODIES = {"shm": ("any", "packed", "mixed"), "ucx, rma": ("any",), "fabric, rma": ("mixed",)}
MIXED_LIMIT = 256
#: Media that connect instantly.
QUICK = ("inproc", "tcp", "shm")


class Way(NamedTuple):
    """The parts of a route."""

    medium: str
    arrangement: str = "one"
    bodies: str = "any"

    def __str__(self) -> str:
        return "-".join(self)


WAYS = [
    Way(medium, arrangement, bodies)
    for medium in MEDIA
    for arrangement in FEWER.get(medium, ARRANGEMENTS)
    for bodies in BODIES.get(medium, ("any",))
]
#: Media without a way of their own, for one dataset each.
REST = [Way(medium) for medium in MEDIA if not FEWER.get(medium, ARRANGEMENTS)]


class Route:
    """A server or two, and a reader that connects to them."""

    def __init__(self, way: Way, certified: Certificates) -> None:
        self.way = way
        self.certified = certified
        self.start()

    def start(self) -> None:
        self._rma = self.way.medium.endswith(", rma")
        limit = MIXED_LIMIT if self.way.bodies == "mixed" else 0
        self.servers = [
            dis.Server(
                [MEDIA[self.way.medium]],
                catalog=None,
                inline_limit=limit,
                allow_rma=self._rma,
                **self.certified.options,
            )
            for _ in range(2 if self.way.arrangement == "apart" else 1)
        ]

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def publish(self, source: Any, name: str = "data", options: dis.WriteOptions | None = None) -> None:
        ticket = secrets.token_bytes(16)
        for server in self.servers:
            server.publish(name, source, options=options, ticket=ticket)

    def uris(self, name: str = "data") -> str | list[str]:
        bodies = "packed" if self.way.bodies == "packed" else "any"
        if self.way.arrangement == "one":
            return self.servers[0].locations(name, bodies=bodies)[0]
        return [
            self.servers[0].locations(name, streams="metadata")[0],
            self.servers[-1].locations(name, streams="bodies", bodies=bodies)[0],
        ]

    def ticket(self, name: str = "data") -> bytes:
        return self.servers[0].ticket(name)

    def open(self, name: str = "data", **options: Any) -> pa.RecordBatchReader:
        return self.request(self.uris(name), self.ticket(name), **options)

    def request(self, uris: str | list[str], ticket: bytes, **options: Any) -> pa.RecordBatchReader:
        return dis.open_stream(uris, ticket, allow_rma=self._rma, **options)

    def tensors(self, name: str = "data", **options: Any) -> TensorReader:
        return dis.open_tensors(self.uris(name), self.ticket(name), allow_rma=self._rma, **options)

    def read(self, source: Any, options: dis.WriteOptions | None = None) -> tuple[pa.Schema, list[pa.RecordBatch]]:
        """Publish a source, and return the schema and the batches that a reader receives, fully validated."""
        self.publish(source, options=options)
        reader = self.open()
        schema, arrived = reader.schema, list(reader)
        for batch in arrived:
            batch.validate(full=True)
        return schema, arrived

    @property
    def is_quick(self) -> bool:
        """Whether it connects instantly, so that a test can afford many cases. The others cost 0.1 s of processor."""
        return self.way.medium in QUICK

    @property
    def connections(self) -> int:
        """Return how many connections stay open after a wait."""
        return sum(connections_left(server) for server in self.servers)


def _ways(some: Iterable[Way]) -> list[Any]:
    return media(some, lambda way: str(way.medium))


def _run(way: Way, certified: Certificates) -> Iterator[Route]:
    """Yield a route. Libraries with permanent resources load first, because routes of several fixtures overlap."""
    for library in ("ucx", "libfabric"):
        missing(library)
    with leaving_nothing(), closing(Route(way, certified)) as route:
        yield route


def _check(route: Route) -> Iterator[Route]:
    yield route
    # Restart after a failed test, whose variables may keep connections, so that the next test does not fail, too.
    if route.connections:
        route.close()
        route.start()
        pytest.fail("connections are left open")


@pytest.fixture(scope="module", params=_ways(WAYS))
def _any_route(request: pytest.FixtureRequest, trusted: Certificates) -> Iterator[Route]:
    yield from _run(request.param, trusted)


@pytest.fixture
def route(_any_route: Route) -> Iterator[Route]:
    """Yield each way, and fail if the test leaves a connection open."""
    yield from _check(_any_route)


@pytest.fixture(params=_ways(REST))
def rest(request: pytest.FixtureRequest, trusted: Certificates) -> Iterator[Route]:
    """Yield the media that no other fixture covers."""
    yield from _run(request.param, trusted)


@pytest.fixture(scope="module", params=_ways(way for way in WAYS if way.arrangement == "one"))
def _direct_route(request: pytest.FixtureRequest, trusted: Certificates) -> Iterator[Route]:
    yield from _run(request.param, trusted)


@pytest.fixture
def direct(_direct_route: Route) -> Iterator[Route]:
    """Yield each way with one connection."""
    yield from _check(_direct_route)


QUICK_WAYS = [way for way in WAYS if way.arrangement == "one" and way.medium in QUICK]


@pytest.fixture(scope="module", params=_ways(QUICK_WAYS))
def _quick_route(request: pytest.FixtureRequest, trusted: Certificates) -> Iterator[Route]:
    yield from _run(request.param, trusted)


@pytest.fixture
def quick(_quick_route: Route) -> Iterator[Route]:
    """Yield each kind of bodies over one connection that opens instantly, for tests of many cases."""
    yield from _check(_quick_route)


ARRANGED = [Way(medium, arrangement) for medium in ("tcp", "shm") for arrangement in ARRANGEMENTS]


@pytest.fixture(scope="module", params=_ways(ARRANGED))
def _arranged_route(request: pytest.FixtureRequest, trusted: Certificates) -> Iterator[Route]:
    yield from _run(request.param, trusted)


@pytest.fixture
def arranged(_arranged_route: Route) -> Iterator[Route]:
    """Yield each arrangement of connections, with bodies inline and by address, to compare two servers."""
    yield from _check(_arranged_route)


@pytest.fixture(scope="module", params=_ways([Way("tcp"), Way("shm")]))
def _either_route(request: pytest.FixtureRequest, trusted: Certificates) -> Iterator[Route]:
    yield from _run(request.param, trusted)


@pytest.fixture
def either(_either_route: Route) -> Iterator[Route]:
    """Yield bodies inline and by address, for subjects that do not depend on the medium."""
    yield from _check(_either_route)

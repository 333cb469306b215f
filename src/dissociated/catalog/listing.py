"""Flight descriptions of datasets: a FlightInfo for each version, with an endpoint for each of its parts."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.host import boot_id, host_name
from dissociated.catalog.holdings import Holdings
from dissociated.codec.schemas import deserialize
from dissociated.control.access import Grant
from dissociated.control.change_counter import CounterPlace
from dissociated.control.locations import MAX_EMBEDDED, has_embedded, with_embedded
from dissociated.control.version import NodeRecord, Part, Version

#: A location that tells a client to reuse the connection over which it called GetFlightInfo. Clients that know only
#: Flight need it.
REUSE_CONNECTION = "arrow-flight-reuse-connection://?"

_SAME_HOST = ("shm", "inproc")
_MAX_ANSWERS = 64  # FlightInfos that are kept, each with up to MAX_EMBEDDED bytes of rows
_MAX_AGE = 1.0  # seconds for which an answer is repeated
_MAX_DESCRIPTOR = 1024  # bytes of a request whose answer is kept
_SEEN_STEP = 5.0  # seconds; an answer does not say more precisely when this process was last heard
_MAX_PARTS = 16  # of a version whose description is kept

_deserialize = lru_cache(256)(deserialize)


class Listing:
    """Describes versions in terms of Flight, as the node that has `holdings`.

    Args:
        holdings: The datasets of the node.
        counter: The place of the catalog's counter of changes, for callers on this host; None if they have to ask for
            each read.
    """

    def __init__(self, holdings: Holdings, counter: CounterPlace | None = None) -> None:
        self._holdings = holdings
        self._counter = counter
        self._registry = holdings.registry

    def info(self, version: Version, caller: Mapping[str, Any], expires: float | None = None) -> flight.FlightInfo:
        """Return the FlightInfo of a version.

        Args:
            version: The version.
            caller: The host and boot id of the caller, if it sent them, and as `embed` the size up to which it wants
                the rows with the answer.
            expires: The time at which its tickets may end, in seconds since the epoch; None if no lifetime is
                guaranteed.
        """
        embed = min(caller.get("embed") or 0, MAX_EMBEDDED) if len(version.parts) == 1 else 0
        endpoints = [
            self.endpoint(part, caller, earliest_expiry(expires, version.expires), embed=embed)
            for part in version.parts
        ]
        app_metadata = {
            "host": host_name(),
            "boot_id": boot_id(),
            "version": version.number,
            "created": version.created,
            "expires": version.expires,
            "began": version.lineage_id,
            "tags": dict(version.tags),
        }
        if caller.get("boot_id") == boot_id() and self._is_counted(version, endpoints):
            app_metadata["counter"] = self._counter
        return flight.FlightInfo(
            _deserialize(version.schema),
            flight.FlightDescriptor.for_path(version.name),
            endpoints,
            -1 if version.rows is None else version.rows,
            -1 if version.nbytes is None else version.nbytes,
            ordered=True,
            app_metadata=json.dumps(app_metadata),
        )

    def _is_counted(self, version: Version, endpoints: Sequence[flight.FlightEndpoint]) -> bool:
        """Return whether no clock, other node or user's file can change the answer, but only the database."""
        if len(version.parts) != 1 or len(version.parts[0].nodes) != 1:
            return False
        local = self._registry.lookup_part(version.parts[0].id)
        if local is None or not local.repeatable or local.is_modifiable:
            return False
        return self._holdings.endpoints.are_fixed(local) or has_embedded(endpoints[0].app_metadata)

    def reference_info(self, version: Version, descriptor: flight.FlightDescriptor) -> flight.FlightInfo | None:
        """Return the FlightInfo that the C++ reference expects for a command that is a name only.

        The result is None if this server has no listener for the reference implementation.
        """
        local = self._registry.lookup(version.parts[0].ticket) if len(version.parts) == 1 else None
        pair = [] if local is None else self._holdings.endpoints.reference_locations(local)
        if local is None or not pair:
            return None
        ticket = self._registry.issue_ticket(local)
        endpoint = flight.FlightEndpoint(ticket.data, pair)
        return flight.FlightInfo(_deserialize(version.schema), descriptor, [endpoint], -1, -1)

    def endpoint(
        self,
        part: Part,
        caller: Mapping[str, Any],
        expires: float | None,
        columns: tuple[str, ...] | None = None,
        embed: int = 0,
    ) -> flight.FlightEndpoint:
        """Return the endpoint of one part, with the locations nearest to the caller first.

        Nodes that are dead, or have set the part aside, are listed in the metadata, but get no location. A caller that
        does not send its host (our clients do send it) may know only Flight and use the first location, so that is a
        Flight server then.

        Args:
            part: The part.
            caller: The host and boot id of the caller, if it sent them.
            expires: The time at which the ticket may end, in seconds since the epoch; None without a guarantee.
            columns: The columns that the ticket gives access to; None for all.
            embed: The size in bytes up to which all rows are sent with the answer.
        """
        host, boot_id_of_caller = caller.get("host"), caller.get("boot_id")
        local = self._registry.lookup(part.ticket)

        def distance(node: NodeRecord) -> int:
            return 0 if node.boot_id == boot_id_of_caller else 1 if node.host == host else 2

        own_id = self._holdings.backend.id
        nodes = sorted((node for node in part.nodes if node.alive), key=distance)
        locations = [node.flight for node in nodes] if boot_id_of_caller is None else []
        for node in nodes:
            near = boot_id_of_caller is None or node.boot_id == boot_id_of_caller
            local_part = local if node.id == own_id else None
            uris = node.locations if local_part is None else self._holdings.endpoints.dataset_locations(local_part)
            locations += [uri for uri in uris if near or uri.partition(":")[0] not in _SAME_HOST]
            if boot_id_of_caller is not None and node.id != own_id:
                locations.append(node.flight)
        if nodes:
            locations.append(REUSE_CONNECTION)
        # This node sends no heartbeats to itself. A client uses its last answer again if the new one is equal.
        now = time.time()
        last_seen = {node.id: now - now % _SEEN_STEP if node.id == own_id else node.seen for node in part.nodes}
        known_nodes = [
            {"id": node.id, "host": node.host, "boot_id": node.boot_id, "alive": node.alive, "seen": last_seen[node.id]}
            for node in part.nodes
        ]
        if local is not None and not local.repeatable:
            expires = None  # A second request may return nothing, or another stream.
        # Only this process publishes with chosen tickets. The ids of copies on other nodes differ.
        sole = self._registry.lookup_part(part.id) if len(part.nodes) == 1 else None
        # If a server encrypts data, its small datasets must not travel in clear text with their descriptions.
        is_secure = not any(node.flight.startswith("grpc:") and _encrypts(node) for node in part.nodes)
        ticket = self._registry.tickets.sign(Grant(part.ticket, columns), self._registry.now())
        expirations = [end for end in (expires, ticket.expires) if end is not None]
        metadata = {"nodes": known_nodes, "rows": part.rows, "part": None if sole is None else part.id}
        if part.set_aside:
            metadata["set_aside"] = True
        return flight.FlightEndpoint(
            ticket.data,
            locations,
            # pyarrow would cast any other type, in 60 us.
            None if not expirations else pa.scalar(int(min(expirations) * 1e6) * 1000, pa.timestamp("ns")),
            with_embedded(
                json.dumps(metadata),
                self._holdings.read_small(sole, embed) if sole is not None and embed and is_secure else None,
            ),
        )


class _Answer(NamedTuple):
    info: flight.FlightInfo
    changes: int
    is_embedded: bool
    until: float  # by time.monotonic


class Answers:
    """The last FlightInfos of versions in stores. Each is returned again for a second if nothing has changed.

    Many processes often request one dataset at a time, and some request it repeatedly.

    Args:
        retain: Lifetime of the tickets in the answers, in seconds; 0 if none is promised. An answer is repeated for a
            hundredth of it at most.
    """

    def __init__(self, retain: float) -> None:
        #: Seconds for which an answer is repeated. Tickets must be valid for that much longer.
        self.max_age = min(_MAX_AGE, retain / 100) if retain else _MAX_AGE
        self._answers: OrderedDict[bytes, _Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, descriptor: bytes, changes: int) -> _Answer | None:
        """Return the answer to a serialized descriptor if the database still has this number of `changes`, or None."""
        answer = self._answers.get(descriptor)
        if answer is None or answer.changes != changes or time.monotonic() >= answer.until:
            return None
        return answer

    def put(self, descriptor: bytes, changes: int, version: Version, info: flight.FlightInfo) -> None:
        """Keep an answer, unless it is large. It was made after the database had this number of `changes`."""
        if len(descriptor) > _MAX_DESCRIPTOR or len(version.parts) > _MAX_PARTS:
            return
        now = time.monotonic()  # before the other clock is read: this thread may be paused in between
        seconds = self.max_age if version.expires is None else min(self.max_age, version.expires - time.time())
        is_embedded = any(has_embedded(endpoint.app_metadata) for endpoint in info.endpoints)
        with self._lock:
            self._answers[descriptor] = _Answer(info, changes, is_embedded, now + seconds)
            self._answers.move_to_end(descriptor)
            if len(self._answers) > _MAX_ANSWERS:
                self._answers.popitem(last=False)


def _encrypts(node: NodeRecord) -> bool:
    return any(uri.startswith("tls:") for uri in node.locations)


def earliest_expiry(promised: float | None, expires: float | None) -> float | None:
    """Return the earlier of `promised` and `expires`; None if no lifetime is promised."""
    return promised if promised is None or expires is None else min(promised, expires)

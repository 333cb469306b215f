"""The nodes of a catalog, and the client that catalogs and nodes call each other with."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.display import duration, plural, utc
from dissociated.catalog.database import Database
from dissociated.client.calls import CatalogClient
from dissociated.client.flight_connection import read_flight
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.codec.validation import Validator
from dissociated.control.access import Security
from dissociated.control.commit import StagedSegment
from dissociated.control.flight_streams import upload
from dissociated.control.locations import unavailable
from dissociated.control.version import NodeRecord, Part
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    NodeUnreachable,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

PEER_TIMEOUT = 60.0  # seconds in which a peer must answer
_ANSWER_TIMEOUT = 2.0  # seconds that a node has to answer a check of its id
_REACH_TIMEOUT = 10.0  # seconds in which a node that registers must answer the catalog
_MAX_PEERS = 64  # nodes to which connections are kept
_MAX_REFUSALS = 100  # refused nodes that are remembered
#: The seconds by which the clocks of a node and of its catalog may differ without a warning.
CLOCK_TOLERANCE = 2.0


def describe_clock_skew(skew: float) -> str:
    """Return a sentence about a node's clock that is `skew` seconds ahead of the catalog's; empty if they agree."""
    if abs(skew) <= CLOCK_TOLERANCE:
        return ""
    return f"the node's clock is {duration(abs(skew))} {'ahead of' if skew > 0 else 'behind'} the catalog's"


def describe_unlisted(count: int) -> str:
    """Return a sentence about `count` versions in a node's store that are not listed; empty if there are none."""
    if not count:
        return ""
    return f"the node holds {plural(count, 'version')} of datasets that the catalog does not list: see its own status"


class Refusal(NamedTuple):
    """A registration that was refused: the node, the reason, and the time in seconds since the epoch."""

    node: NodeRecord
    reason: str
    at: float


class Peer(CatalogClient):
    """A client for the calls between a catalog and its nodes.

    Args:
        uri: The URI of the other catalog.
        security: The credentials of this process.
        timeout: The number of seconds in which the other catalog must answer.
    """

    #: While a link is cut, a node misses heartbeats, and a commit holds up others of its dataset. Both must soon notice
    #: it, and that the link was repaired.
    _keepalive_timeout: ClassVar[float | None] = 5.0

    def __init__(self, uri: str, security: Security, timeout: float = PEER_TIMEOUT) -> None:
        unlimited = sys.maxsize  # The final reader applies its own limit to relayed data.
        super().__init__(uri, timeout, security.peer, security.roots, max_metadata=unlimited)

    def get(self, ticket: bytes) -> pa.RecordBatchReader:
        """Read the dataset of `ticket` as it is, by one call of DoGet, for a reader of this process."""
        return read_flight(self._calls, ticket, self.defaults)

    def forward_action(self, action: str, body: bytes) -> bytes:
        """Return the answer to an action whose body is not JSON."""
        (result,) = self.call_flight(lambda client: [*client.do_action(flight.Action(action, body))])
        return bytes(result.body.to_pybytes())


class _Recipient(Peer):
    """A client for an upload to a node. A node that is paused, and so takes nothing, does not soon count as lost."""

    _keepalive_timeout = None


class Members:
    """The nodes that have registered in `database`. Its methods may be called from several threads.

    A method that calls a node raises the errors of the node, and CatalogError if the node does not answer. The record
    `own` is that of the catalog's process, which is never called.
    """

    def __init__(self, database: Database, own: NodeRecord, security: Security) -> None:
        self._database = database
        self._own = own
        self._security = security
        self._clock_skews: dict[str, float] = {}  # by node: the seconds by which its clock is ahead
        self._unlisted: dict[str, int] = {}  # by node: the versions that it holds and the catalog does not list
        self._refusals: dict[tuple[str, str], Refusal] = {}  # by id and host, the oldest first
        self._peers: dict[str, Peer] = {}  # by Flight URI: the connections that reads were relayed over

    def find(self, ids: Iterable[str]) -> dict[str, NodeRecord]:
        """Return the known nodes by id. Raise CatalogError if one of `ids` has not registered."""
        nodes = {node.id: node for node in self._database.nodes()}
        for id in ids:
            if id not in nodes:
                raise CatalogError(f"no node {id!r} has registered at this catalog")
        return nodes

    def clock_skew(self, node: str) -> float:
        """Return the seconds by which the clock of a node is ahead of this host's, as of its last message."""
        return self._clock_skews.get(node, 0.0)

    def record_time(self, node: str, node_time: object) -> float:
        """Record the time at which a node sent a message that has just arrived.

        Returns:
            The seconds by which the node's clock is ahead, less the time that the message took; 0 if the node did not
            tell its time.
        """
        if not isinstance(node_time, int | float):
            return 0.0
        skew = float(node_time) - time.time()
        before = self._clock_skews.get(node, 0.0)
        self._clock_skews[node] = skew
        if abs(skew - before) > CLOCK_TOLERANCE and (sentence := describe_clock_skew(skew)):
            _log.warning("clock is wrong: node=%s difference=%r", node, sentence)
        return skew

    def record_unlisted(self, node: str, count: int) -> None:
        """Record how many versions a node holds that the catalog does not list."""
        self._unlisted[node] = count

    def problem(self, node: str) -> str:
        """Return sentences about a node that is alive, as of its last message; empty if all is well."""
        sentences = describe_clock_skew(self.clock_skew(node)), describe_unlisted(self._unlisted.get(node, 0))
        return "; ".join(filter(None, sentences))

    def refuse(self, node: NodeRecord, reason: str) -> None:
        """Record that the registration of a node was refused. `refusals` then lists it."""
        _log.warning("a node was refused: host=%s flight=%s reason=%s", node.host, node.flight, reason)
        key = node.id, node.host  # The port may differ each time that a service manager starts the node.
        self._refusals.pop(key, None)
        self._refusals[key] = Refusal(node, reason, time.time())
        while len(self._refusals) > _MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]

    def refusals(self) -> list[Refusal]:
        """Return the nodes whose last registration was refused."""
        return [*self._refusals.values()]

    def forget(self, node: str) -> None:
        """Forget the messages and the refusals of the node with this id."""
        self._clock_skews.pop(node, None)
        self._unlisted.pop(node, None)
        self.admit(node)

    def admit(self, node: str) -> None:
        """Forget the refusals of the node with this id."""
        for refusal in self.refusals():
            if refusal.node.id == node:
                self._refusals.pop((refusal.node.id, refusal.node.host), None)

    def check_reachable(self, node: NodeRecord) -> None:
        """Raise AccessDenied unless the node answers at the Flight URI that it announces.

        The catalog calls nodes to commit, and to read for clients that know only Flight.
        """
        try:
            with Peer(node.flight, self._security, _REACH_TIMEOUT) as peer:
                if peer.stage().node == node.id:
                    return
            reason = f"another server answers the catalog at {node.flight}, which this node announces"
        except (CatalogUnreachable, DeadlineExceeded):
            reason = f"the catalog gets no answer at {node.flight}, which this node announces"
        except DissociatedError as error:
            reason = f"the catalog is refused at {node.flight}, which this node announces: {error}"
        raise AccessDenied(
            f"{reason}. Let the Flight server of the node listen at an address that the catalog's host reaches, such "
            "as grpc://0.0.0.0:PORT, open that port, and advertise a name of the node's host that the catalog's host "
            "can resolve"
        )

    def find_duplicate(self, node: NodeRecord) -> NodeRecord | None:
        """Return another node that is alive and has the same id at a different address, or None.

        Such nodes have copies of one store, but only one of them holds a newly written version.
        """
        for candidate in self._database.nodes():
            if candidate.id == node.id and candidate.alive and candidate.flight != node.flight:
                with suppress(DissociatedError), Peer(candidate.flight, self._security, _ANSWER_TIMEOUT) as peer:
                    if peer.stage().node == node.id:
                        return candidate
        return None

    def open(self, name: str, part: Part, ticket: bytes) -> pa.RecordBatchReader:
        """Return the stream of a part, read by Flight from the first node that is alive and has it.

        Every batch is validated in full.

        Args:
            name: The name of the dataset, for messages.
            part: The part.
            ticket: The ticket of the part, perhaps with a selection.

        Raises:
            DatasetNotFound: This node has removed the part, which is not recorded yet.
            NodeUnreachable: No node with the part is alive.
            CatalogError: Its node has set the part aside.
        """
        for node in part.nodes:
            if node.alive and node.id != self._own.id:
                return self._open_on(node, ticket)
        if part.nodes and not part.set_aside and all(node.id == self._own.id for node in part.nodes):
            raise DatasetNotFound(
                f"a part of {name!r} is gone: it may have been replaced, dropped or evicted; look it up again"
            )
        hosts = [node.host for node in part.nodes]
        raise unavailable(name, hosts, max((node.seen for node in part.nodes), default=0.0), part.set_aside)

    def _open_on(self, node: NodeRecord, ticket: bytes) -> pa.RecordBatchReader:
        reader = self._get(node.flight, ticket)
        validator = Validator(reader.schema)

        def pairs() -> Iterator[BatchAndMetadata]:
            for batch, metadata in batches(reader):
                # The other process may have sent an invalid batch, on which libarrow would abort this process.
                yield validator.check(batch, full=True), metadata

        return BatchReader(reader.schema, pairs())

    def _get(self, uri: str, ticket: bytes) -> pa.RecordBatchReader:
        """Request a stream from a node, over the connection of the last read if that still works."""
        peer = self._peers.get(uri)
        if peer is not None:
            with suppress(CatalogUnreachable, AccessDenied):  # the latter if certificates were exchanged
                return peer.get(ticket)
        peer = self._peers[uri] = Peer(uri, self._security)
        while len(self._peers) > _MAX_PEERS:
            with suppress(KeyError, RuntimeError):  # another thread may do the same
                del self._peers[next(iter(self._peers))]
        return peer.get(ticket)

    def prepare(self, node: NodeRecord, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have a node make segments ready to be published. Return its answer: see `Catalog.prepare`."""
        with self._call(node) as peer:
            return peer.do_action("prepare", body)

    def discard(self, node: NodeRecord, names: Sequence[str]) -> None:
        """Remove segments from the stage of a node, which has to answer soon: a commit is locked meanwhile."""
        with Peer(node.flight, self._security, _ANSWER_TIMEOUT) as peer:
            peer.discard(names)

    def stage(self, caller: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stage of a node: see `Catalog.stage`. Raise CatalogError if no node is alive."""
        node = self._nearest(caller)
        with self._call(node) as peer:
            return {**peer.do_action("stage", dict(caller)), "flight": node.flight}

    def put(
        self,
        command: Mapping[str, Any],
        schema: pa.Schema,
        pairs: Iterator[BatchAndMetadata],
        commit: Callable[[StagedSegment], None],
    ) -> dict[str, Any]:
        """Have a node write a stream from a Flight client, and commit the result.

        Args:
            command: The command of the client.
            schema: The schema of the stream.
            pairs: The batches of the stream with their metadata.
            commit: A function that publishes the segment that the node wrote. If it raises, the node discards the
                segment.

        Returns:
            The answer of the node.

        Raises:
            CatalogError: No node is alive.
        """
        node = self._nearest({})
        descriptor = flight.FlightDescriptor.for_command(json.dumps({**command, "staged": True, "end": True}))
        with self._call(node, _Recipient) as peer:
            answer = peer.call_flight(lambda client: upload(client, descriptor, schema, pairs))
            try:
                commit(StagedSegment(answer["segment"], node.id))
            except BaseException:
                with suppress(DissociatedError):
                    peer.discard([answer["segment"]])
                raise
        return answer

    @contextmanager
    def _call(self, node: NodeRecord, peer_class: type[Peer] = Peer) -> Iterator[Peer]:
        """Open a client for a node, and raise NodeUnreachable if the node does not answer.

        The caller must not see CatalogUnreachable, which leaves the result of a commit unknown. This catalog decides
        commits itself, so a silent node only means that nothing was published.
        """
        with peer_class(node.flight, self._security) as peer:
            try:
                if not node.alive:  # The process may be stopped, and a commit must not wait for a minute.
                    with Peer(node.flight, self._security, _ANSWER_TIMEOUT) as probe:
                        probe.stage()
                yield peer
            except (CatalogUnreachable, DeadlineExceeded) as error:
                _log.warning("a node does not answer: host=%s flight=%s error=%s", node.host, node.flight, error)
                raise NodeUnreachable(
                    f"the node on {node.host} does not answer the catalog at {node.flight}: start the node, and open "
                    "that port"
                ) from error

    def _nearest(self, caller: Mapping[str, Any]) -> NodeRecord:
        """Return a node that is alive, preferably on the caller's host. Raise CatalogError if there is none."""
        nodes = [node for node in self._database.nodes() if node.alive and node.flight != self._own.flight]
        for node in nodes:
            if node.boot_id == caller.get("boot_id"):
                return node
        if nodes:
            return nodes[0]
        away = [node for node in self._database.nodes() if node.flight != self._own.flight]
        if away:
            hosts = ", ".join(sorted({node.host for node in away}))
            last = utc(max(node.seen for node in away))
            raise CatalogError(f"no node of this catalog is alive: start that on {hosts} again (last heard {last})")
        raise CatalogError("no node has registered at this catalog: start one, dissociated node --catalog URI")

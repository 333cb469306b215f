"""The nodes that belong to a catalog, and how catalogs and nodes call each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.access import Security
from dissociated.catalog.database import Database
from dissociated.client.calls import CatalogClient
from dissociated.codec.batches import BatchReader
from dissociated.codec.split import BatchAndMetadata, batches
from dissociated.codec.validation import Validator
from dissociated.control.flight_streams import upload
from dissociated.control.records import NodeRecord, ReplicatedPart
from dissociated.errors import CatalogError, CatalogUnreachable, DeadlineExceeded, DissociatedError

T = TypeVar("T")

PEER_TIMEOUT = 60.0  # seconds, for a peer to answer
_ANSWER_TIMEOUT = 2.0  # seconds, for a node that is there to say so


class Peer(CatalogClient):
    """Another catalog, or a node of this one, as a catalog speaks with it.

    Calls the catalog at `uri`, which answers within `timeout` seconds, proving itself as `security` says.
    """

    def __init__(self, uri: str, security: Security, timeout: float = PEER_TIMEOUT) -> None:
        unlimited = sys.maxsize  # what is relayed, whoever reads it limits
        super().__init__(uri, timeout, security.peer, security.roots, max_metadata=unlimited)

    def forward(self, call: Callable[[flight.FlightClient], T]) -> T:
        """What that one answers."""
        return self._calls.call(call)

    def forward_action(self, action: str, body: bytes) -> bytes:
        """The answer to an action whose body is not JSON."""
        (result,) = self.forward(lambda client: [*client.do_action(flight.Action(action, body))])
        return bytes(result.body.to_pybytes())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Members:
    """The nodes that have registered in `database`. `own` is the process of the catalog itself, which is not called.

    What a node raises comes out of each call; CatalogError where it does not answer. Safe to use from many threads.
    """

    def __init__(self, database: Database, own: NodeRecord, security: Security) -> None:
        self._database = database
        self._own = own
        self._security = security

    def find(self, ids: Iterable[str]) -> dict[str, NodeRecord]:
        """The nodes with these ids. Raises CatalogError for one that has not registered."""
        known = {node.id: node for node in self._database.nodes()}
        for id in ids:
            if id not in known:
                raise CatalogError(f"no node {id!r} has registered at this catalog")
        return known

    def twin(self, node: NodeRecord) -> NodeRecord | None:
        """Another node with the same id, which lives and answers elsewhere. What one holds, the other does not."""
        for known in self._database.nodes():
            if known.id == node.id and known.alive and known.flight != node.flight:
                with suppress(DissociatedError), Peer(known.flight, self._security, _ANSWER_TIMEOUT) as peer:
                    if peer.stage().node == node.id:
                        return known
        return None

    def open(self, name: str, part: ReplicatedPart, ticket: bytes) -> pa.RecordBatchReader:
        """The stream of `ticket`, a part of the dataset `name`, by Flight from the first node that has it and lives.

        Every batch is validated in full. Raises CatalogError where no such node lives.
        """
        for node in part.nodes:
            if node.alive and node.id != self._own.id:
                return self._open_on(node, ticket)
        silent = ", ".join(node.host for node in part.nodes)
        raise CatalogError(f"a part of {name!r} is on {silent}, which says nothing any more: is its node running?")

    def _open_on(self, node: NodeRecord, ticket: bytes) -> pa.RecordBatchReader:
        peer = Peer(node.flight, self._security)
        reader = peer.do_get(ticket)
        validator = Validator(reader.schema)

        def pairs() -> Iterator[BatchAndMetadata]:
            with peer:
                for batch, metadata in batches(reader):
                    # It may be another's mistake, and would end this process.
                    yield validator.check(batch, full=True), metadata

        return BatchReader(reader.schema, pairs())

    def prepare(self, node: NodeRecord, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have a node make segments ready to be published. Returns its part: see `Catalog.prepare`."""
        with self._call(node) as peer:
            return peer.do_action("prepare", body)

    def stage(self, caller: Mapping[str, Any]) -> dict[str, Any]:
        """The stage of a node: see `Catalog.stage`. Raises CatalogError where there is no node."""
        with self._call(self._nearest(caller)) as peer:
            return peer.do_action("stage", dict(caller))

    def put(
        self,
        command: Mapping[str, Any],
        schema: pa.Schema,
        pairs: Iterator[BatchAndMetadata],
        commit: Callable[[Mapping[str, str]], None],
    ) -> dict[str, Any]:
        """Have a node write a stream that a Flight client sends, and `commit` what it wrote: node and segment.

        Returns what the node answers. Where `commit` raises, the node discards the segment. Raises CatalogError where
        there is no node.
        """
        node = self._nearest({})
        descriptor = flight.FlightDescriptor.for_command(json.dumps({**command, "staged": True, "end": True}))
        with self._call(node) as peer:
            answer = peer.forward(lambda client: upload(client, descriptor, schema, pairs))
            try:
                commit({"node": node.id, "segment": answer["segment"]})
            except BaseException:
                with suppress(DissociatedError):
                    peer.discard([answer["segment"]])
                raise
        return answer

    @contextmanager
    def _call(self, node: NodeRecord) -> Iterator[Peer]:
        """Whether something is published this catalog knows, whatever a node has not answered: that is no more than
        another reason why it is not."""
        with Peer(node.flight, self._security) as peer:
            try:
                yield peer
            except (CatalogUnreachable, DeadlineExceeded) as error:
                raise CatalogError(str(error)) from error

    def _nearest(self, caller: Mapping[str, Any]) -> NodeRecord:
        """A node that lives: one on the caller's host if there is one."""
        nodes = [node for node in self._database.nodes() if node.alive and node.flight != self._own.flight]
        for node in nodes:
            if node.boot_id == caller.get("boot_id"):
                return node
        if not nodes:
            raise CatalogError("no node has registered at this catalog: start one, dissociated node --catalog URI")
        return nodes[0]

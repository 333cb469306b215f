"""The catalog of a node: it forwards requests to the catalog that the node belongs to, its upstream.

It reports the versions that this process holds to the upstream. The replies say which of them are published and which
can be deleted.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.display import plural
from dissociated.base.locks import held_within
from dissociated.catalog.backend import Prepared
from dissociated.catalog.base import Catalog
from dissociated.catalog.holdings import Holdings
from dissociated.catalog.members import CLOCK_TOLERANCE, PEER_TIMEOUT, Peer, describe_clock_skew
from dissociated.control.access import Security
from dissociated.control.commit import Commit
from dissociated.control.descriptors import parse_get
from dissociated.control.messages import parse_app_metadata
from dissociated.control.version import NodeRecord, Version
from dissociated.datasets.base import Dataset
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    DeadlineExceeded,
    DissociatedError,
    StoreError,
    StoreFull,
)
from dissociated.monitoring.status import NodeStatus, ServerStatus
from dissociated.protocol.request import Request

_log = logging.getLogger(__name__)

#: The default number of seconds between two heartbeats.
HEARTBEAT_INTERVAL = 5.0
_MAX_MISSED = 3  # heartbeats that a node may miss before its upstream considers it away
_LEAVE_TIMEOUT = 5.0  # seconds: an upstream that does not answer must not hold up the end of this process
_TIMEOUT_PER_VERSION = 0.01  # seconds that each reported version adds to the timeout


class UpstreamCatalog(Catalog):
    """A catalog that belongs to the catalog at `upstream` and sends it a heartbeat every `heartbeat_interval` seconds.

    If the first report fails, because the upstream does not answer or a version cannot be deleted, the next one tries
    again.

    Raises:
        AccessDenied: The upstream refuses this node.
    """

    def __init__(
        self, node: NodeRecord, holdings: Holdings, security: Security, upstream: str, heartbeat_interval: float
    ) -> None:
        super().__init__(node, holdings, security)
        self.reconcile_interval = heartbeat_interval  # reconciling sends the heartbeat
        self._upstream = Peer(upstream, security)
        self._report_lock = threading.RLock()  # keeps reports in the order of the changes
        self._digest = ""
        self._reported_changes: int | None = None  # the number of changes to the store at the last report
        self._problem = ""  # the reason why the last report failed
        self._unlisted_ids: set[str] = set()  # of published versions that the upstream neither lists nor deletes
        self._incarnation = secrets.token_hex(8)  # random for each process, since its count of changes starts at 0
        self._replaced_ids: set[str] = set()  # of versions that the upstream is known to have replaced
        self._backend.announce_evictions(self._announcing, lambda version: version.id not in self._replaced_ids)

    # Listing

    def infos(self, criteria: bytes) -> Iterator[flight.FlightInfo]:
        yield from self._upstream.call_flight(lambda client: [*client.list_flights(criteria)])

    def info(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        parse_get(descriptor)
        return _without_counter(self._upstream.call_flight(lambda client: client.get_flight_info(descriptor)))

    def schema(self, descriptor: flight.FlightDescriptor) -> pa.Schema:
        parse_get(descriptor)
        return self._upstream.call_flight(lambda client: client.get_schema(descriptor)).schema

    def current(self, names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
        return self._upstream.current(names)

    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        versions = self._upstream.versions(name)
        return [{**version, "created": version["created"].timestamp()} for version in versions]

    def nodes(self) -> Sequence[dict[str, Any]]:
        return self._upstream.nodes()

    def forget(self, node: str) -> None:
        self._upstream.forget(node)

    def renew(self, request: bytes) -> bytes:
        return self._upstream.forward_action("RenewFlightEndpoint", request)

    def _open_remote(self, identifier: bytes, ticket: bytes) -> pa.RecordBatchReader:
        return self._upstream.get(ticket)

    # Publishing

    def publish_dataset(self, dataset: Dataset, ttl: float | None = None) -> None:
        raise CatalogError(
            f"this node belongs to the catalog at {self._upstream.uri}, and cannot publish {dataset.name!r} by itself: "
            "put the dataset through that catalog"
        )

    def commit(self, commit: Commit) -> None:
        commit = self._resolved(commit)
        self._upstream.commit(commit)
        self._clean_up(lambda: self.clear_stage([commit.key]))

    def drop(self, name: str) -> None:
        self._upstream.drop(name)
        self._clean_up(self._report_changes)

    def abort(self, key: str) -> None:
        self._upstream.abort(key)
        self._clean_up(lambda: self.clear_stage([key]))

    def committed(self, key: str) -> bool:
        return self._upstream.committed(key)

    def resolved_commits(self, keys: Sequence[str]) -> Sequence[str]:
        resolved: Sequence[str] = self._upstream.do_action("over", {"keys": [*keys]})["over"]
        return resolved

    # Messages of nodes

    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        raise self._not_a_catalog()

    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        raise self._not_a_catalog()

    def deregister(self, node: str, retiring: bool = False, gone_ids: Sequence[str] = ()) -> None:
        raise self._not_a_catalog()

    def _not_a_catalog(self) -> CatalogError:
        return CatalogError(f"this process is a node of the catalog at {self._upstream.uri}: register there")

    # Reports to the upstream

    def join(self) -> None:
        try:
            self._report_changes()
        except AccessDenied:
            raise
        except DissociatedError as error:
            _log.warning("first report failed, it is tried again: node=%s error=%s", self.node.flight, error)

    def _restore(self, version: Version, prepared: Prepared) -> None:
        pass  # The upstream decides whether the version is published.

    def reconcile(self) -> None:
        self._report_changes()
        self.clear_stage()

    def free_space(self, appends_to: str) -> None:
        super().free_space(appends_to)
        if appends_to:
            self._find_replaced(appends_to)

    def _find_replaced(self, name: str) -> None:
        """Ask the upstream which versions in the store have no part in the current version of their dataset.

        The store keeps such a version while its tickets are valid, but need not keep it for an append.
        """
        versions = [
            version for version in self._backend.store.versions() if version.name == name and not version.prepared
        ]
        current = self._upstream.describe(name)
        tickets, now = self._registry.tickets, self._registry.now()
        identifiers = {
            tickets.check(Request.parse(endpoint.ticket).ticket, now).identifier for endpoint in current.endpoints
        }
        # A version with a higher number was published after the answer.
        published = (version for version in versions if 0 < version.number <= current.version)
        replaced_ids = self._replaced_ids | {version.id for version in published if version.ticket not in identifiers}
        self._replaced_ids = {id for id in replaced_ids if self._backend.store.version(id) is not None}

    def _reporting(self) -> AbstractContextManager[None]:
        """Return a context in which no other thread reports. It raises DeadlineExceeded if one goes on for too long."""
        reason = f"the catalog at {self._upstream.uri} has not answered an earlier report for {PEER_TIMEOUT:g} s"
        return held_within(PEER_TIMEOUT, self._report_lock, reason)

    def _report_changes(self) -> None:
        """Report the changes to the upstream, or everything if the upstream does not know the last report."""
        with self._reporting():
            # Read the count first: changes made from now on are reported once more.
            changes = self._backend.store.changes
            changed_parts = self._changed_parts()
            try:
                if changed_parts is None or not self._report(self._upstream, "heartbeat", changes, **changed_parts):
                    self._report_everything(changes)
            except DissociatedError as error:
                self._problem = str(error)
                raise
            self._problem = ""

    @contextmanager
    def _announcing(self, versions: Sequence[Version]) -> Iterator[Sequence[Version]]:
        """Report versions as gone and yield them, to be evicted in the `with` block.

        If the upstream has just had other versions deleted, there may be enough room: then none is reported or yielded.

        The upstream decides the order of evictions and appends: it refuses to append to a version that was reported as
        gone. If it learned of an eviction later, it would first acknowledge an append to that version, and then have
        the new rows deleted, too.

        Raises:
            CatalogUnreachable, DeadlineExceeded: The upstream does not answer.
            StoreFull: The upstream has not confirmed the report.
        """
        store = self._backend.store
        with ExitStack() as reporting:
            try:
                reporting.enter_context(self._reporting())
                before = store.changes
                self._report_changes()
                if any(store.version(id) is None for id in store.changed(before) or ()):
                    versions = ()
                changes, self._reported_changes = self._reported_changes, None  # If this fails, report everything.
                # The reply may just have had parts deleted, which only the next heartbeat reports.
                assert changes is not None
                gone_ids = [version.id for version in versions]
                body: dict[str, Any] = {"node": self.node.id, "since": self._digest, "parts": [], "gone": gone_ids}
                if not self._report(self._upstream, "heartbeat", changes, **body):
                    raise CatalogError(f"the catalog at {self._upstream.uri} has just started again")
            except DissociatedError as error:
                kind = type(error) if isinstance(error, CatalogUnreachable | DeadlineExceeded) else StoreFull
                raise kind(
                    f"the store {str(store.directory)!r} is full, and the datasets that could be evicted "
                    f"stay until the catalog has recorded that: {error}"
                ) from error
            try:
                yield versions
            except BaseException:
                self._reported_changes = None
                raise

    def _report_everything(self, changes: int) -> None:
        """Report everything that this node holds."""
        # The order matters: `versions` must include every version up to `serial`.
        serial, versions = self._backend.store.next_serial(), self._backend.store.versions()
        with Peer(self._upstream.uri, self.security, PEER_TIMEOUT + len(versions) * _TIMEOUT_PER_VERSION) as peer:
            self._report(
                peer,
                "register",
                changes,
                node=asdict(self.node),
                parts=self._reported(versions),
                numbers={name: [*removed] for name, removed in self._backend.store.removals().items()},
                aside=self._backend.store.set_aside_ids,
                serial=serial,
                guarded=self.security.authorize is not None,
                signs=self._registry.tickets.fingerprint(),
            )

    def _report(self, upstream: Peer, action: str, changes: int, **body: Any) -> bool:
        """Send a report, and apply the reply: confirm published versions and delete unreferenced ones.

        The fields of reports and replies are described in `dissociated.catalog.service`.

        Returns:
            False if the upstream does not know the report that this one is based on.
        """
        digest = f"{self._incarnation}:{changes}"
        sent_at = time.time()
        state = {"digest": digest, "lives": _MAX_MISSED * self.reconcile_interval, "now": sent_at}
        reply = upstream.do_action(action, {**body, **state, "unlisted": len(self._unlisted())})
        self._compare_clocks(sent_at, reply.get("now"))
        if not reply.get("known", True):
            return False
        # If the reply cannot be applied, everything is reported again: the upstream repeats the deletion only of parts
        # that it lists itself.
        self._digest, self._reported_changes = digest, None
        known_ids = {*reply.get("wanted", {}), *reply["unwanted"]}
        held_ids = {version["part"]["id"] for version in body["parts"] if not version["prepared"]}
        earlier_ids = set() if action == "register" else self._unlisted_ids
        self._unlisted_ids = (earlier_ids | held_ids) - known_ids
        self._backend.confirm(reply.get("wanted", {}))
        if reply["unwanted"]:
            try:
                self.holdings.delete_parts(reply["unwanted"])
            except StoreError:
                self.holdings.record_dropped(reply["unwanted"])  # in case the upstream loses its database
                raise
        self._reported_changes = changes
        return True

    def _unlisted(self) -> list[Version]:
        """Return the versions in the store that the upstream does not list, and does not want to be deleted.

        Other rows have taken their place after the upstream lost its database, or only that database knew the other
        parts of the dataset.
        """
        versions = (self._backend.store.version(id) for id in sorted(self._unlisted_ids))
        return [version for version in versions if version is not None]

    def _compare_clocks(self, sent_at: float, upstream_time: object) -> None:
        """Judge tickets by the time of the upstream, which signs them.

        Args:
            sent_at: The time of this host when the call was made.
            upstream_time: The time in the upstream's answer to it.
        """
        if not isinstance(upstream_time, int | float):
            return
        # The upstream answered between these two moments, so only a time outside of them shows that the clocks differ.
        offset = upstream_time - min(max(upstream_time, sent_at), time.time())
        changed = abs(offset - self._registry.clock_offset) > CLOCK_TOLERANCE
        self._registry.clock_offset = offset
        if changed and (sentence := describe_clock_skew(-offset)):
            _log.warning(
                "clock differs from the upstream catalog, whose time counts: upstream=%s difference=%r",
                self._upstream.uri,
                sentence,
            )

    def _changed_parts(self) -> dict[str, Any] | None:
        """Return the changes for a heartbeat, or None if everything must be reported."""
        changed_ids = None if self._reported_changes is None else self._backend.store.changed(self._reported_changes)
        if changed_ids is None:
            return None
        versions = {id: self._backend.store.version(id) for id in changed_ids}
        # Repeat unconfirmed versions until the upstream knows whether they are published.
        versions |= {version.id: version for version in self._backend.store.prepared()}
        held_versions = [version for version in versions.values() if version is not None]
        return {
            "node": self.node.id,
            "since": self._digest,
            "parts": self._reported(held_versions),
            "gone": [id for id, version in versions.items() if version is None],
        }

    def _reported(self, versions: Iterable[Version]) -> list[dict[str, Any]]:
        return [version.to_json() for version in self.holdings.describe_versions(versions)]

    def close(self) -> None:
        try:
            # The upstream must not append to memfds, which end with this process.
            body = {"node": self.node.id, "retiring": self.retiring, "gone": self._backend.store.ids_in_memfds()}
            with Peer(self._upstream.uri, self.security, _LEAVE_TIMEOUT) as peer:
                peer.do_action("leave", body)
        except DissociatedError as error:
            _log.info("deregistration failed: node=%s error=%s", self.node.flight, error)
        self._upstream.close()

    def _version_number(self, part: str) -> int | None:
        return None  # Only the upstream knows numbers.

    def _on_parts_deleted(self, parts: Sequence[str]) -> None:
        pass  # Evictions were announced. The next heartbeat reports other deletions.

    def node_status(self) -> Sequence[NodeStatus]:
        return []

    def status(self) -> ServerStatus:
        status = super().status()
        if status.store is not None:
            unlisted = []
            for version in self._unlisted():
                with suppress(StoreError):  # It was removed in the meantime.
                    unlisted.append(
                        f"{str(self._backend.store.location(version))!r} is set aside: it is version {version.number} "
                        f"of {version.name!r} ({plural(version.rows or 0, 'row')}), which the catalog does not list"
                    )
            status = replace(status, store=replace(status.store, set_aside=(*status.store.set_aside, *unlisted)))
        return replace(status, problem=self._problem)


def _without_counter(info: flight.FlightInfo) -> flight.FlightInfo:
    """Return a description without the place of the upstream's counter, which cannot show that this node has ended."""
    metadata = parse_app_metadata(info.app_metadata, {})
    if metadata.pop("counter", None) is None:
        return info
    return flight.FlightInfo(
        info.schema,
        info.descriptor,
        info.endpoints,
        info.total_records,
        info.total_bytes,
        ordered=info.ordered,
        app_metadata=json.dumps(metadata),
    )

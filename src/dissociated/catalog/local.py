"""The catalog that keeps its own database of datasets, and of the nodes that hold their parts."""

from __future__ import annotations

import base64
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base.display import advise_name
from dissociated.base.interrupts import interrupts_held
from dissociated.base.limited_log import LimitedLog
from dissociated.catalog.backend import Prepared
from dissociated.catalog.base import Catalog
from dissociated.catalog.database import Database
from dissociated.catalog.holdings import Holdings
from dissociated.catalog.listing import Answers, Listing, earliest_expiry
from dissociated.catalog.members import Members
from dissociated.catalog.versions import FOREVER
from dissociated.codec import schemas
from dissociated.codec.split import BatchAndMetadata
from dissociated.control.access import Security
from dissociated.control.commit import Commit
from dissociated.control.descriptors import first_field, parse_criteria, parse_get
from dissociated.control.locations import unavailable
from dissociated.control.version import NodeRecord, Part, Version
from dissociated.datasets.base import Dataset
from dissociated.errors import AccessDenied, CatalogDamaged, CatalogError, DatasetNotFound, StoreError
from dissociated.monitoring.status import DatasetStatus, NodeStatus, ServerStatus
from dissociated.protocol.request import Request
from dissociated.store.keys import CommitKey
from dissociated.store.numbers import Removal

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_COMPARED = 1000  # names that an unknown name is compared with


class Locks:
    """A lock for each key of a commit, and for each name of a dataset. A thread takes that of the key first.

    So a repeated commit and an abort wait for the commit in progress, and the versions of a dataset are published in
    the order of their numbers. Commits of other datasets do not wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[tuple[str, str], threading.Lock] = WeakValueDictionary()

    def of_key(self, key: str) -> threading.Lock:
        """Return the lock of the commits with this key."""
        return self._get(("key", key))

    def of_name(self, name: str) -> threading.Lock:
        """Return the lock of the dataset `name`."""
        return self._get(("name", name))

    def _get(self, key: tuple[str, str]) -> threading.Lock:
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())


class LocalCatalog(Catalog):
    """A catalog whose state is in `database`, which it owns.

    Args:
        retain: The number of seconds for which an issued ticket stays valid after its version was replaced.
    """

    def __init__(
        self, node: NodeRecord, holdings: Holdings, security: Security, database: Database, retain: float = 0.0
    ) -> None:
        super().__init__(node, holdings, security)
        self.retain = retain
        self._database = database
        self._database.on_change = holdings.activity.changes.add
        self._locks = Locks()
        self._confirming = threading.Lock()  # an answer that is late would make a part of a version a whole one
        self._latest: dict[str, Version] = {}  # the latest version of each name, while `start` reads the store
        # A token can be withdrawn, and a signed ticket expires, so their clients must ask the catalog for each read.
        is_open = security.authorize is None and not self._registry.tickets.fingerprint()
        self._listing = Listing(holdings, database.counter.place if is_open else None)
        self._answers = Answers(retain)
        self._members = Members(database, node, security)
        self._promise_log = LimitedLog(_log)
        if self._backend.has_stage:
            set_aside = self._backend.store.set_aside_ids
            self._database.register(node, [], "", FOREVER, serial=-1, set_aside=set_aside)

    # Listing

    def infos(self, criteria: bytes) -> Iterator[flight.FlightInfo]:
        query = parse_criteria(criteria)
        tags = {str(key): str(value) for key, value in dict(query.get("tags") or {}).items()}
        for record in self._database.datasets(str(query.get("prefix") or ""), tags):
            local = self._registry.lookup(record.parts[0].ticket) if record.parts else None
            if local is None or not local.exhausted:
                yield self._listing.info(record, query)

    def info(self, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        key, changes = bytes(descriptor.serialize()), self._database.changes
        answer = self._answers.get(key, changes)
        if answer is not None:
            if answer.is_embedded:
                self.holdings.activity.flight()
            return answer.info
        command = parse_get(descriptor)
        # The answer may be repeated for `max_age`, and its tickets must then still be valid for `retain`.
        record, expires = self._promised(lambda retain: self._find(command, retain), self._answers.max_age)
        name_only = descriptor.descriptor_type == flight.DescriptorType.CMD and len(command) == 1
        reference = self._listing.reference_info(record, descriptor) if name_only else None
        if reference is not None:
            return reference
        info = self._listing.info(record, command, expires)
        if self._is_lasting(record):
            self._answers.put(key, changes, record, info)
        return info

    def _is_lasting(self, version: Version) -> bool:
        """Return whether a description holds until the database changes: neither tickets nor addresses expire."""
        parts = [part for part in (self._registry.lookup(part.ticket) for part in version.parts) if part is not None]
        return not self._registry.tickets.fingerprint() and all(part.stored and not part.exposed for part in parts)

    def schema(self, descriptor: flight.FlightDescriptor) -> pa.Schema:
        return schemas.deserialize(self._find(parse_get(descriptor)).schema)

    def _find(self, command: Mapping[str, Any], retain: float = 0.0) -> Version:
        """Return the version that a parsed descriptor selects. Raise DatasetNotFound if it does not exist."""
        name, version = command["name"], command.get("version")
        with self._advising(name, version):
            return self._database.find(name, version, retain)

    def _promised(self, find: Callable[[float], T], extra: float = 0.0) -> tuple[T, float | None]:
        """Find a version whose tickets are to stay valid for `retain` seconds, and `extra` more.

        Args:
            find: Returns the version. Its argument is the lifetime to record, which is 0 if none is guaranteed.
            extra: The seconds to add to the lifetime.

        Returns:
            The result of `find`, and the earliest end of a ticket issued now; None if no lifetime is guaranteed, or it
            cannot be recorded, for example on a full disk.
        """
        expires = time.time() + self.retain
        if self.retain:
            try:
                return find(self.retain + extra), expires
            except (DatasetNotFound, CatalogDamaged):
                raise
            except CatalogError as error:
                self._promise_log.write(
                    logging.WARNING,
                    "recording the lifetime of a ticket failed, none is guaranteed: error=%s",
                    error,
                    event="promise",
                )
        return find(0.0), None

    @contextmanager
    def _advising(self, name: str, version: int | None = None) -> Iterator[None]:
        """Add advice to DatasetNotFound."""
        try:
            yield
        except DatasetNotFound as error:
            if version is None:
                names = self._database.names(_MAX_COMPARED)
                advice = advise_name(name, names, "client.list() or dissociated ls")
            else:
                advice = "list those that are kept with client.versions(name) or dissociated versions"
            raise DatasetNotFound(f"{error}: {advice}") from None

    def current(self, names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
        return self._database.current(names)

    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        return [
            {"version": version.number, "created": version.created, "rows": version.rows, "current": version.current}
            for version in self._database.versions(name)
        ]

    def nodes(self) -> Sequence[dict[str, Any]]:
        registered = [
            {**asdict(node), "registered": True, "problem": self._problem_of(node)} for node in self._database.nodes()
        ]
        refused = [
            {**asdict(replace(node, alive=False, seen=at)), "registered": False, "problem": reason}
            for node, reason, at in self._members.refusals()
        ]
        return [*registered, *refused]

    def _problem_of(self, node: NodeRecord) -> str:
        """Return sentences about a registered node; empty if all is well, or the node is away."""
        return self._members.problem(node.id) if node.alive else ""

    def forget(self, node: str) -> None:
        records = [*self._database.nodes(), *(refusal.node for refusal in self._members.refusals())]
        ids = {record.id for record in records if node in (record.id, record.host, record.flight)} - {self.node.id}
        if len(ids) != 1:
            hint = f"these have the ids {', '.join(sorted(ids))}: name one of them" if ids else "see the status"
            raise CatalogError(f"{len(ids) or 'no'} nodes of this catalog are called {node!r}; {hint}")
        (id,) = ids
        if id in {record.id for record in self._database.nodes()}:
            self._database.forget(id)
        self._members.forget(id)

    def renew(self, request: bytes) -> bytes:
        endpoint = flight.FlightEndpoint.deserialize(first_field(request))
        if not self.retain and not self._registry.tickets.fingerprint():
            raise CatalogError(
                "this catalog guarantees no lifetime of tickets, so none can be renewed: look the dataset up again"
            )
        ticket = Request.parse(endpoint.ticket.ticket).ticket
        identifier, columns = self._registry.tickets.check(ticket, self._registry.now())
        (record, part), expires = self._promised(lambda retain: self._database.find_by_ticket(identifier, retain))
        renewed = self._listing.endpoint(part, {}, earliest_expiry(expires, record.expires), columns)
        return bytes(renewed.serialize())

    def _open_remote(self, identifier: bytes, ticket: bytes) -> pa.RecordBatchReader:
        record, part = self._database.find_by_ticket(identifier)
        reader = self._members.open(record.name, part, ticket)
        self.holdings.activity.flight()
        return reader

    # Publishing

    def publish_dataset(self, dataset: Dataset, ttl: float | None = None) -> None:
        part = Part(secrets.token_hex(8), self.node.id, dataset.ticket, dataset.rows, dataset.nbytes)
        commit = Commit(dataset.name, key=part.id, ttl=ttl)
        with self._locks.of_name(dataset.name):
            with interrupts_held():
                old = self._registry.find_name(dataset.name)
                try:
                    self._registry.publish(dataset)  # first, so that every ticket in the catalog works
                    self._registry.assign_part(part.id, dataset)
                    self._database.publish(commit, schemas.serialize(dataset.schema), [part])
                except BaseException:
                    self._registry.withdraw_parts([part.id])
                    self._registry.withdraw(dataset)
                    self._registry.restore(old)
                    raise
            # With the lock, because the next dataset of the name may have the ticket of the old one.
            self._clean_up(self._delete_unreferenced)

    def drop(self, name: str) -> None:
        # A new database publishes every version in the store that is not recorded as dropped. So delete or record the
        # versions before the drop is reported.
        with self._advising(name), self._locks.of_name(name):
            stored = [version.id for version in self._backend.store.named(name)]
            if self._database.is_durable:
                self._database.drop(name)
                try:
                    self.holdings.delete_parts(stored)
                except StoreError:
                    self._record_dropped(name, stored)
            else:
                self._database.find(name)
                try:
                    self.holdings.delete_parts(stored)
                except BaseException:
                    self._record_deletions(stored)
                    raise
                self._database.drop(name)
        self._clean_up(self._delete_unreferenced)

    def _record_dropped(self, name: str, parts: Sequence[str]) -> None:
        """Record parts of a dropped dataset that cannot be deleted. Raise StoreError if that fails, too."""
        try:
            self.holdings.record_dropped(parts)
        except StoreError as error:
            raise StoreError(
                f"{name!r} is dropped, but a catalog that lost its database would list it again: {error}; the catalog "
                "tries again to remove its segments"
            ) from None

    def abort(self, key: str) -> None:
        with self._locks.of_key(key):
            self._database.abort(key)
            if not self.committed(key):
                self._record_keys(CommitKey(key, time.time()))
        self._clean_up(self._delete_unreferenced, lambda: self.clear_stage([key]))

    def committed(self, key: str) -> bool:
        return self._database.committed(key) is not None

    def resolved_commits(self, keys: Sequence[str]) -> Sequence[str]:
        return self._database.resolved_commits(keys)

    def commit(self, commit: Commit) -> None:
        commit = self._resolved(commit)
        # Other nodes may take long to prepare their parts. Meanwhile, only these two locks are held.
        with self._locks.of_key(commit.key), self._locks.of_name(commit.name):
            if self._database.find_commit(commit.name, commit.key) is not None:
                repeated = commit.by_node()
                self._clean_up(*(partial(self._discard_on, id, own.segment_names) for id, own in repeated.items()))
                return
            if commit.exists is not None:
                self._check_exists(commit.name, commit.exists)
            current = self._find_current(commit.name) if commit.append else None
            if current is not None:
                self._check_held(current)
            # `next_version` raises if the dataset was lost, even after `_find_current`.
            number = self._database.next_version(commit.name, commit.append)
            commit = replace(commit, number=number, catalog=self._database.id)
            by_node = commit.by_node()
            dataset = None if current is None else self._find_held(current)
            new_lineage = current is not None and self._database.is_overtaken(commit.name)
            if [*by_node] == [self.node.id] and (current is None or dataset is not None):
                self._commit_local(by_node[self.node.id], current, dataset, new_lineage)
            else:
                self._commit_distributed(commit, by_node, 0 if current is None else current.number)
        self._clean_up(self._delete_unreferenced, lambda: self.clear_stage([commit.key]))

    def _discard_on(self, node: str, names: Sequence[str]) -> None:
        """Remove segments from the stage of a node."""
        if node == self.node.id:
            self.discard(names)
        elif names:
            self._members.discard(self._members.find([node])[node], names)

    def _find_current(self, name: str) -> Version | None:
        """Return the current version of a dataset, or None if the dataset does not exist."""
        with suppress(DatasetNotFound):
            return self._database.find(name)
        return None

    def _check_exists(self, name: str, exists: bool) -> None:
        """Raise CatalogError unless a dataset exists, or does not exist, as the condition of a commit says."""
        if exists and self._find_current(name) is None:
            raise DatasetNotFound(f"{name!r} does not exist any more, so nothing was replaced: create it")
        if not exists and self._find_current(name) is not None:
            raise CatalogError(f"{name!r} has been created meanwhile, so nothing was written: drop it, or replace it")

    def _check_held(self, version: Version) -> None:
        """Raise CatalogError if a part is set aside, or if this process alone had it, and its store lacks it."""
        for part in version.parts:
            if part.set_aside:
                hosts = [node.host for node in part.nodes]
                reason = unavailable(version.name, hosts, 0.0, set_aside=True)
                raise CatalogError(f"{version.name!r} cannot be appended to: {reason}")
            is_own = all(node.id == self.node.id for node in part.nodes)
            if is_own and self._registry.lookup(part.ticket) is None:
                raise CatalogError(
                    f"{version.name!r} cannot be appended to: rows of version {version.number} are no longer in the "
                    "store; put all rows again, with the mode overwrite"
                )

    def _find_held(self, version: Version) -> Dataset | None:
        """Return the dataset of a version of which this process serves the only part, or None.

        The store may know that the part is not the whole of a later version, which a restored database lacks.
        """
        if len(version.parts) != 1:
            return None
        stored = self._backend.store.version(version.part.id)
        return self._registry.lookup(version.part.ticket) if stored is None or stored.whole else None

    def _commit_local(
        self, commit: Commit, current: Version | None, dataset: Dataset | None, new_lineage: bool
    ) -> None:
        """Publish a commit as one part of this node.

        Args:
            commit: The commit.
            current: The version that the commit appends to; None if it replaces the dataset, or is its first version.
            dataset: The dataset of that version.
            new_lineage: Whether an append begins a new lineage.
        """
        before: list[str] = []
        if current is not None:  # An append must keep all rows of the current version.
            before = [commit.key if new_lineage else current.lineage_id]
            tags, ttl = current.merged_options(commit.tags, commit.ttl)
            commit = replace(commit, tags=tags, ttl=ttl)
        prepared = self._backend.prepare(commit, dataset, new_lineage=new_lineage)
        old = self._registry.find_name(commit.name)
        self._registry.serve(prepared.id, prepared.dataset, named=True)
        try:
            stored = self._backend.store.version(prepared.id)
            created = None if stored is None else stored.created  # A restart takes the time from the store as well.
            schema = schemas.serialize(prepared.dataset.schema)
            part, base = self.holdings.describe_part(prepared), 0 if current is None else current.number
            self._database.publish(commit, schema, [part], created, before, base)
        except BaseException:
            # Remove the version from the store if it was not published, since a restart would publish it.
            if self._database.version_of(prepared.id) is None:
                self._registry.withdraw_parts([prepared.id])
                self._registry.restore(old)
                self._backend.refuse(prepared.id)
            raise
        if stored is not None:
            key = CommitKey(commit.key, stored.created, commit.name)
            self._clean_up(lambda: self._record_keys(key))
            self._backend.store.record_published(stored)

    def _record_keys(self, *keys: CommitKey) -> None:
        """Record keys in the store, unless the database outlives this process. Raises StoreError."""
        if not self._database.is_durable:
            self._backend.store.record_keys(keys)

    def _commit_distributed(self, commit: Commit, by_node: Mapping[str, Commit], base: int) -> None:
        """Have each node prepare its part, and publish all parts in one transaction of the database.

        An append extends the version with the number `base`; 0 if the dataset does not exist.
        """
        nodes = self._members.find(by_node)
        parts = []
        encoded_schemas = set()
        for number, (node, own) in enumerate(by_node.items()):
            body = own.to_json()
            prepared = self.prepare(body) if node == self.node.id else self._members.prepare(nodes[node], body)
            parts.append(replace(Part.parse(prepared["part"]), number=number))
            encoded_schemas.add(base64.b64decode(prepared["schema"]))
        if len(encoded_schemas) > 1:
            raise CatalogError(f"the segments of {commit.name!r} have different schemas: write all with one schema")
        if self.node.id not in by_node:  # Otherwise the manifest of this node's own part has the number.
            self._use_number(commit)
        self._database.publish(commit, encoded_schemas.pop(), parts, base=base)
        self._clean_up(self._confirm)

    def _use_number(self, commit: Commit) -> None:
        """Record the number of a commit in the store. Errors are raised only if no database has it after a restart."""
        try:
            self._backend.store.use_number(commit.name, commit.number)
        except StoreError as error:
            if not self._database.is_durable:
                raise
            _log.warning("a number has no second record in the store: error=%s", error)

    def _confirm(self) -> None:
        """Tell the store which of its prepared versions are published."""
        with self._confirming:
            unconfirmed = [version.id for version in self._backend.store.prepared()]
            published = self._database.referenced_parts(self.node.id, unconfirmed)
            self._backend.confirm(published)
            self._database.acknowledge_parts(published)

    def _write_put(
        self, commit: Commit, command: Mapping[str, Any], pairs: Iterator[BatchAndMetadata]
    ) -> dict[str, Any]:
        if self._backend.has_stage:
            return super()._write_put(commit, command, pairs)
        return self._members.put(
            command, commit.schema, pairs, lambda segment: self.commit(replace(commit, segments=[segment]))
        )

    def stage(self, caller: Mapping[str, Any]) -> dict[str, Any]:
        return super().stage(caller) if self._backend.has_stage else self._members.stage(caller)

    # Messages of nodes

    def register(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node = NodeRecord.parse(body["node"])
        try:
            self._check_admission(node, body)
        except AccessDenied as error:
            self._members.refuse(node, str(error))
            raise
        self._members.admit(node.id)
        announced = self._parse_announced(node.id, body)
        alive_until = time.time() + float(body["lives"])
        removed = {
            str(name): Removal(int(version), bool(lost), int(highest))
            for name, (version, lost, highest) in body.get("numbers", {}).items()
        }
        set_aside = [str(part) for part in body.get("aside", ())]
        self._database.register(
            node, announced, str(body["digest"]), alive_until, int(body["serial"]), removed, set_aside
        )
        return self._node_reply(node.id, announced)

    def _check_admission(self, node: NodeRecord, body: Mapping[str, Any]) -> None:
        """Raise AccessDenied if a node that wants to register differs from this catalog, or cannot be reached."""
        if self.security.authorize is not None and not body.get("guarded"):
            raise AccessDenied(
                "this catalog requires tokens, and the node does not: start the node with authorize, a token file"
            )
        if body.get("signs", "") != self._registry.tickets.fingerprint():
            raise AccessDenied(
                "this catalog and the node do not make the same tickets: start both with the same secret and a "
                "ticket_lifetime (--secret-file, --ticket-lifetime), or both without"
            )
        if (duplicate := self._members.find_duplicate(node)) is not None:
            raise AccessDenied(
                f"the node at {duplicate.flight} on {duplicate.host} has the same id, so one store is a copy of the "
                "other, and each node would remove the versions of the other: start this node with another store"
            )
        self._members.check_reachable(node)

    def _parse_announced(self, node: str, body: Mapping[str, Any]) -> list[Version]:
        """Return the versions in a report. The times of prepared versions, which expire, are the catalog's."""
        self._members.record_unlisted(node, int(body.get("unlisted", 0)))
        clock_skew = self._members.record_time(node, body.get("now"))
        announced = [Version.parse(plain) for plain in body.get("parts", ())]
        return [
            replace(version, created=version.created - clock_skew) if version.prepared else version
            for version in announced
        ]

    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        node, digest = str(body["node"]), str(body["digest"])
        announced = self._parse_announced(node, body)
        is_known = self._database.touch_node(
            node,
            digest,
            time.time() + float(body["lives"]),
            since=str(body.get("since", digest)),
            announced=announced,
            removed=[str(part) for part in body.get("gone", ())],
        )
        return {"known": is_known, **(self._node_reply(node, announced) if is_known else {})}

    def _node_reply(self, node: str, announced: Sequence[Version]) -> dict[str, Any]:
        """Return the state of announced versions: the published ones, and the parts to delete."""
        return {
            "now": time.time(),
            "wanted": self._database.referenced_parts(node, [version.id for version in announced]),
            "unwanted": self._database.unreferenced_parts(node, announced),
        }

    def deregister(self, node: str, retiring: bool = False, gone_ids: Sequence[str] = ()) -> None:
        if self._database.deregister(node, retiring, gone_ids):
            self._members.forget(node)

    # Start, reconciliation and end

    def join(self) -> None: ...

    def start(self) -> None:
        self._database.record_removed(self._backend.store.removals(), self._backend.store.versions())
        self._latest = {
            version.name: version
            for version in self._backend.store.versions()
            if version.whole and not version.prepared
        }
        super().start()
        self._latest.clear()
        if not self._database.is_durable:
            self._clean_up(self._record_keys_in_manifests)
            self._database.remember(self._backend.store.commit_keys())
        self._clean_up(self._delete_unreferenced)

    def _record_keys_in_manifests(self) -> None:
        """Record the keys of published versions: a killed process may not have done so. Complete both directories.

        A key that is missing may also be one that was left out because there were too many. Only the key of the last
        commit of a version has a time that tells which of the two it is.
        """
        store = self._backend.store
        recorded = store.commit_keys()
        last = max((record.at for record in recorded), default=0.0)
        earlier, own = [], []
        for version in store.versions():
            if version.whole and not version.prepared:
                earlier += [CommitKey(key, version.created, version.name) for key in version.before]
                own.append(CommitKey(version.key, version.created, version.name))
        own.sort(key=lambda record: record.at)
        store.record_keys([record for record in own if record.at > last])
        store.record_keys([*earlier, *own, *recorded], earlier=True)

    def _restore(self, version: Version, prepared: Prepared) -> None:
        if not version.whole or version.prepared:
            self._database.record_removed({version.name: Removal.of(version.number, lost=False, published=False)})
            return
        if any(entry.replaces(version) for entry in self._backend.store.set_aside):
            raise CatalogError("a later version of the dataset is set aside, so this version is not published")
        (described,) = self.holdings.describe_versions([version])
        self._database.learn(described)
        latest = self._latest[version.name]
        if latest.id != version.id and latest.created + self.retain > time.time():
            with suppress(DatasetNotFound):  # Its time to live may be over.
                self._database.find(version.name, retain=self.retain)

    def reconcile(self) -> None:
        self._clean_up(self._confirm, self._delete_unreferenced, self.clear_stage)

    def close(self) -> None:
        self._database.counter.close()
        self._promise_log.close()

    def release(self) -> None:
        super().release()
        self._database.close()

    def _delete_unreferenced(self) -> None:
        """Delete the parts of this node that no version has."""
        announced = self.holdings.describe_versions(self._backend.store.prepared())
        unreferenced = self._database.unreferenced_parts(self.node.id, announced)
        if unreferenced:
            try:
                self.holdings.delete_parts(unreferenced)
            finally:
                self._record_deletions(unreferenced)

    def _record_deletions(self, parts: Sequence[str]) -> None:
        """Delete from the database those parts that are no longer in the store.

        A part that is set aside remains in the database, so that it is deleted when the store can read it.
        """
        store = self._backend.store
        set_aside = store.set_aside_ids
        self._database.delete_parts([part for part in parts if store.version(part) is None and part not in set_aside])

    def _version_number(self, part: str) -> int | None:
        return self._database.version_of(part)

    def _on_parts_deleted(self, parts: Sequence[str]) -> None:
        self._database.delete_parts(parts)

    # Status

    def node_status(self) -> Sequence[NodeStatus]:
        now = time.time()
        nodes = []
        for node in self._database.nodes():
            if node.id != self.node.id:
                clock_skew = self._members.clock_skew(node.id)
                age = max(0.0, now - node.seen)
                problem = self._problem_of(node)
                nodes.append(NodeStatus(node.host, node.flight, node.alive, age, node.id, clock_skew, problem=problem))
        for node, reason, at in self._members.refusals():
            age = max(0.0, now - at)
            nodes.append(NodeStatus(node.host, node.flight, False, age, node.id, registered=False, problem=reason))
        return nodes

    def status(self) -> ServerStatus:
        parts, names = self._database.unreadable()
        status = replace(super().status(), unreadable_parts=parts, unreadable_datasets=names)
        if self._backend.has_stage:
            return status
        datasets = (
            DatasetStatus(version.name, version.rows, version.nbytes, 0, 0, 0, 0, 0)
            for version in self._database.datasets()
        )
        return replace(status, datasets=tuple(datasets))

"""The calls of a catalog's clients."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, ClassVar, Self, TypeVar

import pyarrow.flight as flight

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.display import html
from dissociated.base.host import boot_id
from dissociated.client.endpoints import EndpointReader
from dissociated.client.flight_connection import CatalogConnection, open_flight, token_for
from dissociated.client.idle import IdleConnections
from dissociated.client.lookup import Identities, Lookup, caller_identity
from dissociated.client.request import MAX_PARALLEL, TIMEOUT, ReadRequest
from dissociated.client.sql_database import SqlDatabase
from dissociated.control.commit import Commit, StagedSegment
from dissociated.control.dataset_info import DatasetInfo, DatasetList
from dissociated.control.flight_streams import parse_answer
from dissociated.control.messages import CURRENT_FIELDS, NODE_FIELDS, VERSION_FIELDS, FieldTypes, has_fields, is_moment
from dissociated.errors import (
    CatalogError,
    DatasetNotFound,
    DissociatedError,
    FormatError,
)
from dissociated.monitoring.status import ServerStatus
from dissociated.store.handover import hand_over
from dissociated.store.stage import StagePlace

T = TypeVar("T")


class CatalogClient:
    """A client of a catalog. `connect` describes the parameters and further errors.

    A client that is unpickled connects anew with the same parameters. The pickle contains the token.

    `call_flight`, `current`, `describe_current`, `describe_version`, `discard`, `do_action`, `join_trace`, `reserve`,
    `sql_database`, `stage` and `with_uri` are internal: nodes, writers and other rooms of this library use them.

    Raises:
        CatalogError: The catalog cannot be reached, or refuses a call.
    """

    _keepalive_timeout: ClassVar[float | None] = None  # see `CatalogConnection`

    def __init__(
        self,
        uri: str,
        timeout: float = TIMEOUT,
        token: str | None = None,
        tls_roots: str | os.PathLike[str] | None = None,
        trusted_users: Sequence[str | int] = (),
        max_metadata: int = MAX_METADATA,
        trusted_files: bool = False,
        max_parallel: int = MAX_PARALLEL,
    ) -> None:
        users = tuple(trusted_users)
        self._parameters = uri, timeout, token, tls_roots, users, max_metadata, trusted_files, max_parallel
        self._calls = CatalogConnection(uri, timeout, token, tls_roots, self._keepalive_timeout)
        self._lookup = Lookup(self._calls)
        #: Default request of a read.
        self.defaults = ReadRequest(
            timeout=timeout, max_metadata=max_metadata, max_parallel=max_parallel, idle=IdleConnections()
        )
        #: Database in which queries of SQL run.
        self.sql_database = SqlDatabase()
        self.uri = uri
        self._trust = {
            "tls": {} if tls_roots is None else {"roots": os.fspath(tls_roots)},
            "shm": {"allow": ",".join(map(str, trusted_users))} if trusted_users else {},
        }
        if trusted_files:
            self._trust["shm"]["files"] = "allow"

    @cached_property
    def endpoints(self) -> EndpointReader:
        """Return the reader that opens the endpoints of this catalog's datasets."""
        return EndpointReader(partial(open_flight, self._calls), self._trust)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parameters

    def join_trace(self, traceparent: str | None) -> None:
        """Let calls and reads belong to a trace of another process, if their thread has no current span."""
        self._calls.traceparent = traceparent
        self.defaults = replace(self.defaults, traceparent=traceparent)

    def with_uri(self, uri: str) -> Self:
        """Return a client of a node that this catalog names, with the same parameters. See `token_for`."""
        catalog, timeout, token = self._parameters[:3]
        return type(self)(uri, timeout, token_for(uri, catalog, token), *self._parameters[3:])

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.uri}>"

    def _repr_html_(self) -> str:
        """Return the catalog's datasets as HTML for a notebook, or the error if the catalog fails."""
        try:
            datasets = self.list()
        except DissociatedError as error:
            return html(f"{type(self).__name__} of {self.uri}", [str(error)])
        return html(f"{type(self).__name__} of {self.uri}", [], datasets._repr_html_())

    def list(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> DatasetList:
        """List the datasets, in the order of their names.

        Args:
            prefix: List only names that begin with it.
            tags: List only datasets that have all of these tags.

        Raises:
            CatalogError: The catalog fails, or the server is not of this library and does not list datasets.

        Example:
            ```python
            client.put("archive/flights", table, tags={"year": "2026"})
            for info in client.list("archive/", tags={"year": "2026"}):
                print(info.name, info.rows, info.nbytes)
            ```
        """
        return self._lookup.list(prefix, dict(tags or {}))

    def describe(self, name: str, version: int | None = None) -> DatasetInfo:
        """Describe a dataset.

        Args:
            name: Its name.
            version: A version that was replaced and can still be read; None for the current one.

        Raises:
            DatasetNotFound: There is no such dataset or version.
            CatalogError: The catalog fails, or `version` is given and the server is not of this library.

        Example:
            ```python
            info = client.describe("flights")
            print(info.schema.names, info.rows, info.version)
            ```
        """
        return self._lookup.describe(name, version)

    def describe_current(self, name: str) -> DatasetInfo:
        """Ask for the current version of a dataset, as `describe` does, for a caller that does not change the result.

        The catalog keeps the version for a while after it is replaced. `current` then sees changes without a call.
        """
        return self._lookup.describe_counted(name)

    def describe_version(self, name: str, version: int, lineage_id: str) -> DatasetInfo:
        """Describe a version again.

        Raises:
            DatasetNotFound: The version is gone, or another catalog at the same URI has a different version of that
                number.
        """
        with suppress(DatasetNotFound):
            current = self.describe(name, version)
            if current.lineage_id == lineage_id:
                return current
        raise DatasetNotFound(
            f"version {version} of {name!r} is gone, because it was replaced, dropped or evicted: look the dataset "
            "up again, or refresh() the handle, to read the current version"
        )

    def current(self, names: Sequence[str]) -> Identities:
        """Return the identity of the current version of each of these datasets that exists, and perhaps of others.

        Returns:
            For each name `version`, `created` and `began`, which are the `version`, `created` and `lineage_id` of
                `describe`.
        """
        return self._lookup.current(names, self._ask_current)

    def _ask_current(self, names: Sequence[str]) -> Identities:
        records = self._ask("current", {"names": [*names]}, "current", dict)
        if not all(has_fields(record, CURRENT_FIELDS) for record in records.values()):
            raise CatalogError(f"the server at {self.uri} returned an unexpected answer to 'current'")
        return records

    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        """List the versions of a dataset that can still be read, the oldest first.

        Returns:
            For each version: `version`, its number, counted from 1 for each dataset; `created`, a datetime in UTC;
                `rows`, or None if they are not known; and `current`, whether a read without a version reads this one.

        Example:
            ```python
            client.put("flights", table.slice(0, 100))
            for version in client.versions("flights"):
                print(version["version"], version["created"], version["rows"], version["current"])
            ```
        """
        versions = self._ask_list("versions", {"name": name}, VERSION_FIELDS, "created")
        return [{**version, "created": datetime.fromtimestamp(version["created"], UTC)} for version in versions]

    def nodes(self) -> Sequence[dict[str, Any]]:
        """List the nodes that have ever registered at the catalog.

        Returns:
            For each node: `id`, `host`, `boot_id` (of its kernel), `flight` (its Flight URI), `locations` (URIs of its
                transports), `alive`, and `seen`, its last heartbeat in seconds since the epoch.

        Example:
            ```python
            hosts = [node["host"] for node in client.nodes() if node["alive"]]
            ```
        """
        return self._ask_list("nodes", {}, NODE_FIELDS, "seen")

    def forget(self, node: str) -> None:
        """Remove a node that will not come back from the catalog, with the datasets that only this node has.

        Args:
            node: The id of the node, the name of its host, or its Flight URI.

        Raises:
            CatalogError: No node, or more than one, is called so, or the node is alive.

        Example:
            ```python
            for node in client.nodes():
                if not node["alive"]:
                    client.forget(node["id"])
            ```
        """
        self.do_action("forget", {"node": node})

    def stage(self) -> StagePlace:
        """Return the place for a writer's segments, on this host if there is a node."""
        self.sql_database.kept_versions.close()  # the node may need their memory for the segments
        place = StagePlace.parse(self.do_action("stage", caller_identity()))
        return place if place.flight else replace(place, flight=self.uri)

    def reserve(self, segment: str, size: int, wish: int, appends_to: str = "") -> int:
        """Reserve room for a segment, as `Store.reserve` does. Writers in a limited stage call it before they write."""
        request = {"segment": segment, "size": size, "wish": wish, "appends": appends_to}
        return self._ask("reserve", request, "size", int)

    def hand_over(self, descriptor: int) -> StagedSegment:
        """Give this host's node a sealed memfd with an Arrow IPC stream or file. The node serves it without a copy.

        The memfd must be sealed against writing, shrinking and growing. It counts against the node's limit, and is
        released when the node ends.

        Args:
            descriptor: The memfd. The caller keeps it, and may close it at any time after the call.

        Returns:
            A segment for a `Commit`.

        Raises:
            StoreError: The node refuses the memfd.
            CatalogError: There is no node on this host.
            AccessDenied, TransportError, DeadlineExceeded: The catalog or the node cannot be reached.

        Example:
            ```python
            import fcntl
            import os

            import dissociated as dis
            from dissociated.node.launch import ensure

            descriptor = os.memfd_create("flights", os.MFD_ALLOW_SEALING)
            with open(os.dup(descriptor), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            with dis.connect(ensure().uri) as node:
                segment = node.hand_over(descriptor)
                node.commit(dis.Commit("flights", [segment], table.schema))
                assert node.read("flights").read_all().equals(table)
            os.close(descriptor)
            ```
        """
        stage = self.stage()
        if not stage.handover or stage.boot_id != boot_id():
            raise CatalogError(
                "there is no node on this host that memory could be handed over to: start one, dissociated node"
            )
        return StagedSegment(hand_over(stage.handover, descriptor, self.defaults.timeout), stage.node)

    def commit(self, commit: Commit) -> None:
        """Publish segments of the stage, in their order and atomically. A repeated call does nothing.

        Args:
            commit: The commit. Its segments are in the stage of the catalog's own node, or name their node, as
                segments from `hand_over` do. It has their schema.

        Raises:
            OptionError: The commit has no schema.
            CatalogError: The catalog refuses, or cannot be reached.

        Example:
            ```python
            import dissociated as dis

            client.commit(dis.Commit("empty", schema=table.schema))  # `hand_over` has an example with a segment
            assert client.describe("empty").rows == 0
            ```
        """
        self.sql_database.kept_versions.close()  # an older version is replaced
        self.do_action("commit", commit.to_json())

    def committed(self, key: str) -> bool:
        """Return whether a commit with this `key` was made, of any dataset.

        The catalog remembers keys for thirty days. If it is a node, it remembers at least the last 50,000 of them after
        a restart. A catalog of several nodes needs a database for that.

        Example:
            ```python
            import dissociated as dis

            client.commit(dis.Commit("empty", schema=table.schema, key="nightly 2026-11-24"))
            assert client.committed("nightly 2026-11-24")
            ```
        """
        return self._ask("committed", {"key": key}, "committed", bool)

    def discard(self, segments: Sequence[str]) -> None:
        """Remove these segments from the stage of the catalog's own node. Missing segments are ignored."""
        self.do_action("discard", {"segments": [*segments]})

    def abort(self, key: str) -> None:
        """Forbid a commit with this `key`, unless it was made already, and remove the segments written for it.

        These are all segments, on any node, whose names begin with the key and "-", also unfinished ones. The catalog's
        own node removes them at once, other nodes with their next heartbeat.

        Example:
            ```python
            client.abort("nightly 2026-11-24")
            assert not client.committed("nightly 2026-11-24")
            ```
        """
        self.do_action("abort", {"key": key})

    def drop(self, name: str) -> None:
        """Drop the dataset `name`. Readers that have opened it can read to its end.

        Raises:
            DatasetNotFound: There is no such dataset.

        Example:
            ```python
            client.drop("flights")
            assert "flights" not in client
            ```
        """
        self.sql_database.kept_versions.close()  # the memory is free as soon as nobody maps it
        self.do_action("drop", {"name": name})

    def status(self) -> ServerStatus:
        """Return the status of the catalog's server: its datasets, its readers, and the bytes that it has sent.

        Raises:
            CatalogError: The catalog fails, or its answer is invalid.

        Example:
            ```python
            status = client.status()
            print(status.totals.bytes, [dataset.name for dataset in status.datasets])
            ```
        """
        try:
            return ServerStatus.parse(self.do_action("status", {}))
        except FormatError as error:
            raise CatalogError(f"the catalog at {self.uri} sent an unreadable status: {error}") from None

    def close(self) -> None:
        """Close the connection to the catalog, idle connections to servers, and the database of `Client.sql`.

        Streams that are open stay open.
        """
        self.sql_database.close()
        if self.defaults.idle is not None:
            self.defaults.idle.close()
        self._lookup.close()
        self._calls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call_flight(self, call: Callable[[flight.FlightClient], T]) -> T:
        """Return the result of `call`, which gets the Flight client.

        Raises:
            CatalogError, AccessDenied, DeadlineExceeded: The call failed.
        """
        return self._calls.call(call)

    def do_action(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call an action of the catalog. `dissociated.catalog.service` describes the actions.

        Raises:
            CatalogError: The catalog fails, or its answer is invalid.
        """
        message = flight.Action(action, json.dumps(body).encode())
        options = self._calls.call_options()
        results = self._calls.call(lambda client: [*client.do_action(message, options)])
        if len(results) != 1:
            raise CatalogError(f"the server at {self.uri} gave {len(results)} answers to {action!r}, which has one")
        return parse_answer(results[0].body, repr(action))

    def _ask_list(
        self, action: str, body: Mapping[str, Any], fields: FieldTypes, moment: str
    ) -> Sequence[dict[str, Any]]:
        """Return the objects that an action answers under its own name, which have these fields and a `moment`."""
        records = self._ask(action, body, action, list)
        if not all(
            has_fields(record, fields) and record.keys() >= fields.keys() and is_moment(record[moment])
            for record in records
        ):
            raise CatalogError(f"the server at {self.uri} returned an unexpected answer to {action!r}")
        return records

    def _ask(self, action: str, body: Mapping[str, Any], key: str, kind: type[T]) -> T:
        """Return the value under `key` in the answer to an action."""
        value = self.do_action(action, body).get(key)
        if not isinstance(value, kind):
            raise CatalogError(f"the server at {self.uri} is not a catalog: it answers to {action!r} without {key!r}")
        return value

"""What a catalog answers: the calls of its clients."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from dissociated.base.buffers import MAX_METADATA
from dissociated.base.display import html
from dissociated.base.host import boot_id
from dissociated.client.endpoints import EndpointReader
from dissociated.client.flight_connection import CatalogConnection
from dissociated.client.flight_reader import open_flight, read_flight
from dissociated.client.lookup import Lookup, caller_identity
from dissociated.client.put import Progress, Put
from dissociated.client.request import TIMEOUT, ReadRequest
from dissociated.codec.options import ReadOptions, check_options
from dissociated.control.commit import Publication
from dissociated.control.flight_streams import parse_answer
from dissociated.control.locations import DatasetInfo, DatasetList
from dissociated.control.messages import NODE_FIELDS, VERSION_FIELDS, FieldTypes, has_fields, is_moment
from dissociated.control.stage import StagePlace
from dissociated.datasets.base import Source
from dissociated.datasets.sources import make_dataset
from dissociated.errors import (
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    FormatError,
    OptionError,
)
from dissociated.monitoring.status import ServerStatus
from dissociated.store.handover import hand_over

T = TypeVar("T")


class CatalogClient:
    """The calls that a catalog answers. Raises CatalogError where it cannot be reached or refuses.

    `connect` says what the parameters mean and what else is raised. A client that is unpickled connects anew with the
    same parameters: the token is in the pickle.
    """

    def __init__(
        self,
        uri: str,
        timeout: float = TIMEOUT,
        token: str | None = None,
        tls_roots: str | os.PathLike[str] | None = None,
        trusted_users: Sequence[str | int] = (),
        max_metadata: int = MAX_METADATA,
        trusted_files: bool = False,
    ) -> None:
        self._parameters = uri, timeout, token, tls_roots, tuple(trusted_users), max_metadata, trusted_files
        self._calls = CatalogConnection(uri, timeout, token, tls_roots)
        self._lookup = Lookup(self._calls)
        #: The request of a read for which nothing else is said.
        self.defaults = ReadRequest(timeout=timeout, max_metadata=max_metadata)
        self.uri = uri
        self._trust = {
            "tls": {} if tls_roots is None else {"roots": os.fspath(tls_roots)},
            "shm": {"allow": ",".join(map(str, trusted_users))} if trusted_users else {},
        }
        if trusted_files:
            self._trust["shm"]["files"] = "allow"

    @property
    def endpoints(self) -> EndpointReader:
        """What opens the endpoints of this catalog's datasets."""
        return EndpointReader(partial(open_flight, self._calls), self._trust)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parameters

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.uri}>"

    def _repr_html_(self) -> str:
        """For a notebook: what there is, as far as the catalog says so now."""
        try:
            found = self.list()
        except DissociatedError as error:
            return html(f"{type(self).__name__} of {self.uri}", [str(error)])
        return html(f"{type(self).__name__} of {self.uri}", [], found._repr_html_())

    def list(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> DatasetList:
        """Every dataset whose name begins with `prefix` and that has all of `tags`, in the order of names.

        Raises CatalogError, also where a server of somebody else's does not list.
        """
        return self._lookup.list(prefix, dict(tags or {}))

    def describe(self, name: str, version: int | None = None) -> DatasetInfo:
        """What the catalog says of the dataset `name`, or of a `version` of it that was replaced and is still there.

        Raises DatasetNotFound, and CatalogError for a version at a server of somebody else's.
        """
        return self._lookup.describe(name, version)

    def describe_version(self, name: str, version: int, lineage_id: str) -> DatasetInfo:
        """Describe a version once more.

        Raises DatasetNotFound if it is gone, also if another catalog there has a version of that number.
        """
        with suppress(DatasetNotFound):
            current = self.describe(name, version)
            if current.lineage_id == lineage_id:
                return current
        raise DatasetNotFound(
            f"version {version} of {name!r} is gone: it was replaced, dropped or evicted, and is kept no longer. Look "
            "the dataset up again, or refresh() a handle, for the version that is there now"
        )

    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        """The versions of a dataset that can still be read, the oldest first.

        Each has `version`, its number; `created`, in seconds since the epoch; `rows`, None where they are not known;
        and `current`, whether it is the one that `name` alone stands for.
        """
        return self._ask_list("versions", {"name": name}, VERSION_FIELDS, "created")

    def nodes(self) -> Sequence[dict[str, Any]]:
        """The nodes that have ever registered at the catalog.

        Each has `id`, `host`, `boot_id` (of the kernel that it runs on), `flight` (the URI where it answers),
        `locations` (URIs of its transports), `alive`, and `seen`: its last heartbeat, in seconds since the epoch.
        """
        return self._ask_list("nodes", {}, NODE_FIELDS, "seen")

    def do_get(self, ticket: bytes, options: ReadOptions | None = None) -> pa.RecordBatchReader:
        """A reader over all that `ticket` stands for, by Flight's DoGet: slower than any transport, and always there.

        Of `options` count those that libarrow applies, and the limit of depth. Raises CatalogError, AccessDenied,
        DatasetNotFound and FormatError, OptionError for a memory_pool, which Flight does not know, and
        RemoteProtocolError for metadata above the client's `max_metadata`.
        """
        request = replace(self.defaults, options=check_options(options, ReadOptions))
        return read_flight(self._calls, ticket, request)

    def put(
        self,
        name: str,
        source: Source,
        *,
        schema: pa.Schema | None = None,
        mode: str = "overwrite",
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
        transport: str | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Publish everything that `source` gives under `name`, whole and at once. Returns the number of rows.

        - `source`: whatever `Server.publish` takes, but for tensors.
        - `schema`: of an iterator or a list of record batches, which may then be empty.
        - `mode`: "overwrite" or "append".
        - `tags`: kept with the dataset; `list` can ask for them.
        - `ttl`: after so many seconds, 1e10 at most, the dataset is gone. None: it stays.
        - `transport`: "shm", through the memory of a node on this host, or "grpc", by Flight's DoPut. Left out: the
          first where it can be.
        - `progress`: called after each batch with the rows and the bytes so far, and with the number of all rows, or
          None where that is not known. What it raises ends the put.

        Where this fails or is interrupted, also by the end of this process, what had that name stays as it was. Where
        the catalog stops answering while it publishes, nobody knows, and the error says so. What it has begun to
        publish, an interrupt does not undo.

        Raises SourceError where the source cannot be read, also for tensors, OptionError for what makes no sense.
        """
        if transport not in (None, "shm", "grpc"):
            raise OptionError(f'transport is "shm" or "grpc" for a put, not {transport!r}')
        publication = Publication(name, mode, tags or {}, ttl)
        put = Put(publication, make_dataset(name, source, schema=schema), progress)
        place = None if transport == "grpc" else self._stage_here()
        if place is None and transport == "shm":
            raise CatalogError("there is no node on this host whose memory this process could write to: put by grpc")
        key = secrets.token_hex(16)
        if place is None:
            self._require_catalog(key)
        try:
            if place is not None:
                return self._put_into(place, put, key)
            return self._calls.call(lambda client: put.by_flight(client, key))
        except BaseException as error:
            if (place is not None or put.complete) and self._was_published(put, key, error):
                return put.rows
            raise

    def _require_catalog(self, key: str) -> None:
        """Raise CatalogError where a put with this `key` would come to a server of somebody else's."""
        try:
            self.committed(key)
        except CatalogUnreachable:
            raise
        except CatalogError as error:
            raise CatalogError(
                f"the server at {self.uri} is no catalog of this library, and would take what describes the put for a "
                f"name: put there by DoPut of pyarrow.flight ({error})"
            ) from None

    def _stage_here(self) -> StagePlace | None:
        """The stage of a node that this process can write to."""
        try:
            place = self.stage()
        except CatalogUnreachable:
            raise
        except CatalogError:
            return None  # it has none, or is somebody else's and knows no such action
        return place if place.here else None

    def _put_into(self, place: StagePlace, put: Put, key: str) -> int:
        segment = f"{key}-0.arrows"
        publication = put.publication
        with ExitStack() as stack:
            reserve = None
            if place.limited:
                node = stack.enter_context(closing(CatalogClient(place.flight, *self._parameters[1:])))
                reserve = node.reserve
            rows = put.write(place, segment, reserve)
        written = [{"node": place.node, "segment": segment}]
        self.commit(
            publication.name,
            written,
            publication.mode,
            put.schema,
            key=key,
            tags=publication.tags,
            ttl=publication.ttl,
        )
        return rows

    def _was_published(self, put: Put, key: str, error: BaseException) -> bool:
        """Whether what `error` ended was published all the same. If it was not, it never will be.

        Raises an error like that one, which says more, where the catalog does not answer.
        """
        failed = put.complete and isinstance(error, DissociatedError)  # and was neither interrupted nor cut short
        try:
            self.abort(key)
            return failed and self.committed(key)
        except (CatalogUnreachable, DeadlineExceeded):
            if failed:
                raise type(error)(
                    f"{error}; nor did it say whether {put.publication.name!r} was published in the end: "
                    "look at its versions before you put it again"
                ) from error
        except DissociatedError:
            pass  # it is somebody else's, and knows no such action
        return False

    def stage(self) -> StagePlace:
        """Where writers put segments: on this host, if there is a node."""
        return StagePlace.parse(self.do_action("stage", caller_identity()))

    def reserve(self, segment: str, size: int, wish: int) -> int:
        """Reserve room for a segment: see `Store.reserve`. Writers in a limited stage call it before they write."""
        return self._ask("reserve", {"segment": segment, "size": size, "wish": wish}, "size", int)

    def hand_over(self, descriptor: int) -> dict[str, str]:
        """Give this host's node a sealed memfd, which holds an Arrow IPC stream or file, to be served where it lies.

        Returns what `commit` takes as a segment. The descriptor stays yours: close it when you like. The memfd must be
        sealed against writing, shrinking and growing. It counts against the node's limit, and goes when the node ends.

        Raises StoreError where the node refuses it, CatalogError where there is none on this host, AccessDenied,
        TransportError and DeadlineExceeded.
        """
        stage = self.stage()
        if not stage.handover or stage.boot_id != boot_id():
            raise CatalogError(
                "there is no node on this host that memory could be handed over to: start one, dissociated node"
            )
        return {"node": stage.node, "segment": hand_over(stage.handover, descriptor, self.defaults.timeout)}

    def commit(
        self,
        name: str,
        segments: Sequence[str | Mapping[str, str]],
        mode: str,
        schema: pa.Schema,
        *,
        key: str | None = None,
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> None:
        """Publish segments in the stage under `name`, in this order, whole and at once. A repeated call does nothing.

        - `segments`: names of segments. One that is on another node than the catalog's own is `{"node": ..., "segment":
          ...}`, as `hand_over` returns it.
        - `mode`: "overwrite" or "append".
        - `schema`: that of all segments. It is the dataset's schema also where there is no segment.
        - `key`: tells this commit from every other. Left out, the segments do.
        - `tags`, `ttl`: as for `put`.

        Segments whose names begin with the key and "-", and that are not among these, are removed: attempts that failed
        or were not needed have left them.
        """
        publication = Publication(name, mode, tags or {}, ttl)
        body = {
            **asdict(publication),
            "segments": [*segments],
            "append": mode == "append",
            "schema": base64.b64encode(schema.serialize()).decode(),
            "key": key,
        }
        self.do_action("commit", body)

    def committed(self, key: str) -> bool:
        """Whether there was a commit with this `key`. After thirty days nobody knows any more."""
        return self._ask("committed", {"key": key}, "committed", bool)

    def discard(self, segments: Sequence[str]) -> None:
        """Remove these segments from the stage of the catalog's own node, as far as they exist."""
        self.do_action("discard", {"segments": [*segments]})

    def abort(self, key: str) -> None:
        """There shall be no commit with this `key`, unless there was one; what was written for it is removed.

        That is every segment, on any node, whose name begins with the key and "-", also while it is written. The
        catalog's own node removes them at once, others with their next heartbeat.
        """
        self.do_action("abort", {"key": key})

    def drop(self, name: str) -> None:
        """Make the dataset `name` unavailable. Whoever reads it reads on. Raises DatasetNotFound."""
        self.do_action("drop", {"name": name})

    def status(self) -> ServerStatus:
        """What the catalog's server publishes, who reads it, and what it has sent. Raises CatalogError."""
        try:
            return ServerStatus.parse(self.do_action("status", {}))
        except FormatError as error:
            raise CatalogError(f"the catalog at {self.uri} answered with what cannot be read: {error}") from None

    def close(self) -> None:
        """Close the connection to the catalog. Streams that were opened go on."""
        self._calls.close()

    def do_action(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call an action of the catalog: see `dissociated.catalog.service`. Raises CatalogError."""
        message = self._calls.flight.Action(action, json.dumps(body).encode())
        options = self._calls.options()
        results = self._calls.call(lambda client: [*client.do_action(message, options)])
        if len(results) != 1:
            raise CatalogError(f"the server at {self.uri} gave {len(results)} answers to {action!r}, which has one")
        return parse_answer(results[0].body, repr(action))

    def _ask_list(
        self, action: str, body: Mapping[str, Any], fields: FieldTypes, moment: str
    ) -> Sequence[dict[str, Any]]:
        """Return the objects that an action answers under its own name, which have these fields and a `moment`."""
        found = self._ask(action, body, action, list)
        if not all(has_fields(one, fields) and one.keys() >= fields.keys() and is_moment(one[moment]) for one in found):
            raise CatalogError(f"the server at {self.uri} answers to {action!r} with something else")
        return found

    def _ask(self, action: str, body: Mapping[str, Any], key: str, kind: type[T]) -> T:
        """What an action answers under `key`."""
        found = self.do_action(action, body).get(key)
        if not isinstance(found, kind):
            raise CatalogError(f"the server at {self.uri} answers to {action!r} without {key!r}, so it is no catalog")
        return found

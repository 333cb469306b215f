"""Finds datasets in a catalog, and opens them wherever they can be had best."""

from __future__ import annotations

import base64
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from dissociated.access import check_token
from dissociated.buffers import MAX_METADATA
from dissociated.catalog.chunks import taken, upload
from dissociated.catalog.locations import DatasetInfo, Endpoint
from dissociated.catalog.publication import Publication
from dissociated.client.open import TIMEOUT
from dissociated.codec.batches import BatchReader
from dissociated.codec.options import ReadOptions, given
from dissociated.codec.reader import named
from dissociated.codec.split import Pair, batches
from dissociated.datasets.base import Source
from dissociated.datasets.blame import source_blamed
from dissociated.datasets.sources import dataset
from dissociated.datasets.static import StaticDataset
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    FormatError,
    UriError,
)
from dissociated.fork import belongs, disown, keep, use_grpc
from dissociated.host import boot_id, directory_id, host_name
from dissociated.monitoring.status import ServerStatus
from dissociated.store.handover import hand_over
from dissociated.transport.base import seconds
from dissociated.uri import Uri

if TYPE_CHECKING:
    pass

T = TypeVar("T")

_UNTRUSTED = ("certificate verify failed", "is not in peer certificate")  # how gRPC says it


@dataclass(frozen=True)
class StagePlace:
    """Where writers put segments, and on which host that is.

    `node` is the node that has it, `flight` where that answers. Where it is `limited`, writers must reserve room.
    `inode` tells the directory from one that has the same path in another container.
    `handover` is the Unix socket where it takes sealed memfds, empty where it takes none.
    """

    directory: str
    host: str
    boot_id: str
    node: str = ""
    flight: str = ""
    limited: bool = False
    inode: str = ""
    handover: str = ""

    @property
    def here(self) -> bool:
        """Whether this process can write there."""
        try:
            return self.boot_id == boot_id() and self.inode == directory_id(self.directory)
        except OSError:
            return False


class CatalogClient:
    """The calls that a catalog answers. Raises CatalogError where it cannot be reached or refuses.

    What the parameters mean, and what else is raised, says `connect`. Where it is pickled, its copy connects anew, with
    the same parameters: the token is among them.
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
        import pyarrow.flight as flight

        from dissociated.catalog.guard import client_options

        if not Uri.parse(uri).scheme.startswith("grpc"):
            raise UriError(f"{uri} is not the URI of a catalog: grpc://HOST:PORT")
        self._flight = flight
        self._parameters = uri, timeout, token, tls_roots, tuple(trusted_users), max_metadata, trusted_files
        self._timeout = seconds(timeout)
        self._max_metadata = max_metadata
        self.uri = uri
        roots = None if tls_roots is None else os.fspath(tls_roots)
        self._trust = {
            "tls": {} if roots is None else {"roots": roots},
            "shm": {"allow": ",".join(map(str, trusted_users))} if trusted_users else {},
        }
        if trusted_files:
            self._trust["shm"]["files"] = "allow"
        self._options_of_grpc = client_options(None if token is None else check_token(token), roots)
        self._connection: Any = None
        self._closed = False
        belongs(self)

    @property
    def _client(self) -> Any:
        """The connection, made with the first call: a process that is forked before has one of its own."""
        if self._connection is None:
            if self._closed:
                raise CatalogError(f"this client of the catalog at {self.uri} is closed")
            use_grpc()
            self._connection = self._flight.FlightClient(self.uri, **self._options_of_grpc)
        return self._connection

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._parameters

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.uri}>"

    def forked(self) -> None:
        """See `dissociated.fork`. What needs no call to the catalog works in the child, too."""
        keep(self._connection)
        self._connection = None

    def list(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> Sequence[DatasetInfo]:
        """Every dataset whose name begins with `prefix` and that has all of `tags`, by name."""
        criteria = json.dumps({"prefix": prefix, "tags": dict(tags or {}), **_asking()}).encode()

        def found() -> list[DatasetInfo]:
            try:
                return [_info(one) for one in self._client.list_flights(criteria, self._options())]
            except NotImplementedError:
                raise CatalogError(
                    f"the server at {self.uri} does not list what it has (it has no ListFlights): "
                    "ask for a dataset by its name"
                ) from None

        return self._call(found)

    def describe(self, name: str, version: int | None = None) -> DatasetInfo:
        """One dataset, or a version of it that was replaced and is still there. Raises DatasetNotFound."""
        describe = self._flight.FlightDescriptor
        ours = {"name": name, **_asking(), **({} if version is None else {"version": version})}
        ways = [describe.for_command(json.dumps(ours))]
        if version is None:
            ways += describe.for_command(name), describe.for_path(name)  # as other servers may understand it
        unknown = False
        for way in ways:
            try:
                return self._described(way)
            except CatalogUnreachable:
                raise
            except CatalogError as error:
                refused = error
                unknown = unknown or isinstance(error, DatasetNotFound)
        if unknown and not isinstance(refused, DatasetNotFound):
            raise DatasetNotFound(f"the server at {self.uri} knows no dataset {name!r}") from None
        raise refused

    def _described(self, descriptor: Any) -> DatasetInfo:
        return self._call(lambda: _info(self._client.get_flight_info(descriptor, self._options())))

    def versions(self, name: str) -> Sequence[dict[str, Any]]:
        """What of a dataset can still be read, the oldest first: version, created, rows, current."""
        found: Sequence[dict[str, Any]] = self.act("versions", {"name": name})["versions"]
        return found

    def nodes(self) -> Sequence[dict[str, Any]]:
        """Who holds parts of datasets: id, host, boot_id, flight, locations, alive, seen."""
        found: Sequence[dict[str, Any]] = self.act("nodes", {})["nodes"]
        return found

    def do_get(self, ticket: bytes, options: ReadOptions | None = None) -> pa.RecordBatchReader:
        """The stream over Flight itself, all of its columns: slower than anything else here, and always there.

        Of `options` count those that libarrow applies, and the depth.
        """
        options = given(options, ReadOptions)
        wanted = self._flight.Ticket(ticket)
        told = self._flight.FlightCallOptions(read_options=replace(options, included_fields=()).to_pyarrow())
        reader = self._call(lambda: self._client.do_get(wanted, told))
        schema = self._call(lambda: named(reader.schema))
        options.check_depth(schema)

        return BatchReader(schema, taken(_Received(self._call, reader)))

    def put(
        self,
        name: str,
        source: Source,
        *,
        mode: str = "overwrite",
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> int:
        """Publish everything that `source` gives under `name`, by DoPut, whole and at once. Returns the number of rows.

        - `source`: whatever `Server.publish` takes, but for tensors.
        - `mode`: "overwrite" or "append".
        - `tags`: kept with the dataset; `list` can ask for them.
        - `ttl`: after so many seconds the dataset is gone. None: it stays.

        Where this fails or is interrupted, also by the end of this process, what had that name stays as it was.

        Raises SourceError where the source cannot be read, also for tensors, OptionError for what makes no sense.
        """
        asked = Publication(name, mode, dict(tags or {}), ttl)
        made = dataset(name, source)
        reader = made.open_reader()

        def pairs() -> Iterator[Pair]:
            with source_blamed(name):
                yield from batches(reader)

        size = None
        if isinstance(made, StaticDataset):  # then a node makes room for all of it, or for nothing
            with source_blamed(name):
                for _ in batches(made.open_reader()):
                    pass  # what is no valid data is refused before anything looks into it
            size = made.packed_size
        command = json.dumps({**asdict(asked), "key": secrets.token_hex(16), "end": True, "nbytes": size})
        descriptor = self._flight.FlightDescriptor.for_command(command)
        answer = self._call(lambda: upload(self._client, descriptor, reader.schema, pairs()))
        return int(answer["rows"])

    def stage(self) -> StagePlace:
        """Where writers put segments: on this host, if there is a node."""
        return StagePlace(**self.act("stage", _asking()))

    def reserve(self, segment: str, size: int, wish: int) -> int:
        """See Store.reserve: what writers in a limited stage call before they write."""
        return int(self.act("reserve", {"segment": segment, "size": size, "wish": wish})["size"])

    def hand_over(self, descriptor: int) -> dict[str, str]:
        """Give this host's node a sealed memfd, which holds an Arrow IPC stream or file. The node serves it where it
        lies.

        Returns what `commit` takes as a segment. The descriptor stays yours: close it when you like. The memfd must be
        sealed against writing, shrinking and growing. It counts against the node's limit, and goes when the node ends.

        Raises StoreError where the node refuses it, CatalogError where there is none on this host, AccessDenied,
        TransportError and DeadlineExceeded.
        """
        place = self.stage()
        if not place.handover or place.boot_id != boot_id():
            raise CatalogError(
                "there is no node on this host that memory could be handed over to: start one, dissociated node"
            )
        return {"node": place.node, "segment": hand_over(place.handover, descriptor, self._timeout)}

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
        asked = Publication(name, mode, dict(tags or {}), ttl)
        body = {
            **asdict(asked),
            "segments": [*segments],
            "append": mode == "append",
            "schema": base64.b64encode(schema.serialize()).decode(),
            "key": key,
        }
        self.act("commit", body)

    def committed(self, key: str) -> bool:
        """Whether there was a commit with this `key`. After thirty days nobody knows any more."""
        return bool(self.act("committed", {"key": key})["committed"])

    def discard(self, segments: Sequence[str]) -> None:
        """Remove segments from the stage, as far as they exist."""
        self.act("discard", {"segments": [*segments]})

    def abort(self, key: str) -> None:
        """There shall be no commit with this `key`, unless there was one; what was written for it is removed.

        That is every segment, on any node, whose name begins with the key and "-", also while it is written. The
        catalog's own node removes them at once, others with their next sign of life.
        """
        self.act("abort", {"key": key})

    def drop(self, name: str) -> None:
        """Make a dataset unavailable. Raises DatasetNotFound."""
        self.act("drop", {"name": name})

    def status(self) -> ServerStatus:
        """What the catalog's server publishes, who reads it, and what it has sent."""
        try:
            return ServerStatus.parse(self.act("status", {}))
        except FormatError as error:
            raise CatalogError(f"the catalog at {self.uri} answered with what cannot be read: {error}") from None

    def close(self) -> None:
        """Close the connection to the catalog. Streams that were opened go on."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def act(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Call an action of the catalog: see `dissociated.catalog.service`."""
        message = self._flight.Action(action, json.dumps(body).encode())
        (result,) = self._call(lambda: [*self._client.do_action(message, self._options())])
        decoded: dict[str, Any] = json.loads(result.body.to_pybytes())
        return decoded

    def _options(self) -> Any:
        return self._flight.FlightCallOptions(timeout=self._timeout)

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except DissociatedError:  # some are OSErrors, too: of a source that is put
            raise
        except self._flight.FlightUnavailableError as error:
            if any(sign in str(error) for sign in _UNTRUSTED):
                raise AccessDenied(
                    f"the certificate of the catalog at {self.uri} is not to be trusted, or not for that host "
                    "(tls_roots says which certificates are)"
                ) from None
            raise CatalogUnreachable(f"no catalog answers at {self.uri}: is it running? ({_sentence(error)})") from None
        except self._flight.FlightTimedOutError:
            raise DeadlineExceeded(f"the catalog at {self.uri} did not answer for {self._timeout:g} s") from None
        except (self._flight.FlightUnauthenticatedError, self._flight.FlightUnauthorizedError) as error:
            raise AccessDenied(_sentence(error)) from None
        except pa.ArrowKeyError as error:
            raise DatasetNotFound(_sentence(error)) from None
        except (pa.ArrowException, ValueError, OSError) as error:  # of a stream, Flight's come out as OSError
            raise CatalogError(f"the catalog at {self.uri} refused: {_sentence(error)}") from None


class _Received:
    """The batches of a stream over Flight."""

    def __init__(self, call: Callable[[Callable[[], Any]], Any], reader: pa.RecordBatchReader) -> None:
        self._call = call
        self._reader = reader
        belongs(self)

    def __iter__(self) -> _Received:
        return self

    def __next__(self) -> pa.RecordBatch:
        batch = self._call(lambda: next(self._reader, None))
        if batch is None:
            raise StopIteration
        return batch

    def forked(self) -> None:
        keep(self._reader)
        disown(self)


def _asking() -> dict[str, str]:
    """Who asks: the catalog then names the nearest first."""
    return {"host": host_name(), "boot_id": boot_id()}


def _info(found: Any) -> DatasetInfo:
    about = json.loads(found.app_metadata or b"{}")
    return DatasetInfo(
        name=b"/".join(found.descriptor.path).decode() if found.descriptor.path else found.descriptor.command.decode(),
        schema=named(found.schema),
        rows=found.total_records if found.total_records >= 0 else None,
        nbytes=found.total_bytes if found.total_bytes >= 0 else None,
        endpoints=tuple(
            Endpoint(
                endpoint.ticket.ticket,
                tuple(location.uri.decode() for location in endpoint.locations),
                tuple(node["host"] for node in part.get("nodes", ())),
                part.get("rows"),
            )
            for endpoint in found.endpoints
            for part in [json.loads(endpoint.app_metadata or b"{}")]
        ),
        version=about.get("version", 0),
        created=about.get("created", 0.0),
        expires=about.get("expires"),
        tags=about.get("tags", {}),
        began=about.get("began", ""),
    )


def _sentence(error: BaseException) -> str:
    """What the other side said, without what gRPC and libarrow add to it."""
    text = str(error).partition(". gRPC client debug context")[0].partition(". Client context")[0]
    text = text.partition(". Detail: ")[0].strip()
    return text[1:-1] if text[:1] == text[-1:] and text[:1] in ("'", '"') else text  # a KeyError prints its repr

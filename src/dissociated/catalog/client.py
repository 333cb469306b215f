"""Finds datasets in a catalog, and opens them wherever they can be had best."""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from dissociated.client import MAX_BODY, TIMEOUT, column_indices, open_stream
from dissociated.errors import CatalogError, DatasetNotFound, DeadlineExceeded, RemoteError, TransportError, UriError
from dissociated.ipc.options import ReadOptions
from dissociated.store.stage import boot_id, host_name
from dissociated.transport import registry
from dissociated.transport.base import seconds
from dissociated.uri import Uri

T = TypeVar("T")

_MAX_REPLACED = 10  # times that a dataset may be replaced between looking it up and asking for it


@dataclass(frozen=True)
class Endpoint:
    """A part of a dataset: the identifier to ask with, and the locations that can be asked, the nearest first.

    There are none where its node, which is on `hosts`, says nothing any more.
    """

    ticket: bytes
    locations: tuple[str, ...]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetInfo:
    """What a catalog says of a dataset. `rows` and `nbytes` are None where it does not know.

    `created` and `expires` are seconds since the epoch; one without a time to live never expires.
    """

    name: str
    schema: pa.Schema
    rows: int | None
    nbytes: int | None
    endpoints: tuple[Endpoint, ...]
    version: int = 0
    created: float = 0.0
    expires: float | None = None
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StagePlace:
    """Where writers put segments, and on which host that is.

    `node` is the node that has it, `flight` where that answers. Where it is `limited`, writers must reserve room.
    """

    directory: str
    host: str
    boot_id: str
    node: str = ""
    flight: str = ""
    limited: bool = False


class CatalogClient:
    """The calls that a catalog answers. Raises CatalogError where it cannot be reached or refuses."""

    def __init__(self, uri: str, timeout: float = TIMEOUT) -> None:
        import pyarrow.flight as flight

        if not Uri.parse(uri).scheme.startswith("grpc"):
            raise UriError(f"{uri} is not the URI of a catalog: grpc://HOST:PORT")
        self._flight = flight
        self._timeout = seconds(timeout)
        self.uri = uri
        self._client = self._call(lambda: flight.FlightClient(uri))

    def list(self, prefix: str = "", tags: Mapping[str, str] | None = None) -> Sequence[DatasetInfo]:
        """Every dataset whose name begins with `prefix` and that has all of `tags`, by name."""
        criteria = json.dumps({"prefix": prefix, "tags": dict(tags or {}), **_asking()}).encode()
        return self._call(lambda: [_info(found) for found in self._client.list_flights(criteria, self._options())])

    def describe(self, name: str, version: int | None = None) -> DatasetInfo:
        """One dataset, or a version of it that was replaced and is still there. Raises DatasetNotFound."""
        asked = {"name": name, **_asking(), **({} if version is None else {"version": version})}
        descriptor = self._flight.FlightDescriptor.for_command(json.dumps(asked))
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
        """The stream over Flight itself: slower than anything else here, and always there."""
        wanted = self._flight.Ticket(ticket)
        told = self._flight.FlightCallOptions(read_options=(options or ReadOptions()).to_pyarrow())
        reader = self._call(lambda: self._client.do_get(wanted, told).to_reader())

        def batches() -> Iterator[pa.RecordBatch]:
            while (batch := self._call(lambda: next(reader, None))) is not None:
                yield batch

        return pa.RecordBatchReader.from_batches(reader.schema, batches())

    def put(
        self,
        name: str,
        reader: pa.RecordBatchReader,
        *,
        mode: str = "overwrite",
        tags: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> int:
        """Publish everything that `reader` gives under `name`, whole and at once, by DoPut. Returns the rows.

        `mode` is "overwrite" or "append"; after `ttl` seconds the dataset is gone.
        """
        asked = {"name": name, "mode": mode, "tags": dict(tags or {}), "ttl": ttl, "key": secrets.token_hex(16)}
        descriptor = self._flight.FlightDescriptor.for_command(json.dumps(asked))

        def put() -> int:
            writer, told = self._client.do_put(descriptor, reader.schema)
            with writer:
                for batch in reader:
                    writer.write_batch(batch)
                writer.done_writing()
                answer = told.read()
            return int(json.loads(answer.to_pybytes())["rows"])

        return self._call(put)

    def stage(self) -> StagePlace:
        """Where writers put segments: on this host, if there is a node."""
        return StagePlace(**self.act("stage", _asking()))

    def reserve(self, segment: str, size: int, wish: int) -> int:
        """See Store.reserve: what writers in a limited stage call before they write."""
        return int(self.act("reserve", {"segment": segment, "size": size, "wish": wish})["size"])

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
        """Publish segments in the stage under `name`, in this order, whole and at once; a repeated call does nothing.

        `mode` is "overwrite" or "append". `schema` is that of all segments, and counts where there is none. A segment
        that is on another node than the catalog's own is `{"node": ..., "segment": ...}`. `key` tells this commit
        from every other; left out, the segments do.
        """
        body = {
            "name": name,
            "segments": [*segments],
            "append": mode == "append",
            "schema": base64.b64encode(schema.serialize()).decode(),
            "key": key,
            "tags": dict(tags or {}),
            "ttl": ttl,
        }
        self.act("commit", body)

    def discard(self, segments: Sequence[str]) -> None:
        """Remove segments from the stage, as far as they exist."""
        self.act("discard", {"segments": [*segments]})

    def drop(self, name: str) -> None:
        """Make a dataset unavailable. Raises DatasetNotFound."""
        self.act("drop", {"name": name})

    def close(self) -> None:
        """Close the connection to the catalog. Streams that were opened go on."""
        self._client.close()

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
        except self._flight.FlightUnavailableError as error:
            raise CatalogError(f"no catalog answers at {self.uri}: is it running? ({_sentence(error)})") from None
        except self._flight.FlightTimedOutError:
            raise DeadlineExceeded(f"the catalog at {self.uri} did not answer for {self._timeout:g} s") from None
        except pa.ArrowKeyError as error:
            raise DatasetNotFound(_sentence(error)) from None
        except (pa.ArrowException, ValueError) as error:
            raise CatalogError(f"the catalog at {self.uri} refused: {_sentence(error)}") from None


class Client(CatalogClient):
    """Reads datasets by name. Use it as a context manager, or `close` it."""

    def read(
        self,
        name: str,
        transport: str | None = None,
        columns: Sequence[str] | None = None,
        *,
        version: int | None = None,
        options: ReadOptions | None = None,
        max_body: int = MAX_BODY,
    ) -> pa.RecordBatchReader:
        """A reader over the dataset `name`, through `transport`, or the nearest one that reaches it.

        `version` is one that was replaced and is still there. `transport` is a scheme: "shm", "tcp", or "grpc" for
        Flight's own DoGet. `columns` keeps only these top-level columns, in the order of the schema; `options` say
        how batches are decoded. Raises DatasetNotFound, ColumnNotFound, and what `open_stream` raises.
        """
        wanted = partial(self._open, name, transport, columns, options, max_body)
        info = self.describe(name, version)
        for _ in range(_MAX_REPLACED):
            try:
                return _chained(info, [wanted(endpoint) for endpoint in info.endpoints])
            except RemoteError:
                found = self.describe(name, version)
                if found.endpoints == info.endpoints:
                    raise
                info = found  # it was replaced after we had looked it up
        return _chained(info, [wanted(endpoint) for endpoint in info.endpoints])

    def _open(
        self,
        name: str,
        scheme: str | None,
        columns: Sequence[str] | None,
        options: ReadOptions | None,
        max_body: int,
        endpoint: Endpoint,
    ) -> pa.RecordBatchReader:
        if scheme == "grpc":
            reader = self.do_get(endpoint.ticket, options)
            return reader if columns is None else _select(reader, columns)
        if not endpoint.locations:
            raise CatalogError(
                f"a part of {name!r} is on {', '.join(endpoint.hosts)}, whose node says nothing any more: "
                "is it running?"
            )
        usable = [uris for uris in locations(endpoint) if scheme is None or uris[0].scheme == scheme]
        reachable = [uris for uris in usable if all(registry.transport(uri.scheme).reachable(uri) for uri in uris)]
        if not reachable:
            offered = ", ".join(sorted({one.partition(":")[0] for one in endpoint.locations}))
            raise CatalogError(
                f"{name!r} cannot be reached from here by {scheme or 'any transport'}: it is offered by {offered}"
            )
        reachable.sort(key=lambda uris: registry.transport(uris[-1].scheme).nearness)
        while True:
            nearest = [str(uri) for uri in reachable.pop()]
            try:
                return open_stream(
                    nearest,
                    endpoint.ticket,
                    columns=columns,
                    options=options,
                    timeout=self._timeout,
                    max_body=max_body,
                )
            except TransportError:
                if not reachable:
                    raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chained(info: DatasetInfo, readers: Sequence[pa.RecordBatchReader]) -> pa.RecordBatchReader:
    if len(readers) == 1:
        return readers[0]
    schema = readers[0].schema if readers else info.schema
    return pa.RecordBatchReader.from_batches(schema, (batch for reader in readers for batch in reader))


def connect(catalog_uri: str, *, timeout: float = TIMEOUT) -> Client:
    """A client of the catalog at `catalog_uri`, grpc://HOST:PORT. `timeout` is how many seconds it may be silent."""
    return Client(catalog_uri, timeout)


def locations(endpoint: Endpoint) -> list[list[Uri]]:
    """The ways to reach an endpoint that this library knows: each one URI, or one for metadata and one for bodies.

    Locations are alternatives, but for a pair: marked by a `stream` parameter or, as the C++ reference does it,
    exactly two of one scheme that differ in want_data.
    """
    known = registry.schemes()
    uris = []
    for text in endpoint.locations:
        try:
            uri = Uri.parse(text)
        except UriError:
            continue
        if uri.scheme in known and uri.want_data is not None:
            uris.append(uri)
    if len(uris) == 2 == len(endpoint.locations) and uris[0].scheme == uris[1].scheme:
        marked = {uri.parameters.get("stream"): uri for uri in uris}
        if marked.keys() == {"metadata", "bodies"}:
            return [[marked["metadata"], marked["bodies"]]]
        if uris[0].want_data != uris[1].want_data:
            return [uris]
    whole = [[uri] for uri in uris if "stream" not in uri.parameters]
    metadata = [uri for uri in uris if uri.parameters.get("stream") == "metadata"]
    bodies = [uri for uri in uris if uri.parameters.get("stream") == "bodies"]
    return whole + [[one, other] for one in metadata for other in bodies]


def _asking() -> dict[str, str]:
    """Who asks: the catalog then names the nearest first."""
    return {"host": host_name(), "boot_id": boot_id()}


def _info(found: Any) -> DatasetInfo:
    about = json.loads(found.app_metadata or b"{}")
    return DatasetInfo(
        name=b"/".join(found.descriptor.path).decode() if found.descriptor.path else found.descriptor.command.decode(),
        schema=found.schema,
        rows=found.total_records if found.total_records >= 0 else None,
        nbytes=found.total_bytes if found.total_bytes >= 0 else None,
        endpoints=tuple(
            Endpoint(
                endpoint.ticket.ticket,
                tuple(location.uri.decode() for location in endpoint.locations),
                tuple(node["host"] for node in json.loads(endpoint.app_metadata or b"{}").get("nodes", ())),
            )
            for endpoint in found.endpoints
        ),
        version=about.get("version", 0),
        created=about.get("created", 0.0),
        expires=about.get("expires"),
        tags=about.get("tags", {}),
    )


def _select(reader: pa.RecordBatchReader, columns: Sequence[str]) -> pa.RecordBatchReader:
    indices = column_indices(reader.schema, columns)
    schema = pa.schema([reader.schema.field(index) for index in indices], reader.schema.metadata)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            yield batch.select(indices)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _sentence(error: BaseException) -> str:
    """What the other side said, without what gRPC and libarrow add to it."""
    text = str(error).partition(". gRPC client debug context")[0].partition(". Client context")[0]
    text = text.partition(". Detail: Python exception")[0].removesuffix(". Detail: Failed").strip()
    return text[1:-1] if text[:1] == text[-1:] and text[:1] in ("'", '"') else text  # a KeyError prints its repr

"""The calls of Arrow Flight that a catalog answers: see `dissociated.catalog.service` for what they take."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.catalog.chunks import sent
from dissociated.catalog.guard import require_peer
from dissociated.codec.split import batches
from dissociated.errors import AccessDenied, CatalogError, DatasetNotFound, DissociatedError, told

if TYPE_CHECKING:
    from dissociated.catalog.service import CatalogService

_NOT_CANCELLABLE = b"\x08\x03"  # CancelFlightInfoResult { status: CANCEL_STATUS_NOT_CANCELLABLE }
_BETWEEN = frozenset(("prepare", "over", "register", "heartbeat", "leave"))  # catalogs and nodes
_FIRST_FIELD = 0x0A  # of a protobuf message, as bytes

_Body = dict[str, Any]

_log = logging.getLogger(__name__)


@contextmanager
def told_by_flight() -> Iterator[None]:
    """Turn our errors into those that Flight carries to the client: a KeyError arrives as "not found"."""
    try:
        yield
    except DatasetNotFound as error:
        raise KeyError(str(error)) from None
    except AccessDenied as error:
        raise flight.FlightUnauthorizedError(str(error)) from None
    except DissociatedError as error:
        _log.info("%s", error)
        raise flight.FlightServerError(told(error)) from None
    except (pa.ArrowException, flight.FlightError):  # of what the client sent, or that it is gone
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is None:  # libarrow's, of the same
            raise
        _log.exception("a call failed for a reason of ours")
        raise flight.FlightServerError("the catalog failed for a reason that its log tells") from None


def _told(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; what is raised between them is told, too."""
    with told_by_flight():
        yield from items


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """Answers for `service` once that is `ready`."""

    def __init__(self, service: CatalogService, uri: str, **protection: Any) -> None:
        self._service = service
        self.ready = threading.Event()
        self._actions: dict[str, tuple[Callable[[_Body], Any], str]] = {
            "stage": (service.stage, "where writers put segments"),
            "reserve": (
                lambda body: {"size": service.reserve(str(body["segment"]), int(body["size"]), int(body["wish"]))},
                "room for a segment in the stage",
            ),
            "commit": (service.commit, "publish segments under a name, whole and at once"),
            "discard": (
                lambda body: service.discard([str(one) for one in body["segments"]]),
                "remove segments that will not be committed",
            ),
            "committed": (
                lambda body: {"committed": service.committed(str(body["key"]))},
                "whether there was a commit with this key",
            ),
            "abort": (lambda body: service.abort(str(body["key"])), "a commit that shall not come, and its segments"),
            "drop": (lambda body: service.drop(str(body["name"])), "make a dataset unavailable"),
            "versions": (
                lambda body: {"versions": service.versions(str(body["name"]))},
                "what of a dataset can still be read",
            ),
            "nodes": (lambda body: {"nodes": service.nodes()}, "who holds parts of datasets"),
            "status": (lambda body: service.status().plain(), "what there is, who reads it, what was sent"),
            "prepare": (service.prepare, "between catalogs and nodes: make segments ready to be published"),
            "over": (
                lambda body: {"over": service.over([str(one) for one in body["keys"]])},
                "between catalogs and nodes: which of these were committed or aborted",
            ),
            "register": (service.register, "between catalogs and nodes: all that a node holds"),
            "heartbeat": (service.heartbeat, "between catalogs and nodes: a node lives"),
            "leave": (lambda body: service.leave(str(body["node"])), "between catalogs and nodes: a node ends"),
        }
        self._binary: dict[str, tuple[Callable[[bytes], bytes], str]] = {
            "RenewFlightEndpoint": (self._renew, "keep the ticket of an endpoint good for longer"),
            "CancelFlightInfo": (self._cancel, "nothing is computed for a FlightInfo, so there is nothing to cancel"),
        }
        super().__init__(uri, **protection)

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with self._answering():
            outer = self._service.outer
            if outer is not None:
                yield from outer.forwarded(lambda client: [*client.list_flights(criteria)])
                return
            asked = _parsed(criteria, 'the criteria are JSON: {"prefix": "...", "tags": {...}}') if criteria else {}
            yield from self._service.infos(asked, asked)

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        with self._answering():
            asked = _described(descriptor)
            outer = self._service.outer
            if outer is not None:
                return outer.forwarded(lambda client: client.get_flight_info(descriptor))
            expires = self._service.expiry()
            record = self._service.find(asked, self._service.retain)
            plainly = descriptor.descriptor_type == flight.DescriptorType.CMD and len(asked) == 1
            reference = self._service.reference_info(record, descriptor) if plainly else None
            return reference or self._service.info(record, asked, expires)

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        with self._answering():
            asked = _described(descriptor)
            outer = self._service.outer
            if outer is not None:
                return outer.forwarded(lambda client: client.get_schema(descriptor))
            return flight.SchemaResult(self._service.info(self._service.find(asked), asked).schema)

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with self._answering():
            reader = self._service.open(ticket.ticket)
        return flight.GeneratorStream(reader.schema, _told(sent(reader.schema, batches(reader))))

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with self._answering():
            told = self._service.put(_described(descriptor), reader, context.is_cancelled)
            writer.write(pa.py_buffer(json.dumps(told).encode()))

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        actions: Mapping[str, tuple[Any, str]] = {**self._actions, **self._binary}
        return [(name, description) for name, (_, description) in actions.items()]

    def do_action(self, context: Any, action: flight.Action) -> list[bytes]:
        content = action.body.to_pybytes()
        with self._answering():
            if action.type in _BETWEEN:
                require_peer(context, self._service.security)
            try:
                if action.type in self._binary:
                    return [self._binary[action.type][0](content)]
                if action.type in self._actions:
                    return [json.dumps(self._actions[action.type][0](json.loads(content or b"{}")) or {}).encode()]
            except DissociatedError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                _log.info("%s was called with a body that it does not take: %r", action.type, error)
                raise CatalogError(f"the body of {action.type!r} is not what it takes") from None
            raise CatalogError(f"no action {action.type!r}; there are {', '.join([*self._actions, *self._binary])}")

    def _renew(self, request: bytes) -> bytes:
        outer = self._service.outer
        if outer is not None:
            return outer.forward_action("RenewFlightEndpoint", request)
        endpoint = flight.FlightEndpoint.deserialize(_first_field(request))
        return bytes(self._service.renew(endpoint.ticket.ticket).serialize())

    def _cancel(self, request: bytes) -> bytes:
        flight.FlightInfo.deserialize(_first_field(request))
        return _NOT_CANCELLABLE

    @contextmanager
    def _answering(self) -> Iterator[None]:
        self.ready.wait()
        with told_by_flight():
            yield


def _described(descriptor: flight.FlightDescriptor) -> _Body:
    """What a descriptor asks for: a name, and whatever else its command says."""
    if descriptor.descriptor_type == flight.DescriptorType.PATH and len(descriptor.path) == 1:
        return {"name": descriptor.path[0].decode(errors="replace")}
    if descriptor.descriptor_type == flight.DescriptorType.CMD:
        if not descriptor.command.lstrip().startswith(b"{"):
            return {"name": descriptor.command.decode(errors="replace")}
        asked = _parsed(descriptor.command, 'a command is a name, or JSON: {"name": "...", ...}')
        if isinstance(asked.get("name"), str):
            return asked
    raise CatalogError("a dataset is described by a path of one part, or a command: its name, or JSON with its name")


def _parsed(text: bytes, otherwise: str) -> _Body:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise CatalogError(f"{otherwise} ({error})") from None
    if not isinstance(parsed, dict):
        raise CatalogError(otherwise)
    return parsed


def _first_field(message: bytes) -> bytes:
    """The first field of a protobuf message that has only that: bytes. Raises ValueError where it is none."""
    length = shift = 0
    for at, byte in enumerate(message[1:6], 1):
        length |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if message[0] == _FIRST_FIELD and len(message) == at + 1 + length:
                return message[at + 1 :]
            break
    raise ValueError("not a message of Flight.proto with one field")

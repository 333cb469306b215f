"""The Flight server of a catalog. `dissociated.catalog.service` describes the calls and their arguments."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

from dissociated.base import strict_json, tracing
from dissociated.base.limited_log import LimitedLog
from dissociated.catalog.base import Catalog
from dissociated.catalog.guard import CALL_NAMES, require_action
from dissociated.codec.split import batches
from dissociated.control.commit import Commit
from dissociated.control.descriptors import first_field, parse_put
from dissociated.control.flight_streams import checked, generate_get
from dissociated.control.messages import MAX_CURRENT
from dissociated.errors import (
    AccessDenied,
    CatalogError,
    CatalogUnreachable,
    DatasetNotFound,
    DeadlineExceeded,
    DissociatedError,
    error_details,
    log_level,
    log_message,
    peer_message,
)

_NOT_CANCELLABLE = b"\x08\x03"  # CancelFlightInfoResult { status: CANCEL_STATUS_NOT_CANCELLABLE }

_CALL = "call"

_Body = dict[str, Any]

_log = logging.getLogger(__name__)


class _WithoutTraceback(Exception):
    """An error whose traceback pyarrow does not send to the client.

    pyarrow appends the traceback to every exception that is not a Flight error, unless formatting the traceback fails.
    Flight errors cannot be used, since none of them has the code for "not found" or "not implemented".
    """

    __str__ = Exception.__str__  # KeyError would print the repr of its argument.

    @property
    # The formatter of tracebacks reads this attribute first.
    def __cause__(self) -> BaseException | None:  # type: ignore[override]
        raise AttributeError("the traceback is not for clients")


class NotFound(_WithoutTraceback, KeyError):
    """An error that the client receives as NOT_FOUND."""


class NotAnswered(_WithoutTraceback, NotImplementedError):
    """An error that the client receives as UNIMPLEMENTED."""


class Refused(_WithoutTraceback, ValueError):
    """An error that the client receives as INVALID_ARGUMENT."""


@contextmanager
def flight_errors(log: LimitedLog, context: Any) -> Iterator[None]:
    """Convert exceptions to Flight errors for the client of the call with this `context`."""
    try:
        yield
    except DatasetNotFound as error:
        raise NotFound(str(error)) from None
    except AccessDenied as error:
        raise flight.FlightUnauthorizedError(str(error), error_details(error)) from None
    except DissociatedError as error:
        if error.reference is None:
            log.write(logging.INFO, "call refused: error=%s", error, event="refused", peer=context.peer())
        else:  # The client receives the reference, which must lead to this line of the log.
            _log.log(log_level(error), "call failed: error=%s", log_message(error))
        kind = flight.FlightServerError
        if isinstance(error, CatalogUnreachable):
            kind = flight.FlightUnavailableError
        elif isinstance(error, DeadlineExceeded):
            kind = flight.FlightTimedOutError
        raise kind(peer_message(error), error_details(error)) from None
    except flight.FlightError:
        raise
    except Exception as error:
        of_libarrow = isinstance(error, OSError) and error.errno is None
        if of_libarrow or isinstance(error, pa.ArrowException):  # The client sent invalid data, or has disconnected.
            raise flight.FlightServerError(str(error)) from None
        log.write(
            logging.ERROR, "call failed, internal error", event="internal error", peer=context.peer(), exc_info=True
        )
        raise flight.FlightServerError("the catalog failed: see its log") from None


def _with_flight_errors(items: Iterator[Any], log: LimitedLog, context: Any) -> Iterator[Any]:
    """Yield `items`, and convert exceptions that are raised between them to Flight errors."""
    with flight_errors(log, context):
        yield from items


@contextmanager
def _counting_refusals(catalog: Catalog) -> Iterator[None]:
    """Count an error of this library in a call that publishes."""
    try:
        yield
    except DissociatedError:
        catalog.holdings.activity.refuse_put()
        raise


class _Calls(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no type hints
    """Middleware that traces calls, if this process does, and marks calls of clients with a limit of messages.

    These accept messages of 4 MiB at most, which is the default of gRPC. The C++ implementation of Flight, which
    pyarrow, R and Ruby use, accepts messages of any size.
    """

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> _Call | None:
        unlimited = any("grpc-c++/" in agent for agent in headers.get("user-agent", ()))
        span = None
        if tracing.is_active():
            contexts = headers.get(tracing.TRACEPARENT, ())
            parent = contexts[0] if len(contexts) == 1 else None
            span = tracing.begin(f"dissociated.catalog/{CALL_NAMES.get(info.method, '')}", parent, server=True)
        return None if unlimited and span is None else _Call(not unlimited, span)


class _Call(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no type hints
    def __init__(self, is_limited: bool, span: tracing.TraceSpan | None) -> None:
        self.is_limited = is_limited
        self.span = span

    def call_completed(self, exception: BaseException | None) -> None:
        if self.span is not None:
            self.span.end(None if exception is None else type(exception).__name__)


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A Flight server that listens at `uri`, and answers calls once its catalog is set. Earlier calls wait.

    gRPC answers as soon as it listens, but the catalog needs the address at which it listens.
    """

    def __init__(self, uri: str, **protection: Any) -> None:
        self._catalog_future: Future[Catalog] = Future()
        self._log = LimitedLog(_log)
        self._actions: dict[str, tuple[Callable[[_Body], Any], str]] = {}
        self._binary: dict[str, tuple[Callable[[bytes], bytes], str]] = {}
        middleware = {**protection.pop("middleware", {}), _CALL: _Calls()}
        super().__init__(uri, middleware=middleware, **protection)

    def set_catalog(self, catalog: Catalog) -> None:
        """Answer calls with `catalog` from now on."""
        self._actions |= _actions(catalog)
        self._binary |= {
            "RenewFlightEndpoint": (catalog.renew, "extend the lifetime of an endpoint's ticket"),
            "CancelFlightInfo": (_cancel, "nothing is computed for a FlightInfo, so there is nothing to cancel"),
        }
        self._catalog_future.set_result(catalog)

    def stop(self) -> None:
        """Fail the calls that wait for a catalog, if none was set."""
        if not self._catalog_future.done():
            self._catalog_future.set_exception(CatalogError("this catalog could not start"))

    def shutdown(self) -> None:
        """Stop answering."""
        super().shutdown()
        self._log.close()

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[flight.FlightInfo]:
        with flight_errors(self._log, context):
            yield from self._catalog.infos(criteria)

    def get_flight_info(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.FlightInfo:
        with flight_errors(self._log, context):
            return self._catalog.info(descriptor)

    def get_schema(self, context: Any, descriptor: flight.FlightDescriptor) -> flight.SchemaResult:
        try:
            with flight_errors(self._log, context):
                return flight.SchemaResult(self._catalog.schema(descriptor))
        except flight.FlightError as error:  # For GetSchema, pyarrow sends the traceback of Flight errors too.
            raise Refused(str(error)) from None

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with flight_errors(self._log, context):
            reader = self._catalog.open(ticket.ticket, context.is_cancelled)
            call = context.get_middleware(_CALL)
            limited = call is not None and call.is_limited
        # Both iterators need `_with_flight_errors`: pyarrow pulls the batches of a run itself, and would send the
        # client the text of any exception raised there.
        pairs = _with_flight_errors(checked(reader.schema, batches(reader), limited), self._log, context)
        messages = generate_get(pairs)
        return flight.GeneratorStream(reader.schema, _with_flight_errors(messages, self._log, context))

    def do_put(self, context: Any, descriptor: flight.FlightDescriptor, reader: Any, writer: Any) -> None:
        with flight_errors(self._log, context):
            command = parse_put(descriptor)
            with _counting_refusals(self._catalog):
                result = self._catalog.put(command, reader, context.is_cancelled)
            writer.write(pa.py_buffer(json.dumps(result).encode()))

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise NotAnswered("DoExchange is not supported: read with GetFlightInfo and DoGet, publish with DoPut")

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        actions: Mapping[str, tuple[Any, str]] = {**self._actions, **self._binary}
        return [(name, description) for name, (_, description) in actions.items()]

    def do_action(self, context: Any, action: flight.Action) -> list[bytes]:
        content = action.body.to_pybytes()
        if (call := context.get_middleware(_CALL)) is not None and call.span is not None:
            call.span.set(action=action.type)
        with flight_errors(self._log, context):
            self._catalog_future.result()  # Wait for the catalog, which defines the actions.
            if action.type in self._binary or action.type in self._actions:
                require_action(context, action.type)
            try:
                if action.type in self._binary:
                    return [self._binary[action.type][0](content)]
                if action.type in self._actions:
                    answer = self._actions[action.type][0](strict_json.loads(content or b"{}"))
                    return [json.dumps(answer or {}).encode()]
            except DissociatedError:
                raise
            except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
                # Log without the text of the error, which may contain the whole body, including tickets.
                self._log.write(
                    logging.INFO,
                    "action refused, invalid body: action=%s error=%s",
                    action.type,
                    type(error).__name__,
                    event="body",
                    peer=context.peer(),
                )
                raise CatalogError(f"the body of the action {action.type!r} is invalid") from None
            raise CatalogError(f"no action {action.type!r}; there are {', '.join([*self._actions, *self._binary])}")

    @cached_property
    def _catalog(self) -> Catalog:
        return self._catalog_future.result()


def _actions(catalog: Catalog) -> dict[str, tuple[Callable[[_Body], Any], str]]:
    def counted(act: Callable[[_Body], Any]) -> Callable[[_Body], Any]:
        def call(body: _Body) -> Any:
            with _counting_refusals(catalog):
                return act(body)

        return call

    return {
        "stage": (catalog.stage, "locate the directory for segments of writers"),
        "reserve": (
            counted(lambda body: {"size": _reserve(catalog, body)}),
            "reserve room for a segment in the stage",
        ),
        "commit": (
            counted(lambda body: catalog.commit(Commit.parse(body))),
            "publish segments as a dataset, all at once",
        ),
        "discard": (
            lambda body: catalog.discard([str(item) for item in body["segments"]]),
            "remove segments that will not be committed",
        ),
        "committed": (
            lambda body: {"committed": catalog.committed(_only(body, "key"))},
            "tell whether a commit with this key was made",
        ),
        "abort": (lambda body: catalog.abort(_only(body, "key")), "forbid a commit, and remove its segments"),
        "drop": (lambda body: catalog.drop(_only(body, "name")), "make a dataset unavailable"),
        "current": (
            lambda body: {"current": catalog.current(_names(body))},
            "identify the current versions of several datasets",
        ),
        "versions": (
            lambda body: {"versions": catalog.versions(_only(body, "name"))},
            "list the versions of a dataset that can still be read",
        ),
        "forget": (lambda body: catalog.forget(_only(body, "node")), "remove a node that will not come back"),
        "nodes": (lambda body: {"nodes": catalog.nodes()}, "list the nodes, which hold parts of datasets"),
        "status": (lambda body: catalog.status().plain(), "report the datasets, their readers, and the data sent"),
        "prepare": (catalog.prepare, "between catalogs and nodes: make segments ready to be published"),
        "over": (
            lambda body: {"over": catalog.resolved_commits([str(item) for item in body["keys"]])},
            "between catalogs and nodes: tell which of these keys were committed or aborted",
        ),
        "register": (catalog.register, "between catalogs and nodes: register a node with all its parts"),
        "heartbeat": (catalog.heartbeat, "between catalogs and nodes: report that a node is alive"),
        "leave": (
            lambda body: catalog.deregister(
                str(body["node"]), bool(body.get("retiring")), [str(part) for part in body.get("gone", ())]
            ),
            "between catalogs and nodes: deregister a node",
        ),
    }


def _reserve(catalog: Catalog, body: _Body) -> int:
    return catalog.reserve(str(body["segment"]), int(body["size"]), int(body["wish"]), str(body.get("appends", "")))


def _only(body: _Body, key: str) -> str:
    """Return the value of the only key in `body`, as text. Errors are those of `_value`."""
    return str(_value(body, key))


def _value(body: _Body, key: str) -> Any:
    """Return the value of the only key in `body`.

    Raises:
        ValueError: The body has other keys, so the client expects more than the action does.
    """
    if [*body] != [key]:
        raise ValueError(f"{key} alone")
    return body[key]


def _names(body: _Body) -> list[str]:
    """Return the different `names` in `body`. Raise ValueError if there are more than a client asks for."""
    names = [*dict.fromkeys(map(str, _value(body, "names")))]
    if len(names) > MAX_CURRENT:
        raise ValueError(f"{len(names)} names; at most {MAX_CURRENT} are accepted")
    return names


def _cancel(request: bytes) -> bytes:
    flight.FlightInfo.deserialize(first_field(request))
    return _NOT_CANCELLABLE

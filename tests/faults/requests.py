"""Random bytes for a server from any client, or for a client from a server. `faults.fuzz` runs this module.

Each role makes its requests from a seed. The first requests of some roles are fixed: similar requests did harm once.
"""

from __future__ import annotations

import base64
import copy
import json
import logging
import random
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight

import dissociated as dis
from dissociated.codec.filter.pruning import may_pass
from dissociated.codec.filter.substrait import parse_filter
from dissociated.node.node import Node
from dissociated.store.store import Store

from .filters import batch_of, hostile_filters, random_filter
from .outcomes import Outcomes, changed

MAGIC = b"DISSREQ\x01"
TIMEOUT = 5.0
ROWS = 40
HUGE = (2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63), -(10**30))
#: JSON values that servers do not expect.
VALUES: tuple[Any, ...] = (
    *HUGE,
    0,
    1,
    0.5,
    1e308,
    -1e308,
    float("inf"),
    float("nan"),
    True,
    None,
    "",
    "\ud800",
    "\x00",
    "../../x",
    "/etc/passwd",
    "x" * 5000,
    [],
    {},
    [None],
    [[[[[]]]]],
    {"node": 5},
    {"": ""},
)
DEEP = b"[" * 60_000, b'{"a":' * 60_000, b'{"batches":' + b"[" * 60_000


@contextmanager
def failures(outcomes: Outcomes) -> Iterator[None]:
    """Count the errors that this process logs as its own, or that escape from a thread or finalizer, as outcomes."""

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or record.exc_info:
                kind = "" if not record.exc_info else getattr(record.exc_info[0], "__name__", "")
                outcomes.add(f"logged: {record.levelname} {kind}", f"{record.getMessage()} {record.exc_info}")

    handler = Log()
    logging.getLogger("dissociated").addHandler(handler)
    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = lambda found: outcomes.add("unraisable", repr(found.exc_value))
    threading.excepthook = lambda found: outcomes.add("thread", repr(found.exc_value))
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before
        logging.getLogger("dissociated").removeHandler(handler)


def told(outcomes: Outcomes, number: int, call: Callable[[], object]) -> None:
    """Make a call of pyarrow's client. A refusal is a good outcome unless it reveals the server's code."""

    def attempt() -> None:
        try:
            call()
        except (flight.FlightError, pa.ArrowException, KeyError, NotImplementedError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # libarrow's errors have no number
            leak = "Traceback" in str(error) or "the catalog failed: see its log" in str(error)
            outcomes.add(f"{'leaked' if leak else 'told'}: {type(error).__name__}", f"{number}: {error}")

    outcomes.attempt(number, attempt)


def fuzz_filters(outcomes: Outcomes, dice: random.Random, count: int) -> None:
    """Read random filters, and evaluate those that can be read."""

    def attempt(encoded: bytes) -> None:
        received = parse_filter(encoded)
        rows, columns = received.bind(received.schema)
        batch = batch_of(received.schema)
        may_pass(received.tree, pa.array([batch.num_rows]), {})
        rows.at_columns(columns).mask(batch)

    directed = [*hostile_filters().values()]
    for number in range(count):
        encoded = directed[number] if number < len(directed) else random_filter(dice)
        if number >= len(directed) and dice.random() < 0.3:
            encoded = changed(encoded, dice)
        outcomes.attempt(number, lambda encoded=encoded: attempt(encoded))  # type: ignore[misc]


def spoil(plain: Any, dice: random.Random) -> Any:
    """Replace, remove or add one value at any depth."""
    if isinstance(plain, dict | list) and plain and dice.random() < 0.85:
        spoilt = copy.copy(plain)
        keys = [*spoilt] if isinstance(spoilt, dict) else [*range(len(spoilt))]
        key = dice.choice(keys)
        if dice.random() < 0.1:
            del spoilt[key]
        elif dice.random() < 0.1 and isinstance(spoilt, dict):
            spoilt[dice.choice(("", "name", "x", "\ud800"))] = dice.choice(VALUES)
        else:
            spoilt[key] = spoil(spoilt[key], dice)
        return spoilt
    return dice.choice(VALUES)


def encode(plain: Any, dice: random.Random) -> bytes:
    """Encode a value, mostly as JSON."""
    encoded = json.dumps(plain).encode()
    if dice.random() < 0.1:
        return changed(encoded, dice)
    return dice.choice(DEEP) if dice.random() < 0.01 else encoded


def table() -> pa.Table:
    return pa.Table.from_batches(
        pa.table({"n": range(ROWS), "text": [f"text {n}" for n in range(ROWS)]}).to_batches(max_chunksize=8)
    )


def selections(ticket: bytes) -> list[dict[str, Any]]:
    filters = [base64.b64encode(one).decode() for one in hostile_filters().values()]
    return [
        *({"batches": pair} for pair in ([0, 2**63], [2**63, 2**64], [0, 10**30], [2**63 - 1, 2**63 - 1], [5, 2])),
        *({"fields": [one]} for one in HUGE),
        *({"columns": [one]} for one in ("\ud800", "", "n" * 60_000)),
        *({"rows": {"exact": True, "limit": one}} for one in HUGE),
        *({"rows": {"exact": False, "filter": one}, "batches": [0, 2**63]} for one in filters[:3]),
        *({"rows": {"exact": True, "filter": one}} for one in filters),
    ]


def random_selection(dice: random.Random) -> Any:
    good: dict[str, Any] = {
        "columns": ["n"],
        "fields": [0, 1],
        "batches": [1, 3],
        "streams": dice.choice(("metadata", "bodies")),
        "keep": True,
        "rows": {"exact": True, "limit": 5, "filter": base64.b64encode(random_filter(dice)).decode()},
    }
    chosen = {key: good[key] for key in good if dice.random() < 0.4} or {"columns": ["n"]}
    return chosen if dice.random() < 0.2 else spoil(chosen, dice)


def fuzz_selections(outcomes: Outcomes, dice: random.Random, count: int) -> None:
    """Request columns, batches and rows over TCP, shared memory and Flight's DoGet."""
    with dis.Server(["tcp://127.0.0.1:0", "shm:"], catalog="grpc://127.0.0.1:0") as server:
        server.publish("static", table())
        server.publish("streamed", table().to_reader)
        directed = selections(b"")
        with flight.connect(server.catalog_uri) as client:
            for number in range(count):
                name = dice.choice(("static", "streamed"))
                ticket = server.ticket(name)
                wanted = directed[number // 2] if number < 2 * len(directed) else random_selection(dice)
                length = len(ticket) if dice.random() < 0.95 else dice.choice((0, 2**32 - 1, len(ticket) + 1))
                identifier = MAGIC + struct.pack("<I", length) + ticket + encode(wanted, dice)
                if dice.random() < 0.05:
                    identifier = changed(identifier, dice)
                if number % 2:
                    told(outcomes, number, lambda asked=identifier: get(client, asked))  # type: ignore[misc]
                    continue
                uri = dice.choice(server.locations(name))

                def attempt(uri: str = uri, asked: bytes = identifier) -> None:
                    dis.open_stream(uri, asked, timeout=TIMEOUT).read_all().validate(full=True)

                outcomes.attempt(number, attempt)
            assert get(client, server.ticket("static")).num_rows == ROWS


def get(client: Any, ticket: bytes) -> pa.Table:
    return client.do_get(flight.Ticket(ticket), flight.FlightCallOptions(timeout=TIMEOUT)).read_all()


def bodies(ticket: bytes) -> dict[str, Any]:
    """Return a valid body of each action of a catalog."""
    schema = base64.b64encode(table().schema.serialize()).decode()
    part = {
        "id": "f" * 16,
        "node": "n",
        "ticket": base64.b64encode(b"ticket").decode(),
        "rows": 1,
        "nbytes": 8,
        "number": 0,
        "serial": 1,
    }
    announced = {
        "part": part,
        "name": "announced",
        "key": "k",
        "schema": schema,
        "created": 1e9,
        "prepared": False,
        "whole": True,
        "tags": {"a": "b"},
        "ttl": 5.0,
        "before": [],
    }
    node = {"id": "n", "host": "h", "boot_id": "b", "flight": "grpc://127.0.0.1:1", "locations": ["tcp://h:1"]}
    commit = {
        "name": "made",
        "segments": [],
        "append": False,
        "schema": schema,
        "key": "key",
        "tags": {"a": "b"},
        "ttl": 60.0,
    }
    return {
        "stage": {"host": "h", "boot_id": "b"},
        "reserve": {"segment": "key-0.arrows", "size": 100, "wish": 200},
        "commit": commit,
        "discard": {"segments": ["a"]},
        "committed": {"key": "k"},
        "abort": {"key": "k"},
        "drop": {"name": "made"},
        "current": {"names": ["static", "made"]},
        "versions": {"name": "static"},
        "nodes": {},
        "forget": {"node": "n"},
        "status": {},
        "prepare": commit,
        "over": {"keys": ["k"]},
        "register": {"node": node, "parts": [announced], "lives": 5.0, "digest": "d", "serial": 1, "signs": ""},
        "heartbeat": {"node": "n", "digest": "e", "since": "d", "parts": [announced], "gone": ["x"], "lives": 1.0},
        "leave": {"node": "n", "gone": ["x"]},
    }


def descriptor(dice: random.Random, plain: Mapping[str, Any]) -> Any:
    if dice.random() < 0.2:
        parts = [dice.choice((b"static", b"", b"\xff", b"x" * 5000)) for _ in range(dice.randrange(3))]
        return flight.FlightDescriptor.for_path(*parts)
    return flight.FlightDescriptor.for_command(encode(plain if dice.random() < 0.1 else spoil(plain, dice), dice))


def fuzz_flight(outcomes: Outcomes, dice: random.Random, count: int) -> None:
    """Call every method of a node over Flight."""
    good = bodies(b"")
    options = flight.FlightCallOptions(timeout=TIMEOUT)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Node(Store(f"{directory}/store"), ["tcp://127.0.0.1:0"]) as node,
        dis.connect(node.uri) as ours,
        flight.connect(node.uri) as client,
    ):
        ours.put("static", table())

        def action() -> None:
            name = dice.choice([*good])
            body = encode(spoil(good[name], dice), dice)
            [*client.do_action(flight.Action(name, body), options)]

        def renew() -> None:
            name = dice.choice(("RenewFlightEndpoint", "CancelFlightInfo", "nope", ""))
            endpoint = ours.describe("static").endpoints[0]
            message = flight.FlightEndpoint(endpoint.ticket, []).serialize()
            message = b"\x0a" + bytes([len(message)]) + message if len(message) < 128 else message
            [*client.do_action(flight.Action(name, changed(message, dice)), options)]

        def describe() -> None:
            asked = descriptor(dice, {"name": "static", "version": 1, "host": "h", "boot_id": "b", "embed": 1 << 16})
            dice.choice((client.get_flight_info, client.get_schema))(asked, options)

        def listed() -> None:
            criteria = encode(spoil({"prefix": "s", "tags": {"a": "b"}, "host": "h", "boot_id": "b"}, dice), dice)
            [*client.list_flights(criteria, options)]

        def put() -> None:
            asked = {"name": "put", "mode": "overwrite", "tags": {"a": "b"}, "ttl": 5.0, "key": "k", "end": True}
            asked |= {"nbytes": 100, "staged": False}
            batch = table().to_batches()[0]
            schema = batch.schema.with_metadata({dice.randbytes(3): dice.randbytes(3)} if dice.random() < 0.2 else None)
            writer, reader = client.do_put(descriptor(dice, asked), schema, options)
            with writer:
                metadata = {"dissociated.metadata": [["YQ==", "Yg=="]]}
                writer.write_with_metadata(batch, encode(spoil(metadata, dice), dice))
                writer.write_metadata(encode(spoil({"dissociated.end": {"batches": 1, "rows": 8}}, dice), dice))
                writer.done_writing()
                reader.read()

        for number in range(count):
            told(outcomes, number, dice.choice((action, action, action, renew, describe, listed, put)))
        ours.put("static", table())  # some requests may have replaced or dropped it
        assert ours.read("static").read_all().num_rows == ROWS


#: Extension types that libarrow creates from a schema's metadata without checking it.
EXTENSIONS = ("arrow.fixed_shape_tensor", "arrow.json", "arrow.bool8", "arrow.opaque", "arrow.uuid", "arrow.nope")
EXTENSION_METADATA = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"shape":[]}',
    b'{"shape":[0]}',
    b'{"shape":[-1]}',
    b'{"shape":[2],"permutation":[5]}',
    b'{"shape":[2,2],"permutation":[-1,0]}',
    b'{"shape":[4294967296,4294967296]}',
    b'{"shape":["a"],"dim_names":[1]}',
    b'{"type_name":5,"vendor_name":[]}',
    b"[" * 100_000,
)


def random_schema(dice: random.Random) -> bytes:
    storages = (
        pa.list_(pa.int32(), 4),
        pa.binary(16),
        pa.int8(),
        pa.string(),
        pa.decimal128(5, 2),
        pa.dictionary(pa.int8(), pa.string()),
        pa.struct([("a", pa.int8())]),
        pa.map_(pa.string(), pa.int8()),
        pa.timestamp("us", "UTC"),
        pa.dense_union([pa.field("a", pa.int8())]),
        pa.run_end_encoded(pa.int32(), pa.int8()),
    )
    fields = []
    for number in range(dice.randint(1, 4)):
        metadata = None
        if dice.random() < 0.5:
            name = dice.choice(EXTENSIONS)
            metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": dice.choice(EXTENSION_METADATA)}
        fields.append(pa.field(f"c{number}", dice.choice(storages), metadata=metadata))
    encoded = pa.schema(fields, metadata={"pandas": dice.choice(EXTENSION_METADATA)}).serialize().to_pybytes()
    return changed(encoded, dice) if dice.random() < 0.7 else encoded


def fuzz_schemas(outcomes: Outcomes, dice: random.Random, count: int) -> None:
    """Commit datasets without rows under random schemas, and read the committed datasets."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Node(Store(f"{directory}/store"), ["tcp://127.0.0.1:0"]) as node,
        dis.connect(node.uri) as client,
    ):

        def attempt(number: int, schema: bytes) -> None:
            body = {"name": "made", "segments": [], "append": False, "key": f"key {number}"}
            client.do_action("commit", body | {"schema": base64.b64encode(schema).decode()})
            repr(client.describe("made"))
            for transport in ("tcp", "grpc"):
                client.read("made", transport=transport).read_all()

        for number in range(count):
            schema = random_schema(dice)
            outcomes.attempt(number, lambda number=number, schema=schema: attempt(number, schema))  # type: ignore[misc]
        client.put("made", table())
        assert client.read("made").read_all().num_rows == ROWS


class HostileCatalog(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no type hints
    """A catalog whose answers `told` defines: versions, endpoints, the server's description, and results of actions."""

    def __init__(self) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self.version: bytes = b""
        self.endpoint: bytes = b""
        self.answer: bytes = b""
        self.totals = 0, 0
        self.tensors: bytes | None = None
        self.expires: int | None = None

    def _info(self) -> Any:
        endpoint = flight.FlightEndpoint(b"ticket", ["tcp://127.0.0.1:1"], self.expires, self.endpoint)
        where = flight.FlightDescriptor.for_path("d")
        schema = table().schema
        if self.tensors is not None:
            schema = schema.with_metadata({b"dissociated.tensors": self.tensors})
        return flight.FlightInfo(schema, where, [endpoint], *self.totals, app_metadata=self.version)

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[Any]:
        yield self._info()

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        return self._info()

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        return [self.answer]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        return [("committed", "")]


#: Commands that print a catalog's answers.
COMMANDS = (["ls", "-l"], ["ls", "--json"], ["status", "--once"], ["status", "--json"], ["describe"], ["versions"])


def ipc_stream() -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table().schema) as writer:
        writer.write_table(table())
    return bytes(sink.getvalue())


def fuzz_answers(outcomes: Outcomes, dice: random.Random, count: int) -> None:
    """Query a hostile catalog with the client and with the commands."""
    version = {"host": "h", "boot_id": "b", "version": 1, "created": 1e9, "expires": 2e9, "began": "x", "tags": {}}
    endpoint = {"nodes": [{"id": "n", "host": "h", "boot_id": "b"}], "rows": 5}
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("d", table())
        with dis.connect(server.catalog_uri) as ours:
            dis.open_stream(server.locations("d")[0], server.ticket("d")).read_all()
            status = ours.status().plain()
    status["nodes"] = [{"host": "h", "catalog": "c", "alive": True, "seconds": 1.0}]
    status["store"] = {"held": 5, "limit": 10}
    answers: list[dict[str, Any]] = [
        status,
        {"current": {"d": {"version": 1, "created": 1e9, "began": "x"}}},
        {"versions": [{"version": 1, "created": 1e9, "rows": 5, "current": True}]},
        {"nodes": [{"id": "n", "host": "h", "boot_id": "b", "flight": "f", "locations": [], "alive": True, "seen": 1}]},
    ]
    tensors = {"count": 1, "first": [{"format": "dense", "type": "int64", "shape": [2, 3], "names": ["x", "y"]}]}
    rows = ipc_stream()
    with HostileCatalog() as catalog, dis.connect(f"grpc://127.0.0.1:{catalog.port}") as client:

        def spoilt(plain: Any, number: int) -> bytes:
            return encode(plain if dice.random() < 0.3 else spoil(plain, dice), dice)

        def show() -> None:
            found = client.list()
            repr(found), found._repr_html_()
            info = client.describe("d")
            repr(info), info._repr_html_(), [repr(one) for one in info.endpoints]
            handle = client.dataset("d")
            repr(handle), handle.created, handle.num_rows

        def read() -> None:
            """Read the rows of an endpoint, which may be damaged. Their contents are not checked unless one asks."""
            embedded = rows if dice.random() < 0.2 else changed(rows, dice)
            good = json.dumps(endpoint).encode()
            catalog.endpoint = b"\0".join((good if dice.random() < 0.8 else catalog.endpoint, embedded))
            found = client.read("d", columns=dice.choice((None, [], ["text"]))).read_all()
            with suppress(pa.ArrowInvalid):
                found.validate(full=True)

        def person() -> None:
            from dissociated.cli import main

            words = dice.choice(COMMANDS)
            try:
                main([words[0], f"{client.uri}/d" if words[0] in ("describe", "versions") else client.uri, *words[1:]])
            except SystemExit as error:
                if error.code not in (0, 1, None):
                    raise RuntimeError(f"{words}: {error.code}") from None

        calls: tuple[Callable[[], object], ...] = show, show, person, person, read, read, client.status, client.nodes
        for number in range(count):
            catalog.version = spoilt(version, number)
            catalog.endpoint = spoilt(endpoint, number)
            catalog.answer = spoilt(dice.choice(answers), number)
            catalog.tensors = spoilt(tensors, number) if dice.random() < 0.3 else None
            catalog.totals = dice.choice(((5, 100), (-1, -1), (2**63 - 1, 2**63 - 1), (-(2**63), 0)))
            outcomes.attempt(number, dice.choice(calls))  # type: ignore[arg-type]


ROLES: Mapping[str, Callable[[Outcomes, random.Random, int], None]] = {
    "filters": fuzz_filters,
    "selections": fuzz_selections,
    "flight": fuzz_flight,
    "schemas": fuzz_schemas,
    "answers": fuzz_answers,
}

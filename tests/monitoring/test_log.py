"""The log: records that programs can read, without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyarrow import flight

import dissociated as dis
from dissociated.errors import AccessDenied, OptionError
from dissociated.monitoring.log import JsonFormatter, TextFormatter, configure
from support.certificates import Certificates
from support.helpers import PATIENCE, connections_left, written_forms

TABLE = pa.table({"n": [1, 2, 3]})
TOKEN, WRONG = "sesame-0123456789", "simsim-9876543210"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Yield all log output down to the lowest level: each record as JSON, as text, and with all its attributes."""
    written = io.StringIO()

    class Everything(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return "\n".join([JsonFormatter().format(record), TextFormatter().format(record), repr(vars(record))])

    handler = logging.StreamHandler(written)
    handler.setFormatter(Everything())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield written
    root.removeHandler(handler)
    root.setLevel(level)


@pytest.mark.parametrize("lifetime", [None, 3600.0])
def test_no_secret_is_ever_logged(lines: io.StringIO, certified: Certificates, lifetime: float | None) -> None:
    secrets = set()

    def failing() -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(TABLE.schema, iter([pa.record_batch({"x": [1]})]))

    with dis.Server(
        ["shm:", "tcp:", "tls:", "inproc:"],
        catalog="grpc+tls://127.0.0.1:0",
        authorize={TOKEN: ("ali", "admin")},
        ticket_lifetime=lifetime,
        secret=b"the secret of the server" if lifetime else None,
        **certified.options,
    ) as server:
        server.publish("data", TABLE)
        server.publish("failing", lambda: failing() if server.names() == ["data", "failing"] else TABLE.to_reader())
        with dis.connect(server.catalog_uri, token=TOKEN, tls_roots=certified.roots) as client:
            for transport in ("shm", "tls", "tcp", "inproc", "grpc"):
                assert client.read("data", transport=transport).read_all() == TABLE
                with pytest.raises(dis.DissociatedError):
                    client.read("failing", transport=transport).read_all()
            client.status()
        wrong = dis.connect(server.catalog_uri, token=WRONG, tls_roots=certified.roots)
        with wrong as client, pytest.raises(AccessDenied):
            client.list()
        for name in ("data", "failing"):
            ticket = server.ticket(name)
            altered = ticket[:-1] + bytes([ticket[-1] ^ 1])
            secrets |= {ticket, altered, server.dataset(name).ticket}
            for uri in server.locations(name):
                if not uri.startswith("tls"):
                    with pytest.raises(dis.DissociatedError):
                        dis.open_stream(uri, altered, timeout=PATIENCE).read_all()
        connections_left(server)
    secrets |= {TOKEN.encode(), WRONG.encode(), b"the secret of the server"}
    log = lines.getvalue()
    assert "no dataset has this ticket" in log or "was altered" in log
    assert "does not accept this token" in log
    assert '"identity": "ali"' in log
    for secret in secrets:
        for form in written_forms(secret):
            assert form not in log


def test_a_call_that_is_not_understood_is_logged_without_its_body(lines: io.StringIO) -> None:
    with dis.Server(["inproc:"]) as server, flight.connect(server.catalog_uri) as client:
        for body in (f'{{"key": "{TOKEN}\xff"}}'.encode("latin-1"), f'{{"name": "{TOKEN}'.encode()):
            with pytest.raises(flight.FlightError, match="is invalid"):
                list(client.do_action(flight.Action("drop", body)))
    assert "action refused, invalid body: action=drop error=UnicodeDecodeError" in lines.getvalue()
    assert TOKEN not in lines.getvalue()


def test_each_record_of_a_connection_says_which(lines: io.StringIO) -> None:
    with dis.Server(["tcp:"], catalog=None) as server:
        server.publish("data", TABLE)
        for _ in range(2):
            dis.open_stream(server.locations("data")[0], server.ticket("data")).read_all()
        with pytest.raises(dis.errors.RemoteError):
            dis.open_stream(server.locations("data")[0], b"wrong")
        connections_left(server)
    records = [json.loads(line) for line in lines.getvalue().splitlines() if line.startswith("{") and '"time"' in line]
    ended = sorted((one for one in records if "outcome" in one), key=lambda one: one["connection"])
    assert [one["connection"] for one in ended] == [1, 2, 3]
    assert [one["outcome"] for one in ended] == ["done", "done", "refused"]
    assert [(one["dataset"], one["messages"], one["bytes"]) for one in ended[:2]] == [("data", 2, 24)] * 2
    assert "dataset" not in ended[2]
    assert all(one["transport"] == "tcp" and one["peer"].startswith("tcp client 127.0.0.1:") for one in ended)


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("dissociated.server.server", logging.INFO, "file", 1, "said %r", ("thé",), None)
    made.created, made.msecs = 1_700_000_000.25, 250.0
    vars(made).update(extra)
    return made


def test_a_record_as_json() -> None:
    assert json.loads(JsonFormatter().format(record(connection=7, peer='a "peer"', ticket="secret"))) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "info",
        "logger": "dissociated.server.server",
        "message": "said 'thé'",
        "connection": 7,
        "peer": 'a "peer"',
    }
    try:
        raise ValueError("wrong\nnews")
    except ValueError as error:
        broken = record(exc_info=(type(error), error, error.__traceback__))
    line = JsonFormatter().format(broken)
    assert "\n" not in line
    assert "ValueError: wrong\nnews" in json.loads(line)["exception"]


def test_a_record_as_text() -> None:
    assert (
        TextFormatter().format(record(connection=7, peer='a "peer"', ticket="secret"))
        == '2023-11-14T22:13:20.250Z INFO said \'thé\' connection=7 peer="a \\"peer\\""'
    )
    forged = record(msg="no column a\n2023-11-14T22:13:21.250Z ERROR all is lost\r\x1b[H\u2028", args=())
    (line,) = TextFormatter().format(forged).splitlines()
    assert line.endswith(r"no column a\n2023-11-14T22:13:21.250Z ERROR all is lost\r\x1b[H\u2028")


@pytest.mark.parametrize(("format", "level"), [("xml", "info"), ("json", "loud")])
def test_formats_and_levels_there_are_not(format: str, level: str) -> None:
    with pytest.raises(OptionError, match="the formats are text, json, and the levels debug, info, warning, error"):
        configure(format, level)
    assert logging.getLogger("dissociated").handlers == []

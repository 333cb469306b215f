"""The dashboard of a server: its HTTP answers, and its display in a browser."""

from __future__ import annotations

import base64
import html
import json
import re
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.control.access import security
from dissociated.errors import OptionError, TransportError
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.certificates import Certificates
from support.helpers import Serve, wait_until
from support.machine import BROWSER

TABLE = pa.table({"n": [1, 2, 3]})


def get(uri: str, context: ssl.SSLContext | None = None, **headers: str) -> tuple[int, Message, str]:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(uri, headers=headers), timeout=10, context=context
        ) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


def status(uri: str) -> Any:
    return json.loads(get(f"{uri}/status.json")[2])


def wait_for(uri: str, good: Callable[[Any], bool]) -> Any:
    """Return the first status that is good. The server makes a new one each half second."""
    found: list[Any] = []

    def is_good() -> bool:
        found.append(status(uri))
        return good(found[-1])

    wait_until(is_good, "the page says so")
    return found[-1]


def test_what_the_page_asks_for_says_what_happens(serve: Serve) -> None:
    server = serve(http="127.0.0.1:0", catalog="grpc://127.0.0.1:0")
    name = '<script>alert("x")</script>'
    server.publish(name, TABLE)
    server.publish(name, TABLE)
    server.publish("gone", TABLE)
    server.drop("gone")
    kept = dis.open_stream(server.locations(name)[0], server.ticket(name)).read_all()
    shown = wait_for(server.http_uri, lambda found: found["consumer_count"] == 1 and len(found["samples"]) > 1)
    assert kept == TABLE
    assert [(one["name"], one["rows"], one["consumers"]) for one in shown["datasets"]] == [(name, 3, 1)]
    assert [(one["kind"], one["dataset"]) for one in shown["changes"]] == [
        ("dropped", "gone"),
        ("committed", "gone"),
        ("retired", name),
        ("committed", name),
        ("committed", name),
    ]
    assert [one["transport"] for one in shown["consumers"]] == ["shm"]
    assert shown["samples"][-1][1] <= shown["totals"]["bytes"] == 24
    assert "leases" in get(f"{server.http_uri}/metrics")[2]
    assert get(f"{server.http_uri}/healthz")[::2] == (200, "ok\n")
    assert get(f"{server.http_uri}/other")[0] == 404


def test_a_guarded_catalog_guards_its_page(serve: Serve, certified: Certificates) -> None:
    server = serve(
        http="127.0.0.1:0",
        catalog=None,
        authorize={"secret": ("me", "admin")},
        tls_cert=certified.cert,
        tls_key=certified.key,
    )
    trust = ssl.create_default_context(cafile=certified.roots)
    basic = base64.b64encode(b"me:secret").decode()
    assert server.http_uri.startswith("https:")
    for path in ("/", "/status.json", "/metrics", "/page.js"):
        code, headers, _ = get(f"{server.http_uri}{path}", trust)
        assert (code, headers["WWW-Authenticate"][:5]) == (401, "Basic")
        for wrong in ("Bearer wrong", "Bearer", "Basic !", "Digest secret", f"Basic {basic[:-8]}"):
            assert get(f"{server.http_uri}{path}", trust, Authorization=wrong)[0] == 401
        for right in ("Bearer secret", f"Basic {basic}"):
            assert get(f"{server.http_uri}{path}", trust, Authorization=right)[0] == 200
    assert get(f"{server.http_uri}/healthz", trust)[0] == 200


def test_the_log_tells_why_a_token_could_not_be_checked(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve(http="127.0.0.1:0", authorize=lambda token: [token])
    assert get(f"{server.http_uri}/status.json", Authorization="Bearer secret")[0] == 401
    assert "token check failed: error=the owner of a token is a list: give a name" in caplog.text
    assert "secret" not in caplog.text


def test_other_sites_cannot_read_what_is_at_this_host(serve: Serve) -> None:
    """A site whose name resolves to 127.0.0.1 gets no data, and no page may frame this one or load content into it."""
    uri = serve(http="127.0.0.1:0").http_uri
    assert [get(f"{uri}/status.json", Host=host)[0] for host in ("evil.example", "127.0.0.1.evil.example", "[")] == [
        421
    ] * 3
    assert [get(f"{uri}/status.json", Host=host)[0] for host in ("localhost:1", "127.0.0.1", "[::1]:80")] == [200] * 3
    assert get(uri)[1]["Content-Security-Policy"].startswith("default-src 'self'; frame-ancestors 'none'")


def test_places_that_are_none(serve: Serve) -> None:
    with pytest.raises(OptionError, match="not an address for the page"):
        serve(http="here")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(TransportError, match="the page"):
        serve(http=f"127.0.0.1:{taken.getsockname()[1]}")


def _seen(uri: str, directory: Path) -> str:
    """Return the text of the page after two seconds, without tags, with words separated by single spaces."""
    assert BROWSER is not None
    options = "headless no-sandbox disable-gpu disable-quic disable-sync disable-background-networking no-first-run"
    own = (f"--user-data-dir={directory}", "--virtual-time-budget=2000", "--disable-component-update", "--dump-dom")
    dom = subprocess.run(
        [BROWSER, *(f"--{option}" for option in options.split()), *own, uri],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", dom)).split())


@pytest.mark.needs("browser")
def test_a_browser_shows_a_guarded_node(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", limit=1 << 20)
    guarded = security(authorize={"secret": ("me", "admin")})
    with Node(store, ["shm:"], http="127.0.0.1:0", security=guarded) as node:
        with dis.connect(node.uri, token="secret") as client:
            name = '<b title="x">bold</b>'
            client.put(name, TABLE)
            kept = client.read(name, transport="shm").read_all()
            uri = node.server.http_uri
            text = _seen(uri.replace("://", "://me:secret@"), tmp_path / "browser")
            assert kept == TABLE
        assert f"{name} 3 24 B 1 1 1 1 24 B" in text
        assert "shm client" in text
        assert "committed" in text
        assert "of 1.05 MB" in text
        assert "live" in text.split()
        assert get(uri)[0] == 401
    with dis.Server(["tcp://127.0.0.1:0"], http="127.0.0.1:0") as server:
        assert server.http_uri is not None
        text = _seen(server.http_uri, tmp_path / "without a store")
    assert "this server has no store" in text
    assert "live" in text.split()

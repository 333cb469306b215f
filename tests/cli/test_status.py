"""`dissociated status` for its users, in a terminal and elsewhere, and a guarded `serve`."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest

import dissociated as dis
from dissociated.cli import text
from support.certificates import Certificates
from support.processes import Fork

from .shell import call
from .test_cli import PATIENCE, TABLE, started, until_catalog

pytestmark = pytest.mark.usefixtures("forks")

WIDE = pa.table({"n": np.zeros(100_000)})


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["tcp:"]) as running:
        running.publish("flights", WIDE)
        dis.open_stream(running.locations("flights")[0], running.ticket("flights")).read_all()
        yield running


def test_elsewhere_than_in_a_terminal_it_is_shown_once(server: dis.Server) -> None:
    ran = call("status", server.catalog_uri)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert f"process {os.getpid()}" in ran.stdout
    assert re.search(r"^DATASET +ROWS +SIZE +CONSUMERS +STREAMS +SENT +RATE +LEASES$", ran.stdout, re.MULTILINE)
    assert re.search(r"^flights +100,000 +800 kB +0 +1 +800 kB +- +0$", ran.stdout, re.MULTILINE)
    assert "sent 800 kB in 2 messages of 1 stream" in ran.stdout
    assert "\x1b" not in ran.stdout


def test_what_a_server_says_cannot_move_the_cursor(server: dis.Server) -> None:
    nasty = "\x1b[2J\n\u202e"
    with dis.connect(server.catalog_uri) as client:
        plain = client.status().plain()
    plain |= {"host": nasty, "version": nasty, "state": nasty}
    plain["store"] = {"directory": nasty, "held": 0, "limit": None, "free": None, "set_aside": [nasty], "log": nasty}

    class Hostile(flight.FlightServerBase):  # type: ignore[misc]
        def do_action(self, context: Any, action: Any) -> list[bytes]:
            return [json.dumps(plain).encode()]

    with Hostile("grpc://127.0.0.1:0") as hostile:
        shown = call("status", f"grpc://127.0.0.1:{hostile.port}")
    assert shown.returncode == 0, shown.stderr
    assert not {*shown.stdout} & {"\x1b", "\u202e"}
    assert shown.stdout.count(r"\x1b[2J\n\u202e") == 6


def test_for_machines(server: dis.Server) -> None:
    told = json.loads(call("status", server.catalog_uri, "--json").stdout)
    assert told["totals"]["bytes"] == 800_000
    assert told["datasets"][0]["name"] == "flights"
    assert told["pid"] == os.getpid()


class Terminal:
    """A command in a terminal of 24 lines of 90 columns, and its output."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 90, 0, 0))
        self.process = Fork("-m", "dissociated", *arguments, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.shown = ""

    def wait_for(self, pattern: str) -> str:
        """Wait until the last screen shows `pattern`, and return that screen."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            screen = self.shown.rpartition("\x1b[H\x1b[J")[2]
            if re.search(pattern, screen):
                return screen
            if select.select([self._master], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self._master, 1 << 16).decode().replace("\r\n", "\n")
                except OSError:  # the command has ended
                    break
        raise AssertionError(f"never showed {pattern!r}: {self.shown[-2000:]!r}")

    def end(self) -> str:
        """Press Ctrl-C, and return the last screen."""
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(PATIENCE) == 0
        return self.wait_for(r"\x1b\[\?1049l$")

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._master)


def test_in_a_terminal_it_is_renewed(server: dis.Server) -> None:
    with Terminal("status", server.catalog_uri, "--interval", "0.1") as terminal:
        screen = terminal.wait_for(r"flights +100,000 +800 kB +0 +1 +800 kB +0 B/s")
        assert max(map(len, screen.splitlines())) <= 90
        dis.open_stream(server.locations("flights")[0], server.ticket("flights")).read_all()
        terminal.wait_for(r"flights +100,000 +800 kB +\d +2 +1.60 MB +[\d.]+ .?B/s")
        for number in range(30):
            server.publish(f"one of many {number}", WIDE)
        assert len(terminal.wait_for(r"\.\.\. and \d+ more lines").splitlines()) <= 24
        server.close()
        # The last view stays, cut to the height, and the command tries again.
        assert terminal.process.poll() is None
        terminal.end()
    assert terminal.shown.startswith("\x1b[?1049h\x1b[?25l")
    assert terminal.shown.endswith("\x1b[?25h\x1b[?1049l")


def test_a_server_that_is_gone_is_waited_for(server: dis.Server) -> None:
    with Terminal("status", server.catalog_uri, "--interval", "0.1") as terminal:
        terminal.wait_for("flights")
        uri = server.catalog_uri
        server.close()
        terminal.wait_for(r"(?s)trying again: no catalog answers.*flights")  # the last view stays
        with dis.Server(["tcp:"], catalog=uri) as other:
            other.publish("the next", WIDE)
            screen = terminal.wait_for("the next")
            assert "trying again" not in screen
            terminal.end()


def test_once_also_in_a_terminal(server: dis.Server) -> None:
    server.publish(f"results/{'long ' * 20}/2026", WIDE)  # its middle is left out, and not the columns beside it
    with Terminal("status", server.catalog_uri, "--once") as terminal:
        assert "\x1b" not in terminal.wait_for(r"DATASET +ROWS +SIZE(.*\n)+results/long .*… ?.*long /2026 +\d")
        assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (86_399, "23 h 59 min"),
        (90_000, "1 d 01 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


# A guarded server, from the command line alone


@pytest.fixture(scope="module")
def guarded(
    forks: None, tmp_path_factory: pytest.TempPathFactory, certified: Certificates
) -> Iterator[tuple[str, str, Path]]:
    """Yield the catalog and the metrics of a `serve` that requires a token, and the directory of its files."""
    directory = tmp_path_factory.mktemp("guarded")
    with pa.ipc.new_file(directory / "planes.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
    (directory / "tokens").write_text("ali sesame admin\n")
    (directory / "wrong").write_text("simsim\n")
    arguments = (
        "serve", directory / "planes.arrow", "--tls-cert", certified.cert, "--tls-key", certified.key,
        "--token-file", directory / "tokens", "--ticket-lifetime", "60", "--metrics", "127.0.0.1:0",
        "--log-format", "json", "--log-level", "debug",
    )  # fmt: skip
    with (
        (directory / "log").open("w") as log,
        started(*arguments, stderr=log) as process,
    ):
        assert process.stdout is not None
        printed = until_catalog(process.stdout).split()
        yield printed[-1], printed[-3], directory
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("asked", ["ls", "get", "status"])
def test_commands_show_their_token_and_check_the_certificate(
    guarded: tuple[str, str, Path], certified: Certificates, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, _, directory = guarded
    assert catalog.startswith("grpc+tls://")
    uri, more = (
        (f"{catalog}/planes", ["-o", f"{tmp_path}/out.arrow", "--transport", "tls"])
        if asked == "get"
        else (catalog, [])
    )
    roots: list[str | Path] = ["--tls-roots", certified.roots]
    token: list[str | Path] = ["--token-file", directory / "tokens"]
    for options, sentence in [
        ([], "is not trusted"),
        (roots, "requires a token"),
        ([*roots, "--token-file", directory / "wrong"], "does not accept this token"),
        ([*roots, "--token-file", "/nowhere"], "cannot read tokens from '/nowhere'"),
    ]:
        refused = call(asked, uri, *more, *options)
        assert refused.returncode == 1
        assert sentence in refused.stderr
        assert refused.stderr.count("\n") == 1 or "absl" in refused.stderr  # except for gRPC's own lines
        assert refused.stdout == ""
    for options in ([*roots, *token], []):
        told = call(asked, uri, *more, *options)
        assert told.returncode == 0, told.stderr
        assert "planes" in told.stdout + told.stderr
        monkeypatch.setenv("DISSOCIATED_TOKEN", "sesame")
        monkeypatch.setenv("DISSOCIATED_TLS_ROOTS", certified.roots)
    if asked == "get":
        assert pa.ipc.open_file(tmp_path / "out.arrow").read_all() == TABLE


def test_metrics_and_the_log_of_serve(guarded: tuple[str, str, Path], certified: Certificates) -> None:
    catalog, metrics, directory = guarded
    with dis.connect(catalog, token="sesame", tls_roots=certified.roots) as client:
        assert client.read("planes", transport="tls").read_all() == TABLE
    while True:
        records = [json.loads(line) for line in (directory / "log").read_text().splitlines()]
        if any(one.get("outcome") == "done" for one in records):
            break
    (done, *_) = [one for one in records if one.get("outcome") == "done"]
    assert (done["level"], done["dataset"], done["transport"]) == ("info", "planes", "tls")
    assert any(one.get("identity") == "ali" for one in records)
    with urllib.request.urlopen(metrics, timeout=10) as answer:
        assert b'dissociated_dataset_streams_total{dataset="planes"}' in answer.read()
    assert "sesame" not in (directory / "log").read_text()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tls-cert", "x"], "give both"),
        (["--token-file", "/nowhere"], "cannot read tokens"),
        (["--ticket-lifetime", "0"], "positive number of seconds"),
        (["--metrics", "nowhere"], "is not an address for metrics"),
        (["--catalog", "grpc+tls://127.0.0.1:0"], "needs a certificate"),
    ],
)
def test_options_of_serve_that_make_no_sense(tmp_path: Path, options: list[str], sentence: str) -> None:
    with pa.ipc.new_file(tmp_path / "planes.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE)
    ran = call("serve", tmp_path / "planes.arrow", *options)
    assert ran.returncode == 1
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1

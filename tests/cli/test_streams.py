"""The standard streams of commands, in the states in which other processes leave them."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.cli import main
from support.helpers import PATIENCE, case, wait_until

from .shell import call

TABLE = pa.table({"n": range(20)})


@pytest.fixture
def client() -> Iterator[dis.Client]:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        client.put("numbers", TABLE)
        yield client


def encoded(kind: str) -> bytes:
    """Return TABLE in a format."""
    sink = io.BytesIO()
    if kind == "parquet":
        pq.write_table(TABLE, sink)
    elif kind == "arrows":
        with pa.ipc.new_stream(sink, TABLE.schema) as writer:
            writer.write_table(TABLE)
    elif kind == "csv":
        sink.write(b"n\n" + b"".join(b"%d\n" % n for n in range(20)))
    else:
        sink.write(b"".join(b'{"n": %d}\n' % n for n in range(20)))
    return sink.getvalue()


def given_slowly(content: bytes, first: int, *arguments: str) -> str:
    """Run a command whose standard input is a non-blocking pipe, in which the first bytes come alone.

    Return its output.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)

    def feed() -> None:
        for piece in (content[:first], content[first:]):
            os.write(write, piece)
            wait_until(lambda: not any(fcntl.ioctl(read, termios.FIONREAD, bytes(4))), "the piece was read")
        os.close(write)

    feeder = threading.Thread(target=feed)
    with open(read) as stdin:
        assert isinstance(stdin, io.TextIOWrapper)
        feeder.start()
        called = call(*arguments, given=stdin)
        feeder.join()
    assert called.returncode == 0, called.stderr
    return called.stdout


@pytest.mark.parametrize("kind", ["arrows", "parquet", "csv", "jsonl"])
def test_put_waits_for_the_whole_standard_input(client: dis.Client, kind: str) -> None:
    """Another process can make the pipe non-blocking, and the first piece can be too short to tell what it is."""
    text = ["--format", kind] if kind in ("csv", "jsonl") else []
    for first in (3, len(encoded(kind)) // 2):
        given_slowly(encoded(kind), first, "put", *text, "-", f"{client.uri}/copy")
        assert client.read("copy").read_all() == TABLE


def test_sql_waits_for_the_whole_query(client: dis.Client) -> None:
    assert given_slowly(b"FROM numbers WHERE n = 7", 12, "sql", "--catalog", client.uri, "-f", "csv") == '"n"\n7\n'


@pytest.mark.parametrize("arguments", [("put", "-", "x"), ("sql",), ("drop", "numbers", "others")])
def test_a_closed_standard_input_is_an_error(
    client: dis.Client, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.put("others", TABLE)
    monkeypatch.setattr(sys, "stdin", None)
    assert main([*arguments, "--catalog", client.uri]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_closed_standard_output_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["ls"]) == 1
    assert "the standard output is closed" in capsys.readouterr().err


def test_characters_that_the_standard_output_lacks_are_escaped(
    client: dis.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put("prices", pa.table({"é": ["€"]}))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    assert main(["cat", f"{client.uri}/prices"]) == 0
    assert written.getvalue().decode("latin-1") == "é\n\\u20ac\n"


def test_a_closed_standard_error_changes_nothing_else(client: dis.Client, tmp_path: Path) -> None:
    for name, status in (("numbers", 0), ("nothing", 1)):
        arguments = ["get", f"{client.uri}/{name}", "-o", str(tmp_path / "out.arrows")]
        command = ["sh", "-c", '"$0" -m dissociated "$@" 2>&-', sys.executable, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=PATIENCE)
        assert (done.returncode, done.stdout) == (status, b"")
    assert pa.ipc.open_stream(tmp_path / "out.arrows").read_all() == TABLE


def test_the_output_of_a_program_may_be_a_file(client: dis.Client, tmp_path: Path) -> None:
    script = "import sys; sys.stdout = open(sys.argv[1], 'w'); from dissociated.cli import main; main(sys.argv[2:])"
    for unbuffered in ("", "1"):
        with case(unbuffered):
            command = [
                sys.executable,
                "-c",
                script,
                str(tmp_path / "rows"),
                "cat",
                f"{client.uri}/numbers",
                "-f",
                "csv",
            ]
            subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": unbuffered}, check=True, timeout=PATIENCE)
            assert (tmp_path / "rows").read_bytes() == b'"' + encoded("csv").replace(b"\n", b'"\n', 1)

"""The command line for its users: output, exit status, and real processes for commands that keep running."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import IO, Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.cli import COMMANDS, main, quantities
from dissociated.cli.rows import plain_rows
from dissociated.errors import SourceError
from dissociated.node.launch import running
from dissociated.store.segment import Segment, SegmentWriter
from support import processes
from support.helpers import Child, wait_until
from support.processes import Fork, forking_command

from .shell import ENVIRONMENT, call

pytestmark = pytest.mark.usefixtures("forks")

PATIENCE = 30.0  # seconds; only failing tests wait this long
TABLE = pa.table({"n": range(1000), "text": [f"value {n % 7}" if n % 5 else None for n in range(1000)]})


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "dissociated", *map(str, arguments)]


def in_terminal(columns: int, arguments: list[str], **environment: str) -> str:
    """Return the output of a command in a terminal with this number of columns."""
    around = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    return processes.in_terminal(columns, arguments, {**around, **environment})


def started(*arguments: str | Path, **options: Any) -> Fork:
    """Start the command in a process of its own, whose output is a pipe."""
    return Fork("-m", "dissociated", *arguments, stdout=subprocess.PIPE, **options)


def until_catalog(output: IO[str]) -> str:
    """Return the output of `serve` up to the line of its catalog, which ends with the URI."""
    lines = []
    for line in output:
        lines.append(line)
        if line.startswith("catalog"):
            return "".join(lines)
    raise AssertionError(f"serve ended: {''.join(lines)}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    pq.write_table(TABLE, directory / "flights.parquet")
    with pa.ipc.new_file(directory / "planes.arrow", TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=100)
    (directory / "other").mkdir()
    numbers = pa.table({"n": pa.array([0.5], pa.float32())})
    with pa.ipc.new_file(directory / "other" / "numbers.arrow", numbers.schema) as writer:
        writer.write_table(numbers)
    return directory


@pytest.fixture(scope="module")
def size(files: Path) -> str:
    """Return the total size of all bodies in planes.arrow, by libarrow's count."""
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer((files / "planes.arrow").read_bytes()[8:]))
    total = sum(message.body.size for message in [*reader][1:])
    return f"{total / 1000:.1f} kB"


@pytest.fixture(scope="module")
def catalog(forks: None, files: Path) -> Iterator[str]:
    """Yield the catalog of a `dissociated serve` of both files."""
    with started("serve", files) as process:
        assert process.stdout is not None
        yield until_catalog(process.stdout).split()[-1]
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_at_a_signal_and_leaves_nothing(files: Path, size: str, tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with started("serve", files / "planes.arrow", env=environment) as process:
        assert process.stdout is not None
        printed = until_catalog(process.stdout)
        assert len(list(tmp_path.glob("dissociated/*.sock"))) == 1
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
    assert printed.splitlines()[:2] == [
        "NAME     ROWS     SIZE  COLUMNS  FILE",
        f"planes  1,000  {size}        2  {files / 'planes.arrow'}",
    ]
    assert not list(tmp_path.glob("dissociated/*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_leaves_signals_to_the_program(number: int) -> None:
    script = (
        "import dissociated, signal, sys, time\n"
        f"signal.signal({number}, lambda *_: sys.exit(7))\n"
        "with dissociated.Server(['shm:']) as server:\n"
        "    print(server.catalog_uri, flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"  # not forever: a signal that came just before the sleep would not end it
    )
    with Fork("-c", script, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("grpc://")
        process.send_signal(number)
        assert process.wait(PATIENCE) == 7


def test_ls(catalog: str, size: str) -> None:
    listed = call("ls", catalog)
    assert listed.returncode == 0
    assert listed.stdout.splitlines() == [
        "NAME      ROWS     SIZE  COLUMNS  VERSION",
        "flights  1,000        -        2        1",
        f"planes   1,000  {size}        2        1",
    ]
    long = call("ls", "--long", DISSOCIATED_CATALOG=catalog).stdout.splitlines()
    assert long[0].split()[5:] == ["CREATED", "EXPIRES", "HOSTS", "TRANSPORTS", "TAGS"]
    assert "shm tcp" in long[1]
    for one in ("pl*", "planes"):
        assert call("ls", one, "--catalog", catalog).stdout.split()[5:] == ["planes", "1,000", *size.split(), "2", "1"]
    (plain,) = json.loads(call("ls", "--json", f"{catalog}/flights").stdout)
    assert plain["rows"] == 1000
    assert plain["schema"][1] == {"name": "text", "type": "string", "nullable": True}
    assert {uri.partition(":")[0] for uri in plain["locations"]} == {"shm", "tcp", "arrow-flight-reuse-connection"}


def test_describe_and_versions(catalog: str, size: str) -> None:
    described = call("describe", f"{catalog}/planes", "--long").stdout.splitlines()
    assert described[0] == f"planes: 1,000 rows, {size}"
    assert re.fullmatch(r"version 1 of \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", described[1])
    assert described[3:6] == ["COLUMN  TYPE", "n       int64", "text    string"]
    assert described[7].split() == ["PART", "ROWS", "HOSTS", "TRANSPORTS"]
    assert described[10].startswith("shm:///")
    versions = call("versions", "planes", DISSOCIATED_CATALOG=catalog).stdout.splitlines()
    assert versions[0].split() == ["VERSION", "ROWS", "CREATED", "STATE"]
    assert (versions[1].split()[0], versions[1].split()[-1]) == ("1", "current")
    (told,) = json.loads(call("versions", f"{catalog}/planes", "--json").stdout)
    assert datetime.fromisoformat(told["created"]).tzinfo is not None


def test_head_and_cat_show_rows(catalog: str) -> None:
    shown = call("head", f"{catalog}/planes", "-n", "2")
    assert shown.stdout == "n  text\n0  NULL\n1  value 1\n"
    assert call("cat", f"{catalog}/flights", "--rows", "6:8", "--columns", " text").stdout == "text\nvalue 6\nvalue 0\n"
    assert call("cat", f"{catalog}/planes", "--rows", ":0").stdout == "n  text\n"
    lines = call("cat", f"{catalog}/planes", "--rows", "995:", "-f", "jsonl").stdout.splitlines()
    assert [json.loads(line) for line in lines] == TABLE.slice(995).to_pylist()


def test_head_cat_and_get_take_conditions(catalog: str, tmp_path: Path) -> None:
    condition = "n >= 10 and (text = 'value 4' or text is null)"
    expected = [row for row in TABLE.to_pylist() if row["n"] >= 10 and row["text"] in ("value 4", None)]
    for name in ("planes", "flights"):
        lines = call(
            "cat", f"{catalog}/{name}", "--filter", condition, "-f", "jsonl", "--transport", "tcp"
        ).stdout.splitlines()
        assert [json.loads(line) for line in lines] == expected
        shown = call("head", f"{catalog}/{name}", "-n", "2", "--filter", condition, "--columns", "n").stdout.split()
        assert shown == ["n", *(str(row["n"]) for row in expected[:2])]
    got = call("get", f"{catalog}/planes", "-o", tmp_path / "some.parquet", "--filter", "n < 5", "--rows", "3:10")
    assert got.stderr.startswith("planes: 2 rows, ")
    assert pq.read_table(tmp_path / "some.parquet") == TABLE.slice(3, 2)


def test_a_condition_is_for_the_version_that_is_read() -> None:
    """The dataset is replaced at the second request: a condition for integers means something else for doubles."""
    requests = 0

    def authorize(token: str) -> str:
        nonlocal requests
        requests += 1
        if requests == 2:
            server.publish("d", pa.table({"x": [5.2, 5.6]}))
        return "user"

    with dis.Server(["tcp://127.0.0.1:0"], authorize=authorize) as server:
        server.publish("d", pa.table({"x": [1, 9]}))
        shown = call("cat", f"{server.catalog_uri}/d", "--filter", "x > 5.5", DISSOCIATED_TOKEN="any")
    assert (shown.returncode, shown.stdout) == (0, "  x\n5.6\n"), shown.stderr
    assert requests > 2


def test_sql_asks_datasets_by_their_names(catalog: str, files: Path) -> None:
    question = "SELECT text, count(*) AS c, max(n) AS m FROM flights WHERE n > 500 GROUP BY text ORDER BY text"
    with duckdb.connect() as connection:
        connection.register("flights", TABLE)
        expected = connection.execute(question).fetchall()
    told = call("sql", question, "-f", "jsonl", "--catalog", catalog)
    assert told.stderr == ""
    assert [tuple(json.loads(line).values()) for line in told.stdout.splitlines()] == expected
    twice = "SELECT count(*) AS c FROM flights a JOIN planes b USING (n) JOIN planes p USING (n)"
    assert call("sql", given=twice.encode(), DISSOCIATED_CATALOG=catalog).stdout == "   c\n1000\n"
    for asked, why in [
        ("SELECT * FROM nothing", "DuckDB has no table 'nothing', and no dataset 'nothing' is published here"),
        ("SELEC 1", "Parser Error: syntax error"),
        ("FROM client", "no dataset 'client' is published here"),  # SQL does not see variables of the command
        ("SELECT x FROM planes", 'Referenced column "x" not found'),
    ]:
        refused = call("sql", asked, "--catalog", catalog)
        assert (refused.returncode, refused.stdout) == (1, "")
        assert why in refused.stderr


def test_what_asks_nobody_loads_no_library() -> None:
    """These are help and the names of commands, which a shell requests at each key."""
    script = """if True:
        import sys
        import dissociated as dis
        from dissociated.cli import main
        assert main([]) == 0
        assert not {"pyarrow", "numpy", "rich.console", "dissociated.catalog"} & {*sys.modules}
        from dissociated import *
        assert (Server, connect, open_stream) == (dis.Server, dis.connect, dis.open_stream)
        assert {*dis.__all__} <= {*dir(dis)}
        assert dis.monitoring.__name__ == "dissociated.monitoring"
        assert not hasattr(dis, "nothing")
    """
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("usage: dissociated")


def test_a_shell_completes_commands_options_and_names(catalog: str, tmp_path: Path) -> None:
    """The test asks like argcomplete's code for bash: by the environment, and on descriptor 8."""
    pytest.importorskip("argcomplete", reason="argcomplete is not installed")
    around = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "DISSOCIATED_CATALOG": catalog, "IFS": "\v"}
    script = ["bash", "-c", f"{tmp_path}/dissociated 8>&1 >/dev/null"]

    def completed(line: str) -> set[str]:
        asked = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": ":="}
        environment = {**os.environ, **around, **asked}
        told = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        return {one.strip() for one in told.stdout.split("\v") if one.strip()}

    def is_completed(line: str, name: str) -> bool:
        return completed(line) == {name}

    with forking_command(tmp_path / "dissociated"):
        assert completed("dissociated desc") == {"describe"}
        assert completed("dissociated cat planes --fo") == {"--format"}
        assert completed("dissociated ls --catalog grpc://127.0.0.1:1 p") == set()
        for line, name in [  # a shell waits for a second only, and this machine may be slower
            ("dissociated head pl", "planes"),
            (f"dissociated drop {catalog}/fl", f"{catalog.rpartition(':')[2]}/flights"),  # for bash a colon ends a word
        ]:
            wait_until(partial(is_completed, line, name), f"{line} is completed")
    for shell, line in (("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --command dissociated")):
        assert line in call("completion", shell).stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete(shell: str, catalog: str, tmp_path: Path) -> None:
    """The shell is a real one, interactive if it completes only then. The test before covers bash."""
    pytest.importorskip("argcomplete", reason="argcomplete is not installed")
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    (tmp_path / "dissociated").write_text(f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')
    (tmp_path / "dissociated").chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path), "DISSOCIATED_CATALOG": catalog, "TERM": "dumb"}
    for line, whole in (("dissociated desc", "describe"), ("dissociated head pl", "planes")):
        if shell == "fish":
            script = f"dissociated completion fish | source; complete -C {shlex.quote(line)}"
            arguments = ["fish", "--command", script]
            told = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=PATIENCE)
            assert told.stdout.split()[0] == whole
            continue
        set_up = 'autoload -Uz compinit && compinit -u; eval "$(dissociated completion zsh)"\n'
        with interactive(["zsh", "-f"], environment) as (read_until, write):
            write(f"{set_up}echo set''up\n".encode())
            read_until("\nsetup")
            write(f"{line}\t".encode())
            read_until(whole)


@contextmanager
def interactive(
    arguments: list[str], environment: dict[str, str]
) -> Iterator[tuple[Callable[[str], None], Callable[[bytes], int]]]:
    """Run a shell in a terminal; yield a function that waits for output, and one that types a text."""
    ours, theirs = pty.openpty()
    with Child(
        arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        written = ""

        def read_until(text: str) -> None:
            nonlocal written
            while text not in written.replace("\r", ""):
                assert select.select([ours], [], [], PATIENCE)[0], written
                written += os.read(ours, 1 << 16).decode()

        yield read_until, partial(os.write, ours)
        process.kill()
    os.close(ours)


def test_rows_are_shown_as_wide_as_a_terminal_is(catalog: str) -> None:
    """A terminal narrower than the rows gets some whole columns, and a dumb terminal gets no escape sequences."""
    table = "n  …\r\n0  …\r\n1 of 2 columns: --columns A,B shows others\r\n"
    arguments = command("head", f"{catalog}/planes", "-n", "1")
    assert in_terminal(6, arguments, TERM="dumb") == table
    coloured = in_terminal(6, arguments, TERM="xterm")
    assert coloured == table.replace("n  …", "\x1b[1mn  …\x1b[0m", 1)
    refused = in_terminal(60, command("cat", f"{catalog}/planes", "-f", "parquet"), TERM="xterm", NO_COLOR="1")
    assert "dissociated: this format is binary" in refused


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"CLICOLOR_FORCE": "1"}, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_the_users_choice(catalog: str, environment: dict[str, str], coloured: bool) -> None:
    assert ("\x1b[" in call("ls", catalog, given=b"", **environment).stdout) is coloured


def test_what_a_dataset_says_cannot_move_the_cursor(tmp_path: Path) -> None:
    nasty = "\x1b[2J\n\u202e"
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish(f"name {nasty}", pa.table({nasty: [nasty]}))
        for arguments in (["ls"], ["ls", "--long"], ["describe", f"name {nasty}"], ["cat", f"name {nasty}"]):
            shown = call(*arguments, DISSOCIATED_CATALOG=server.catalog_uri)
            assert shown.returncode == 0
            assert not {*shown.stdout} & {"\x1b", "\u202e"}
            assert r"\x1b[2J\n\u202e" in shown.stdout
        failed = call("cat", f"name {nasty}", "--columns", "x", DISSOCIATED_CATALOG=server.catalog_uri)
        assert failed.returncode == 1
        assert not {*failed.stderr} & {"\x1b", "\u202e"}
        assert r"\x1b[2J" in failed.stderr


def test_json_lines_say_what_arrow_says(catalog: str) -> None:
    """The output keeps details that Python's own values lose: nanoseconds, digits of decimals, keys of maps."""
    columns: dict[str, tuple[pa.DataType, Any, Any]] = {
        "t": (pa.timestamp("ns", "UTC"), 123456789123456789, "1973-11-29 21:33:09.123456789Z"),
        "time": (pa.time64("ns"), 1, "00:00:00.000000001"),
        "d": (pa.decimal128(10, 2), Decimal("1.20"), "1.20"),
        "b": (pa.binary(), b"\xff", "/w=="),
        "l": (
            pa.list_(pa.struct({"x": pa.timestamp("ns")})),
            [{"x": 1}, None],
            [{"x": "1970-01-01 00:00:00.000000001"}, None],
        ),
        "m": (pa.map_(pa.string(), pa.int8()), [("k", 1), ("k", 2)], [["k", 1], ["k", 2]]),
        "v": (pa.month_day_nano_interval(), (1, 2, 3), [1, 2, 3]),
    }
    table = pa.table({name: pa.array([value, None], of) for name, (of, value, _) in columns.items()})
    table = table.append_column("dict", pa.array(["x", None]).dictionary_encode())
    table = table.append_column("ree", pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([7, None])))
    union = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", None])])
    table = table.append_column("union", union)
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("kinds", table)
        server.publish("twice", pa.table([[1], [2]], names=["n", "n"]))
        written = call("cat", f"{server.catalog_uri}/kinds", "-f", "jsonl").stdout.splitlines()
        first = {name: expected for name, (_, _, expected) in columns.items()}
        assert [json.loads(line) for line in written] == [
            {**first, "dict": "x", "ree": 7, "union": 1},
            dict.fromkeys(table.column_names),
        ]
        refused = call("cat", f"{server.catalog_uri}/kinds", "-f", "csv")
        no_csv = ", ".join(f"column {n!r} of the type {table.field(n).type}" for n in ("l", "m", "ree", "union"))
        assert f"CSV cannot hold {no_csv}: choose --columns" in refused.stderr
        twice = call("cat", f"{server.catalog_uri}/twice", "-f", "jsonl")
        assert (twice.returncode, twice.stdout) == (1, "")
        assert call("cat", f"{server.catalog_uri}/twice").stdout == "n  n\n1  2\n"
    assert plain_rows(table.select([]).to_batches()[0]) == [{}, {}]


def test_structs_keep_fields_of_the_same_name() -> None:
    twice = pa.StructArray.from_arrays(
        [pa.array([1, 3]), pa.array([2, 4])], names=["a", "a"], mask=pa.array([False, True])
    )
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("d", pa.table({"s": twice}))
        assert (
            call("cat", f"{server.catalog_uri}/d", "-f", "jsonl").stdout == '{"s": [["a", 1], ["a", 2]]}\n{"s": null}\n'
        )
        assert call("cat", f"{server.catalog_uri}/d").stdout.split("\n")[1] == '[["a", 1], ["a", 2]]'


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_times_that_would_be_written_as_others_are_refused(kind: str) -> None:
    """libarrow writes "<value out of range: ...>", or another year with a zone, and +0053 for Berlin's +00:53:28."""
    old, berlin = -3 * 10**9, "Europe/Berlin"
    last = pa.scalar(datetime(9999, 12, 31), pa.timestamp("s"))
    unused = pa.DictionaryArray.from_arrays([0, None], pa.array([0, 2**62]).cast(pa.timestamp("s")))
    good = [unused, pa.array([last, None]), pa.array([old, 0]).cast(pa.timestamp("s", "UTC")), pa.nulls(2, pa.date32())]
    bad = [
        pa.array([None, 2**62]).cast(pa.timestamp("s")),
        pa.array([0, 2**31 - 1], pa.int32()).cast(pa.date32()),
        pa.array([0, old * 1000]).cast(pa.timestamp("ms", berlin)),
        pa.array([0, old]).cast(pa.timestamp("s", berlin)).dictionary_encode(),
        pa.array([0, 2 * 10**12]).cast(pa.timestamp("s", "UTC")),
        pa.array([0, 971_890_963_200]).cast(pa.timestamp("s", "+02:00")),
    ]
    if kind == "jsonl":
        moments = pa.array([0, old]).cast(pa.timestamp("s", berlin))
        bad.append(pa.array([[moments[0]], [moments[1]]], pa.list_(moments.type)))
        bad.append(pa.array([None, {"a": moments[1]}], pa.struct({"a": moments.type})))
        bad.append(pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), moments))
        bad.append(pa.array([[], [(moments[1], moments[0])]], pa.map_(moments.type, moments.type)))
        bad.append(pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [moments]))
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        for number, column in enumerate([*good, *bad]):
            server.publish("d", pa.table({"moment": column}))
            told = call("cat", f"{server.catalog_uri}/d", "-f", kind)
            assert told.returncode == (number >= len(good)), column
            assert ("column 'moment' has times that text cannot hold" in told.stderr) == (number >= len(good))


def test_different_dictionaries_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    """A file of Arrow IPC has one dictionary for a column."""
    table = pa.concat_tables([pa.table({"c": pa.array([text]).dictionary_encode()}) for text in "ab"])
    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("d", table)
        refused = call("get", f"{server.catalog_uri}/d", "-o", tmp_path / "out.arrow")
        assert refused.returncode == 1
        assert "give --format arrows, for a stream, or parquet" in refused.stderr
        assert not os.listdir(tmp_path)
        assert call("get", f"{server.catalog_uri}/d", "-o", tmp_path / "out.arrows").returncode == 0
        assert pa.ipc.open_stream(tmp_path / "out.arrows").read_all()["c"].to_pylist() == ["a", "b"]


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc", None])
@pytest.mark.parametrize("name", ["flights", "planes"])
def test_get(catalog: str, tmp_path: Path, name: str, transport: str | None) -> None:
    chosen = [] if transport is None else ["--transport", transport]
    got = call("get", f"{catalog}/{name}", "-o", tmp_path / "out.parquet", *chosen)
    assert (got.returncode, got.stdout) == (0, "")
    assert got.stderr.startswith(f"{name}: 1,000 rows, ")
    assert pq.read_table(tmp_path / "out.parquet").equals(TABLE)
    assert os.listdir(tmp_path) == ["out.parquet"]


def test_get_in_other_formats(catalog: str, tmp_path: Path) -> None:
    for ending in (".arrow", ".feather", ".arrows", ".csv"):
        out = tmp_path / f"out{ending}"
        assert call("get", f"{catalog}/planes", "-o", out, "--columns", "n").returncode == 0
        if ending == ".csv":
            assert out.read_text().splitlines() == ['"n"', *map(str, range(1000))]
        else:
            opened = pa.ipc.open_stream(out) if ending == ".arrows" else pa.ipc.open_file(out)
            assert opened.read_all().equals(TABLE.select(["n"]))


def test_get_keeps_the_permissions_of_a_file(catalog: str, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    for mode in (0o600, 0o664, 0o444):
        out.unlink(missing_ok=True)
        out.touch(mode)
        out.chmod(mode)
        if os.geteuid() == 0:
            os.chown(out, 1234, 5678)
        before = out.stat()
        assert call("get", f"{catalog}/planes", "-o", out).returncode == 0
        after = out.stat()
        assert out.read_text().count("\n") == 1001
        assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)


def test_get_gives_a_group_no_permissions_of_an_access_control_list(catalog: str, tmp_path: Path) -> None:
    """With a list, the permissions of the group in the mode are the most that any user in the list may have."""
    out = tmp_path / "out.csv"
    out.touch(0o600)
    entries = [(1, 6, -1), (2, 6, 12345), (4, 0, -1), (16, 6, -1), (32, 0, -1)]  # owner, a user, group, mask, others
    try:
        os.setxattr(
            out, "system.posix_acl_access", b"\2\0\0\0" + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        )
    except OSError as error:
        pytest.skip(f"the file system has no access control lists: {error}")
    assert out.stat().st_mode & 0o777 == 0o660
    assert call("get", f"{catalog}/planes", "-o", out).returncode == 0
    assert out.stat().st_mode & 0o777 == 0o600


def test_get_to_standard_output(catalog: str, tmp_path: Path) -> None:
    options = ("-o", "-", "--transport", "shm", "--log-level", "debug")
    out, log = tmp_path / "out.arrows", tmp_path / "log"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        arguments = ("-m", "dissociated", "get", f"{catalog}/planes", *options)
        assert Fork(*arguments, stdout=stdout, stderr=stderr).wait(PATIENCE) == 0
    assert pa.ipc.open_stream(out).read_all().equals(TABLE)
    assert re.search(r"Z DEBUG connection c1 \(shm server .*\): received schema 0: metadata of", log.read_text())


def test_a_stream_that_breaks_off_in_a_pipe_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[pa.RecordBatch]:
        yield from TABLE.to_batches()
        raise OSError("the disk is gone")

    with dis.Server(["tcp://127.0.0.1:0"]) as server:
        server.publish("broken", lambda: pa.RecordBatchReader.from_batches(TABLE.schema, broken()))
        for kind in ("arrows", "arrow", "parquet"):
            written = io.BytesIO()
            monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, write_through=True))
            assert main(["get", f"{server.catalog_uri}/broken", "-o", "-", "--format", kind]) == 1
            assert written.getvalue()
            put = call("put", "-", f"{server.catalog_uri}/copy", given=written.getvalue())
            assert put.returncode == 1, kind
        assert call("ls", server.catalog_uri).stdout.count("copy") == 0


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}, {"use_legacy_format": True}], ids=str)
def test_a_stream_without_its_end_is_not_published(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its writer may have died, and readers would take the end of the data for the end of the stream."""
    dictionary = pa.table({"text": TABLE["text"].combine_chunks().dictionary_encode()})
    path = tmp_path / "some.arrows"
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        name = f"{server.catalog_uri}/ends"
        for table, copies in ((TABLE, 2), (dictionary, 1), (TABLE, 0)):
            sink = io.BytesIO()
            with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
                for _ in range(copies):
                    writer.write_table(table)
            whole = sink.getvalue()
            cut = whole[: -4 if "use_legacy_format" in options else -8]
            # libarrow accepts the stream, in accordance with the specification.
            content = pa.ipc.open_stream(cut).read_all()
            path.write_bytes(whole)
            for source, given in (("-", whole), (path, b"")):
                assert call("put", source, name, given=given).returncode == 0
                assert client.read("ends").read_all() == content
                client.drop("ends")
            path.write_bytes(cut)
            for source, given in (("-", cut), (path, b"")):
                put = call("put", source, name, given=given)
                assert (put.returncode, "no end-of-stream marker" in put.stderr) == (1, True)
            for publish in (client.put, server.publish):
                with pytest.raises(SourceError, match=r"no end-of-stream marker.*publish a reader"):
                    publish("ends", path)
            with pytest.raises(SourceError, match=r"no end-of-stream marker.*publish a reader"):
                server.publish("ends", cut)
            assert "ends" not in client
            assert client.put("ends", pa.ipc.open_stream(path)) == content.num_rows


def test_compressed_values_that_libarrow_would_misread_are_not_published_from_a_pipe(catalog: str) -> None:
    sink = io.BytesIO()
    old = pa.ipc.IpcWriteOptions(compression="lz4", metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, TABLE.schema, options=old) as writer:
        writer.write_table(TABLE)
    put = call("put", "-", f"{catalog}/old", given=sink.getvalue())
    assert (put.returncode, "its metadata is older than V5" in put.stderr) == (1, True)


def test_a_stream_that_something_follows_is_not_published(tmp_path: Path) -> None:
    """Readers would ignore the trailing data. The statistics after a segment are part of it."""
    path, segment = tmp_path / "some.arrows", tmp_path / "segment"
    large = pa.record_batch({"n": range(20_000)})  # segments with few rows have no statistics
    with SegmentWriter(segment, large.schema) as writer:
        writer.write_batch(large)
    assert Segment.open(segment).statistics is not None
    content = segment.read_bytes()
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, large.schema) as other:
        other.write_batch(large)
    stream = sink.getvalue()
    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        name = f"{server.catalog_uri}/ends"
        for more in (stream, content, stream[:-8], b"\n", bytes(4096)):
            for first in (stream, content):
                path.write_bytes(first + more)
                for source, given in (("-", first + more), (path, b"")):
                    put = call("put", source, name, given=given)
                    assert put.returncode == 1
                    assert "has data after" in put.stderr
                    assert "(with --append, dissociated put adds one to another)" in put.stderr
                for publish in (client.put, server.publish):
                    with pytest.raises(SourceError, match=r"has data after.*publish each stream by itself"):
                        publish("ends", path)
                    with pytest.raises(SourceError, match=r"has data after.*publish each stream by itself"):
                        publish("ends", first + more)
        # The end is missing in a file that was extended before it was written.
        path.write_bytes(stream[:-8] + bytes(4096))
        for source, given in (("-", path.read_bytes()), (path, b"")):
            assert call("put", source, name, given=given).returncode == 1
        assert "ends" not in client
        path.write_bytes(content)
        for source, given in (("-", content), (path, b"")):
            assert call("put", source, name, given=given).returncode == 0
            assert client.read("ends").read_all() == pa.Table.from_batches([large])


def test_files_after_each_other_are_not_published(tmp_path: Path) -> None:
    """The footer of the last file would list messages of the first."""
    path = tmp_path / "some.arrow"

    def file(*numbers: int) -> bytes:
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, pa.schema({"n": pa.int64()})) as writer:
            for number in numbers:
                writer.write_batch(pa.record_batch({"n": [number] * 3}))
        return sink.getvalue()

    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        name = f"{server.catalog_uri}/files"
        for parts in ([(1,), (2,)], [(1, 2), (3,)], [(1,), ()], [(), ()], [(1,), (2,), (3,)]):
            content = b"".join(file(*numbers) for numbers in parts)
            path.write_bytes(content)
            for source, given in (("-", content), (path, b"")):
                put = call("put", source, name, given=given)
                assert put.returncode == 1
                where = "the standard input cannot be published" if source == "-" else f"'{path}'"
                assert where in put.stderr
                assert "holds several Arrow IPC files" in put.stderr
            for publish in (client.put, server.publish):
                with pytest.raises(SourceError, match="several Arrow IPC files"):
                    publish("files", path)
            with pytest.raises(SourceError, match="several Arrow IPC files"):
                server.publish("files", content)
        assert "files" not in client
        with pa.ipc.new_file(path, pa.schema({"ARROW1": pa.int64()}, metadata={"format": "ARROW1"})):
            pass
        server.publish("empty", path)
        path.write_bytes(file(1, 2))
        server.publish("files", path)
        assert client.read("files").read_all()["n"].to_pylist() == [1, 1, 1, 2, 2, 2]


def test_get_replaces_files_alone(catalog: str, tmp_path: Path) -> None:
    planes = f"{catalog}/planes"
    fifo, link, target = (tmp_path / name for name in ("fifo.csv", "link.csv", "target.csv"))
    os.mkfifo(fifo)
    with Child(["cat", fifo], stdout=subprocess.PIPE, text=True) as reader:
        assert call("get", planes, "-o", fifo, "--columns", "n").returncode == 0
        read = reader.communicate(timeout=PATIENCE)[0].split()
    assert read == ['"n"', *map(str, range(1000))]
    target.write_text("old")
    link.symlink_to(target)
    assert call("get", planes, "-o", link, "--columns", "n").returncode == 0
    assert target.read_text().split() == read
    with target.open("ab") as appended:
        got = command("get", planes, "-o", "/dev/stdout", "--format", "csv", "--columns", "n")
        assert subprocess.run(got, stdout=appended, stderr=subprocess.DEVNULL, timeout=PATIENCE).returncode == 0
    assert target.read_text().split() == [*read, *read]
    assert (fifo.is_fifo(), link.is_symlink()) == (True, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["get", "CATALOG/nothing", "-o", "out.csv"], "no dataset 'nothing' is published here"),
        (["get", "CATALOG", "-o", "out.csv"], "has no dataset name"),
        (["head", "CATALOG/flihgts"], "did you mean 'flights'? List the names with client.list() or dissociated ls"),
        (["get", "CATALOG/planes", "-o", "out.xyz"], "none of the endings .arrow, .feather"),
        (["cat", "planes", "--store", "FILES/none"], "and no node with the store 'FILES/none' runs"),
        (["get", "CATALOG/planes", "-o", "no/such/out.csv"], "the directory 'no/such' does not exist"),
        (["get", "CATALOG/planes", "-o", "out.csv", "--columns", "x"], "there is no column 'x'; there are n, text"),
        (["get", "CATALOG/planes", "-o", "out.csv", "--transport", "ucx"], "it is offered by"),
        (["ls", "grpc://127.0.0.1:1"], "is it running?"),
        (["head", "CATALOG/planes", "--filter", "n >"], "the condition 'n >' is invalid at its end"),
        (["head", "CATALOG/planes", "--filter", "n = 'x"], 'at "\'x": expected a closing quote'),
        (
            ["head", "CATALOG/planes", "--filter", "text = 5"],
            "'=' 5 could select other rows than you mean: write a",
        ),
        (
            ["versions", "CATALOG/nothing"],
            "no dataset 'nothing' is published here: list the names with client.list() or dissociated ls",
        ),
        (["get", "CATALOG/planes", "-o", "FILES"], "is a directory: give a file in it"),
        (["ls", "--catalog", "nonsense"], "'nonsense' is not the URI of a catalog: give grpc://HOST:PORT"),
        (["ls", "127.0.0.1:1234"], "'127.0.0.1:1234' has no scheme: give grpc://127.0.0.1:1234, or"),
        (["serve", "/no/such/file"], "the file does not exist"),
        (["serve", "/dev/null/..", "."], "dissociated: "),
        (["serve", "FILES/planes.arrow", "--listen", "tcp://127.0.0.1:1:1"], "is not a URI"),
        (["serve", "pyproject.toml"], "pyproject.toml' is text, not Arrow IPC or Parquet: dissociated put takes CSV"),
        (["inspect", "/no/such/file"], "No such file"),
        (["inspect", "/dev/null"], "the file is empty"),
        (["inspect", "pyproject.toml"], "pyproject.toml' is text, not Arrow IPC: inspect shows Arrow IPC only"),
        (["inspect", "FILES/flights.parquet"], "flights.parquet' is a Parquet file, not Arrow IPC"),
        (["inspect", "FILES"], "is a directory"),
        (["put", "pyproject.toml", "CATALOG/x"], "is text, not Arrow IPC or Parquet: give --format csv or jsonl"),
        (["put", "FILES", "CATALOG/x"], "a directory must have Parquet files only"),
        (["put", "-", "CATALOG/x"], "the standard input is empty"),
        (["put", "FILES/planes.arrow", "CATALOG"], "has no dataset name: give CATALOG/NAME"),
        (["put", "FILES/planes.arrow", ""], "'' has no dataset name: give NAME"),
        (["put", "x", "FILES/planes.arrow"], "the name of the dataset, and 'FILES/planes.arrow' is a file"),
        (["put", "FILES/planes.arrow", "CATALOG/a*"], "'a*' is not a name for a dataset: '*' stands for any text"),
        (["sql", " ", "--catalog", "CATALOG"], "the query is empty"),
        (["status", "CATALOG/planes"], "not the dataset 'planes': dissociated describe shows a dataset"),
        (
            ["put", "FILES/planes.arrow", "FILES/other/numbers.arrow", "CATALOG/x"],
            "other/numbers.arrow' and",
        ),
        (
            ["put", "FILES/other/numbers.arrow", "CATALOG/planes", "--append"],
            "'n' is float, not int64; there is no",
        ),
    ],
)
def test_an_error_is_one_sentence(catalog: str, files: Path, arguments: list[str], sentence: str) -> None:
    for place, there in (("CATALOG", catalog), ("FILES", str(files))):
        arguments = [argument.replace(place, there) for argument in arguments]
        sentence = sentence.replace(place, there)
    got = call(*arguments)
    assert got.returncode == 1
    assert got.stdout == ""
    (line,) = got.stderr.splitlines()
    assert line.startswith("dissociated: ")
    assert sentence in line


def test_inspect(files: Path) -> None:
    lines = call("inspect", files / "planes.arrow").stdout.splitlines()
    assert lines[0].endswith(" metadata V5, little-endian")
    assert "planes.arrow: Arrow IPC file, " in lines[0]
    assert lines[1].startswith("1,000 rows in 10 record batches, bodies of ")
    assert lines[3:6] == ["COLUMN  TYPE", "n       int64", "text    string"]
    assert lines[7].split() == ["#", "MESSAGE", "OFFSET", "METADATA", "BODY", "ROWS", "BUFFERS"]
    assert lines[8].split()[:4] == ["0", "schema", "8", lines[8].split()[3]]
    assert [line.split()[-2:] for line in lines[9:]] == [["100", "5"]] * 10


def test_inspect_tells_programs_where_every_buffer_lies(files: Path) -> None:
    path = files / "planes.arrow"
    told = json.loads(call("inspect", "--json", path).stdout)
    content = path.read_bytes()
    assert (told["format"], told["bytes"], told["rows"]) == ("file", len(content), 1000)
    batches = [message for message in told["messages"] if message["type"] == "record batch"]
    numbers = [message["buffers"][1] for message in batches]  # of column n, after its absent bitmap
    data = b"".join(content[one["offset"] : one["offset"] + one["length"]] for one in numbers)
    assert data == np.arange(1000).tobytes()


def test_inspect_shows_what_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "words.arrows"
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True, compression="zstd", use_legacy_format=True)
    words = [["a", "b"], ["a", "b", "c"]] + [["a", "b", "c"]] * 30
    schema = pa.schema({"d": pa.dictionary(pa.int8(), pa.string())}, {"made": "by hand"})
    with pa.ipc.new_stream(path, schema, options=options) as writer:
        for some in words:
            indices = pa.array(range(len(some)), pa.int8())
            writer.write_batch(pa.record_batch([pa.DictionaryArray.from_arrays(indices, some)], schema=schema))
    shown = call("inspect", path).stdout
    assert "95 rows in 32 record batches" in shown
    assert "compressed by zstd" in shown
    assert "METADATA OF THE SCHEMA  VALUE\nmade                    by hand" in shown
    assert "dictionary 0  " in shown
    assert "dictionary 0, delta  " in shown
    assert shown.splitlines()[-1] == "and 15 more: --all shows them"
    assert len(call("inspect", "--all", path).stdout.splitlines()) == len(shown.splitlines()) - 1 + 15
    assert call("inspect", "--buffers", path).stdout.startswith(f"{shown}\n #  BUFFER  OFFSET  LENGTH\n")


def test_help_and_version() -> None:
    assert call("--version").stdout == f"dissociated {dis.__version__}\n"
    assert call("help", "ls").stdout == call("ls", "--help").stdout
    assert call().stdout == call("--help").stdout
    for name in (None, *COMMANDS):
        helped = call(*filter(None, [name]), "--help", COLUMNS="80")
        assert helped.returncode == 0
        assert helped.stdout.startswith("usage: ")
        assert max(map(len, helped.stdout.splitlines())) <= 80


def test_put_ls_get_and_drop(files: Path, tmp_path: Path) -> None:
    with started("node", "--store", tmp_path / "store", "--limit", "64MB") as process:
        assert process.stdout is not None
        uri = until_catalog(process.stdout).split()[-1]
        put = call("put", files / "planes.arrow", files / "flights.parquet", f"{uri}/both", "--tag", "of=cli")
        assert (put.returncode, put.stdout) == (0, "")
        assert put.stderr.startswith("both: 2,000 rows in ")
        (tmp_path / "of=dir").mkdir()
        (tmp_path / "of=dir" / "part.parquet").symlink_to(files / "flights.parquet")
        assert call("put", tmp_path, f"{uri}/directory").returncode != 0  # the directory contains the store
        assert call("put", tmp_path / "of=dir", f"{uri}/directory").stderr.startswith("directory: 1,000 rows in ")
        assert call("drop", f"{uri}/directory").returncode == 0
        assert call("put", files / "planes.arrow", f"{uri}/both", "--append", "--ttl", "1h").returncode == 0
        (listed,) = json.loads(call("ls", "--json", uri).stdout)
        assert (listed["name"], listed["rows"]) == ("both", 3000)
        for name in ("", "bo*", "both"):
            assert call("ls", f"{uri}/{name}", "--tag", "of=cli").stdout.startswith("NAME")
            assert call("ls", f"{uri}/{name}", "--tag", "of=others").stdout == "no datasets\n"
        assert call("get", f"{uri}/both", "-o", tmp_path / "both.arrow").returncode == 0
        assert pa.ipc.open_file(tmp_path / "both.arrow").read_all() == pa.concat_tables([TABLE] * 3)
        large = tmp_path / "large.arrow"
        with pa.ipc.new_file(large, pa.schema([("n", pa.int64())])) as writer:
            writer.write_table(pa.table({"n": np.arange(10_000_000)}))
        full = call("put", large, f"{uri}/large")
        assert (full.returncode, full.stdout) == (1, "")
        assert re.search(r"\nthe store holds [\d.]+ kB of at most 64\.0 MB\n", call("status", uri).stdout)
        assert "is full: it holds" in full.stderr
        assert call("drop", f"{uri}/both").returncode == 0
        assert call("ls", uri).stdout == "no datasets\n"
        missing = call("drop", f"{uri}/both")
        assert (missing.returncode, missing.stderr) == (
            1,
            "dissociated: no dataset 'both' is published here: list the names with client.list() or dissociated ls\n",
        )
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_put_takes_what_get_writes(catalog: str, tmp_path: Path) -> None:
    """Files and the standard input are put into equal datasets."""
    for number, written in enumerate(("arrow", "arrows", "parquet", "csv", "jsonl")):
        path, name = tmp_path / f"out.{written}", f"{catalog}/put-{number}"
        assert call("get", f"{catalog}/planes", "-o", path, "-f", written, "--rows", "1:5").returncode == 0
        assert call("put", path, name).returncode == 0
        text_format = ["-f", written] if written in ("csv", "jsonl") else []
        piped = call("put", "-", name, "--append", *text_format, given=path.read_bytes())
        assert (piped.returncode, piped.stderr.partition(" rows")[0]) == (0, f"put-{number}: 4")
        shown = call("cat", name, "-f", "jsonl").stdout.splitlines()
        assert [json.loads(line) for line in shown] == [*TABLE.slice(1, 4).to_pylist()] * 2
        assert call("drop", name).returncode == 0


def test_csv_goes_through_put_and_get_unchanged(catalog: str, tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    for written in ('"s","f","d"\n"NA",nan,2024-01-31\n"",,\n,1.5,\n"null",inf,\n', '"s"\n"NA"\n\n""\n\n'):
        assert call("put", "-", f"{catalog}/words", "-f", "csv", given=written.encode()).returncode == 0
        assert call("get", f"{catalog}/words", "-o", path).returncode == 0
        assert path.read_text() == written
        path.unlink()
    assert call("drop", f"{catalog}/words").returncode == 0


def test_put_keeps_texts_that_look_like_times(catalog: str) -> None:
    """libarrow would convert them to timestamps without their zone."""
    line = '{"a": "2013-01-01T10:00:00Z", "b": [{"c": "2013-01-01"}]}\n'
    assert call("put", "-", f"{catalog}/times", "-f", "jsonl", given=line.encode()).returncode == 0
    assert call("cat", f"{catalog}/times", "-f", "jsonl").stdout == line
    assert call("drop", f"{catalog}/times").returncode == 0


def test_put_takes_no_json_that_is_not_utf_8(catalog: str) -> None:
    """libarrow would accept it, and readers of the text would fail."""
    put = call("put", "-", f"{catalog}/latin", "-f", "jsonl", given='{"a": "Zürich"}\n'.encode("latin-1"))
    assert (put.returncode, "row 1 is not UTF-8" in put.stderr) == (1, True)


def test_put_and_get_show_how_far_they_are_on_a_terminal(files: Path, catalog: str, tmp_path: Path) -> None:
    put = in_terminal(60, command("put", files / "planes.arrow", f"{catalog}/far"), TERM="xterm")
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", put)
    assert re.search(r"far ━* +100% 1\d\.\d kB, [^ ]+ .?B/s 00:00\r.*\rfar: 1,000 rows in", shown, re.DOTALL)
    dumb = in_terminal(60, command("get", f"{catalog}/far", "-o", tmp_path / "far.csv"), TERM="dumb")
    assert re.fullmatch(r"far: 1,000 rows, .*/s\r\n", dumb)
    assert call("drop", f"{catalog}/far").returncode == 0


@pytest.mark.usefixtures("forked_nodes")
def test_put_starts_a_node_where_there_is_none(files: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for mode in ("", "--append"):
        put = call("put", files / "planes.arrow", "planes", "--store", store, *filter(None, [mode]))
        assert put.returncode == 0
    node = running(store)
    assert node is not None
    try:
        assert put.stderr.endswith(f", at {node.uri}/planes\n")
        (listed,) = json.loads(call("ls", "--json", node.uri).stdout)
        assert (listed["name"], listed["rows"]) == ("planes", 2000)
    finally:
        os.kill(node.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("written", "size"),
    [("4096", 4096), ("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 kB", 1500), ("2k", 2000), ("1TiB", 1 << 40)],
)
def test_sizes_are_written_as_people_do(written: str, size: int) -> None:
    assert quantities.size(written) == size


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 90), ("0.5", 0.5), ("1e-05", 1e-5), ("15m", 900), ("5 min", 300), ("1.5h", 5400), ("2d", 172_800)],
)
def test_durations_are_written_as_people_do(written: str, seconds: float) -> None:
    assert quantities.duration(written) == seconds


@pytest.mark.parametrize("written", ["", "8 elephants", "-1", "GiB", "1e9"])
def test_an_invalid_size_is_refused(written: str, tmp_path: Path) -> None:
    refused = call("node", "--store", tmp_path / "store", f"--limit={written}")
    assert refused.returncode == 2
    assert f"--limit: {written!r} is not a size: give 8GiB, 500MB, or a number of bytes" in refused.stderr


def test_a_misspelt_command_is_told_the_closest() -> None:
    refused = call("lst")
    assert refused.returncode == 2
    assert "there is no command 'lst': did you mean 'ls'? List the commands with dissociated --help" in refused.stderr


@pytest.mark.parametrize("written", ["", "1 fortnight", "-1", "h", "nan"])
def test_an_invalid_duration_is_refused(written: str, tmp_path: Path) -> None:
    refused = call("put", tmp_path / "f.arrow", "f", f"--ttl={written}")
    assert refused.returncode == 2
    assert f"--ttl: {written!r} is not a duration: give 90s, 15m, 1h, 2d, or a number of seconds" in refused.stderr

"""The command line as a user meets it: real processes, their output, their exit status."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.cli import text
from dissociated.node.launch import running

PATIENCE = 30.0  # seconds; nothing waits this long but a test that fails
TABLE = pa.table({"n": range(1000), "text": [f"value {n % 7}" if n % 5 else None for n in range(1000)]})


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "dissociated", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE)


def until_catalog(output: IO[str]) -> str:
    """What `serve` prints up to the line that names its catalog, and that line's URI last."""
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
    return directory


@pytest.fixture(scope="module")
def size(files: Path) -> str:
    """What all bodies of planes.arrow have together, by libarrow's count."""
    reader = pa.ipc.MessageReader.open_stream(pa.py_buffer((files / "planes.arrow").read_bytes()[8:]))
    total = sum(message.body.size for message in [*reader][1:])
    return f"{total / 1000:.1f} kB"


@pytest.fixture(scope="module")
def catalog(files: Path) -> Iterator[str]:
    """The catalog of a `dissociated serve` of both files."""
    with subprocess.Popen(command("serve", files), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield until_catalog(process.stdout).split()[-1]
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_ends_at_a_signal_and_leaves_nothing(files: Path, size: str, tmp_path: Path, number: int) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    arguments = command("serve", files / "planes.arrow")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as process:
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
        "import dissociated, signal, sys\n"
        f"signal.signal({number}, lambda *_: sys.exit(7))\n"
        "with dissociated.Server(['shm:']) as server:\n"
        "    print(server.catalog_uri, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("grpc://")
        process.send_signal(number)
        assert process.wait(PATIENCE) == 7


def test_ls(catalog: str, size: str) -> None:
    listed = run("ls", catalog)
    assert listed.returncode == 0
    assert listed.stdout.splitlines() == [
        "NAME      ROWS     SIZE  COLUMNS  TRANSPORTS",
        "flights  1,000        -        2  shm tcp",
        f"planes   1,000  {size}        2  shm tcp",
    ]
    described = run("ls", f"{catalog}/planes").stdout.splitlines()
    assert described[:5] == [f"planes: 1,000 rows, {size}", "", "COLUMN  TYPE", "n       int64", "text    string"]
    (plain,) = json.loads(run("ls", "--json", f"{catalog}/flights").stdout)
    assert plain["rows"] == 1000
    assert plain["schema"][1] == {"name": "text", "type": "string", "nullable": True}
    assert {uri.partition(":")[0] for uri in plain["locations"]} == {"shm", "tcp", "arrow-flight-reuse-connection"}


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc", None])
@pytest.mark.parametrize("name", ["flights", "planes"])
def test_get(catalog: str, tmp_path: Path, name: str, transport: str | None) -> None:
    chosen = [] if transport is None else ["--transport", transport]
    got = run("get", f"{catalog}/{name}", "-o", tmp_path / "out.parquet", *chosen)
    assert (got.returncode, got.stdout) == (0, "")
    assert got.stderr.startswith(f"{name}: 1,000 rows, ")
    assert pq.read_table(tmp_path / "out.parquet").equals(TABLE)
    assert os.listdir(tmp_path) == ["out.parquet"]


@pytest.mark.parametrize("ending", [".arrow", ".feather", ".arrows", ".csv"])
def test_get_in_other_formats(catalog: str, tmp_path: Path, ending: str) -> None:
    out = tmp_path / f"out{ending}"
    got = run("get", f"{catalog}/planes", "-o", out, "--columns", "n", "--log-level", "debug")
    assert got.returncode == 0
    assert re.search(r"Z DEBUG connection c1 \(shm server .*\): received schema 0: metadata of", got.stderr)
    if ending == ".csv":
        assert out.read_text().splitlines() == ['"n"', *map(str, range(1000))]
    else:
        opened = pa.ipc.open_stream(out) if ending == ".arrows" else pa.ipc.open_file(out)
        assert opened.read_all().equals(TABLE.select(["n"]))


def test_get_to_standard_output(catalog: str) -> None:
    got = subprocess.run(command("get", f"{catalog}/planes", "-o", "-"), capture_output=True, timeout=PATIENCE)
    assert pa.ipc.open_stream(got.stdout).read_all().equals(TABLE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["get", "CATALOG/nothing", "-o", "out.csv"], "no dataset 'nothing' is published here"),
        (["get", "CATALOG", "-o", "out.csv"], "names no dataset"),
        (["get", "CATALOG/planes", "-o", "out.xyz"], "none of the endings .arrow, .feather"),
        (["get", "CATALOG/planes", "-o", "no/such/out.csv"], "there is no directory no/such"),
        (["get", "CATALOG/planes", "-o", "out.csv", "--columns", "x"], "there is no column 'x'; there are n, text"),
        (["get", "CATALOG/planes", "-o", "out.csv", "--transport", "ucx"], "it is offered by"),
        (["ls", "grpc://127.0.0.1:1"], "is it running?"),
        (["ls", "nonsense"], "a URI starts with a scheme"),
        (["serve", "/no/such/file"], "there is no such file"),
        (["serve", "/dev/null/..", "."], "dissociated: "),
        (["serve", "pyproject.toml", "--listen", "tcp://127.0.0.1:1:1"], "is not a URI"),
        (["serve", "pyproject.toml"], "not an Arrow IPC stream"),
        (["inspect", "/no/such/file"], "No such file"),
        (["inspect", "/dev/null"], "the file is empty"),
        (["inspect", "pyproject.toml"], "pyproject.toml: not an Arrow IPC stream"),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(catalog: str, arguments: list[str], sentence: str) -> None:
    got = run(*(argument.replace("CATALOG", catalog) for argument in arguments))
    assert got.returncode == 1
    assert got.stdout == ""
    (line,) = got.stderr.splitlines()
    assert line.startswith("dissociated: ")
    assert sentence in line


def test_inspect(files: Path) -> None:
    lines = run("inspect", files / "planes.arrow").stdout.splitlines()
    assert lines[0].endswith(" metadata V5, little-endian")
    assert "planes.arrow: Arrow IPC file, " in lines[0]
    assert lines[1].startswith("1,000 rows in 10 record batches, bodies of ")
    assert lines[3:6] == ["COLUMN  TYPE", "n       int64", "text    string"]
    assert lines[7].split() == ["#", "MESSAGE", "OFFSET", "METADATA", "BODY", "ROWS", "BUFFERS"]
    assert lines[8].split()[:4] == ["0", "schema", "8", lines[8].split()[3]]
    assert [line.split()[-2:] for line in lines[9:]] == [["100", "5"]] * 10


def test_inspect_tells_programs_where_every_buffer_lies(files: Path) -> None:
    path = files / "planes.arrow"
    told = json.loads(run("inspect", "--json", path).stdout)
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
    shown = run("inspect", path).stdout
    assert "95 rows in 32 record batches" in shown
    assert "compressed by zstd" in shown
    assert "METADATA OF THE SCHEMA  VALUE\nmade                    by hand" in shown
    assert "dictionary 0  " in shown
    assert "dictionary 0, delta  " in shown
    assert shown.splitlines()[-1] == "and 15 more: --all shows them"
    assert len(run("inspect", "--all", path).stdout.splitlines()) == len(shown.splitlines()) - 1 + 15
    assert run("inspect", "--buffers", path).stdout.startswith(f"{shown}\n #  BUFFER  OFFSET  LENGTH\n")


def test_help_and_version() -> None:
    assert run("--version").stdout == f"dissociated {dis.__version__}\n"
    for arguments in ([], ["serve"], ["ls"], ["get"], ["inspect"]):
        helped = run(*arguments, "--help")
        assert helped.returncode == 0
        assert helped.stdout.startswith("usage: ")


def test_put_ls_get_and_drop(files: Path, tmp_path: Path) -> None:
    arguments = command("node", "--store", tmp_path / "store", "--limit", "64MB")
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        uri = until_catalog(process.stdout).split()[-1]
        put = run("put", files / "planes.arrow", files / "flights.parquet", f"{uri}/both", "--tag", "of=cli")
        assert (put.returncode, put.stdout) == (0, "")
        assert put.stderr.startswith("both: 2,000 rows in ")
        assert run("put", files / "planes.arrow", f"{uri}/both", "--append", "--ttl", "3600").returncode == 0
        (listed,) = json.loads(run("ls", "--json", uri).stdout)
        assert (listed["name"], listed["rows"]) == ("both", 3000)
        assert run("get", f"{uri}/both", "-o", tmp_path / "both.arrow").returncode == 0
        assert pa.ipc.open_file(tmp_path / "both.arrow").read_all() == pa.concat_tables([TABLE] * 3)
        large = tmp_path / "large.arrow"
        with pa.ipc.new_file(large, pa.schema([("n", pa.int64())])) as writer:
            writer.write_table(pa.table({"n": np.arange(10_000_000)}))
        full = run("put", large, f"{uri}/large")
        assert (full.returncode, full.stdout) == (1, "")
        assert re.search(r"\nthe store holds [\d.]+ kB of at most 64\.0 MB\n", run("status", uri).stdout)
        assert "is full: it holds" in full.stderr
        assert run("drop", f"{uri}/both").returncode == 0
        assert run("ls", uri).stdout == "no datasets\n"
        missing = run("drop", f"{uri}/both")
        assert (missing.returncode, missing.stderr) == (1, "dissociated: no dataset 'both' is published here\n")
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_put_starts_a_node_where_there_is_none(files: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    for mode in ("", "--append"):
        put = run("put", files / "planes.arrow", "planes", "--store", store, *filter(None, [mode]))
        assert put.returncode == 0
    node = running(store)
    assert node is not None
    try:
        assert put.stderr.endswith(f", at {node.uri}/planes\n")
        (listed,) = json.loads(run("ls", "--json", node.uri).stdout)
        assert (listed["name"], listed["rows"]) == ("planes", 2000)
    finally:
        os.kill(node.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("written", "size"),
    [("4096", 4096), ("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 kB", 1500), ("2k", 2000), ("1TiB", 1 << 40)],
)
def test_sizes_are_written_as_people_do(written: str, size: int) -> None:
    assert text.parse_size(written) == size


@pytest.mark.parametrize("written", ["", "8 elephants", "-1", "GiB", "1e9"])
def test_what_is_no_size_is_told(written: str, tmp_path: Path) -> None:
    refused = run("node", "--store", tmp_path / "store", f"--limit={written}")
    assert refused.returncode == 2
    assert "--limit: invalid" in refused.stderr

"""The peers in C, C++ and Node in examples/peers: they read every test vector, and our server."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from porter.double import PREAMBLE, RUN, TAGGED, UNTAGGED, encode, run_of, taken_apart
from support.helpers import PATIENCE, case, location
from vectors.replay import ABORTED, INVALID, NUMBERS, OF_CLIENTS, READABLE, Vector, cases, replayed

SOURCES = Path(__file__).parents[2] / "examples" / "peers"
STRICT = ["-Wall", "-Wextra", "-Werror", "-O1", "-fsanitize=address,undefined"]
LANGUAGES = ["c", "cc", "mjs"]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the compiled readers."""
    return tmp_path_factory.mktemp("peers")


def reader(language: str, folder: Path, source_folder: Path = SOURCES) -> list[str]:
    """Return the command of a reader, which is compiled on first use."""
    if language == "mjs":
        node = shutil.which("node")
        return [node, str(source_folder / "read.mjs")] if node else pytest.skip("there is no node on this machine")
    compiler = shutil.which("cc" if language == "c" else "c++")
    if compiler is None:
        pytest.skip(f"there is no compiler for {language} on this machine")
    program = folder / language
    if not program.exists():
        sources = ["read.c", "dissociated.c"] if language == "c" else ["read.cc"]
        standard = "-std=c11" if language == "c" else "-std=c++17"
        paths = [str(source_folder / name) for name in sources]
        subprocess.run([compiler, standard, *STRICT, "-o", str(program), *paths], check=True)
    return [str(program)]


def read(command: list[str], uri: str, ticket: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*command, uri, ticket.decode()], capture_output=True, timeout=PATIENCE, check=False)


def table_of(stream: bytes) -> pa.Table:
    return pa.ipc.open_stream(stream).read_all()


@pytest.mark.parametrize(
    ("language", "name", "scheme"),
    [
        pytest.param(language, *case.values, id=f"{case.id}-{language}")
        for language in LANGUAGES
        for case in cases(READABLE)
        if language == "c" or case.values[1] == "tcp"
    ],
)
def test_a_peer_reads_a_vector(language: str, name: str, scheme: str, built: Path, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, scheme, tmp_path) as (uri, freed):
        done = read(reader(language, built), uri, vector.ticket)
    assert done.returncode == 0, done.stderr
    table = table_of(done.stdout)
    table.validate(full=True)
    assert table.equals(table_of(vector.read("stream.arrows")))
    assert Counter(freed) == Counter(vector.plain.get("frees", ()))


def test_the_c_library_takes_a_number_for_the_message_of_the_vectors(built: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler for c on this machine")
    program, source = built / "numbers", Path(__file__).parent / "numbers.c"
    subprocess.run([compiler, "-std=c11", *STRICT, f"-I{SOURCES}", "-o", str(program), str(source)], check=True)
    arguments = [word for row in NUMBERS for word in (row["next"], str(row["number"]))]
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.split() == [row["message"] or "null" for row in NUMBERS]


class Renumbered(Vector):
    """A vector whose first message has another number than 0. Numbers are modulo 2**32."""

    def __init__(self, name: str, first: int) -> None:
        super().__init__(name)
        self.first = first

    def read(self, file: str) -> bytes:
        data = super().read(file)
        return PREAMBLE + b"".join(self._frames(data[len(PREAMBLE) :])) if file == "server" else data

    def _frames(self, data: bytes) -> Iterator[bytes]:
        while data:
            word, tag = struct.unpack_from("<QQ", data)
            length, kind = word & (1 << 56) - 1, word >> 56
            payload, data = data[16 : 16 + length], data[16 + length + -length % 8 :]
            if kind == RUN:
                frames = [self._message(*frame) for frame in taken_apart(payload)]
                yield run_of([(head[2], *body[1:]) for head, body in zip(frames[::2], frames[1::2], strict=True)])
            else:
                kind, tag, payload = self._message(kind, tag, payload)
                yield encode(kind, payload, tag)

    def _message(self, kind: int, tag: int, payload: bytes) -> tuple[int, int, bytes]:
        if kind == UNTAGGED:
            (number,) = struct.unpack_from("<I", payload, 1)
            payload = payload[:1] + struct.pack("<I", (number + self.first) % 2**32) + payload[5:]
        else:
            assert kind == TAGGED
            tag = tag >> 32 << 32 | (tag + self.first) % 2**32
        return kind, tag, payload


@pytest.mark.parametrize(("language", "first"), [("cc", 'std::stoul(getenv("FIRST"))'), ("mjs", "+process.env.FIRST")])
def test_the_numbers_that_a_peer_reads_wrap_around(
    language: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No stream that a test can send has 2**32 messages. So a copy of the reader begins at another number than 0.
    source = (SOURCES / f"read.{language}").read_text()
    assert source.count(" next = 0;") == 1
    (tmp_path / f"read.{language}").write_text(source.replace(" next = 0;", f" next = {first};"))
    command = reader(language, tmp_path, tmp_path)
    for name in ("packed-dictionary-deltas", "order-reversed", "order-end-early", "run", "run-reversed"):
        stream = Vector(name).read("stream.arrows")
        messages = len([*pa.ipc.MessageReader.open_stream(stream)])
        for before in (1, 2, messages):
            vector = Renumbered(name, 2**32 - before)
            monkeypatch.setenv("FIRST", str(vector.first))
            with case(f"{name}, {before} of {messages} messages before the wrap"):
                with replayed(vector, "tcp", tmp_path) as (uri, _):
                    done = read(command, uri, vector.ticket)
                assert done.returncode == 0, done.stderr
                assert table_of(done.stdout).equals(table_of(stream))


@pytest.mark.parametrize(
    ("name", "scheme"),
    cases([name for name in INVALID if name not in (*OF_CLIENTS, "invalid-buffer-count", "invalid-tensors-alone")]),
)
def test_the_c_library_names_the_rule_that_a_server_breaks(name: str, scheme: str, built: Path, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, scheme, tmp_path) as (uri, _):
        done = read(reader("c", built), uri, vector.ticket)
    assert done.returncode == 1
    assert done.stderr.decode().partition(":")[0] == vector.plain["broken_rule"]


@pytest.mark.parametrize("language", ["cc", "mjs"])
@pytest.mark.parametrize(
    "rule", ["metadata-prefix", "end-length", "body-length", "tag-kind", "preamble", "stream-whole"]
)
def test_a_stream_that_a_peer_refuses_is_not_whole(language: str, rule: str, built: Path, tmp_path: Path) -> None:
    vector = Vector(f"invalid-{rule}")
    with replayed(vector, "tcp", tmp_path) as (uri, _):
        done = read(reader(language, built), uri, vector.ticket)
    assert done.returncode == 1
    assert not done.stdout.endswith(b"\xff\xff\xff\xff\0\0\0\0")


@pytest.mark.parametrize("name", ABORTED)
def test_the_c_library_reads_up_to_an_abort(name: str, built: Path, tmp_path: Path) -> None:
    vector = Vector(name)
    with replayed(vector, "tcp", tmp_path) as (uri, _):
        done = read(reader("c", built), uri, vector.ticket)
    assert done.returncode == 1
    assert done.stderr.startswith(b"the server gave up: ")
    if vector.plain["abort"] is not None:
        assert f"code {vector.plain['abort']}\n".encode() in done.stderr
    if (vector.folder / "stream.arrows").exists():
        assert done.stdout + b"\xff\xff\xff\xff\0\0\0\0" == vector.read("stream.arrows")


@pytest.mark.parametrize(("language", "scheme"), [*((language, "tcp") for language in LANGUAGES), ("c", "shm")])
def test_a_peer_reads_from_our_server(language: str, scheme: str, built: Path) -> None:
    command = reader(language, built)
    table = pa.table({"n": range(100_000), "s": [f"row {n}" for n in range(100_000)]})
    small = pa.Table.from_batches(pa.table({"n": range(30_000)}).to_batches(max_chunksize=10))
    with dis.Server(["tcp:", "shm:"], catalog=None) as server:
        server.publish("table", table, ticket=b"table")
        server.publish("small", small, ticket=b"small")
        server.publish("live", lambda: table.to_reader(max_chunksize=10_000), ticket=b"live")
        for name, expected in (("table", table), ("small", small), ("live", table)):
            done = read(command, location(server, name, scheme), name.encode())
            assert done.returncode == 0, done.stderr
            assert table_of(done.stdout).equals(expected)


def test_nanoarrow_reads_the_stream_of_the_c_reader(built: Path, tmp_path: Path) -> None:
    nanoarrow = pytest.importorskip("nanoarrow")
    vector = Vector("scattered")
    with replayed(vector, "shm", tmp_path) as (uri, _):
        done = read(reader("c", built), uri, vector.ticket)
    path = tmp_path / "stream.arrows"
    path.write_bytes(done.stdout)
    with nanoarrow.ArrayStream.from_path(path) as stream:
        rows = [row for chunk in stream for row in chunk.iter_py()]
    assert rows == table_of(vector.read("stream.arrows")).to_pylist()

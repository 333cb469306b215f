"""CSV and JSON lines as sources in Python: published by a server, and put into a node."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DissociatedError, SourceError

ROWS: dict[str, list[Any]] = {"id": [1, 2], "name": ["Ann", "Bob"], "since": [date(2024, 1, 31), None]}


@pytest.fixture
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
        yield server


@pytest.fixture
def client(server: dis.Server) -> Iterator[dis.Client]:
    with dis.connect(server.catalog_uri) as client:
        yield client


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    path = tmp_path / "customers.csv"
    path.write_text("id,name,since\n1,Ann,2024-01-31\n2,Bob,\n")
    return path


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
def test_a_csv_file_is_published_and_read_again_and_again(
    server: dis.Server, client: dis.Client, csv: Path, transport: str
) -> None:
    server.publish("customers", str(csv))
    for _ in range(2):
        assert client.read("customers", transport=transport).read_all().to_pydict() == ROWS
    columns = client.read("customers", columns=["name"], filter=("id", ">", 1), transport=transport).read_all()
    assert columns.to_pydict() == {"name": ["Bob"]}


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson"])
def test_json_lines_are_put_with_their_strings(client: dis.Client, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"events{ending}"
    path.write_text('{"at": "2024-01-31T10:00:00+01:00", "n": 1}\n{"n": 2}\n')
    assert client.put("events", path) == 2
    table = client.read("events").read_all()
    assert table.schema.field("at").type == pa.string()
    assert table.to_pydict() == {"at": ["2024-01-31T10:00:00+01:00", None], "n": [1, 2]}


def test_a_put_of_csv_survives_its_file(client: dis.Client, csv: Path) -> None:
    assert client.put("customers", csv) == 2
    assert client.put("customers", csv, mode="append") == 2
    csv.unlink()
    assert client.read("customers").read_all().to_pydict() == {name: values * 2 for name, values in ROWS.items()}


def test_a_file_that_was_modified_is_not_read(server: dis.Server, client: dis.Client, csv: Path) -> None:
    server.publish("customers", csv)
    assert client.read("customers").read_all().num_rows == 2
    csv.write_text("id,name,since\n3,Eve,2024-02-01\n")
    with pytest.raises(DissociatedError, match="was modified after it was published"):
        client.read("customers").read_all()
    server.publish("customers", csv)
    assert client.read("customers").read_all()["name"].to_pylist() == ["Eve"]
    csv.write_text("")
    with pytest.raises(SourceError, match=r"customers.csv': the file is empty"):
        server.publish("customers", csv)


@pytest.mark.parametrize(
    "content", [b"", b"a,b\n1,2\n3\n", "a\nZürich\n".encode("latin-1")], ids=["empty", "odd", "latin"]
)
def test_text_that_cannot_be_read_is_refused(client: dis.Client, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.csv"
    path.write_bytes(content)
    if content.startswith(b"a\n"):  # CSV in another encoding is binary
        client.put("wrong", path)
        assert client.dataset("wrong").schema.field("a").type == pa.binary()
        return
    with pytest.raises(SourceError):
        client.put("wrong", path)
    assert "wrong" not in client

"""`dissociated sql` for its users: joins, statements that change data, published results, and hints that fit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest

import dissociated as dis
from cli.shell import call, run
from support import processes
from support.helpers import case

pytestmark = pytest.mark.usefixtures("forks")


@pytest.fixture
def client() -> Iterator[dis.Client]:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("orders", pa.table({"id": [1, 2, 3], "customer": [7, 8, 7]}))
        server.publish("team/customers", pa.table({"customer": [7, 8], "name": ["Ann", "Bob"]}))
        server.publish("wide", pa.table({f"column {number}": [[{"a": number}]] for number in range(20)}))
        yield client


JOIN = 'SELECT name, count(*) AS n FROM orders JOIN "team/customers" USING (customer) GROUP BY name ORDER BY name'


def test_datasets_join_by_name(client: dis.Client) -> None:
    lines = run("sql", JOIN, "-f", "jsonl", "--catalog", client.uri).splitlines()
    assert [json.loads(line) for line in lines] == [{"name": "Ann", "n": 2}, {"name": "Bob", "n": 1}]


def test_a_result_is_published(client: dis.Client) -> None:
    told = call("sql", JOIN, "--into", "per customer", "--catalog", client.uri).stderr
    assert told.startswith("per customer: 2 rows in ")
    assert client.read("per customer").read_all().to_pydict() == {"name": ["Ann", "Bob"], "n": [2, 1]}
    call("sql", "SELECT id + 1 AS id FROM orders", "--into", f"{client.uri}/orders", "--catalog", client.uri)
    assert client.read("orders").read_all().to_pydict() == {"id": [2, 3, 4]}


def test_statements_that_change_data_are_refused_before_anything_runs(client: dis.Client) -> None:
    before = client.read("orders").read_all()
    for statement in (
        "DELETE FROM orders",
        "UPDATE orders SET id = 0",
        "INSERT INTO orders VALUES (4, 7)",
        "DROP TABLE orders",
        "ALTER TABLE orders DROP COLUMN id",
        "SELECT 1; TRUNCATE orders",
        "CREATE TABLE copy AS SELECT * FROM orders",
    ):
        with case(statement):
            told = call("sql", statement, "--catalog", client.uri)
            assert (told.returncode, told.stdout) == (1, "")
            assert "--into NAME" in told.stderr
            assert told.stderr.count("\n") == 1
            assert client.read("orders").read_all() == before


def test_several_results_are_refused_by_formats_that_hold_one(client: dis.Client) -> None:
    script = "SELECT 1 AS a; SELECT 2 AS b"
    for kind in ("arrow", "arrows", "parquet", "csv"):
        told = call("sql", script, "-f", kind, "--catalog", client.uri)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"the format {kind} holds one result" in told.stderr
    assert call("sql", script, "-f", "jsonl", "--catalog", client.uri).stdout == '{"a": 1}\n{"b": 2}\n'
    assert call("sql", script, "--catalog", client.uri).stdout == "a\n1\nb\n2\n"
    setting = "SET threads = 1; LOAD json; SELECT 1 AS a; USE memory"
    assert call("sql", setting, "-f", "csv", "--catalog", client.uri).stdout == '"a"\n1\n'
    assert call("sql", f"CREATE TABLE t AS {script}", "-f", "csv", "--catalog", client.uri).stdout == '"b"\n2\n'


def test_private_tables_may_change(client: dis.Client) -> None:
    script = "CREATE TABLE t AS FROM orders; DELETE FROM t WHERE id = 1; SELECT count(*) AS n FROM t"
    assert call("sql", script, "--catalog", client.uri).stdout == "n\n2\n"


def test_hints_are_for_this_command(client: dis.Client) -> None:
    arguments = ["sql", "FROM wide", "--catalog", client.uri]
    shown = processes.in_terminal(60, [sys.executable, "-m", "dissociated", *arguments], os.environ)
    assert "SELECT A,B shows others" in shown
    refused = call(*arguments, "-f", "csv").stderr
    assert "SELECT A,B" in refused
    assert "--columns" not in shown + refused

"""SQL over datasets by their names: the answers of DuckDB over Tables, from shared memory and over a network."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import DatasetNotFound, OptionError, SourceError, WrongKind
from dissociated.node.node import Node
from dissociated.store.store import Store
from support.helpers import case

ROWS, BATCH = 4_000, 250
N = np.arange(ROWS)
ORDERS = pa.table({"n": N, "customer": N * 7 % 10, "price": pa.array(N / 4, mask=N % 9 == 0)})
CUSTOMERS = pa.table({"customer": range(10), "name": [f"name {number}" for number in range(10)]})
ADVICE = r"client\.put\(name, client\.sql\(query\)\)"


@pytest.fixture(scope="module", params=["shm:", "tcp://127.0.0.1:0"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dis.Client]:
    store = Store(tmp_path_factory.mktemp("sql") / "store")
    with Node(store, [request.param]) as node, dis.connect(node.uri) as client:
        client.put("orders", pa.Table.from_batches(ORDERS.to_batches(max_chunksize=BATCH)))
        client.put("team/customers", CUSTOMERS)
        yield client


def test_answers_are_those_over_tables(client: dis.Client) -> None:
    with duckdb.connect() as database:
        database.register("orders", ORDERS)
        database.register("team/customers", CUSTOMERS)
        for query in (
            "SELECT sum(price), count(*) FROM orders",
            "SELECT * FROM orders WHERE n = 1234",
            "SELECT n FROM orders WHERE n IN (0, 3999) ORDER BY n",
            "SELECT sum(n) FROM orders WHERE n < 3000 AND price > 10",
            "SELECT count(*) FROM orders WHERE n < 0",
            "SELECT n FROM orders WHERE n < 10 UNION ALL SELECT n FROM orders WHERE price > 100 ORDER BY n",
            "SELECT a.n, b.price FROM orders a JOIN orders b ON a.n = b.n + 1 WHERE a.n = 77 ORDER BY ALL",
            'SELECT name, sum(price) FROM orders JOIN "team/customers" USING (customer) GROUP BY name ORDER BY name',
            'SELECT name FROM orders JOIN "team/customers" USING (customer) WHERE n BETWEEN 5 AND 7 ORDER BY n',
            "WITH customer AS (SELECT 1 AS a) SELECT a FROM customer",
            "SELECT n FROM main.orders LIMIT 3",
            "PIVOT (SELECT n % 2 AS odd, customer, price FROM orders) ON odd USING sum(price) ORDER BY customer",
        ):
            with case(query):
                assert client.sql(query).equals(database.sql(query).to_arrow_table())


def test_tables_of_a_script_are_private(client: dis.Client) -> None:
    script = "CREATE TABLE t AS FROM orders WHERE n < 9; DELETE FROM t WHERE n < 5; SELECT count(*) AS n FROM t"
    for _ in range(2):
        assert client.sql(script).to_pylist() == [{"n": 4}]
    with pytest.raises(DatasetNotFound):
        client.sql("FROM t")


def test_a_result_needs_neither_client_nor_dataset(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("orders", ORDERS)
        client.read("orders").read_all()  # from here on, the node itself maps the segment
        before = _mappings(tmp_path)
        result = client.sql("SELECT n, price FROM orders")
        gc.collect()
        assert _mappings(tmp_path) <= before
        client.put("orders", ORDERS[:5])
        assert client.sql("SELECT count(*) AS n FROM orders").to_pylist() == [{"n": 5}]
        client.drop("orders")
    assert result == ORDERS.select(["n", "price"])


def _mappings(directory: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(directory))


def test_errors_tell_what_to_do(client: dis.Client) -> None:
    variable = ORDERS
    assert variable.num_rows == ROWS
    with pytest.raises(DatasetNotFound, match="no dataset 'variable' is published here, and DuckDB has no table"):
        client.sql("FROM variable")
    for query, message in {
        "SELEC 1": "syntax error",
        "SELECT x FROM orders": 'Referenced column "x" not found',
        "SELECT error('late') FROM orders": "late",
        "BEGIN; SELECT 1; COMMIT; SELECT 2": "leave out BEGIN and COMMIT",
        "": "query is needed",
        "DELETE FROM orders": ADVICE,
        "INSERT INTO orders VALUES (1, 2, 3)": ADVICE,
        "CREATE TABLE copy AS FROM orders": ADVICE,
    }.items():
        with case(query), pytest.raises(OptionError, match=message):
            client.sql(query)
    assert client.describe("orders").rows == ROWS


def test_a_plan_is_a_result(client: dis.Client) -> None:
    assert "Projections: n" in client.sql("EXPLAIN SELECT sum(n) FROM orders")["explain_value"][0].as_py()


def test_errors_of_datasets_keep_their_class() -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield CUSTOMERS.to_batches()[0]
        raise ValueError("no more")

    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("broken", lambda: pa.RecordBatchReader.from_batches(CUSTOMERS.schema, batches()))
        for query in ("SELECT count(customer) FROM broken", "FROM broken", "SELECT error('x') FROM broken, broken b"):
            with case(query), pytest.raises(SourceError, match="the source of 'broken' failed") as caught:
                client.sql(query)
            assert caught.value.code == "source_failed"


def test_names_that_differ_in_case_are_not_confused() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("a", pa.table({"x": [1]}))
        server.publish("A", pa.table({"x": [2]}))
        assert [client.sql(f'FROM "{name}"').to_pydict() for name in "aA"] == [{"x": [1]}, {"x": [2]}]
        with pytest.raises(OptionError, match="does not distinguish 'A' and 'a'"):
            client.sql('SELECT (SELECT x FROM "a"), (SELECT x FROM "A")')


def test_tensors_have_no_rows() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("weights", pa.Tensor.from_numpy(np.eye(3)))
        with pytest.raises(WrongKind, match="read_tensors"):
            client.sql("FROM weights")

"""SQL over datasets by their names: the answers of DuckDB over Tables, from shared memory and over a network."""

from __future__ import annotations

import gc
import os
import signal
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.base.exit import StreamThread
from dissociated.client import sql_database
from dissociated.client.mapped import MappedVersion
from dissociated.client.version_reader import VersionReader
from dissociated.control.dataset_info import DatasetInfo
from dissociated.errors import CatalogUnreachable, DatasetNotFound, OptionError, SourceError, StoreFull, WrongKind
from dissociated.node.node import Node
from dissociated.store.eviction import Policy
from dissociated.store.store import Store
from support.helpers import PATIENCE, case, wait_until
from support.nodes import until_expired
from support.processes import Start

ROWS, BATCH = 4_000, 250
N = np.arange(ROWS)
ORDERS = pa.table({"n": N, "customer": N * 7 % 10, "price": pa.array(N / 4, mask=N % 9 == 0)})
CUSTOMERS = pa.table({"customer": range(10), "name": [f"name {number}" for number in range(10)]})
MANY, LONG_BATCH = 1 << 20, 1 << 16
KEYS = np.arange(MANY)
EVENTS = pa.table({"key": KEYS, "value": KEYS % 1000, "item": pa.array(KEYS % 11 - 1, mask=KEYS % 7 == 3)})
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
            "WITH orders AS (SELECT 1 AS a) SELECT a FROM orders",
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
    for rows in (ROWS, 1, ROWS):
        script = "FROM orders" if rows > 1 else "CREATE TABLE orders AS SELECT 1 AS n; FROM orders"
        assert client.sql(script).num_rows == rows


def test_settings_and_functions_of_a_script_are_private(client: dis.Client) -> None:
    (before,) = client.sql("SELECT current_setting('threads') AS threads")["threads"].to_pylist()
    for script in (
        f"SET threads = {before + 1}; SELECT current_setting('threads') AS threads",
        f"SET GLOBAL threads = {before + 1}; SELECT current_setting('threads') AS threads",
        "ATTACH ':memory:' AS other; CREATE TABLE other.t AS SELECT 1 AS x; FROM other.t",
        "CREATE TEMP TABLE t AS SELECT 1 AS x; FROM t",
        "CREATE MACRO twice(x) AS 2 * x; SELECT twice(3)",
    ):
        client.sql(script)
    assert client.sql("SELECT current_setting('threads') AS threads")["threads"].to_pylist() == [before]
    assert client.sql("SELECT database_name FROM duckdb_databases() WHERE NOT internal").num_rows == 1
    assert client.sql("FROM duckdb_tables()").num_rows == 0
    with pytest.raises(OptionError, match="twice"):
        client.sql("SELECT twice(3)")


def test_a_name_means_the_current_version_in_each_call(tmp_path: Path) -> None:
    query = "SELECT n, (SELECT count(*) FROM team) AS size FROM orders"
    with (
        Node(Store(tmp_path / "store"), ["shm:"]) as node,
        Node(Store(tmp_path / "other"), ["shm:"], catalog=node.uri) as other,
        dis.connect(node.uri) as client,
        dis.connect(node.uri) as reader,
        dis.connect(other.uri) as reader_at_a_node,
    ):
        readers = client, reader, reader_at_a_node

        def check(rows: range) -> None:
            for _ in range(2):
                for each in readers:
                    assert each.sql(query).to_pydict() == {"n": [*rows], "size": [10] * len(rows)}

        client.put("team", CUSTOMERS)
        for rows in (5, 3, 9):
            client.put("orders", ORDERS[:rows])
            check(range(rows))
        client.put("orders", ORDERS[9:12], mode="append")
        check(range(12))
        client.drop("orders")
        for each in readers:
            with pytest.raises(DatasetNotFound):
                each.sql(query)
        client.put("orders", ORDERS[1:2])
        check(range(1, 2))


@pytest.mark.usefixtures("forks")
def test_a_repeated_query_asks_the_catalog_after_changes_alone(memory: Path, start: Start) -> None:
    query = "SELECT count(*) AS n, (SELECT count(*) FROM team) AS size FROM orders"
    node = start("node", "--store", memory / "store", "--listen", "shm:")

    with dis.connect(node.uri) as client:

        def check(rows: int) -> None:
            assert client.sql(query).to_pylist() == [{"n": rows, "size": 10}]

        client.put("team", CUSTOMERS)
        for rows in (5, 3):
            client.put("orders", ORDERS[:rows])
            for _ in range(3):
                check(rows)
            node.signal(signal.SIGSTOP)
            wait_until(lambda: ") T " in Path(f"/proc/{node.pid}/stat").read_text(), "the catalog cannot answer")
            check(rows)
            node.signal(signal.SIGCONT)
        client.put("orders", ORDERS, ttl=0.5)
        for _ in until_expired(client, "orders", lambda: check(ROWS)):
            pass


def test_functions_change_no_other_query(client: dis.Client) -> None:
    seeds, numbers = "SELECT setseed(0.5) FROM orders LIMIT 1", "SELECT random() AS r FROM orders LIMIT 3"
    drawn = []
    for _ in range(3):
        client.sql(seeds)
        drawn += client.sql(numbers)["r"].to_pylist()
    both = "SELECT setseed(0.5), random() AS r FROM orders LIMIT 3"
    assert client.sql(both)["r"] != client.sql(both)["r"]
    assert len({*drawn}) == 9


def test_memory_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("orders", ORDERS)
        client.read("orders").read_all()  # from here on, the node itself maps the segment
        wait_until(lambda: _mappings(tmp_path) == 1, "the reader has given its memory back")
        result = client.sql("SELECT n, price FROM orders")
        client.close()
        gc.collect()
        wait_until(lambda: _mappings(tmp_path) == 1, "the memory is given back by a closed client")
        with dis.connect(node.uri) as client:
            monkeypatch.setattr(sql_database, "MAX_AGE", 0.2)
            for is_interrupted in (False, True, False):
                with monkeypatch.context() as patch:
                    if is_interrupted:
                        patch.setattr(sql_database, "StreamThread", _InterruptedThread)
                    with suppress(KeyboardInterrupt):
                        client.sql("SELECT n, price FROM orders")
                        assert not is_interrupted
                wait_until(lambda: _mappings(tmp_path) == 1, "the memory is given back without another query")
            client.drop("orders")
    assert result == ORDERS.select(["n", "price"])


class _InterruptedThread(StreamThread):
    """A thread in whose place comes Ctrl-C."""

    def start(self) -> None:
        signal.raise_signal(signal.SIGINT)


def _mappings(directory: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(directory))


def test_a_client_makes_room_of_memory_that_its_queries_keep(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_database, "MAX_AGE", 1e6)
    tables = [pa.table({"n": np.full(1 << 17, number)}) for number in range(3)]

    def is_put(client: dis.Client, name: str, table: pa.Table, transport: str) -> bool:
        try:
            client.put(name, table, transport=transport)
        except StoreFull:  # the node may not know yet that the memory was given back
            return False
        return True

    for policy in (Policy.REFUSE, Policy.EVICT):
        store = Store(memory / policy.value, limit=tables[0].nbytes * 3 // 2, policy=policy)
        with Node(store, ["shm:"]) as node, dis.connect(node.uri) as client:
            for transport in ("shm", "grpc"):
                for number, table in enumerate(tables):
                    name = f"{transport} {number}"
                    with case((policy.value, name)):
                        wait_until(partial(is_put, client, name, table, transport), "there is room")
                        assert client.sql(f'SELECT min(n) AS n FROM "{name}"')["n"].to_pylist() == [number]
                        if policy is Policy.REFUSE:
                            client.drop(name)


def test_memory_is_given_back_without_the_lock(tmp_path: Path) -> None:
    """A thread that gives back a large version must not hold up the queries of others."""
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("orders", ORDERS)
        info = client.describe("orders")
        kept, given_back = sql_database.KeptVersions(), []

        def give_back() -> None:
            for step in (lambda: kept.put(info, _map(client, info)), kept.close):
                mapped = _map(client, info)
                weakref.finalize(mapped, lambda: given_back.append(kept.get(info)))
                kept.put(info, mapped)
                del mapped
                step()

        thread = threading.Thread(target=give_back, daemon=True)
        thread.start()
        thread.join(PATIENCE)
        assert len(given_back) == 2
        kept.close()


def _map(client: dis.Client, info: DatasetInfo) -> MappedVersion:
    mapped = VersionReader(client, info, None).map(client.defaults)
    assert mapped is not None
    return mapped


def test_queries_of_threads_share_a_client(client: dis.Client) -> None:
    def ask(number: int) -> list[int]:
        query = f'SELECT count(*) AS n FROM orders JOIN "team/customers" USING (customer) WHERE n < {number}'
        return client.sql(query if number % 3 else f"SET threads = 1; {query}")["n"].to_pylist()

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(ask, range(12))] == [[number] for number in range(12)]


def test_a_closed_client_closes_its_database_and_a_child_opens_its_own(client: dis.Client) -> None:
    with dis.connect(client.uri) as other:
        assert other.sql("SELECT sum(n) AS s FROM orders")["s"].to_pylist() == [ROWS * (ROWS - 1) // 2]
        if not (child := os.fork()):
            try:
                query = "SELECT sum(range) AS s FROM range(100000)"
                answers = [other.sql(query)["s"].to_pylist() for _ in range(2)]
                other.close()
                os._exit(0 if answers == [[4999950000]] * 2 else 2)
            finally:
                os._exit(3)
        assert os.waitpid(child, 0)[1] == 0
        assert other.sql("SELECT 1 AS a")["a"].to_pylist() == [1]
    with pytest.raises(dis.DissociatedError, match="closed"):
        other.sql("FROM orders")


def test_a_client_may_be_closed_during_a_query() -> None:
    started, closed = threading.Event(), threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield CUSTOMERS.to_batches()[0]
        started.set()
        assert closed.wait(PATIENCE)
        yield CUSTOMERS.to_batches()[0]

    with dis.Server(["tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("slow", lambda: pa.RecordBatchReader.from_batches(CUSTOMERS.schema, batches()))
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(client.sql, "SELECT count(*) AS n FROM slow")
            assert started.wait(PATIENCE)
            client.close()
            closed.set()
            assert answer.result()["n"].to_pylist() == [20]


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dis.Client]:
    with (
        Node(Store(tmp_path_factory.mktemp("events") / "store"), ["shm:"]) as node,
        dis.connect(node.uri) as client,
    ):
        client.put("events", pa.Table.from_batches(EVENTS.to_batches(max_chunksize=LONG_BATCH)))
        client.put("items", pa.table({"item": range(-1, 10), "label": [f"label {n}" for n in range(-1, 10)]}))
        yield client


def test_answers_over_many_rows(events: dis.Client) -> None:
    with duckdb.connect() as database:
        database.register("events", EVENTS)
        database.register("items", events["items"].to_table())
        for query in (
            "SELECT sum(value), count(item) FROM events",
            "FROM events WHERE key = 700000",
            "FROM events WHERE key = -1",
            "SELECT key, label FROM events JOIN items USING (item) WHERE key BETWEEN 131070 AND 131075 ORDER BY key",
            "SELECT label, sum(value) FROM events JOIN items USING (item) WHERE value > 9 GROUP BY label ORDER BY ALL",
            "SELECT a.key FROM events a JOIN events b ON a.key = b.value WHERE b.key = 999 OR b.key = 5 ORDER BY a.key",
            "SELECT count(*) FROM events a JOIN events b ON a.key = b.key + 1 WHERE a.key < 9 AND b.value < 500",
            "(SELECT key FROM events WHERE key < 9) UNION ALL (SELECT max(value) FROM events) ORDER BY key",
            "SELECT key FROM events WHERE key < (SELECT min(value) + 4 FROM events WHERE value > 2) ORDER BY key",
            "SELECT key, value FROM events WHERE key > 1048570 AND value % 2 = 0",
            "SELECT key FROM events WHERE key < 70000 LIMIT 3",
            "SELECT count(*) FROM (FROM events LIMIT 100000)",
        ):
            for _ in range(2):  # the second call knows of the first
                with case(query):
                    assert events.sql(query).equals(database.sql(query).to_arrow_table())


def test_errors_over_many_rows(events: dis.Client) -> None:
    for query in (
        "SELECT error('late ' || value) FROM events WHERE key = 70000",
        "SELECT error('late ' || count(*)) FROM events",
    ):
        for _ in range(2):
            with case(query), pytest.raises(OptionError, match="late"):
                events.sql(query)


def test_a_point_query_reads_few_batches(events: dis.Client) -> None:
    whole = "SELECT count(*) AS n FROM events WHERE key + value >= 0 OR item IS NULL"
    assert events.sql(whole)["n"].to_pylist() == [MANY]  # from here on, the node has read all of it
    with dis.connect(events.uri) as client:
        before = _resident("events")
        assert client.sql("FROM events WHERE key = 700000").to_pylist() == EVENTS[700000:700001].to_pylist()
        few = _resident("events") - before
        assert client.sql(whole)["n"].to_pylist() == [MANY]
        assert 0 < few < (_resident("events") - before) / 4


def _resident(directory: str) -> int:
    """Return how many kB of files below a directory of this name are in the page table of this process."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            counted = f"/{directory}" in words[-1]
        elif counted and words[0] == "Rss:":
            total += int(words[1])
    return total


def test_errors_tell_what_to_do(client: dis.Client) -> None:
    variable = ORDERS
    assert variable.num_rows == ROWS
    with pytest.raises(
        DatasetNotFound, match="DuckDB has no table 'variable', and no dataset 'variable' is published here"
    ):
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


def test_queries_leave_neither_files_nor_statements_in_memory(events: dis.Client, tmp_path: Path) -> None:
    pq.write_table(ORDERS, tmp_path / "orders.parquet")
    assert events.sql(f"SELECT count(n) AS n FROM '{tmp_path}/orders.parquet'")["n"].to_pylist() == [ROWS]
    cached = (
        "SELECT * FROM duckdb_memory() WHERE tag IN ('EXTERNAL_FILE_CACHE', 'OBJECT_CACHE') AND memory_usage_bytes > 0"
    )
    assert events.sql(cached).num_rows == 0
    length = 1 << 20
    tracemalloc.start()
    try:
        for number in range(2):
            assert (
                events.sql(f"SELECT max(value) AS m FROM events /* {number} {'x' * length} */")["m"][0].as_py() == 999
            )
        assert tracemalloc.get_traced_memory()[0] < length
    finally:
        tracemalloc.stop()


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


@pytest.mark.parametrize("listener", ["shm:", "tcp://127.0.0.1:0"])
def test_a_dataset_that_is_replaced_after_its_look_up_is_looked_up_again(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dis.Server([listener]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("orders", ORDERS)
        server.publish("customers", CUSTOMERS)
        describe, versions = client.describe_current, [2, 3, 4]

        def describe_and_replace(name: str) -> DatasetInfo:
            info = describe(name)
            if versions and name == "orders":
                server.publish("orders", ORDERS.set_column(0, "n", pa.array([versions.pop()] * ROWS)))
            return info

        monkeypatch.setattr(client, "describe_current", describe_and_replace)
        query = "SELECT sum(n) AS n, count(DISTINCT customer) AS customers FROM orders JOIN customers USING (customer)"
        assert client.sql(query).to_pylist() == [{"n": 2 * ROWS, "customers": 10}]
        server.drop("orders")
        with pytest.raises(DatasetNotFound, match="DuckDB has no table 'orders'"):
            client.sql(query)


def test_names_that_differ_in_case_are_not_confused() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("a", pa.table({"x": [1]}))
        server.publish("A", pa.table({"x": [2]}))
        assert [client.sql(f'FROM "{name}"').to_pydict() for name in "aA"] == [{"x": [1]}, {"x": [2]}]
        with pytest.raises(OptionError, match="does not distinguish 'A' and 'a'"):
            client.sql('SELECT (SELECT x FROM "a"), (SELECT x FROM "A")')


def test_no_statement_reads_the_dataset_of_another_spelling(tmp_path: Path) -> None:
    both = (
        'CREATE TABLE t AS FROM a; CREATE TABLE u AS FROM "A"; FROM t UNION ALL FROM u',
        'SELECT 1; FROM a; FROM "A"',
        'CREATE VIEW w AS FROM "A"; SELECT x, (SELECT x FROM w) AS y FROM a',
        'CREATE TABLE t AS FROM a; PIVOT "A" ON x USING sum(x)',
        "FROM query_table(['A', 'a'])",
        "SELECT * FROM query('FROM a') s, query('FROM \"A\"') t",
        "SELECT * FROM a, query_table(upper('a'))",
        "SELECT * FROM query_table(['A', lower('A')])",
        "SELECT x FROM a WHERE A.x = 1",
    )
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("a", pa.table({"x": [1]}))
        for _ in range(2):  # the second time, the version is kept
            for query in ("SELECT x FROM a WHERE A.x = 1", "SELECT 1; FROM a", "FROM query_table('a')"):
                with case(query):
                    assert client.sql(query).to_pylist() == [{"x": 1}]
            for query in ('FROM a; FROM "A"', 'CREATE TABLE t AS FROM a; CREATE TABLE u AS FROM "A"; FROM u'):
                with case(query), pytest.raises(DatasetNotFound, match="'A'"):
                    client.sql(query)
        client.put("A", pa.table({"x": [100]}))
        for _ in range(2):
            for query in both:
                with case(query), pytest.raises(OptionError, match="does not distinguish 'A' and 'a'"):
                    client.sql(query)
            for name, x in {"a": 1, "A": 100}.items():
                for query in (f"FROM {name}", f"SELECT 1; FROM {name}", f"CREATE TABLE t AS FROM {name}; FROM t"):
                    with case(query):
                        assert client.sql(query).to_pylist() == [{"x": x}]


def test_names_with_quotes_and_other_letters_are_not_confused() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        for x, name in enumerate(('a"b', "é", "É")):
            server.publish(name, pa.table({"x": [x]}))
        assert client.sql('FROM "a""b"').to_pylist() == [{"x": 0}]
        assert client.sql('SELECT s.x, t.x AS y FROM "é" s, "É" t').to_pylist() == [{"x": 1, "y": 2}]
        server.publish('A"b', pa.table({"x": [3]}))
        with pytest.raises(OptionError, match="does not distinguish"):
            client.sql('CREATE VIEW v AS FROM "A""b"; FROM "a""b", v')


def test_a_table_of_a_script_hides_the_dataset_of_its_name(tmp_path: Path) -> None:
    with Node(Store(tmp_path / "store"), ["shm:"]) as node, dis.connect(node.uri) as client:
        client.put("a", pa.table({"x": [1]}))
        client.put("b", pa.table({"x": [10]}))
        for _ in range(2):  # the second time, the versions are kept
            for query, x in {
                "CREATE TABLE a AS SELECT x + 1 AS x FROM a; FROM a": 2,
                "CREATE VIEW w AS FROM a; CREATE TABLE t AS FROM b; SELECT w.x + t.x AS x FROM w, t": 11,
                "WITH a AS (SELECT x + 1 AS x FROM a) FROM a": 2,
                "WITH a AS (SELECT x + 1 AS x FROM a), b AS (SELECT a.x + b.x AS x FROM a, b) FROM b": 12,
            }.items():
                with case(query):
                    assert client.sql(query).to_pylist() == [{"x": x}]
            with pytest.raises(OptionError, match="Circular reference"):
                client.sql("WITH c AS (FROM c) FROM c")


def test_a_dataset_hides_the_file_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hidden.csv").write_text("n\n1\n")
    (tmp_path / "file.csv").write_text("n\n2\n")
    queries = [
        "SELECT n FROM '{}'",
        'SELECT max(n) AS n FROM "{}" a JOIN orders USING (n)',
        "SELECT n FROM query_table('\"{}\"')",
        "CREATE TABLE t AS FROM '{}'; SELECT n FROM t",
        "CREATE TABLE t AS SELECT 0 AS n; UPDATE t SET n = (SELECT max(n) FROM '{}'); FROM t",
        "PIVOT (SELECT n FROM '{}') ON n USING max(n)",
    ]
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("orders", ORDERS)
        server.publish("hidden.csv", ORDERS[7:8])
        for _ in range(2):  # the second time, the queries and the dataset are kept
            for query in queries:
                with case(query):
                    assert client.sql(query.format("hidden.csv")).to_pydict() in ({"n": [7]}, {"7": [7]})
                    assert client.sql(query.format("file.csv")).to_pydict() in ({"n": [2]}, {"2": [2]})
        script = 'CREATE TABLE "hidden.csv" AS SELECT 5 AS n; SELECT n FROM "hidden.csv"'
        assert client.sql(script).to_pylist() == [{"n": 5}]
        server.publish("file.csv", ORDERS[8:9])
        server.publish("hidden.csv", ORDERS[9:10])
        for query in queries[:2]:
            assert [client.sql(query.format(f"{name}.csv"))["n"][0].as_py() for name in ("hidden", "file")] == [9, 8]
        server.drop("hidden.csv")
        assert [client.sql(query.format("hidden.csv"))["n"][0].as_py() for query in queries[:2]] == [1, 1]


def test_paths_and_urls_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.csv").write_text("n\n2\n")
    with dis.Server([]) as server:
        client = dis.connect(server.catalog_uri)
    with client:
        for path in (
            "./file.csv",
            f"../{tmp_path.name}/file.csv",
            tmp_path / "file.csv",
            f"file://{tmp_path}/file.csv",
        ):
            for query in (f"FROM '{path}'", f'PIVOT (SELECT 2 AS n FROM "{path}") ON n USING max(n)'):
                with case(query):
                    assert client.sql(query).to_pylist() in ([{"n": 2}], [{"2": 2}])
        with pytest.raises(CatalogUnreachable):  # it may be a dataset
            client.sql("FROM 'file.csv'")


def test_tensors_have_no_rows() -> None:
    with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("weights", pa.Tensor.from_numpy(np.eye(3)))
        with pytest.raises(WrongKind, match="read_tensors"):
            client.sql("FROM weights")

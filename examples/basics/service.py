"""Answer queries with datasets: TLS, a role for each client, results that expire, and an asynchronous consumer.

Run `python -m examples.basics.service cert.pem key.pem roots.pem`, with a certificate for 127.0.0.1.
"""

import asyncio
import sys

import duckdb
import pyarrow as pa

import dissociated as dis

CERT, KEY, ROOTS = sys.argv[1:]
TOKENS = {"token-of-web": ("web", "read"), "token-of-ops": ("ops", "admin")}
SALES = pa.table({"city": ["Rome", "Oslo", "Rome"], "price": [3, 5, 4]})
QUERIES = ["SELECT city, sum(price)::INT AS total FROM sales GROUP BY city ORDER BY city", "FROM sales LIMIT 1"]


def answer(server: dis.Server, name: str, query: str) -> None:
    with duckdb.connect() as database:
        database.register("sales", SALES)
        server.publish(name, database.sql(query).to_arrow_table(), ttl=60)  # gone after a minute


async def consume(uri: str, name: str) -> list[dict[str, object]]:
    with dis.connect(uri, token="token-of-web", tls_roots=ROOTS) as client:
        reader = await client.read_async(name)  # over shm on this host, over tls from others
        return [row async for batch in reader for row in batch.to_pylist()]


with dis.Server(
    ["shm:", "tls://127.0.0.1:0"], catalog="grpc+tls://127.0.0.1:0", tls_cert=CERT, tls_key=KEY, authorize=TOKENS
) as server:
    for number, query in enumerate(QUERIES):
        answer(server, f"results/{number}", query)
        print(asyncio.run(consume(server.catalog_uri, f"results/{number}")))

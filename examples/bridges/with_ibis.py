"""Query a dataset with ibis. DuckDB scans the handle, and fetches only the columns and rows of the query."""

import ibis
import pyarrow as pa

import dissociated as dis

flights = pa.table({"dest": ["IAH", "MIA", "ORD", "MIA"] * 500, "delay": [2.0, None, 92.0, 61.5] * 500})

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
    server.publish("flights", flights)
    seen = ibis.memtable(client["flights"])
    late = seen.filter(seen.delay > 60).group_by("dest").agg(mean=seen.delay.mean()).order_by("dest")
    print(late.to_pyarrow().to_pylist())

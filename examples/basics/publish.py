"""Publish a table to other programs, for as long as this program runs. Start `read` in another terminal."""

import pyarrow as pa

import dissociated as dis

flights = pa.table(
    {
        "origin": ["EWR", "LGA", "JFK", "JFK", "EWR"],
        "dest": ["IAH", "IAH", "MIA", "BQN", "ORD"],
        "delay": [2.0, 4.0, 92.0, None, 61.5],
    }
)

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server:
    server.publish("flights", flights)  # also a DataFrame, a reader, a callable, a Parquet or CSV file
    print(f"export DISSOCIATED_CATALOG={server.catalog_uri}", flush=True)
    input("serving; press Enter to end\n")

"""Read a dataset into a DataFrame of Daft, whose tasks fetch only the columns and rows that they need."""

import pyarrow as pa

import dissociated as dis
from dissociated.adapters.daft import read_dissociated

flights = pa.table({"dest": ["IAH", "MIA", "ORD", "MIA"] * 500, "delay": [2.0, None, 92.0, 61.5] * 500})

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
    server.publish("flights", pa.Table.from_batches(flights.to_batches(max_chunksize=200)))
    frame = read_dissociated(client["flights"], filter=("delay", ">", 60), partition_bytes=4096)
    print(frame.num_partitions() > 1, frame.count_rows())
    print(frame.groupby("dest").mean("delay").sort("dest").to_pydict())

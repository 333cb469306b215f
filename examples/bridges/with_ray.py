"""Read a dataset with Ray Data, whose workers fetch only the columns and rows that they need."""

import pyarrow as pa
import ray

import dissociated as dis
from dissociated.adapters.ray import read_dissociated

flights = pa.table({"dest": ["IAH", "MIA", "ORD", "MIA"] * 500, "delay": [2.0, None, 92.0, 61.5] * 500})

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
    server.publish("flights", flights)
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    late = read_dissociated(client["flights"], columns=["delay"], filter=("delay", ">", 60))
    print(late.count(), late.take(1))
    ray.shutdown()

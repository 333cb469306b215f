"""Send one stream to several consumers while it is made. Each of them gets every batch."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

import dissociated as dis

SCHEMA = pa.schema([("tick", pa.int64())])


def ticks() -> Iterator[pa.RecordBatch]:
    for number in range(5):
        time.sleep(0.05)  # a sensor, a queue, a model ...
        yield pa.record_batch([[number]], schema=SCHEMA)


def consume(uri: str) -> list[int]:
    with dis.connect(uri) as client:
        return [batch["tick"][0].as_py() for batch in client.read("ticks")]


with dis.Server(["shm:"]) as server, ThreadPoolExecutor(2) as pool:
    server.publish("ticks", ticks(), schema=SCHEMA, live=dis.Live(consumers=2))
    for received in pool.map(consume, [server.catalog_uri] * 2):
        print(received)

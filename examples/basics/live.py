"""Send one stream to several consumers while it is made. Each of them gets every batch."""

import threading
import time
from collections.abc import Iterator

import pyarrow as pa

import dissociated as dis

SCHEMA = pa.schema([("tick", pa.int64())])


def ticks() -> Iterator[pa.RecordBatch]:
    for number in range(5):
        time.sleep(0.05)  # a sensor, a queue, a model ...
        yield pa.record_batch([[number]], schema=SCHEMA)


def consume(uri: str, name: str) -> None:
    with dis.connect(uri) as client:
        total = sum(batch["tick"][0].as_py() for batch in client.read("ticks"))
    print(f"{name} got a total of {total}")


with dis.Server(["shm:"]) as server:
    server.publish("ticks", ticks(), schema=SCHEMA, live=dis.Live(consumers=2))
    consumers = [threading.Thread(target=consume, args=(server.catalog_uri, name)) for name in ("one", "two")]
    for consumer in consumers:
        consumer.start()
    for consumer in consumers:
        consumer.join()

"""Iterate over a dataset with Hugging Face `datasets`: in shards that workers fetch, or in shared memory."""

import pyarrow as pa

import dissociated as dis
from dissociated.adapters.huggingface import to_dataset, to_iterable_dataset

texts = pa.table({"text": [f"sentence {n}" for n in range(1000)], "label": [n % 2 for n in range(1000)]})

with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
    server.publish("texts", pa.Table.from_batches(texts.to_batches(max_chunksize=100)))
    streamed = to_iterable_dataset(client["texts"], filter=("label", "=", 1), partition_bytes=4096)
    print(streamed.num_shards > 1, next(iter(streamed)))
    print(sum(1 for _ in streamed.shuffle(seed=1, buffer_size=100)))
    mapped = to_dataset(client["texts"])
    print(mapped.num_rows, mapped[999])

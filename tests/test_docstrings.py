"""Every example in a docstring runs unchanged, and every function that users begin with has one."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dissociated as dis
from dissociated.node import launch
from support.pages import Example, Reader, examples

EXAMPLES = [*examples()]
#: Functions and classes that users call first, by module.
REQUIRED = [
    "adapters/dagster.io_manager",
    "adapters/daft.read_dissociated",
    "adapters/dask.read_dissociated",
    "adapters/huggingface.to_dataset",
    "adapters/huggingface.to_iterable_dataset",
    "adapters/ray.read_dissociated",
    "adapters/ray.write_dissociated",
    "client/calls.CatalogClient.abort",
    "client/calls.CatalogClient.commit",
    "client/calls.CatalogClient.committed",
    "client/calls.CatalogClient.describe",
    "client/calls.CatalogClient.drop",
    "client/calls.CatalogClient.forget",
    "client/calls.CatalogClient.hand_over",
    "client/calls.CatalogClient.list",
    "client/calls.CatalogClient.nodes",
    "client/calls.CatalogClient.status",
    "client/calls.CatalogClient.versions",
    "client/client.Client",
    "client/client.Client.dataset",
    "client/client.Client.put",
    "client/client.Client.read",
    "client/client.Client.read_endpoint",
    "client/client.Client.read_on_device",
    "client/client.Client.read_tensors",
    "client/client.Client.scan",
    "client/dataset.DatasetHandle",
    "client/dataset.DatasetHandle.close",
    "client/dataset.DatasetHandle.refresh",
    "client/dataset.DatasetHandle.scan",
    "client/dataset.DatasetHandle.scanner",
    "client/dataset.DatasetHandle.versions",
    "client/dataset._Rows.count_rows",
    "client/dataset._Rows.filter",
    "client/dataset._Rows.head",
    "client/dataset._Rows.join",
    "client/dataset._Rows.join_asof",
    "client/dataset._Rows.replace_schema",
    "client/dataset._Rows.sort_by",
    "client/dataset._Rows.take",
    "client/dataset._Rows.to_batches",
    "client/dataset._Rows.to_pandas",
    "client/dataset._Rows.to_polars",
    "client/dataset._Rows.to_reader",
    "client/dataset._Rows.to_table",
    "client/uri_stream.open_stream",
    "client/uri_stream.open_stream_on_device",
    "client/uri_stream.open_tensors",
    "client/scanner.Scanner",
    "client/scanner.Scanner.count_rows",
    "client/scanner.Scanner.to_reader",
    "codec/options.ReadOptions",
    "codec/options.WriteOptions",
    "codec/writer.FileWriter",
    "codec/writer.StreamWriter",
    "control/dataset_info.DatasetInfo",
    "datasets/live.Live",
    "ipc/asynchronous.open_async",
    "ipc/decoder.StreamDecoder",
    "ipc/files.open_file",
    "ipc/files.open_stream",
    "ipc/tensors.write_tensor",
    "monitoring/log.configure",
    "node/client.connect",
    "node/launch.ensure",
    "server/options.ServerOptions",
    "server/server.Server",
    "server/server.Server.publish",
    "server/server.Server.writer",
    "spark/session.publish",
    "spark/session.read",
    "spark/session.session",
    "control/commit.Commit",
    "torch.loader",
    "torch/dataset.IterableDataset",
    "training/batches.Batches",
]
TABLE = pa.table(
    {
        "dest": ["IAH", "ORD", "MIA", "BQN"] * 500,
        "distance": pa.array(range(2000), pa.float64()),
        "air_time": pa.array(range(2000), pa.float64()),
    }
)


def test_what_users_call_first_has_an_example() -> None:
    assert set(REQUIRED) - {str(example).replace("/__init__", "") for example in EXAMPLES} == set()


@pytest.fixture
def logger() -> Iterator[None]:
    """Restore the log, which an example configures."""
    log = logging.getLogger("dissociated")
    kept = (log.level, log.propagate, [*log.handlers])
    yield
    log.level, log.propagate, log.handlers = kept


@pytest.mark.parametrize("example", [one for one in EXAMPLES if one.block.page.parent.name != "spark"], ids=str)
def test_an_example_runs(
    example: Example, forks: None, logger: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example.block.not_run:
        pytest.skip(example.block.not_run)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "default_store", lambda: tmp_path / "default")
    pq.write_table(TABLE, "flights.parquet")
    for opened, name in ((pa.ipc.new_file, "flights.arrow"), (pa.ipc.new_stream, "flights.arrows")):
        with opened(name, TABLE.schema) as writer:
            writer.write_table(TABLE)
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as server, dis.connect(server.catalog_uri) as client:
        server.publish("flights", TABLE)
        given = {"client": client, "dis": dis, "np": np, "pa": pa, "server": server, "table": TABLE}
        with Reader(tmp_path, given, server.catalog_uri) as reader:
            reader.run([example.block])
    if left := launch.running(tmp_path / "default"):
        os.kill(left.pid, signal.SIGKILL)

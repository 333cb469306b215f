"""Serving a file takes no memory of the server's own, for any number of reads."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import dissociated as dis
from support.processes import Fork

ROWS = 1 << 20
BATCHES = 12  # of 16 MiB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.arrow"
    batch = pa.record_batch({"a": np.arange(ROWS), "b": np.arange(ROWS) * 0.5})
    with pa.ipc.new_file(path, batch.schema) as writer:
        for _ in range(BATCHES):
            writer.write_batch(batch)
    return path


@pytest.fixture
def server(forks: None, file: Path) -> Iterator[subprocess.Popen[str]]:
    with Fork("-m", "dissociated", "serve", file, stdout=subprocess.PIPE) as process:
        yield process
        process.terminate()


def resident(pid: int) -> int:
    """Return the resident bytes of a process without pages of files, which the kernel may reclaim."""
    fields = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_serving_a_file_takes_no_memory(server: subprocess.Popen[str], file: Path, transport: str) -> None:
    assert server.stdout is not None
    catalog = next(line.split()[1] for line in server.stdout if line.startswith("catalog"))
    with dis.connect(catalog) as client:
        client.read("numbers", transport=transport).read_next_batch()
        before = resident(server.pid)
        for _ in range(2):
            assert client.read("numbers", transport=transport).read_all().num_rows == ROWS * BATCHES
        assert resident(server.pid) - before < file.stat().st_size / 20

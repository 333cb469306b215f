"""Every row comes once under each launcher of several processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import OptionError
from dissociated.training.launch import check_accelerate, find_rank

ROWS = 1000


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    with dis.Server(["shm:"]) as made:
        made.publish("data", pa.Table.from_batches(pa.table({"n": range(ROWS)}).to_batches(max_chunksize=70)))
        yield made


def test_the_place_of_a_process_is_that_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    assert find_rank() == (0, 1)
    monkeypatch.setenv("RANK", "3")  # a scheduler's variable that is no launcher's
    assert find_rank() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert find_rank() == (3, 4)
    for wrong in ("4", "-1", "first"):
        monkeypatch.setenv("RANK", wrong)
        with pytest.raises(OptionError, match=r"give rank= and world_size="):
            find_rank()


def test_rows_that_accelerate_would_divide_twice_are_refused() -> None:
    check_accelerate(world_size=1, processes=2)
    check_accelerate(world_size=2, processes=1)
    with pytest.raises(OptionError, match=r"rows are lost: use dissociated\.torch\.loader"):
        check_accelerate(world_size=2, processes=2)


#: Reads an epoch in each process and writes its rows to the directory given, or the error.
SCRIPT = """
import json, os, sys
from pathlib import Path
import dissociated as dis
from dissociated.errors import OptionError
from dissociated.torch import IterableDataset, loader
from torch.utils.data import DataLoader

uri, out, way = sys.argv[1:]
OPTIONS = {"batch_size": 32, "shuffle": True, "seed": 1}


def rows(batches):
    found = [row for batch in batches for row in batch["n"].tolist()]
    Path(out, str(os.getpid())).write_text(json.dumps(found))
    return found


def refused(batches):
    try:
        for _ in batches:
            pass
    except OptionError as error:
        Path(out, str(os.getpid())).write_text(json.dumps(str(error)))


def in_worker(*_):
    import torch.distributed
    with dis.connect(uri) as client:
        batches = loader(client["data"], **OPTIONS)
        found = rows(batches)

        # Ray leaves an iterable dataset as it is, and has no use for a loader.
        from ray.train.torch import prepare_data_loader

        own = DataLoader(IterableDataset(client["data"], **OPTIONS), batch_size=None)
        assert rows(prepare_data_loader(own)) == found
        try:
            prepare_data_loader(batches)
        except AttributeError as error:
            assert "divides its rows among the ranks itself" in str(error)
        else:
            raise AssertionError("a loader was prepared")


if __name__ == "__main__":
    if way == "ray":
        import ray
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer

        # Without "local", Ray waits for the cluster that it noted last, which may have gone.
        ray.init("local", num_cpus=2, include_dashboard=False)
        TorchTrainer(in_worker, scaling_config=ScalingConfig(num_workers=2)).fit()
        sys.exit()
    client = dis.connect(uri)
    batches = loader(client["data"], **OPTIONS)  # before the launcher has initialized torch.distributed
    if way == "torchrun":
        rows(batches)
    elif way == "workers":
        rows(loader(client["data"], num_workers=2, multiprocessing_context="forkserver", **OPTIONS))
    elif way == "lightning":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        rows(fabric.setup_dataloaders(DataLoader(IterableDataset(client["data"], **OPTIONS), batch_size=None)))
    else:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        if way == "accelerate":
            rows(accelerator.prepare(batches))
        elif way == "accelerate alone":
            dataset = IterableDataset(client["data"], rank=0, world_size=1, batch_size=25, shuffle=True)
            rows(accelerator.prepare(DataLoader(dataset, batch_size=None)))
        else:
            refused(accelerator.prepare(DataLoader(IterableDataset(client["data"], **OPTIONS), batch_size=None)))
    client.close()
"""


def run(server: dis.Server, folder: Path, way: str, *command: str) -> list[object]:
    """Run the script by a launcher, and return the result of each process."""
    script, out = folder / "script.py", folder / "out"
    script.write_text(SCRIPT)
    out.mkdir()
    subprocess.run([sys.executable, *command, str(script), server.catalog_uri, str(out), way], check=True, timeout=840)
    return [json.loads(file.read_text()) for file in out.iterdir()]


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.timeout(900)  # Ray starts ten processes, which took seven minutes on a busy machine
@pytest.mark.parametrize(
    ("way", "package", "command"),
    [
        ("torchrun", "torch", TORCHRUN),
        ("workers", "torch", TORCHRUN),
        ("accelerate", "accelerate", TORCHRUN),
        ("accelerate alone", "accelerate", TORCHRUN),
        ("lightning", "lightning", ()),
        ("ray", "ray", ()),
    ],
)
def test_every_row_comes_once(
    server: dis.Server, tmp_path: Path, way: str, package: str, command: tuple[str, ...]
) -> None:
    if find_spec("torch") is None or find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    ranks = run(server, tmp_path, way, *command)
    assert len(ranks) == 2
    assert sorted(row for rank in ranks for row in rank) == [*range(ROWS)]  # type: ignore[attr-defined]


def test_a_data_loader_that_accelerate_prepares_is_refused(server: dis.Server, tmp_path: Path) -> None:
    if find_spec("torch") is None or find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    errors = run(server, tmp_path, "accelerate refused", *TORCHRUN)
    assert len(errors) == 2
    assert all("rows are lost: use dissociated.torch.loader()" in str(error) for error in errors)

"""Batches of tensors, as PyTorch's own DataLoader gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.errors import OptionError
from dissociated.torch import loader

ROWS = 1000
COLUMNS: dict[str, Any] = {"columns": ["n", "x"], "batch_size": 32, "shuffle": True, "buffer_size": 100}


torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'dissociated[torch]'")


@pytest.fixture(scope="module")
def server() -> Iterator[dis.Server]:
    table = pa.table({"n": range(ROWS), "x": [n / 2 for n in range(ROWS)], "s": map(str, range(ROWS))})
    with dis.Server(["shm:", "tcp://127.0.0.1:0"]) as made:
        made.publish("data", pa.Table.from_batches(table.to_batches(max_chunksize=70)))
        yield made


def rows(batches: Any, stop: int | None = None) -> list[list[int]]:
    """The rows of each batch, up to so many of them."""
    found: list[list[int]] = []
    for batch in batches:
        assert torch.equal(batch["x"], batch["n"] / 2)
        found.append(batch["n"].tolist())
        if len(found) == stop:
            break
    return found


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def test_tensors_may_be_written_to_and_the_data_stays_as_it_is(client: dis.Client) -> None:
    for shuffle in (False, True):
        batches = loader(client["data"], columns=["n", "x"], batch_size=64, shuffle=shuffle)
        for _ in range(2):
            for batch in batches:
                assert torch.equal(batch["x"], batch["n"] / 2)
                batch["x"].add_(1)
                batch["n"].zero_()
    texts = loader(client["data"], as_arrow=["s"], num_workers=1)
    assert [one for batch in texts for one in batch["s"].to_pylist()] == [*map(str, range(ROWS))]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_workers_and_ranks_have_every_row_once_and_go_on_exactly(client: dis.Client, transport: str) -> None:
    options: dict[str, Any] = {**COLUMNS, "num_workers": 2, "multiprocessing_context": "fork"}
    handle = client.dataset("data", transport=transport)
    ranks = [loader(handle, rank=rank, world_size=2, **options) for rank in range(2)]
    assert sorted(row for rank in ranks for row in flat(rows(rank))) == [*range(ROWS)]
    assert len(ranks[0]) == len(ranks[1])
    first = loader(handle, persistent_workers=True, **options)
    epochs = [rows(first), rows(first)]
    assert [len(epoch) for epoch in epochs] == [len(first)] * 2
    assert [sorted(flat(epoch)) for epoch in epochs] == [[*range(ROWS)]] * 2
    assert epochs[0] != epochs[1]
    interrupted = loader(handle, **options)
    interrupted.set_epoch(1)
    assert rows(interrupted, 7) == epochs[1][:7]
    resumed = loader(handle, **options)
    resumed.load_state_dict(interrupted.state_dict())
    assert rows(resumed) == epochs[1][7:]
    with pytest.raises(OptionError, match="another shards"):
        loader(handle, **COLUMNS).load_state_dict(interrupted.state_dict())


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_no_forks_read_by_themselves(client: dis.Client, method: str) -> None:
    batches = loader(client["data"], num_workers=1, multiprocessing_context=method, **COLUMNS)
    assert sorted(flat(rows(batches))) == [*range(ROWS)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:This process .* is multi-threaded")
def test_a_stateful_loader_goes_on_exactly(client: dis.Client) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    from dissociated.torch import IterableDataset

    for workers in (0, 2):

        def made(workers: int = workers) -> Any:
            dataset = IterableDataset(client["data"], **COLUMNS)
            dataset.set_epoch(3)
            context = {"multiprocessing_context": "fork"} if workers else {}
            return stateful.StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **context)

        whole = rows(made())
        assert sorted(flat(whole)) == [*range(ROWS)]
        interrupted = made()
        assert rows(interrupted, 5) == whole[:5]
        resumed = made()
        resumed.load_state_dict(interrupted.state_dict())
        assert rows(resumed) == whole[5:]


def test_ranks_are_those_of_torch_distributed(client: dis.Client, tmp_path: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        assert len(flat(rows(loader(client["data"], **COLUMNS)))) == ROWS
    finally:
        torch.distributed.destroy_process_group()
    wrongs: list[dict[str, Any]] = [{"rank": 0}, {"rank": 1, "world_size": 1}, {"sampler": []}]
    for wrong in wrongs:
        with pytest.raises(OptionError):
            loader(client["data"], **COLUMNS, **wrong)

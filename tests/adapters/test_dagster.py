"""Assets of Dagster: each is a dataset, and so is each partition."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.adapters.dagster import io_manager
from dissociated.client.dataset import DatasetHandle
from support.helpers import wait_until

dg = pytest.importorskip("dagster", reason="Dagster is not installed: make bridges")
pytestmark = pytest.mark.filterwarnings("default")


@contextmanager
def stored(client: dis.Client) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a run in this process whose assets are datasets."""
    with dg.DagsterInstance.ephemeral() as instance:
        yield {"resources": {"io_manager": io_manager(client)}, "instance": instance}


def test_an_asset_is_a_dataset(client: dis.Client, table: pa.Table) -> None:
    seen = list[str]()

    @dg.asset(key_prefix="raw")
    def numbers() -> pa.Table:
        return table

    @dg.asset(ins={"numbers": dg.AssetIn(key_prefix="raw")})
    def total(numbers: DatasetHandle) -> pa.Table:
        with numbers:
            seen.append(numbers.info.name)
            return pa.table({"total": [numbers.count_rows()]})

    @dg.asset(ins={"numbers": dg.AssetIn(key_prefix="raw")})
    def streamed(numbers: pa.RecordBatchReader) -> pa.RecordBatchReader:
        return numbers

    with stored(client) as run:
        result = dg.materialize([numbers, total, streamed], **run)
        wait_until(lambda: not client.status().consumers, "no input is open, although the result is held")
        assert result.success
    assert seen == ["raw/numbers"]
    assert client.read("raw/numbers").read_all().equals(table)
    assert client.read("total").read_all().to_pydict() == {"total": [table.num_rows]}
    assert client.read("streamed").read_all().equals(table)


def test_an_input_has_only_the_wanted_columns_and_rows(client: dis.Client, table: pa.Table) -> None:
    inputs: list[pa.Table] = []
    wanted = {"columns": ["n", "wide"], "filter": [["n", ">=", 59_990], ["n", "<", 60_000]]}

    @dg.asset(ins={"rows": dg.AssetIn(metadata=wanted)})
    def few(rows: pa.Table) -> None:
        inputs.append(rows)

    with stored(client) as run:
        assert dg.materialize([dg.AssetSpec("rows"), few], selection=[few], **run).success
    assert inputs[0].equals(table.select(["n", "wide"]).slice(59_990))


def test_a_partition_is_a_dataset_of_its_own(client: dis.Client) -> None:
    days = dg.StaticPartitionsDefinition(["monday", "tuesday"])

    @dg.asset(partitions_def=days)
    def trips(context) -> pa.Table:
        return pa.table({"day": [context.partition_key]})

    @dg.asset(partitions_def=days)
    def copied(trips: pa.Table) -> pa.Table:
        return trips

    with stored(client) as run:
        for day in ("monday", "tuesday"):
            assert dg.materialize([trips, copied], partition_key=day, **run).success
    assert client.read("copied/@monday").read_all().to_pydict() == {"day": ["monday"]}
    assert client.read("trips/@tuesday").read_all().to_pydict() == {"day": ["tuesday"]}


def test_an_output_that_is_no_asset_is_refused(client: dis.Client) -> None:
    @dg.op
    def make() -> pa.Table:
        return pa.table({"n": [1]})

    @dg.job(resource_defs={"io_manager": dg.IOManagerDefinition.hardcoded_io_manager(io_manager(client))})
    def work() -> None:
        make()

    with pytest.raises(dis.errors.OptionError, match="only assets are stored"):
        work.execute_in_process()

"""The consumers: processes without Spark that open published datasets in place, query them, and compare the answers.

python -m examples.tpch.consumers polars --catalog URI
"""

from __future__ import annotations

import argparse
import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from importlib.util import find_spec
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa

import dissociated as dis
from dissociated.torch import loader
from dissociated.training import Batches
from examples.tpch.device import q6_on_device
from examples.tpch.memory import Mapped, own_memory
from examples.tpch.queries import LINEITEM_QUERIES, QUERIES
from examples.tpch.steps import fail, step

Ask = Callable[[str], pa.Table]

BATCH = 4096  # rows of a batch of the loader


class Differs(Exception):
    """The error of a consumer whose answer differs from Spark's."""


def in_polars(lineitem: pa.Table) -> tuple[Ask, pa.Table]:
    """Load the table into Polars.

    Polars converts strings to views, and copies decimals that are not aligned to 16 bytes. Java aligns them to 8.

    Returns:
        A function that answers SQL over the table, and the table as Polars holds it.
    """
    frame = pl.from_arrow(lineitem, rechunk=False)
    assert isinstance(frame, pl.DataFrame)
    context = pl.SQLContext(lineitem=frame)
    return lambda sql: context.execute(sql, eager=True).to_arrow(), frame.to_arrow(compat_level=pl.CompatLevel.newest())


def in_duckdb(lineitem: pa.Table) -> tuple[Ask, pa.Table]:
    """Register the table with DuckDB.

    Returns:
        A function that answers SQL over the table, and the table itself, which DuckDB uses without a copy.
    """
    database = duckdb.connect()
    database.register("lineitem", lineitem)
    return lambda sql: database.sql(sql).to_arrow_table(), lineitem


ENGINES = {"polars": in_polars, "duckdb": in_duckdb}


def opened(client: dis.Client) -> tuple[pa.Table, int]:
    """Open lineitem.

    Returns:
        The table, and the private memory of this process before, in bytes.
    """
    client.read("q6", transport="shm").read_all()  # connects, and loads the modules that reading needs
    before = own_memory()
    with step("open") as current:
        table = client.read("lineitem").read_all()
        current.says = f"{table.num_rows:,} rows, {table.nbytes / 1e6:,.0f} MB"
        current.facts = {"rows": table.num_rows, "nbytes": table.nbytes}
    return table, before


def query(client: dis.Client, engine: Callable[[pa.Table], tuple[Ask, pa.Table]]) -> None:
    """Have an engine answer Spark's queries over the published lineitem, and compare the answers."""
    lineitem, before = opened(client)
    with step("adopt") as current:
        ask, held = engine(lineitem)
        in_place, own = Mapped().share(held), max(0, own_memory() - before)
        current.says = f"{in_place:.0%} of it in place, {own / 1e6:.1f} MB of its own"
        current.facts = {"in_place": in_place, "own": own}
    for name in LINEITEM_QUERIES:
        with step(name) as current:
            answer = ask(QUERIES[name])
        compare(client, name, [column.to_pylist() for column in answer.columns])


def load(client: dis.Client, device: str | None = None) -> None:
    """Read two epochs of lineitem in batches, compute Q6 from each epoch, and compare the answers.

    Each epoch has an order of its own. The batches are views of shared memory; if PyTorch is installed, they are
    tensors whose rows are shuffled, and therefore copied. With a device, Q6 is computed once from columns on it, too.
    """
    columns = ["l_shipdate", "l_discount", "l_quantity", "l_extendedprice"]
    client.read("q6", transport="shm").read_all()
    before = own_memory()
    with step("open") as current:
        lineitem = client["lineitem"]
        views = Batches(lineitem, columns=columns, batch_size=BATCH, shuffle=True, buffer_size=0)
        current.says = f"{lineitem.num_rows:,} rows, {(lineitem.nbytes or 0) / 1e6:,.0f} MB"
        current.facts = {"rows": lineitem.num_rows, "nbytes": lineitem.nbytes}
    with step("adopt") as current:
        shares = [in_place(batch) for batch in views]
        share, own = sum(shares) / len(shares), max(0, own_memory() - before)
        current.says = f"{share:.0%} of the arrays in place, {own / 1e6:.1f} MB of their own"
        current.facts = {"in_place": share, "own": own}
    torch = find_spec("torch") is not None
    epochs = loader(lineitem, columns=columns, batch_size=BATCH, shuffle=True) if torch else views
    for epoch in (1, 2):
        with step(f"epoch {epoch}") as current:
            revenue = sum(q6(batch) for batch in epochs)
            current.says = f"{len(epochs):,} batches of {'tensors' if torch else 'arrays'}, {lineitem.num_rows:,} rows"
        compare(client, "q6", [[Decimal(revenue).scaleb(-4)]])
    if device is not None:
        compare(client, "q6", [[Decimal(q6_on_device(client, columns, device, q6)).scaleb(-4)]])


def in_place(batch: dict[str, Any]) -> float:
    """Return the fraction of the arrays that lie in shared memory.

    An array whose rows come from two record batches is a copy, and does not.
    """
    mapped = Mapped()
    return sum(mapped.holds(*extent(array)) for array in batch.values()) / len(batch)


def extent(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Return the address of an array, and the number of bytes that it spans."""
    return array.ctypes.data, (len(array) - 1) * array.strides[0] + array.itemsize


def q6(batch: dict[str, Any]) -> int:
    """Compute the revenue of Q6 in a batch of arrays or tensors, in hundredths of cents."""
    shipped, discount, quantity = batch["l_shipdate"], batch["l_discount"], batch["l_quantity"]
    wanted = (shipped >= days(1994)) & (shipped < days(1995)) & (discount >= 5) & (discount <= 7) & (quantity < 2400)
    return int((batch["l_extendedprice"][wanted] * discount[wanted]).sum())


def days(year: int) -> int:
    """Return the first of January of a year in days since 1970."""
    return (datetime.date(year, 1, 1) - datetime.date(1970, 1, 1)).days


def compare(client: dis.Client, name: str, answer: list[list[Any]]) -> None:
    """Compare the columns of an answer with Spark's published answer. Averages are compared to Spark's six digits.

    Raises:
        Differs: At the first difference.
    """
    with step(f"check {name}") as current:
        published = client.read(name).read_all()
        theirs = [column.to_pylist() for column in published.columns]
        if [*map(len, answer)] != [*map(len, theirs)]:
            raise Differs(f"{name} has another number of rows or columns here than in Spark")
        for column, here, spark in zip(published.column_names, answer, theirs, strict=True):
            for row, (mine, its) in enumerate(zip(here, spark, strict=True)):
                if not same(mine, its):
                    raise Differs(f"{column} of {name} is {mine} in row {row} here, {its} in Spark")
        values = sum(map(len, answer))
        current.says = f"{values} values equal Spark's"
        current.facts = {"checked": values}


def same(mine: Any, its: Any) -> bool:
    """Return whether two values are equal. Floats are averages, which Spark rounds to six digits as decimals."""
    if isinstance(mine, float):
        return math.isclose(mine, its, rel_tol=1e-12, abs_tol=1e-6)
    return bool(mine == its)


def read_by(client: dis.Client, transports: list[str]) -> None:
    """Open lineitem over each transport, and compare the tables with the one in shared memory."""
    in_place = client.read("lineitem", transport="shm").read_all()
    for transport in transports:
        with step(transport) as current:
            table = client.read("lineitem", transport=transport).read_all()
            current.facts = {"nbytes": table.nbytes}
        if not table.equals(in_place):
            raise Differs(f"lineitem over {transport} is not what it is over shm")


def main() -> None:
    parser = argparse.ArgumentParser(description="Work with what Spark has published.")
    parser.add_argument("consumer", choices=[*ENGINES, "loader", "transports"])
    parser.add_argument("--catalog", required=True, help="URI of the catalog to look in")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp", "grpc"], help="ways to read lineitem")
    parser.add_argument("--device", help="where the loader takes lineitem too, as cuda:0")
    arguments = parser.parse_args()
    try:
        with dis.connect(arguments.catalog) as client:
            match arguments.consumer:
                case "loader":
                    load(client, arguments.device)
                case "transports":
                    read_by(client, arguments.transports)
                case engine:
                    query(client, ENGINES[engine])
    except (dis.DissociatedError, pa.ArrowException, Differs, OSError) as error:
        fail(error)


if __name__ == "__main__":
    main()

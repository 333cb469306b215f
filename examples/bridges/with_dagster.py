"""Store the assets of Dagster as datasets, of which a later asset reads only the columns and rows that it needs."""

import dagster as dg
import pyarrow as pa

import dissociated as dis
from dissociated.adapters.dagster import io_manager


@dg.asset
def flights() -> pa.Table:
    return pa.table({"dest": ["IAH", "MIA", "ORD", "MIA"] * 500, "delay": [2.0, None, 92.0, 61.5] * 500})


@dg.asset(ins={"flights": dg.AssetIn(metadata={"columns": ["dest"], "filter": ["delay", ">", 60]})})
def late(flights: pa.Table) -> pa.Table:
    return flights.group_by("dest").aggregate([([], "count_all")]).sort_by("dest")


with dis.Server(["shm:"]) as server, dis.connect(server.catalog_uri) as client:
    assert dg.materialize([flights, late], resources={"io_manager": io_manager(client)}).success
    print(client.read("late").read_all().to_pydict())

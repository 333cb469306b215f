"""A write by several tasks of Ray, in this process: the steps between Ray and a node. These tests do not need Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pyarrow as pa
import pytest

import dissociated as dis
from dissociated.adapters.ray import DatasetWrite
from dissociated.control.commit import Commit
from dissociated.node.node import Node
from dissociated.store.store import Store

ONE = pa.table({"n": [1]})
SCHEMA = pa.schema({"n": pa.int64(), "s": pa.string()})
#: A table that does not have the schema of `ONE`, and a part of the error that names the difference.
DIFFERENT = {
    "more columns": (pa.table({"n": [2], "extra": ["lost"]}), "there is a new column 'extra'"),
    "a missing column": (pa.table({"m": [2]}), "there is no column 'n'"),
    "a type that can be cast": (pa.table({"n": pa.array([2], pa.int8())}), "column 'n' is int8, not int64"),
    "a text of digits": (pa.table({"n": ["2"]}), "column 'n' is string, not int64"),
    "nulls only": (pa.table({"n": pa.nulls(1)}), "column 'n' is null, not int64"),
    "no nulls allowed": (ONE.cast(pa.schema([pa.field("n", pa.int64(), False)])), "column 'n' may not be null"),
    "an unknown extension type": (
        ONE.cast(pa.schema([pa.field("n", pa.int64(), metadata={"ARROW:extension:name": "x.id"})])),
        "column 'n' has other metadata",
    ),
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Yield a node with an empty store."""
    with Node(Store(tmp_path / "store"), ["tcp://127.0.0.1:0"]) as node:
        yield node


@pytest.fixture
def client(node: Node) -> Iterator[dis.Client]:
    with dis.connect(node.uri) as client:
        yield client


def write_tasks(client: dis.Client, *tasks: list[pa.Table], schema: pa.Schema | None = None) -> pa.Table:
    """Write the tables of each task with a key of their own, and return the rows that are published."""
    with DatasetWrite(client, Commit("d", schema=schema, key=token_hex(8))) as write:
        results = [write.write(number, tables) for number, tables in enumerate(tasks)]
        write.publish([result for result in results if result is not None])
    return client.read("d").read_all()


@pytest.mark.parametrize(("other", "difference"), DIFFERENT.values(), ids=DIFFERENT)
def test_tables_with_different_schemas_are_refused(client: dis.Client, other: pa.Table, difference: str) -> None:
    for tasks in ([[ONE, other]], [[ONE], [other]]):  # one task, and two
        with pytest.raises(dis.errors.OptionError, match=f"give schema=.*{difference}"):
            write_tasks(client, *tasks)
    assert client.list() == []


def test_metadata_of_a_schema_make_no_difference(client: dis.Client) -> None:
    other = ONE.replace_schema_metadata({"pandas": "{}"})
    rows = write_tasks(client, [other, ONE, ONE.slice(1)], [], [ONE, other])
    assert rows.schema.equals(ONE.schema, check_metadata=True)
    assert rows.to_pydict() == {"n": [1, 1, 1, 1]}


def test_a_schema_has_all_columns_of_each_table(client: dis.Client) -> None:
    fits = pa.table({"s": ["a"], "n": pa.array([1], pa.int8())})
    for other in (fits.append_column("extra", [["lost"]]), ONE, pa.table({"n": [1.5], "s": ["a"]})):
        with pytest.raises(dis.errors.OptionError, match=r"the schema.* give another"):
            write_tasks(client, [fits, other], schema=SCHEMA)
    assert client.list() == []


def test_safe_casts_to_a_schema_are_made_in_every_task(client: dis.Client) -> None:
    fits = pa.table({"s": ["a"], "n": pa.array([1], pa.int8())})
    rows = write_tasks(client, [fits, pa.table({"n": [2.0], "s": pa.nulls(1)})], [fits], schema=SCHEMA)
    assert rows.equals(pa.table({"n": [1, 2, 1], "s": ["a", None, "a"]}, schema=SCHEMA))


def test_an_error_says_if_rows_may_have_been_published(node: Node, client: dis.Client) -> None:
    write = DatasetWrite(client, Commit("d", key="k"))
    result = write.write(0, [ONE])
    assert result is not None
    node.close()
    with pytest.raises(dis.errors.CatalogUnreachable, match="nor did it say whether 'd' was published in the end"):
        write.publish([result])


def test_an_interrupted_write_leaves_nothing(client: dis.Client, tmp_path: Path) -> None:
    write = DatasetWrite(client, Commit("d", key="k"))
    result = write.write(0, [ONE])
    assert result is not None
    staged = tmp_path / "store" / "staging"
    assert [*staged.rglob("k-*.arrows")]
    with pytest.raises(KeyboardInterrupt), write:
        raise KeyboardInterrupt
    assert not [*staged.rglob("k-*.arrows")]
    with pytest.raises(dis.errors.CatalogError):
        write.publish([result])
    assert client.list() == []
